"""attention with gradients, and the functions of torch with torch's own signatures and rules."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ..errors import InvalidArguments, Unsupported, names_its_options
from .ops import attend, attend_under_functorch, refuse_forward_mode

__all__ = ["attention", "attention_varlen", "scaled_dot_product_attention", "varlen_attn"]

Tensor: TypeAlias = torch.Tensor


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as the surrounding torch.autocast asks; float64 stays.

    why here: an operator's registered autocast knows one dtype per device, not the user's.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: tuple[Tensor | None, ...],
    longest: tuple[int | None, int | None],
    *,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    align: str | int | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    seed: int | None,
    layout: str,
    precision: str | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = _autocast(q, k, v)
    slopes = arrays[2]
    if slopes is not None and slopes.requires_grad:
        raise Unsupported(
            "alibi_slopes has no gradient.", hint="alibi_slopes.detach(), or the slopes as a bias"
        )
    refuse_forward_mode(q, k, v, *arrays)
    packed = arrays[4] is not None
    left, right = (None, None) if window is None else window
    bottom_right = align == "bottom_right"
    if bottom_right and not packed:
        rows = q.dim() - 2 if layout == "bhsd" or q.dim() == 2 else q.dim() - 3
        align, bottom_right = k.shape[rows] - q.shape[rows], False
    elif bottom_right:
        align = None
    elif align == "top_left":
        align = 0
    elif isinstance(align, str):
        raise InvalidArguments(f"align is {align!r}.", hint='align="top_left", "bottom_right" or an integer')
    if seed is not None and seed >= 2**63:
        seed -= 2**64
    inputs = (
        q, k, v, *arrays, *longest, bool(causal), left, right, align, bottom_right,
        None if scale is None else float(scale), None if softcap is None else float(softcap),
        float(dropout), seed, layout, precision,
    )  # fmt: skip
    under_functorch = torch._C._are_functorch_transforms_active()
    o, lse = (attend_under_functorch if under_functorch else attend)(*inputs)
    return o, lse


@names_its_options
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
    return_lse: bool = False,
) -> Any:
    """`cupy_flash.attention` with autograd: gradients of q, k, v, bias and sinks, through o and lse.

    Parameters
    ----------
    q, k, v, causal, window, align, mask, bias, scale, softcap, alibi_slopes, sinks, dropout, seed, layout
        As in `cupy_flash.attention`; torch tensors on a CPU or a CUDA device.
    precision, return_lse
        As in `cupy_flash.attention`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `cupy_flash.attention`; Unsupported also for forward-mode differentiation.

    Notes
    -----
    Works under torch.compile(fullgraph=True), activation checkpointing, torch.autocast and torch.func. The
    backward pass is deterministic under torch.use_deterministic_algorithms(True). There is no second
    derivative: asking for one raises.
    """
    o, lse = _call(
        q, k, v, (mask, bias, alibi_slopes, sinks, None, None), (None, None),
        causal=causal, window=window, align=align, scale=scale, softcap=softcap, dropout=dropout, seed=seed,
        layout=layout, precision=precision,
    )  # fmt: skip
    return (o, lse) if return_lse else o


@names_its_options
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    return_lse: bool = False,
) -> Any:
    """`cupy_flash.attention_varlen` with autograd.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `cupy_flash.attention_varlen`.
    causal, window, align, mask, bias, scale, softcap, alibi_slopes, sinks, dropout, seed
        As in `cupy_flash.attention_varlen`.
    precision, return_lse
        As in `cupy_flash.attention_varlen`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
        As in `cupy_flash.attention_varlen`.
    """
    o, lse = _call(
        q, k, v, (mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
        causal=causal, window=window, align=align, scale=scale, softcap=softcap, dropout=dropout, seed=seed,
        layout="bshd", precision=precision,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def _drawn_seed(dropout: float) -> int | None:
    """A seed from torch's generator on the CPU, if one is needed."""
    return int(torch.randint(2**62, ()).item()) if dropout else None


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
        seed=_drawn_seed(dropout_p), mask=attn_mask if boolean else None, bias=None if boolean else attn_mask,
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
    seqused_k, block_table, num_splits
        Not supported yet: anything but None raises.

    Returns
    -------
    Tensor, or (Tensor, Tensor) if the log-sum-exp is asked for

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention_varlen`.
    """
    for name, x in (("seqused_k", seqused_k), ("block_table", block_table), ("num_splits", num_splits)):
        if x is not None:
            raise Unsupported(f"varlen_attn does not take {name} yet.", hint=f"{name}=None")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidArguments(
            f"{query.shape[1]} heads of query, {key.shape[1]} of key.", hint="enable_gqa=True"
        )
    left, right = (None if bound == -1 else bound for bound in window_size)
    o, lse = attention_varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, window=(left, right),
        align="bottom_right", scale=scale, return_lse=True,
    )  # fmt: skip
    return (o, lse) if getattr(return_aux, "lse", False) else o
