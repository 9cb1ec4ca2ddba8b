"""The functions of flash-attn 2; see `cupy_flash.flash_attn`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from ..call.checks import flag, pair
from ..call.compound import Rotary, Tuning
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from ..torch import attention, attention_varlen, attention_with_kv_cache
from ..torch.inputs import check_tensors
from .error_names import FLASH_ATTN_2, errors_in_names_of

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Tensor: TypeAlias = torch.Tensor
Mode: TypeAlias = Literal["run", "batch", "prefill", "device"]


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """Convert flash-attn's window, where -1 is unbounded; its own tests draw the two bounds as a tensor."""
    left, right = pair(window_size.tolist() if hasattr(window_size, "tolist") else window_size)
    return None if left == -1 else left, None if right == -1 else right


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    reproducible: Mode | None,
) -> dict[str, Any]:
    """Convert flash-attn's options."""
    if return_attn_probs and dropout_p:
        raise UnsupportedError(
            "return_attn_probs with dropout_p would return the matrix of kept weights, which is never made.",
            hint="return_attn_probs=False, or dropout_p=0.0 for (out, lse, None)",
        )
    shared = options_of(
        softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, reproducible
    )
    return {**shared, "dropout": dropout_p, "alibi_slopes": alibi_slopes}


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    reproducible: Mode | None,
) -> dict[str, Any]:
    """Convert the options that flash-attn 3 has too; reproducible prevails over deterministic."""
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": window_of(window_size),
        "align": "bottom_right",
        "softcap": softcap or None,
        "return_lse": return_lse,
        "reproducible": reproducible or ("run" if flag(deterministic, "deterministic") else None),
    }


def rotary_of(cos: Any, sin: Any, seqlens: Any, interleaved: bool, last: bool = False) -> Rotary | None:
    """Convert flash-attn's rotary options; None without tables."""
    if cos is None and sin is None:
        return None
    return Rotary(cos, sin, seqlens, interleaved, last=last)


def parts_of(packed: Tensor, count: int, name: str) -> tuple[Tensor, ...]:
    """Views of q, k and v, or of k and v, in a packed tensor."""
    check_tensors((name,), **{name: packed})
    if packed.dim() < 3 or packed.shape[-3] != count:
        raise InvalidArgumentsError(
            f"{name} has shape {tuple(packed.shape)}.", hint=f"(..., {count}, heads, head_dim)"
        )
    parts: tuple[Tensor, ...] = packed.unbind(-3)
    return parts


def _result(result: Any, return_attn_probs: bool) -> Any:
    """Return results as flash-attn does, with None as third value, which we have only without dropout."""
    if not return_attn_probs:
        return result
    out, lse = result
    return out, lse, None


def full_length(k_cache: Tensor, k: Tensor | None, table: Tensor | None, name: str) -> int:
    """The default of cache_seqlens, the whole cache; refuse it where that is ambiguous."""
    if k is not None or table is not None:
        raise InvalidArgumentsError(
            f"cache_seqlens is None: with k or {name} the lengths are needed.",
            hint="cache_seqlens, the keys of each sequence before the call",
        )
    length: int = k_cache.shape[1]  # why no int(): a program would hold for one size of caches
    return length


