"""Attention as torch modules, by the names of flash-attn's ``modules.mha``; those without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = ["FlashCrossAttention", "FlashSelfAttention", "get_alibi_slopes"]


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of the ALiBi paper (arXiv:2108.12409), one for each head.

    Parameters
    ----------
    nheads : int

    Returns
    -------
    list of float
        A geometric series from 2 ** (-8 / n) on, n the power of two below nheads; what is missing comes from
        every second slope of 2 n.
    """
    power = 1 << (nheads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(nheads - power)]


class _Attention(torch.nn.Module):
    """The options of both."""

    if TYPE_CHECKING:
        alibi_slopes: torch.Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = torch.nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        # why float(): a model that was made half carries its buffers along.
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.float()
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": slopes,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_Attention):
    """Attention of packed queries, keys and values.

    Parameters
    ----------
    causal, softmax_scale, window_size, alibi_slopes, deterministic
        As in `cupy_flash.flash_attn.flash_attn_func`.
    attention_dropout : float
        While training.
    """

    def forward(
        self,
        qkv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: Any = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim) or, packed, (rows, 3, heads, head_dim)
        causal : bool, optional
            Instead of the module's.
        cu_seqlens : Tensor of int32, shape (sequences + 1,), optional
            Of packed sequences.
        max_seqlen : int, optional
            The longest of them.

        Returns
        -------
        Tensor, shape (batch, seqlen, heads, head_dim) or (rows, heads, head_dim)
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_Attention):
    """Attention of queries over packed keys and values.

    Parameters
    ----------
    causal, softmax_scale, window_size, alibi_slopes, deterministic
        As in `cupy_flash.flash_attn.flash_attn_func`.
    attention_dropout : float
        While training.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        # why: this class has the last ones in another order than the other one.
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_k: Any = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        q : Tensor, shape (batch, seqlen_q, heads, head_dim) or, packed, (rows_q, heads, head_dim)
        kv : Tensor, shape (batch, seqlen_k, 2, heads_k, head_dim) or (rows_k, 2, heads_k, head_dim)
        causal : bool, optional
            Instead of the module's.
        cu_seqlens, cu_seqlens_k : Tensor of int32, shape (sequences + 1,), optional
            Of packed queries and keys.
        max_seqlen, max_seqlen_k : int, optional
            The longest of them.

        Returns
        -------
        Tensor, shape of q
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
        )
