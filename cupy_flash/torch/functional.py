"""attention with gradients, and replacements of torch's functions with torch's signatures and rules."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch

from ..call.checks import flag
from ..call.given import Options
from ..call.options import PARAMETERS, RecordedOptions, RecordedRaggedOptions
from ..call.public_names import renamed
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from .blocks import has_function, ours
from .call import NO_GRADIENTS, TENSORS, Call
from .eager import are_tensors, attend_eagerly, is_plain
from .functions import attend_by_function
from .inputs import (
    as_operands,
    cast_by_context,
    causal_alignment,
    check_tensors,
    drawn_seed,
    dtypes_of_mask,
    is_sharded,
    refuse_lost_gradients,
    scaled_queries,
    widened,
)
from .kv_cache import attention_with_kv_cache
from .leading import are_in_rows, broadcast_batches, over_batches, swap_heads_and_rows
from .nested import are_nested, are_ragged_rows, nested_like, packed
from .ops import attend, in_forward_mode
from .repeat import remember, remember_in_core, repeated
from .repeat_in_core import repeated_in_core

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention", "varlen_attn"]

Tensor: TypeAlias = torch.Tensor
# Names of torch's function by ours.
_OF_TORCH = {"mask": "attn_mask", "bias": "attn_mask", "dropout": "dropout_p", "causal": "is_causal"}
_PARAMETERS = tuple(map(TENSORS.index, PARAMETERS))


def _attend(call: Call, return_lse: bool) -> Any:
    """The result of a call: of nested tensors, DTensors or plain tensors, compiled or eager."""
    if torch.compiler.is_compiling() or not are_tensors(call):
        if are_nested(call):
            return _attend_nested(call, return_lse)
        call = as_operands(call)
        if any(is_sharded(x) for x in call.tensors):
            return _attend_sharded(call, return_lse)
    return _attend_to_tensors(call, return_lse)


def _attend_nested(call: Call, return_lse: bool) -> Any:
    """The result of a call with nested tensors, as nested tensors."""
    q, layout = call.tensors[0], call.options.layout
    o, lse = _attend(packed(call), True)
    o = nested_like(q, layout, o)
    return (o, nested_like(q, layout, lse.transpose(0, 1))) if return_lse else o


def _attend_sharded(call: Call, return_lse: bool) -> Any:
    """The result of a call with DTensors, as DTensors."""
    # why here: the import takes a second, which a caller with DTensors has already spent.
    from .sharding import head_first

    turned = head_first(call)
    o, lse = _attend_to_tensors(turned, True)
    o = o if turned is call else o.transpose(-3, -2)
    return (o, lse) if return_lse else o


def _attend_to_tensors(call: Call, return_lse: bool) -> Any:
    """The result of a call with tensors that the operator accepts."""
    options: Any = call.options
    if isinstance(options.scale, torch.Tensor):
        call = scaled_queries(call)
    if isinstance(options.softcap, torch.Tensor) or isinstance(options.dropout, torch.Tensor):
        refuse_lost_gradients(softcap=options.softcap, dropout=options.dropout)
    q, k, v, *arrays = call.tensors
    if q.dtype == torch.float8_e4m3fn:
        raise UnsupportedError(
            "float8_e4m3fn has no gradient, which this function records.",
            hint="cupy_flash.attention on the same tensors, or with scales on QuantizedArray(x, scale)",
        )
    for at in NO_GRADIENTS:
        x = call.tensors[at]
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            name = TENSORS[at]
            raise UnsupportedError(
                f"{name} has no gradient.", hint=f"{name}.detach(), or what it adds as a bias"
            )
    for at in _PARAMETERS:
        if call.tensors[at] is not None:
            arrays[at - 3] = widened(call.tensors[at], q)
    call = call._replace(tensors=(*cast_by_context(q, k, v), *arrays))
    plain = is_plain(*call.tensors) and not in_forward_mode(*call.tensors)
    if options.seed is None and options.dropout:
        seed = drawn_seed()
        call = call._replace(options=call.options._replace(seed=int(seed) if plain else seed))
    if plain:
        return attend_eagerly(call, return_lse)
    o, lse = attend(call)
    return (o, lse) if return_lse else o


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RecordedOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[RecordedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[RecordedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@takes(RecordedOptions)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[RecordedOptions]
) -> Any:
    """`cupy_flash.attention` with autograd: gradients of q, k, v, bias and sinks, through o and lse.

    Parameters
    ----------
    q, k, v : Tensor
        As in `cupy_flash.attention`; torch tensors on a CPU or a CUDA device. Nested tensors of the jagged
        layout, ragged in the sequence, are packed sequences, and return nested tensors; offsets that are not
        the same tensor are compared, which on a GPU waits for the stream. DTensors stay sharded by
        batch and by heads (if each device gets whole heads of k); torch gathers other shardings.
    mask : Tensor, Spans, BlockMask, mask function, or tuple of these, optional
        As in `cupy_flash.attention`; also a torch.nn.attention.flex_attention.BlockMask, see `block_mask`,
        and a torch.nn.attention.bias.CausalBias, which sets causal and align.
    bias : Tensor or torch.nn.attention.bias.CausalBias, optional
        As in `cupy_flash.attention`.
    scale : float or Tensor, of one element or of shape (heads_q,) or (batch, heads_q), optional
        As in `cupy_flash.attention`; several elements are one per head. q is multiplied by a tensor, in
        the dtype of q, and the tensor has a gradient.
    seed : int or Tensor of one element, optional
        As in `cupy_flash.attention`. With dropout and no seed, one is drawn from torch's CPU generator, so
        that `torch.manual_seed` and activation checkpoints reproduce it. Under torch.compile the backend
        draws it: `torch.manual_seed` reproduces it too, but inductor's numbers differ from those of an eager
        call unless ``torch._inductor.config.fallback_random`` is set.
    sinks : Tensor, optional
        As in `cupy_flash.attention`; 16-bit sinks are cast, and their gradient has 16 bits.
    score
        As in `cupy_flash.attention`; bound tensors that require grad get gradients. torch.compile has a
        graph break at a score or mask function; torch.func and forward mode are not supported, nor are
        second derivatives if bound tensors require grad.
    reproducible : {"run", "batch", "prefill", "device"}, optional
        As in `cupy_flash.attention`; torch.use_deterministic_algorithms(True) sets "run" for backward passes.
    {options: As in `cupy_flash.attention`.}
    return_lse : bool
        As in `cupy_flash.attention`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention`; UnsupportedError also for a softcap or alibi_slopes that require a
        gradient, and for a third derivative. They are a ValueError, a NotImplementedError and a LookupError;
        torch's own functions raise RuntimeError for most of the same mistakes.

    Notes
    -----
    Works under torch.compile(fullgraph=True), activation checkpointing, torch.autocast and torch.func.
    Differentiable twice, in forward mode too (`torch.func.jvp`, ``create_graph=True``), on GPUs too.
    """
    given = (return_lse, *options, *options.values())
    known = repeated_in_core("attention", q, k, v, *given)
    if known is not None:
        return known
    known, key = repeated("attention", q, k, v, options, return_lse)
    if known is not None:
        return known
    flag(return_lse, "return_lse")
    if has_function(options):
        return attend_by_function(q, k, v, ours(options), return_lse)
    call = Call.of(q, k, v, ours(options))
    results = _attend(call, return_lse)
    if key is not None:
        remember("attention", key, q, k, v, call.options, return_lse, given)
    elif return_lse is False and (name := _only_array(call)):
        array = call.tensors[TENSORS.index(name)]
        remember_in_core("attention", (q, k, v), name, array, call.options, given)
    return results


def _only_array(call: Call) -> str:
    """The name of the only array in addition to q, k and v, if it is a mask or bias on a CPU; else empty."""
    if torch.compiler.is_compiling() or not call.tensors[0].is_cpu:
        return ""
    names = [name for name, x in zip(TENSORS, call.tensors, strict=True) if x is not None]
    return names[3] if len(names) == 4 and names[3] in ("mask", "bias") else ""


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[RecordedRaggedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], **options: Unpack[RecordedRaggedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: bool, **options: Unpack[RecordedRaggedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@takes(RecordedRaggedOptions)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[RecordedRaggedOptions],
) -> Any:
    """`cupy_flash.attention_varlen` with autograd.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As in `cupy_flash.attention_varlen`.
    {options: As in `cupy_flash.attention_varlen`.}
    mask, seed, score, reproducible
        As in `attention`.
    scale : float or Tensor, of one element or of shape (heads_q,), optional
        As in `attention`.
    return_lse : bool
        As in `cupy_flash.attention_varlen`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_varlen`.
    """
    cuts = cu_seqlens_q, cu_seqlens_k
    flag(return_lse, "return_lse")
    if has_function(options):
        return attend_by_function(q, k, v, ours(options), return_lse, cuts)
    return _attend(Call.of(q, k, v, ours({**options, "layout": "bshd"}), cuts), return_lse)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` in this library: same signature, same rules.

    Parameters
    ----------
    query, key, value : Tensor, shape (..., heads, seqlen, head_dim)
        Leading axes broadcast, including heads. A tensor broadcast along some of several leading axes is not
        expanded if that takes much memory; separate calls run over the other axes instead. DTensors as in
        `attention`.
    attn_mask : Tensor or torch.nn.attention.bias.CausalBias, optional
        bool, True = take part; or float32 or the dtype of query (under torch.autocast also the other 16-bit
        dtypes), added to the scores unchanged. Broadcasts to (..., heads, seqlen_q, seqlen_k).
    dropout_p : float
        The seed is drawn from torch's CPU generator.
    is_causal : bool
        Aligned top-left. Excludes attn_mask.
    scale : float, optional
        Default head_dim ** -0.5.
    enable_gqa : bool
        Allow fewer heads of key and value.

    Returns
    -------
    Tensor, shape (..., heads, seqlen_q, head_dim_v)
        Contiguous; if query is a view of (batch, seqlen_q, heads, head_dim), so is the result, as with
        torch's fused kernels. The gradients follow the same rule.

    Raises
    ------
    InvalidArgumentsError
        attn_mask together with is_causal, another dtype of attn_mask, or fewer heads without enable_gqa.
        It is a ValueError; torch's own function raises RuntimeError.
    """
    o: Tensor | None
    o = repeated_in_core("sdpa", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if o is not None:
        return o
    named = {"causal": is_causal, "scale": scale, "dropout": dropout_p, "mask": attn_mask}
    o, seen = repeated("sdpa", query, key, value, named, enable_gqa)
    if o is not None:
        return o
    given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if torch.compiler.is_compiling():  # which shows the original text of an error anyway
        return _by_rules_of_torch(*given, seen)
    try:
        return _by_rules_of_torch(*given, seen)
    except (InvalidArgumentsError, UnsupportedError) as error:
        error.args = (renamed(str(error), _OF_TORCH),)
        raise


def _by_rules_of_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    seen: tuple[Hashable, ...] | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` of a call that repeats none; stored under `seen` for repetitions."""
    options = attn_mask, dropout_p, is_causal, scale, enable_gqa
    flag(enable_gqa, "enable_gqa")
    if are_ragged_rows(query):
        return _nested_sdpa(query, key, value, *options)
    given = {"query": query, "key": key, "value": value}
    align = causal_alignment(attn_mask)
    if align is None:
        given["attn_mask"] = attn_mask
    check_tensors(("query", "key", "value"), **{name: x for name, x in given.items() if not is_sharded(x)})
    if attn_mask is not None and is_causal:
        raise InvalidArgumentsError(
            "attn_mask and is_causal exclude each other.", hint="cupy_flash.torch.attention, which takes both"
        )
    if align is None and attn_mask is not None and attn_mask.dtype not in dtypes_of_mask(query):
        raise InvalidArgumentsError(
            f"attn_mask has dtype {attn_mask.dtype}, not torch.bool, torch.float32 or {query.dtype}.",
            hint="attn_mask.to(torch.bool), True where a query may attend; or attn_mask.to(query.dtype)",
        )
    if dropout_p == 1.0:  # as torch: every weight is 0, and so is every gradient
        return 0.0 * _by_rules_of_torch(query, key, value, attn_mask, 0.0, *options[2:])
    features, of_value = query.shape[-1], value.shape[-1]
    # As torch: without features scores are equal, or o has none.
    if features == key.shape[-1] and 0 in (features, of_value):
        if not features:
            query, key = (torch.nn.functional.pad(x, (0, 1)) for x in (query, key))
        padded = torch.nn.functional.pad(value, (0, 1))
        return _by_rules_of_torch(query, key, padded, *options)[..., :of_value]
    qkv, batch = broadcast_batches(query, key, value, enable_gqa)
    where: Any = align or "top_left"
    added = attn_mask is not None and attn_mask.dtype != torch.bool
    in_rows = are_in_rows(qkv[0])
    layout: Any = "bshd" if in_rows else "bhsd"

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        o = attention(
            *(swap_heads_and_rows(q, k, v) if in_rows else (q, k, v)), layout=layout,
            causal=is_causal, align=where, scale=scale, dropout=dropout_p,
            mask=None if added else mask, bias=mask if added else None,
        )  # fmt: skip
        return o.transpose(1, 2) if in_rows else o

    if align is not None:
        return over_batches(lambda q, k, v, _: attend(q, k, v, attn_mask), qkv, None, batch)
    o = over_batches(attend, qkv, attn_mask, batch)
    if len(batch) < 2 and all(map(operator.is_, qkv, (query, key, value))) and not dropout_p:
        of_call = Options(causal=is_causal, align=where, scale=scale, layout=layout)
        if seen is not None:
            remember("sdpa", seen, query, key, value, of_call, False, options, in_rows)
        elif attn_mask is not None and not torch.compiler.is_compiling() and query.is_cpu:
            name = "bias" if added else "mask"
            remember_in_core("sdpa", (query, key, value), name, attn_mask, of_call, options, in_rows)
    return o


def _nested_sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout: float, causal: bool, scale: Any, grouped: bool
) -> Tensor:
    """`scaled_dot_product_attention` of nested tensors, without a mask, as in torch."""
    if attn_mask is not None:
        raise InvalidArgumentsError("attn_mask with nested tensors.", hint="attn_mask=None, is_causal=True")
    if not grouped and query.shape[1] != key.shape[1]:
        raise InvalidArgumentsError(
            f"{query.shape[1]} heads of query, {key.shape[1]} of key.", hint="enable_gqa=True"
        )
    o: Tensor = attention(query, key, value, causal=causal, align="top_left", scale=scale, dropout=dropout)
    return o


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` in this library: same signature, same rules.

    Parameters
    ----------
    query, key, value : Tensor, shape (rows, heads, head_dim)
        With a block_table key and value are (pages, page, heads, head_dim).
    cu_seq_q, cu_seq_k : Tensor of int32, shape (sequences + 1,)
    max_q, max_k : int
        Lengths of the longest sequences.
    return_aux : torch.nn.attention.varlen.AuxRequest, optional
        ``lse=True`` also returns the log-sum-exp.
    scale : float, optional
    window_size : (int, int)
        (left, right), aligned bottom-right; -1 is unbounded, (-1, 0) is causal.
    enable_gqa : bool
        Allow fewer heads of key and value.
    seqused_k : Tensor of int32, shape (sequences,), optional
        Number of keys in use of each sequence; required with a block_table.
    block_table : Tensor of int32, shape (sequences, pages of the longest sequence), optional
        The pages that hold the keys of each sequence; without gradients. cu_seq_k may then be None.
    num_splits
        Not supported yet: anything but None raises.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with the log-sum-exp

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `attention_varlen`.
    """
    if num_splits is not None:
        raise UnsupportedError("varlen_attn does not take num_splits yet.", hint="num_splits=None")
    check_tensors(("query", "key", "value"), query=query, key=key, value=value)
    if not flag(enable_gqa, "enable_gqa") and query.shape[1] != key.shape[-2]:
        raise InvalidArgumentsError(
            f"{query.shape[1]} heads of query, {key.shape[-2]} of key.", hint="enable_gqa=True"
        )
    left, right = (None if bound == -1 else bound for bound in window_size)
    shared: Any = {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "window": (left, right), "scale": scale}
    if block_table is not None:
        if seqused_k is None:
            raise InvalidArgumentsError("block_table is given without seqused_k.", hint="seqused_k, of int32")
        o, lse = attention_with_kv_cache(
            query, key, value, cache_seqlens=seqused_k, cu_seqlens_q=cu_seq_q, block_table=block_table,
            layout="bshd", return_lse=True, **shared,
        )  # fmt: skip
    else:
        check_tensors(("cu_seq_k",), cu_seq_k=cu_seq_k)
        assert cu_seq_k is not None
        o, lse = attention_varlen(
            query, key, value, cu_seq_q, cu_seq_k, seqused_k=seqused_k, align="bottom_right",
            return_lse=True, **shared,
        )  # fmt: skip
    return (o, lse) if getattr(return_aux, "lse", False) else o
