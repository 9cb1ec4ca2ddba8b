"""The functions of flash-attn 3 on torch tensors, with its names, argument order and semantics.

flash-attn 3's own module is called ``flash_attn_interface``.

>>> import torch
>>> from cupy_flash.flash_attn_3 import flash_attn_func
>>> q = k = v = torch.randn(1, 128, 4, 64, requires_grad=True)
>>> flash_attn_func(q, k, v, causal=True).sum().backward()

`cupy_flash.flash_attn` lists what is the same as in flash-attn 2, and what differs. In addition: float8
inputs are forward only, with bfloat16 results; ``num_splits`` (except over caches), ``pack_gqa``,
``sm_margin`` and ``scheduler_metadata`` are not used, because the planner decides; ``attention_chunk``
raises.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from . import api, varlen
from .call.compound import LatentCache, QuantizedArray, QuantizedCache, Tuning
from .call.signature import takes
from .errors import InvalidArgumentsError, UnsupportedError
from .flash_attn import flash_attn_interface as second
from .flash_attn.error_names import FLASH_ATTN_3, errors_in_names_of
from .merge import merge_parts
from .torch import attention, attention_varlen, attention_with_kv_cache
from .torch.inputs import check_tensors

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Tensor: TypeAlias = torch.Tensor
Window: TypeAlias = tuple[int | None, int | None]
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def _refuse_chunks(attention_chunk: int) -> None:
    """Refuse chunks of keys."""
    if attention_chunk:
        raise UnsupportedError(
            "attention_chunk is not supported.",
            hint="attention_chunk=0; flash_attn_varlen_func with a sequence for each chunk",
        )


def _with_qv(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, softmax_scale: float | None
) -> tuple[Tensor, Tensor, float | None]:
    """Q, k and scale with qv: its scores are those of a longer query (q, qv) over longer keys (k, v)."""
    if qv is None:
        return q, k, softmax_scale
    check_tensors(("qv",), qv=qv)
    scale = (q.shape[-1] + qv.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), scale


def _latents(k_cache: Tensor, v_cache: Tensor) -> LatentCache:
    """A LatentCache of adjacent v_cache and k_cache, so that (qv, q) gives scores with its rows."""
    columns = v_cache.shape[-1]
    one, other = (x.untyped_storage().data_ptr() for x in (k_cache, v_cache))
    behind = one == other and k_cache.storage_offset() == v_cache.storage_offset() + columns
    alike = k_cache.shape[:-1] == v_cache.shape[:-1] and k_cache.dtype == v_cache.dtype
    if not (behind and alike and k_cache.stride() == v_cache.stride() and v_cache.stride(-1) == 1):
        raise UnsupportedError(
            "qv is not supported if k_cache and v_cache are not parts of one tensor.",
            hint="v_cache, k_cache = latents.split((head_dim_v, head_dim), -1), views of one tensor",
        )
    shape = *v_cache.shape[:-1], columns + k_cache.shape[-1]
    return LatentCache(v_cache.as_strided(shape, v_cache.stride()), columns)


def _scales(q: Tensor, **descale: Tensor | None) -> dict[str, Any]:
    """Our scales for theirs, by our names."""
    if q.dtype != torch.float8_e4m3fn:
        named = [name for name, scale in descale.items() if scale is not None]
        if named:
            raise InvalidArgumentsError(
                f"{named[0]} with q of {q.dtype}.", hint="q, k and v of torch.float8_e4m3fn"
            )
        return {}
    return {name.replace("descale", "scale"): scale for name, scale in descale.items() if scale is not None}


def _quantized(q: Tensor, k: Tensor, v: Tensor, scales: dict[str, Any]) -> list[Any]:
    """q, k and v, as a `QuantizedArray` where there is a scale."""
    named = {"q": q, "k": k, "v": v}
    return [
        QuantizedArray(x, scales[f"{name}_scale"]) if f"{name}_scale" in scales else x
        for name, x in named.items()
    ]


@takes(translate_error=errors_in_names_of(FLASH_ATTN_3))
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,  # noqa: ARG001  (theirs)
    pack_gqa: bool | None = None,  # noqa: ARG001
    deterministic: bool = False,
    sm_margin: int = 0,  # noqa: ARG001
    return_attn_probs: bool = False,
    *,
    reproducible: second.Mode | None = None,
) -> Any:
    """Attention with gradients, with flash-attn 3's signature.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads, head_dim)
        Also torch.float8_e4m3fn, as k and v, without gradients.
    k : Tensor, shape (batch, seqlen_k, heads_k, head_dim)
    v : Tensor, shape (batch, seqlen_k, heads_k, head_dim_v)
    softmax_scale : float, optional
        Default head_dim ** -0.5; with qv (head_dim + head_dim_v) ** -0.5.
    causal : bool
        The last query sees all keys, and each earlier query one key less.
    qv : Tensor, shape (batch, seqlen_q, heads, head_dim_v), optional
        qv v^T is added to q k^T; q and k are copied to join them with qv and v.
    q_descale, k_descale, v_descale : Tensor of float32, shape (batch, heads_k), optional
        The dequantisation scales of float8 inputs.
    window_size : (int, int)
        Keys seen before and after a query, -1 is open.
    attention_chunk : int
        0; anything else raises.
    softcap : float
        scores become softcap * tanh(scores / softcap); 0.0 is none.
    num_splits, pack_gqa, sm_margin
        Not used: the planner decides.
    deterministic : bool
        The gradients have the same bits on every run.
    return_attn_probs : bool
        Return (out, lse).
    reproducible : {"batch", "prefill", "device"}, optional
        Not in flash-attn: batch-invariant bits, as in `cupy_flash.attention`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads, head_dim_v)
    softmax_lse : Tensor, shape (batch, heads, seqlen_q)
        Only with return_attn_probs.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention`; UnsupportedError for attention_chunk.
    """
    check_tensors(("q", "k", "v"), q=q, k=k, v=v)
    _refuse_chunks(attention_chunk)
    scales = _scales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    q, k, softmax_scale = _with_qv(q, k, v, qv, softmax_scale)
    options = second.options_of(
        softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, reproducible
    )
    if q.dtype == torch.float8_e4m3fn:
        return api.attention(*_quantized(q, k, v, scales), layout="bshd", **options)
    return attention(q, k, v, layout="bshd", **options)


@takes(translate_error=errors_in_names_of(FLASH_ATTN_3))
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    reproducible: second.Mode | None = None,
) -> Any:
    """`flash_attn_func` with queries, keys and values in one tensor, without copies.

    Parameters
    ----------
    qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads + 2 heads_k, head_dim)
    num_heads_q : int, optional
        Heads of q, if the heads of q, k and v are adjacent on one axis.
    softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap
        As in `flash_attn_func`.
    deterministic, sm_margin, return_attn_probs, reproducible
        As in `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`
    """
    if num_heads_q is None:
        q, k, v = second.parts_of(qkv, 3, "qkv")
    else:
        check_tensors(("qkv",), qkv=qkv)
        others = qkv.shape[-2] - num_heads_q
        if qkv.dim() != 4 or others <= 0 or others % 2:
            raise InvalidArgumentsError(
                f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}.",
                hint="(batch, seqlen, num_heads_q + 2 * heads_k, head_dim)",
            )
        q, k, v = torch.split(qkv, [num_heads_q, others // 2, others // 2], -2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, 1, None, deterministic, sm_margin, return_attn_probs, reproducible=reproducible,
    )  # fmt: skip


@takes(translate_error=errors_in_names_of(FLASH_ATTN_3))
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,  # noqa: ARG001  (theirs)
    pack_gqa: bool | None = None,  # noqa: ARG001
    deterministic: bool = False,
    sm_margin: int = 0,  # noqa: ARG001
    return_attn_probs: bool = False,
    *,
    reproducible: second.Mode | None = None,
) -> Any:
    """Attention within packed sequences, with gradients, with flash-attn 3's signature.

    Parameters
    ----------
    q : Tensor, shape (rows_q, heads, head_dim)
    k : Tensor, shape (rows_k, heads_k, head_dim)
    v : Tensor, shape (rows_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : Tensor of int32, shape (sequences + 1,)
    max_seqlen_q, max_seqlen_k : int
        The longest lengths.
    seqused_q, seqused_k : Tensor of int32, shape (sequences,), optional
        Queries and keys in use of each sequence; other rows of the result are 0.
    softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap
        As in `flash_attn_func`, for each sequence.
    num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs, reproducible
        As in `flash_attn_func`.

    Returns
    -------
    out : Tensor, shape (rows_q, heads, head_dim_v)
    softmax_lse : Tensor, shape (heads, rows_q)
        Only with return_attn_probs.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_varlen`; UnsupportedError for attention_chunk.
    """
    check_tensors(("q", "k", "v"), q=q, k=k, v=v)
    _refuse_chunks(attention_chunk)
    scales = _scales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    q, k, softmax_scale = _with_qv(q, k, v, qv, softmax_scale)
    options = second.options_of(
        softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, reproducible
    )
    options.update(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    options.update(seqused_q=seqused_q, seqused_k=seqused_k)
    if q.dtype == torch.float8_e4m3fn:
        q8, k8, v8 = _quantized(q, k, v, scales)
        return varlen.attention_varlen(q8, k8, v8, cu_seqlens_q, cu_seqlens_k, **options)
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def _check_parts(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Refuse what `flash_attn_combine` cannot combine, or would broadcast or convert."""
    check_tensors(("out_partial", "lse_partial"), out_partial=out_partial, lse_partial=lse_partial, out=out)
    for name, x in (("lse_partial", lse_partial), ("out", out)):
        if x is not None and x.device != out_partial.device:
            raise InvalidArgumentsError(
                f"{name} is on {x.device}, out_partial on {out_partial.device}.",
                hint=f"{name}.to(out_partial.device)",
            )
    whole = tuple(out_partial.shape[1:])
    if len(whole) not in (3, 4) or out_partial.shape[:-1] != lse_partial.shape or not len(lse_partial):
        raise InvalidArgumentsError(
            f"out_partial has shape {tuple(out_partial.shape)}, lse_partial {tuple(lse_partial.shape)}.",
            hint="out_partial of shape (parts, batch, seqlen, heads, head_dim) or (parts, rows, heads, "
            "head_dim), lse_partial of shape out_partial.shape[:-1], and a part at least",
        )
    if out is not None and out.shape != whole:
        raise InvalidArgumentsError(f"out has shape {tuple(out.shape)}, not {whole}.", hint="out=None")
    if out is not None and out_dtype not in (None, out.dtype):
        raise InvalidArgumentsError(
            f"out has dtype {out.dtype}, and out_dtype is {out_dtype}.", hint="out_dtype=None"
        )
    accumulator = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    result = ("out_dtype", out_dtype) if out is None else ("out", out.dtype)
    for name, dtype, allowed in (
        ("out_partial", out_partial.dtype, _FLOATS),
        ("lse_partial", lse_partial.dtype, (accumulator,)),
        (*result, (*_FLOATS, None)),
    ):
        if dtype not in allowed:
            raise InvalidArgumentsError(
                f"{name} is {dtype}, not {' or '.join(str(one) for one in allowed if one)}.",
                hint="the results of flash_attn_func(..., return_attn_probs=True), stacked",
            )


