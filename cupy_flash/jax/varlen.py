"""attention over packed sequences as a JAX function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax.numpy as jnp

from ..call.options import RecordedPackedOptions
from ..call.signature import takes
from ..varlen import over_pages
from .functional import attend_to
from .kv_cache import attention_with_kv_cache

if TYPE_CHECKING:
    from jax import Array
    from typing_extensions import Unpack

__all__ = ["attention_varlen"]


@overload
def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    return_lse: Literal[False] = False, block_table: Any = None,
    **options: Unpack[RecordedPackedOptions],
) -> Array: ...  # fmt: skip
@overload
def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    return_lse: Literal[True], block_table: Any = None, **options: Unpack[RecordedPackedOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    return_lse: bool, block_table: Any = None, **options: Unpack[RecordedPackedOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@takes(RecordedPackedOptions)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    return_lse: bool = False,
    block_table: Any = None,
    **options: Unpack[RecordedPackedOptions],
) -> Any:
    """`cupy_flash.attention_varlen` as a JAX function, with gradients; other lengths do not recompile.

    Parameters
    ----------
    q, k, v : Array
        As in `cupy_flash.attention_varlen`.
    cu_seqlens_q, cu_seqlens_k : Array of int32, shape (sequences + 1,)
        As in `cupy_flash.attention_varlen`; they may be traced. On a GPU the host neither reads nor checks
        them; on a CPU wrong ones raise when the program runs.
    max_seqlen_q, max_seqlen_k : int, optional
        At least the longest lengths, static under jit. Default: all rows of q and of k, which starts more
        thread blocks on a GPU, and is then the size of a mask or a bias.
    seqused_k : Array of int32, shape (sequences,), optional
        As in `cupy_flash.attention_varlen`.
    align : {"top_left", "bottom_right"} or int, optional
        As in `cupy_flash.attention_varlen`; if the same array is given twice, queries and keys have the same
        lengths.
    mask, bias
        As in `attention`, over (sequences, heads_q, max_seqlen_q, max_seqlen_k).
    scale : float or Array of shape () or (heads_q,), optional
        As in `attention`.
    {options: As in `attention`; positions count from the start of each sequence.}
    return_lse : bool
        As in `attention`.
    block_table : Array of int32, shape (sequences, pages of the longest sequence), optional
        As in `cupy_flash.attention_varlen`, without gradients; it may be traced.

    Returns
    -------
    Array, or (Array, Array) with return_lse
        (rows_q, heads_q, head_dim_v) and (heads_q, rows_q). Rows past the last offset are 0, and so are the
        gradients of those of q, k and v.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `cupy_flash.attention`, while tracing.
    """
    if block_table is not None:
        more = {**options}
        if more.get("seqused_k") is None and cu_seqlens_k is not None:
            more["seqused_k"] = jnp.diff(jnp.asarray(cu_seqlens_k))
        more |= {"block_table": block_table, "return_lse": return_lse}
        return over_pages(q, k, v, cu_seqlens_q, None, more, attention_with_kv_cache)
    packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q}
    if cu_seqlens_k is not cu_seqlens_q:
        packed["cu_seqlens_k"] = cu_seqlens_k
    return attend_to(packed, {**options, "layout": "bshd"}, return_lse)