def rotary_starts(
    q: Tensor,
    k: Tensor | None,
    rotary_cos: Tensor | None,
    cache_seqlens: Tensor | int,
    positional: bool,
    packed: tuple[int, int] | None = None,
) -> Tensor | None:
    """Positions at which flash-attn starts to rotate queries and new keys: after the keys in the cache.

    Parameters
    ----------
    q, k, rotary_cos, cache_seqlens
        As in `flash_attn_with_kvcache`.
    positional : bool
        Whether the call is causal or has a window.
    packed : (int, int), optional
        Number of sequences and most queries of one, if they are packed.
    """
    if rotary_cos is None:
        return None
    if k is None:
        raise InvalidArgumentsError("rotary_cos is given without k.", hint="k and v, the new keys and values")
    sequences, queries = q.shape[:2] if packed is None else packed
    if queries > 1 and not positional:
        # flash-attn then rotates every query by the position of the first.
        raise UnsupportedError(f"rotary_cos with {queries} queries that are not causal.", hint="causal=True")
    if packed is None and k.dim() == 4 and k.shape[1] == queries:
        return None  # then the last query is at the position of the last key
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    return torch.full((sequences,), cache_seqlens, dtype=torch.int32, device=q.device)


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """Attention with gradients, under flash-attn's name.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads, head_dim)
    k, v : Tensor, shape (batch, seqlen_k, heads_k, head_dim)
        heads is a multiple of heads_k.
    dropout_p : float
        Probability of dropping an attention weight; pass 0.0 outside of training.
    softmax_scale : float, optional
        Default head_dim ** -0.5.
    causal : bool
        The last query sees all keys, each one before it one key less.
    window_size : (int, int)
        Keys seen before and after a query, -1 is open.
    softcap : float
        scores become softcap * tanh(scores / softcap); 0.0 is none.
    alibi_slopes : Tensor of float32, shape (heads,) or (batch, heads), optional
    deterministic : bool
        Gradients have the same bits on every run.
    return_attn_probs : bool
        Return (out, lse, None); together with dropout_p it raises.
    reproducible : {"batch", "prefill", "device"}, optional
        Not in flash-attn: the bits of a row do not depend on the batch, as in `cupy_flash.attention`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads, head_dim)
    softmax_lse : Tensor, shape (batch, heads, seqlen_q)
        Only with return_attn_probs.
    None
        Only with return_attn_probs; where flash-attn returns the dropout pattern, if there is one.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention`; UnsupportedError for return_attn_probs with dropout_p.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, reproducible,
    )  # fmt: skip
    return _result(attention(q, k, v, layout="bshd", **options), return_attn_probs)


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """`flash_attn_func` with keys and values in one tensor, without a copy.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads, head_dim)
    kv : Tensor, shape (batch, seqlen_k, 2, heads_k, head_dim)
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    deterministic, return_attn_probs, reproducible
        As in `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`
    """
    k, v = parts_of(kv, 2, "kv")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, reproducible=reproducible,
    )  # fmt: skip


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """`flash_attn_func` with queries, keys and values in one tensor, without a copy.

    Parameters
    ----------
    qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim)
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    deterministic, return_attn_probs, reproducible
        As in `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`
    """
    q, k, v = parts_of(qkv, 3, "qkv")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, reproducible=reproducible,
    )  # fmt: skip


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """Attention within packed sequences, with gradients, under flash-attn's name.

    Parameters
    ----------
    q : Tensor, shape (rows_q, heads, head_dim)
    k, v : Tensor, shape (rows_k, heads_k, head_dim)
        Or (pages, page, heads_k, head_dim) with a block_table; pages of any size.
    cu_seqlens_q, cu_seqlens_k : Tensor of int32, shape (sequences + 1,)
    max_seqlen_q, max_seqlen_k : int
        The longest lengths.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, for each sequence.
    deterministic, return_attn_probs, reproducible
        As in `flash_attn_func`.
    block_table : Tensor of int32, shape (sequences, pages of the longest sequence), optional
        Which pages hold the keys of a sequence; then without dropout and gradients.

    Returns
    -------
    out : Tensor, shape (rows_q, heads, head_dim)
    softmax_lse : Tensor, shape (heads, rows_q)
        Only with return_attn_probs.
    None
        Only with return_attn_probs.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_varlen`; UnsupportedError for dropout_p with a block_table and as in
        `flash_attn_func`.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, reproducible,
    )  # fmt: skip
    if block_table is not None:
        if dropout_p:
            raise UnsupportedError(f"dropout_p is {dropout_p} with a block_table.", hint="dropout_p=0.0")
        for name in ("dropout", "align"):
            del options[name]
        check_tensors(("cu_seqlens_k",), cu_seqlens_k=cu_seqlens_k)
        result = attention_with_kv_cache(
            q, k, v, cache_seqlens=cu_seqlens_k.diff(), cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, block_table=block_table, layout="bshd", **options,
        )  # fmt: skip
        return _result(result, return_attn_probs)
    result = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options
    )
    return _result(result, return_attn_probs)


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """`flash_attn_varlen_func` with keys and values in one tensor of shape (rows_k, 2, heads_k, head_dim).

    Parameters
    ----------
    q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `flash_attn_varlen_func`.
    kv : Tensor, shape (rows_k, 2, heads_k, head_dim)
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, for each sequence.
    deterministic, return_attn_probs, reproducible
        As in `flash_attn_func`.

    Returns
    -------
    As `flash_attn_varlen_func`
    """
    k, v = parts_of(kv, 2, "kv")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        reproducible=reproducible,
    )  # fmt: skip


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor.

    Parameters
    ----------
    qkv : Tensor, shape (rows, 3, heads, head_dim)
    cu_seqlens : Tensor of int32, shape (sequences + 1,)
    max_seqlen : int
        The longest length.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, for each sequence.
    deterministic, return_attn_probs, reproducible
        As in `flash_attn_func`.

    Returns
    -------
    As `flash_attn_varlen_func`
    """
    q, k, v = parts_of(qkv, 3, "qkv")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, reproducible=reproducible,
    )  # fmt: skip


@takes(translate_error=errors_in_names_of(FLASH_ATTN_2))
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    reproducible: Mode | None = None,
) -> Any:
    """Attention over a KV cache, to which new keys and values are appended in place; without gradients.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads, head_dim)
    k_cache, v_cache : Tensor, shape (slots, capacity, heads_k, head_dim)
        Or (pages, page, heads_k, head_dim) with a block_table; pages of any size.
    k, v : Tensor, shape (batch, new, heads_k, head_dim), optional
        Appended to the cache, in place, before attention.
    rotary_cos, rotary_sin : Tensor, shape (positions, rotated / 2), optional
        Rotate q and k, both starting at position cache_seqlens; only with k.
    cache_seqlens : Tensor of int32, shape (batch,), or int
        Keys of each sequence in the cache before this call; without k it may be left out, for a full cache.
    cache_batch_idx : Tensor of int32, shape (batch,), optional
    cache_leftpad : Tensor of int32, shape (batch,), optional
        Left padding: index of the first key of each sequence.
    block_table : Tensor of int32, shape (batch, pages of a sequence), optional
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    rotary_interleaved : bool
        Pair features 2i and 2i + 1 instead of i and i + rotated / 2.
    num_splits : int
        Splits of the keys (split-K); 0 leaves it to the planner.
    return_softmax_lse : bool
        Also return the log-sum-exp.
    reproducible
        As in `flash_attn_func`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads, head_dim)
    softmax_lse : Tensor, shape (batch, heads, seqlen_q)
        Only with return_softmax_lse.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_with_kv_cache`; UnsupportedError for a rotation of several queries that
        are not causal, all of which flash-attn rotates by the position of the first.
    """
    check_tensors(("q", "k_cache", "v_cache"), q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    if cache_seqlens is None:
        cache_seqlens = full_length(k_cache, k, block_table, "block_table")
    window = window_of(window_size)
    first = rotary_starts(q, k, rotary_cos, cache_seqlens, causal or window != (None, None))
    return attention_with_kv_cache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, k=k, v=v,
        block_table=cache_batch_idx if block_table is None else block_table, cache_leftpad=cache_leftpad,
        rotary=rotary_of(rotary_cos, rotary_sin, first, rotary_interleaved), causal=causal, window=window,
        scale=softmax_scale, softcap=softcap or None, alibi_slopes=alibi_slopes, layout="bshd",
        tuning=Tuning(splits=num_splits or None), return_lse=return_softmax_lse, reproducible=reproducible,
    )  # fmt: skip