@takes(translate_error=errors_in_names_of(FLASH_ATTN_3))
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the results over each.

    Parameters
    ----------
    out_partial : Tensor, shape (parts, batch, seqlen, heads, head_dim) or (parts, rows, heads, head_dim)
    lse_partial : Tensor of float32, shape (parts, batch, seqlen, heads) or (parts, rows, heads)
        Of float64 for an out_partial of float64.
    out : Tensor, optional
        Where to write the result, of its shape.
    out_dtype : torch.dtype, optional
        Dtype of the result; default: that of out, or of out_partial.

    Returns
    -------
    out : Tensor, shape (batch, seqlen, heads, head_dim) or (rows, heads, head_dim)
    lse : Tensor, shape (batch, seqlen, heads) or (rows, heads)
        -inf, with out = 0, where every part is empty. out_partial of an empty part may hold any values, also
        NaN.
    """
    _check_parts(out_partial, lse_partial, out, out_dtype)
    whole, lse = merge_parts(torch, tuple(zip(out_partial, lse_partial, strict=True)))
    if out is not None:
        return out.copy_(whole), lse
    return whole.to(out_dtype or out_partial.dtype), lse


@takes(translate_error=errors_in_names_of(FLASH_ATTN_3))
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,  # noqa: ARG001
    num_splits: int = 0,
    pack_gqa: bool | None = None,  # noqa: ARG001
    sm_margin: int = 0,  # noqa: ARG001
    return_softmax_lse: bool = False,
    *,
    reproducible: second.Mode | None = None,
) -> Any:
    """Attention over a KV cache, to which new keys and values are appended in place; without gradients.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads, head_dim), or (rows, heads, head_dim) with cu_seqlens_q
        torch.float8_e4m3fn over a cache of that dtype too; the result is then bfloat16.
    k_cache, v_cache : Tensor, shape (slots, capacity, heads_k, head_dim or head_dim_v)
        Or (pages, page, heads_k, ...) with a page_table; pages of any size.
    k, v : Tensor, shape (batch, new, heads_k, head_dim or head_dim_v), optional
        Appended to the cache, in place, before anything is computed. (rows, heads_k, ...) with
        cu_seqlens_k_new.
    rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, rotary_interleaved, num_splits
        As in `cupy_flash.flash_attn.flash_attn_with_kvcache`.
    cu_seqlens_q, cu_seqlens_k_new : Tensor of int32, shape (batch + 1,), optional
        Offsets of the sequences in q, and in k and v; the latter are not read without k.
    max_seqlen_q : int, optional
        Queries of the longest sequence.
    rotary_seqlens : Tensor of int32, shape (batch,), optional
        Positions at which rotation begins, instead of cache_seqlens; ignored without rotary_cos.
    page_table : Tensor of int32, shape (batch, pages of a sequence), optional
        With cache_batch_idx any number of rows, from which it selects one per sequence.
    q_descale, k_descale, v_descale : Tensor of float32, shape (batch, heads_k), optional
        The dequantisation scales of float8 inputs.
    softmax_scale, causal, window_size, softcap
        As in `flash_attn_func`.
    qv : Tensor, shape (batch, seqlen_q, heads, head_dim_v) or (rows, heads, head_dim_v), optional
        As in `flash_attn_func`. k_cache must directly follow v_cache in each row of one tensor (a cache of
        latents); not supported for float8, if rotary_cos rotates only a part of q, or in compiled programs.
    attention_chunk
        0; anything else raises.
    scheduler_metadata, pack_gqa, sm_margin
        Not used: the planner decides.
    return_softmax_lse : bool
        Also return the log-sum-exp.
    reproducible
        As in `flash_attn_func`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads, head_dim_v)
    softmax_lse : Tensor, shape (batch, heads, seqlen_q), or (heads, rows) with cu_seqlens_q
        Only with return_softmax_lse.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_with_kv_cache`; UnsupportedError for unsupported arguments.
    """
    _refuse_chunks(attention_chunk)
    check_tensors(("q", "k_cache", "v_cache"), q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv)
    if qv is not None and q.dtype == torch.float8_e4m3fn:
        raise UnsupportedError("qv is not supported with q of float8.", hint="no tensor of 8 bits")
    if qv is not None and rotary_cos is not None:
        check_tensors(rotary_cos=rotary_cos)
        turned, features = 2 * rotary_cos.shape[-1], q.shape[-1]
        if turned != features:
            raise UnsupportedError(
                f"qv is not supported with rotary_cos that rotates {turned} of {features} features of q.",
                hint="rotary_cos of head_dim / 2 columns, or q and k rotated before the call",
            )
    if cache_seqlens is None:
        cache_seqlens = second.full_length(k_cache, k, page_table, "page_table")
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = _rows_of(page_table, cache_batch_idx), None
    window = second.window_of(window_size)
    positional = causal or window != (None, None)
    packed = None
    if cu_seqlens_q is not None:
        packed = cu_seqlens_q.shape[0] - 1, max_seqlen_q or int(cu_seqlens_q.diff().max())
    first = second.rotary_starts(q, k, rotary_cos, cache_seqlens, positional, packed)
    scales = _scales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    caches: tuple[Any, Any] = k_cache, v_cache
    if qv is not None:
        caches = _latents(k_cache, v_cache), None
        scale = (q.shape[-1] + qv.shape[-1]) ** -0.5
        softmax_scale = scale if softmax_scale is None else softmax_scale
        q = torch.cat((qv, q), -1)
        if k is not None and v is not None:
            k, v = torch.cat((v, k), -1), None
    if scales or q.dtype == torch.float8_e4m3fn:
        q, scales = _queries_as_bfloat16(q, k_cache, k, scales)
        caches = QuantizedCache(k_cache, scales["k_scale"]), QuantizedCache(v_cache, scales["v_scale"])
    rotary = second.rotary_of(
        rotary_cos, rotary_sin, first if rotary_seqlens is None else rotary_seqlens, rotary_interleaved,
        last=qv is not None,
    )  # fmt: skip
    if k is None:  # why not refused: SGLang then passes the offsets of all keys, and flash-attn 3 reads none
        cu_seqlens_k_new = None
    return attention_with_kv_cache(
        q, *caches, cache_seqlens=cache_seqlens, k=k, v=v, rotary=rotary, cache_leftpad=cache_leftpad,
        block_table=cache_batch_idx if page_table is None else page_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=packed and packed[1], causal=causal, window=window,
        scale=softmax_scale, softcap=softcap or None, layout="bshd", tuning=Tuning(splits=num_splits or None),
        return_lse=return_softmax_lse, reproducible=reproducible,
    )  # fmt: skip


def _rows_of(page_table: Tensor, cache_batch_idx: Tensor) -> Tensor:
    """The rows of the page table that the sequences use."""
    check_tensors(page_table=page_table, cache_batch_idx=cache_batch_idx)
    if cache_batch_idx.dtype != torch.int32 or cache_batch_idx.dim() != 1 or page_table.dim() != 2:
        raise InvalidArgumentsError(
            f"cache_batch_idx has shape {tuple(cache_batch_idx.shape)} and dtype {cache_batch_idx.dtype}, "
            f"page_table shape {tuple(page_table.shape)}.",
            hint="(batch,) of torch.int32, which names rows of (sequences, pages of a sequence)",
        )
    if cache_batch_idx.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = (cache_batch_idx < 0) | (cache_batch_idx >= len(page_table))
        if outside.any():
            raise InvalidArgumentsError(
                f"cache_batch_idx holds {int(cache_batch_idx[outside][0])}; "
                f"page_table has {len(page_table)} rows.",
                hint=f"rows from 0 to {len(page_table) - 1}",
            )
    return page_table.index_select(0, cache_batch_idx)


def _queries_as_bfloat16(
    q: Tensor, k_cache: Tensor, k: Tensor | None, scales: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Float8 queries as bfloat16, which is exact, with their scale multiplied into that of the keys."""
    if k is not None:
        raise UnsupportedError(
            "k and v are appended as values of 8 bits.", hint="k=None: store k and v in the cache before"
        )
    ones = torch.ones((k_cache.shape[-2],), dtype=torch.float32, device=q.device)
    of = {name: scales.get(name, ones) for name in ("q_scale", "k_scale", "v_scale")}
    return q.bfloat16(), {"k_scale": of["q_scale"] * of["k_scale"], "v_scale": of["v_scale"]}


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    """Return None: calls are planned when they are made, and plans are cached."""
