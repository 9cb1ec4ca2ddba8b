"""Attention over packed sequences: rows of all sequences end to end, split by offsets (cu_seqlens)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .api import Gradients, adopted, run_backward, run_forward, scaled, with_scale
from .call.arrays import ArrayView, device_name
from .call.checks import one_of
from .call.compound import QuantizedArray, mask_parts, unquantized
from .call.given import Options, Packing, split
from .call.offsets import check_counts, counts, flat_mask, kept, longest_length, offsets
from .call.opaque import opaque
from .call.options import CacheOptions, PackedGradientOptions, PackedOptions, defaults
from .call.signature import Array, takes
from .errors import InvalidArgumentsError, UnsupportedError
from .kv_cache import attention_with_kv_cache

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "attention_varlen",
    "attention_varlen_backward",
    "check_packing",
    "over_pages",
    "pack",
    "split_dense_or_packed",
    "split_packed",
]


_CUTS = ("cu_seqlens_q", "cu_seqlens_k")


def check_packing(
    views: Mapping[str, ArrayView],
    rows: tuple[int, int],
    longest: tuple[int | None, int | None],
) -> tuple[int, int]:
    """Check offsets and rows in use by reading them, where that is free or needed.

    Parameters
    ----------
    views : mapping of str to ArrayView
        cu_seqlens_q, cu_seqlens_k and, if given, seqused_q and seqused_k.
    rows : (int, int)
        Rows of q and of k.
    longest : (int or None, int or None)
        The longest lengths, as the caller claims them. Without one, offsets on a GPU are read back once,
        which waits for the stream.

    Returns
    -------
    int, int
        The longest lengths.
    """
    cut_q, cut_k = (views[name] for name in _CUTS)
    longest_q = longest_k = longest_length(cut_q, _CUTS[0], rows[0], longest[0])
    if cut_k is not cut_q or rows[1] != rows[0] or longest[1] != longest[0]:
        longest_k = longest_length(cut_k, _CUTS[1], rows[1], longest[1])
    for used, cut, what in (("seqused_q", _CUTS[0], "queries"), ("seqused_k", _CUTS[1], "keys")):
        if used in views:
            check_counts(views, used, cut, what)
    return longest_q, longest_k


def pack(
    raw: dict[str, ArrayView],
    cuts: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    seqused_k: Any = None,
    seqused_q: Any = None,
    *,
    traced: bool = False,
) -> Packing:
    """Check the offsets of packed sequences, and add them to the arrays of the call.

    Parameters
    ----------
    raw : dict of str to ArrayView
        q, k and other arrays; the offsets are added, and for a ragged_mask the start of each mask.
    cuts : (array, array)
        Offsets of q and of k.
    longest : (int or None, int or None)
        The longest lengths, as the caller claims them.
    seqused_k, seqused_q : array, optional
        Keys and queries in use.
    traced : bool
        Nothing can be read, because the arrays belong to a traced program. The longest lengths must be given;
        queries and keys have the same offsets if `cuts` has the same view twice.
    """
    q, k = raw["q"], raw["k"]
    if len(q.shape) != 3 or len(k.shape) != 3:
        raise InvalidArgumentsError(
            f"q has shape {q.shape}, k {k.shape}.", hint="packed sequences are (rows, heads, head_dim)"
        )
    cut_q, cut_k = (offsets(cuts[i], name, longest[i]) for i, name in enumerate(_CUTS))
    own = {"cu_seqlens_q": cut_q, "cu_seqlens_k": cut_k}
    for name, used, cut in (("seqused_q", seqused_q, cut_q), ("seqused_k", seqused_k, cut_k)):
        if used is not None:
            own[name] = counts(used, name, cut.shape[0] - 1)
    for name, view in own.items():
        if view.device != q.device:
            raise InvalidArgumentsError(
                f"{name} is on {device_name(view.device)}, q on {device_name(q.device)}.",
                hint="all arrays of a call on one device",
            )
    alike = cuts[0] is cuts[1] if traced else cut_q.pointer == cut_k.pointer
    if not traced:
        own = {name: kept(view) for name, view in own.items() if not (alike and name == _CUTS[1])}
        own.setdefault(_CUTS[1], own[_CUTS[0]])
        longest = check_packing(own, (q.shape[0], k.shape[0]), longest)
    batch, longest_q, longest_k = cut_q.shape[0] - 1, *longest
    if cut_k.shape != cut_q.shape:
        raise InvalidArgumentsError(
            f"cu_seqlens_q cuts {batch} sequences, cu_seqlens_k {cut_k.shape[0] - 1}.",
            hint="an offset for each sequence in both; one without queries or keys has two equal ones",
        )
    assert longest_q is not None
    assert longest_k is not None
    if "ragged_mask" in raw:
        in_use = (
            own.get(used, own[cut]) for used, cut in zip(("seqused_q", "seqused_k"), _CUTS, strict=True)
        )
        lengths = (x.integers() if x.shape == (batch,) else np.diff(x.integers()) for x in in_use)
        flat_mask(raw, *lengths)
    raw |= own
    return Packing(batch, int(longest_q), int(longest_k), alike and seqused_k is None and seqused_q is None)


@overload
def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    return_lse: Literal[False] = False, out: Array | None = None, **options: Unpack[PackedOptions],
) -> Array: ...  # fmt: skip
@overload
def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    return_lse: Literal[True], out: Array | None = None, **options: Unpack[PackedOptions],
) -> tuple[Array, Any]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    return_lse: bool, out: Array | None = None, **options: Unpack[PackedOptions],
) -> Array | tuple[Array, Any]: ...  # fmt: skip
@takes(PackedOptions)
@opaque
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    **options: Unpack[PackedOptions],
) -> Any:
    """Exact attention within each of several packed sequences, without padding.

    Parameters
    ----------
    q : array, shape (rows_q, heads_q, head_dim)
        Queries of all sequences, one sequence after the other.
    k : array, shape (rows_k, heads_k, head_dim)
        With a block_table (pages, page, heads_k, head_dim), pages of any size.
    v : array, shape (rows_k, heads_k, head_dim_v)
        Like k.
    cu_seqlens_q, cu_seqlens_k : array of int32, shape (sequences + 1,)
        Sequence b has rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; it may be empty. On the device of q.
        With a block_table cu_seqlens_k gives the lengths only, and may be None if seqused_k does.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest lengths. On a GPU, giving them saves reading the offsets back.
    seqused_k : array of int32, shape (sequences,), optional
        Number of keys in use of each sequence: the first rows of its k and v. "bottom_right" counts from the
        last one in use. The host does not read it on a GPU.
    align : {"top_left", "bottom_right"} or int, optional
        As in `attention`, for each sequence; needed by positional options unless cu_seqlens_q and
        cu_seqlens_k are the same array and seqused_k is not given.
    mask : array, Spans, BlockMask, RaggedMask, mask function, or tuple of these, optional
        As in `attention`, over (sequences, heads_q, max_seqlen_q, max_seqlen_k); a `RaggedMask` has the
        flattened masks of all sequences, on a CPU.
    bias : array, optional
        As in `attention`, over (sequences, heads_q, max_seqlen_q, max_seqlen_k).
    alibi_slopes : array, shape (heads_q,) or (sequences, heads_q), optional
    block_table : array of int32, shape (sequences, pages of the longest sequence), optional
        Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``: the call is then
        `attention_with_kv_cache` with cu_seqlens_q, and k and v may be `QuantizedCache`. align is
        "bottom_right"; bias, dropout, score functions, tuning of tiles and the backward pass are not
        supported.
    {options: As in `attention`; positions count from the start of each sequence.}
    return_lse
        As in `attention`.
    out : array, optional
        As in `attention`; rows past the last offset are not written.

    Returns
    -------
    o : array, shape (rows_q, heads_q, head_dim_v)
        Rows past the last offset are 0 if out is not given.
    lse : array, shape (heads_q, rows_q)
        Only with return_lse; rows past the last offset are 0.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `attention`; also offsets that decrease or exceed the rows (checked if the host reads them).
    """
    if options.get("block_table") is not None:
        return over_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, {**options, "return_lse": return_lse, "out": out}
        )
    cuts = cu_seqlens_q, cu_seqlens_k
    arrays, values, packing = split_packed(options)
    kinds: tuple[Any, ...] = type(q), type(k), type(v)
    if QuantizedArray in kinds:
        arrays |= unquantized(q=q, k=k, v=v)
        q, k, v = (arrays.pop(name) for name in "qkv")
    q, values, _ = scaled(q, values)
    raw = adopted(q=q, k=k, v=v, out=out, **arrays)
    return run_forward(raw, values, return_lse, out, pack(raw, cuts, *packing))


def over_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    options: dict[str, Any],
    attend: Callable[..., Any] = attention_with_kv_cache,
) -> Any:
    """Run a packed call over paged keys as a call over a cache, by the function `attend` of an adapter."""
    usual, own = defaults(PackedOptions), defaults(CacheOptions)
    align = options.pop("align", None)
    given = [options.get(name) for name in ("causal", "window", "alibi_slopes")]
    if not one_of(align, ("bottom_right",)) and any(x is not None and x is not False for x in given):
        raise InvalidArgumentsError(
            f"align is {align!r}; over pages the last query of a sequence is at its last key.",
            hint='align="bottom_right"',
        )
    lengths = options.pop("seqused_k", None)
    if "spans" in mask_parts(options.get("mask")):  # why: over a cache, spans cover only the last keys
        raise UnsupportedError(
            "Spans are not supported over pages.", hint="a boolean array, or k and v without pages"
        )
    for name in [name for name in options if name in usual and name not in own]:
        x = options.pop(name)
        if x is not None and (hasattr(x, "shape") or x != usual[name]):
            raise UnsupportedError(
                f"{name} is not supported over pages.", hint=f"no {name}, or k and v without pages"
            )
    if lengths is None:
        if cu_seqlens_k is None:
            raise InvalidArgumentsError(
                "neither seqused_k nor cu_seqlens_k is given.", hint="seqused_k= of int32"
            )
        if attend is attention_with_kv_cache:  # why: adapters check their arrays themselves
            offsets(cu_seqlens_k, _CUTS[1])
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]  # in their library, on their device
    return attend(q, k, v, cache_seqlens=lengths, cu_seqlens_q=cu_seqlens_q, layout="bshd", **options)


@takes(PackedGradientOptions)
@opaque
def attention_varlen_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Unpack[PackedGradientOptions],
) -> Gradients[Array]:
    """Gradients of `attention_varlen`.

    Parameters
    ----------
    do, o : array, shape (rows_q, heads_q, head_dim_v)
    lse, dlse : array, shape (heads_q, rows_q)
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As given to `attention_varlen`.
    {options: As given to `attention_varlen`.}

    Returns
    -------
    Gradients
        Rows past the last offset, and those of keys not in use, are 0.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `attention_varlen`.
    """
    cuts = cu_seqlens_q, cu_seqlens_k
    arrays, values, packing = split_packed(options)
    product, values, by_head = scaled(q, values)
    raw = adopted(do=do, q=product, k=k, v=v, o=o, lse=lse, **arrays)
    grads = run_backward(raw, values, pack(raw, cuts, *packing))
    return grads if by_head is None else with_scale(grads, q, by_head)


def split_packed(
    options: Any,
) -> tuple[dict[str, Any], Options, tuple[tuple[int | None, int | None], Any, Any]]:
    """Split the options of a packed call into arrays, values and the arguments of `pack`."""
    longest = options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None)
    used = options.pop("seqused_k", None), options.pop("seqused_q", None)
    arrays, values = split({**options, "layout": "bshd"})
    return arrays, values, (longest, *used)


def split_dense_or_packed(options: Any) -> tuple[dict[str, Any], Options, tuple[Any, ...] | None]:
    """`split` for a call on dense or packed arrays; for packed ones, also the arguments of `pack`."""
    cuts = options.pop("cu_seqlens_q", None), options.pop("cu_seqlens_k", None)
    if cuts[0] is not None or cuts[1] is not None:
        arrays, values, packing = split_packed(options)
        return arrays, values, (cuts, *packing)
    for name in _OF_PACKED:
        if options.pop(name, None) is not None:
            raise InvalidArgumentsError(f"{name} is given without cu_seqlens_q.", hint=f"{name}=None")
    return *split(options), None


_OF_PACKED = ("max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")
