"""attention with gradients, and the functions of torch with torch's own signatures and rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch

from ..call.options import Options, RecordedOptions, RecordedPackedOptions
from ..call.signature import takes
from ..errors import InvalidArguments, Unsupported
from .call import Call
from .eager import attend_eagerly, is_plain
from .ops import attend, refuse_forward_mode

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "attention_varlen", "drawn_seed", "scaled_dot_product_attention", "varlen_attn"]

Tensor: TypeAlias = torch.Tensor


def _attend(call: Call, return_lse: bool) -> Any:
    """The result of a call, by the way that suits its surroundings."""
    q, k, v, *arrays = call.tensors
    if q.dtype == torch.float8_e4m3fn:
        raise Unsupported(
            "float8_e4m3fn has no gradient, which this function records.",
            hint="cupy_flash.attention(q, k, v, q_scale=..., k_scale=..., v_scale=...) on the same tensors",
        )
    slopes = arrays[2]
    if slopes is not None and slopes.requires_grad:
        raise Unsupported(
            "alibi_slopes has no gradient.", hint="alibi_slopes.detach(), or the slopes as a bias"
        )
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # why here: an operator's registered autocast knows one dtype per device, not the user's.
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        call = call._replace(tensors=(q, k, v, *arrays))
    refuse_forward_mode(*call.tensors)
    if is_plain(call):
        return attend_eagerly(call, return_lse)
    o, lse = attend(call)
    return (o, lse) if return_lse else o


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[RecordedOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[RecordedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[RecordedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@takes()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    precision: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """`cupy_flash.attention` with autograd: gradients of q, k, v, bias and sinks, through o and lse.

    Parameters
    ----------
    q, k, v, causal, window, align, mask, bias, scale, softcap, alibi_slopes, sinks, dropout, seed, layout
        As in `cupy_flash.attention`; torch tensors on a CPU or a CUDA device.
    precision, return_lse
        As in `cupy_flash.attention`.
    deterministic : bool
        Demand the same bits of the gradients on every run; torch.use_deterministic_algorithms(True) does too.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `cupy_flash.attention`; Unsupported also for forward-mode differentiation.

    Notes
    -----
    Works under torch.compile(fullgraph=True), activation checkpointing, torch.autocast and torch.func.
    There is no second derivative: asking for one raises.
    """
    options = Options(causal, window, align, scale, softcap, dropout, seed, layout, precision)
    tensors = (q, k, v, mask, bias, alibi_slopes, sinks, None, None, None)
    return _attend(Call(tensors, options, deterministic=deterministic), return_lse)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[RecordedPackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], **options: Unpack[RecordedPackedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: bool, **options: Unpack[RecordedPackedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@takes()
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """`cupy_flash.attention_varlen` with autograd.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
        As in `cupy_flash.attention_varlen`.
    causal, window, align, mask, bias, scale, softcap, alibi_slopes, sinks, dropout, seed
        As in `cupy_flash.attention_varlen`.
    precision, return_lse
        As in `cupy_flash.attention_varlen`.
    deterministic : bool
        As in `attention`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `cupy_flash.attention_varlen`.
    """
    options = Options(causal, window, align, scale, softcap, dropout, seed, "bshd", precision)
    tensors = (q, k, v, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)
    return _attend(Call(tensors, options, (max_seqlen_q, max_seqlen_k), deterministic), return_lse)


def drawn_seed(dropout: float) -> Any:
    """A seed from torch's generator on the CPU, if one is needed; in a compiled program as a tensor."""
    if not dropout:
        return None
    seed = torch.randint(2**62, ())
    return seed if torch.compiler.is_compiling() else int(seed)


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
    """`torch.nn.functional.scaled_dot_product_attention` by this library: same signature, same rules.

    Parameters
    ----------
    query, key, value : Tensor, shape (..., heads, seqlen, head_dim)
        Leading axes broadcast.
    attn_mask : Tensor, optional
        bool, True = take part; or of query's dtype, added to the scores. Broadcasts to
        (..., heads, seqlen_q, seqlen_k).
    dropout_p : float
        The seed is drawn from torch's generator of the CPU.
    is_causal : bool
        Aligned top-left. Excludes attn_mask.
    scale : float, optional
        Default head_dim ** -0.5.
    enable_gqa : bool
        Allow fewer heads of key and value.

    Returns
    -------
    Tensor, shape (..., heads, seqlen_q, head_dim_v)

    Raises
    ------
    InvalidArguments
        attn_mask together with is_causal, another dtype of attn_mask, or fewer heads without enable_gqa.
    """
    if attn_mask is not None and is_causal:
        raise InvalidArguments(
            "attn_mask and is_causal exclude each other.", hint="cupy_flash.torch.attention, which takes both"
        )
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        raise InvalidArguments(f"attn_mask has dtype {attn_mask.dtype}, not torch.bool or {query.dtype}.")
    if not enable_gqa and query.dim() >= 3 and query.shape[-3] != key.shape[-3] and key.shape[-3] != 1:
        raise InvalidArguments(
            f"{query.shape[-3]} heads of query, {key.shape[-3]} of key.", hint="enable_gqa=True"
        )
    first = -3 if query.dim() >= 3 else -2
    lead = torch.broadcast_shapes(query.shape[:first], key.shape[:first], value.shape[:first])
    q, k, v = (
        x.expand(*lead, *x.shape[first:]).reshape(-1, *x.shape[first:]) if query.dim() != -first else x
        for x in (query, key, value)
    )
    if attn_mask is not None and query.dim() > 4 and attn_mask.dim() > 3:
        rows = attn_mask.shape[-3:]
        attn_mask = attn_mask.expand(*lead, *rows).reshape(-1, *rows)
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    o = attention(
        q, k, v, causal=is_causal, align="top_left", scale=scale, dropout=dropout_p,
        seed=drawn_seed(dropout_p), mask=attn_mask if boolean else None, bias=None if boolean else attn_mask,
    )  # fmt: skip
    result: Tensor = o.reshape(*lead, *o.shape[first:]) if query.dim() != -first else o
    return result


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
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
    """`torch.nn.attention.varlen.varlen_attn` by this library: same signature, same rules.

    Parameters
    ----------
    query, key, value : Tensor, shape (rows, heads, head_dim)
    cu_seq_q, cu_seq_k : Tensor of int32, shape (sequences + 1,)
    max_q, max_k : int
        The longest sequences.
    return_aux : torch.nn.attention.varlen.AuxRequest, optional
        ``lse=True`` also returns the log-sum-exp.
    scale : float, optional
    window_size : (int, int)
        (left, right), aligned bottom-right; -1 is open, (-1, 0) is causal.
    enable_gqa : bool
        Allow fewer heads of key and value.
    seqused_k : Tensor of int32, shape (sequences,), optional
        Keys in use of each sequence.
    block_table, num_splits
        Not supported yet: anything but None raises.

    Returns
    -------
    Tensor, or (Tensor, Tensor) if the log-sum-exp is asked for

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention_varlen`.
    """
    for name, x in (("block_table", block_table), ("num_splits", num_splits)):
        if x is not None:
            raise Unsupported(f"varlen_attn does not take {name} yet.", hint=f"{name}=None")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidArguments(
            f"{query.shape[1]} heads of query, {key.shape[1]} of key.", hint="enable_gqa=True"
        )
    left, right = (None if bound == -1 else bound for bound in window_size)
    o, lse = attention_varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, seqused_k=seqused_k,
        window=(left, right), align="bottom_right", scale=scale, return_lse=True,
    )  # fmt: skip
    return (o, lse) if getattr(return_aux, "lse", False) else o
