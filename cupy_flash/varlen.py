"""Attention over packed sequences: rows of all sequences follow each other, cut by offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .api import Gradients, adopted, run_backward, run_forward
from .call.adopt import adopt
from .call.arrays import CPU, ArrayView
from .call.checks import integer
from .call.opaque import opaque
from .call.operands import cast
from .call.options import Options, PackedGradientOptions, PackedOptions, Packing, split
from .call.signature import Array, takes
from .errors import InvalidArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_varlen", "attention_varlen_backward", "check_packing", "pack", "split_packed"]


_CUTS = ("cu_seqlens_q", "cu_seqlens_k")


def _offsets(x: Any, name: str, claimed: int | None) -> ArrayView:
    """Check what can be seen of offsets without reading them."""
    view = adopt(x, name)
    if view.dtype != "int32" or len(view.shape) != 1 or view.shape[0] < 1:
        raise InvalidArguments(
            f"{name} is {view.describe()}, not (sequences + 1,) int32.", hint=cast(name, view, "int32")
        )
    if view.shape[0] > 1 and view.strides[0] != 1:
        raise InvalidArguments(f"{name} is not contiguous.", hint=f"a copy of {name}")
    if claimed is not None and ((n := integer(claimed)) is None or n < 0):
        raise InvalidArguments(f"the longest length of {name} is {claimed!r}.", hint="an integer, at least 0")
    return view


def _used(x: Any, cut: ArrayView) -> ArrayView:
    """Check what can be seen of the keys in use without reading them."""
    view = adopt(x, "seqused_k")
    batch = cut.shape[0] - 1
    if view.dtype != "int32" or view.shape != (batch,) or (batch > 1 and view.strides[0] != 1):
        raise InvalidArguments(
            f"seqused_k is {view.describe()}, not contiguous ({batch},) int32.",
            hint=cast("seqused_k", view, "int32"),
        )
    if view.device != cut.device:
        raise InvalidArguments(f"seqused_k is on {view.device}, cu_seqlens_k on {cut.device}.")
    return view


def _longest(values: Any, name: str, rows: int, claimed: int | None) -> int:
    """The longest length; refuse offsets that are none."""
    lengths = np.diff(values.astype(np.int64))
    if values[0] != 0 or (lengths < 0).any() or values[-1] > rows:
        raise InvalidArguments(
            f"{name} is {values.tolist()}: it must begin with 0, never fall, and end at {rows} at most.",
            hint="numpy.concatenate([[0], numpy.cumsum(lengths)])",
        )
    actual = int(lengths.max(initial=0))
    if claimed is not None and claimed < actual:
        raise InvalidArguments(f"the longest length of {name} is {actual}, not {claimed}.")
    return actual if claimed is None else int(claimed)


def check_packing(
    views: Mapping[str, ArrayView],
    rows: tuple[int, int],
    longest: tuple[int | None, int | None],
) -> tuple[int, int]:
    """Read offsets and keys in use where that is free or needed; refuse wrong ones.

    Parameters
    ----------
    views : mapping of str to ArrayView
        cu_seqlens_q, cu_seqlens_k and, if there, seqused_k.
    rows : (int, int)
        Of q and of k.
    longest : (int or None, int or None)
        The longest lengths, as the caller claims them. On a GPU offsets without one are read back once, which
        waits for the stream.

    Returns
    -------
    int, int
        The longest lengths.
    """
    found = []
    for i, name in enumerate(_CUTS):
        claimed, view = longest[i], views[name]
        if view.device == CPU:
            found.append(_longest(view.numpy(), name, rows[i], claimed))
        elif claimed is None:
            found.append(_longest(view.integers(), name, rows[i], None))
        else:
            found.append(int(claimed))
    if "seqused_k" in views and views["seqused_k"].device == CPU:
        used = views["seqused_k"].numpy()
        stored = np.diff(views["cu_seqlens_k"].numpy().astype(np.int64))
        wrong = np.flatnonzero((used < 0) | (used > stored))
        if wrong.size:
            b = int(wrong[0])
            raise InvalidArguments(
                f"seqused_k[{b}] is {used[b]}; the sequence has {stored[b]} keys.",
                hint="keys in use, from 0 to the length that cu_seqlens_k gives",
            )
    return found[0], found[1]


def pack(
    raw: dict[str, ArrayView],
    cuts: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    seqused_k: Any = None,
    *,
    traced: bool = False,
) -> Packing:
    """Check the offsets of packed sequences, and put them beside their arrays.

    Parameters
    ----------
    raw : dict of str to ArrayView
        q, k and any others; the offsets are added.
    cuts : (array, array)
        Offsets of q and of k.
    longest : (int or None, int or None)
        The longest lengths, as the caller claims them.
    seqused_k : array, optional
        Keys in use.
    traced : bool
        Nothing can be read: the arrays stand for those of a program that is being traced. The longest lengths
        are given, and queries and keys are cut alike if `cuts` is the same view twice.
    """
    q, k = raw["q"], raw["k"]
    if len(q.shape) != 3 or len(k.shape) != 3:
        raise InvalidArguments(
            f"q has shape {q.shape}, k {k.shape}.", hint="packed sequences are (rows, heads, head_dim)"
        )
    cut_q, cut_k = (_offsets(cuts[i], name, longest[i]) for i, name in enumerate(_CUTS))
    for name, cut in zip(_CUTS, (cut_q, cut_k), strict=True):
        if cut.device != q.device:
            raise InvalidArguments(f"{name} is on {cut.device}, q on {q.device}.")
    own = {"cu_seqlens_q": cut_q, "cu_seqlens_k": cut_k}
    if seqused_k is not None:
        own["seqused_k"] = _used(seqused_k, cut_k)
    alike = cuts[0] is cuts[1] if traced else cut_q.pointer == cut_k.pointer
    if not traced:
        longest = check_packing(own, (q.shape[0], k.shape[0]), longest)
    batch, longest_q, longest_k = cut_q.shape[0] - 1, *longest
    if cut_k.shape != cut_q.shape:
        raise InvalidArguments(f"cu_seqlens_q cuts {batch} sequences, cu_seqlens_k {cut_k.shape[0] - 1}.")
    assert longest_q is not None
    assert longest_k is not None
    raw |= own
    return Packing(batch, int(longest_q), int(longest_k), alike and seqused_k is None)


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
    v : array, shape (rows_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : array of int32, shape (sequences + 1,)
        Sequence b has rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; it may be empty. On the device of q.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest lengths. On a GPU, giving them saves reading the offsets back.
    seqused_k : array of int32, shape (sequences,), optional
        Keys in use: sequence b ends after so many of its rows of k and v; "bottom_right" counts from there.
        On a GPU it is read there only.
    align : {"top_left", "bottom_right"} or int, optional
        As in `attention`, for each sequence; needed by positional options unless cu_seqlens_q and
        cu_seqlens_k are the same array and seqused_k is not given.
    mask, bias : array, optional
        As in `attention`, over (sequences, heads_q, max_seqlen_q, max_seqlen_k).
    alibi_slopes : array, shape (heads_q,) or (sequences, heads_q), optional
    q_scale, k_scale, v_scale : array of float32, shape (heads_k,) or (sequences, heads_k), optional
        As in `attention`.
    {options: As in `attention`; positions count from the start of each sequence.}
    return_lse
        As in `attention`.
    out : array, optional
        As in `attention`; rows past the last offset are left alone.

    Returns
    -------
    o : array, shape (rows_q, heads_q, head_dim_v)
        Rows past the last offset are 0 if out is not given.
    lse : array, shape (heads_q, rows_q)
        Only with return_lse; rows past the last offset are 0.

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `attention`; also offsets that fall or exceed the rows (checked wherever they are read).
    """
    cuts = cu_seqlens_q, cu_seqlens_k
    arrays, values, packing = split_packed(options)
    raw = adopted(q=q, k=k, v=v, out=out, **arrays)
    return run_forward(raw, values, return_lse, out, pack(raw, cuts, *packing))


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
    deterministic : bool
        As in `attention_backward`.
    {options: As given to `attention_varlen`.}

    Returns
    -------
    Gradients
        Rows past the last offset, and those of keys not in use, are 0.

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `attention_varlen`.
    """
    cuts = cu_seqlens_q, cu_seqlens_k
    deterministic = options.pop("deterministic", False)
    arrays, values, packing = split_packed(options)
    raw = adopted(do=do, q=q, k=k, v=v, o=o, lse=lse, **arrays)
    return run_backward(raw, values, deterministic, pack(raw, cuts, *packing))


def split_packed(options: Any) -> tuple[dict[str, Any], Options, tuple[tuple[int | None, int | None], Any]]:
    """The arrays and values among the options of a packed call, and what `pack` takes of them."""
    longest = options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None)
    seqused_k = options.pop("seqused_k", None)
    arrays, values = split({**options, "layout": "bshd"})
    return arrays, values, (longest, seqused_k)
