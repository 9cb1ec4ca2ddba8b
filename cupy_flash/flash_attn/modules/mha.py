"""The torch modules without weights of flash-attn's ``modules.mha``."""

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
    """Compute the slopes of the ALiBi paper (arXiv:2108.12409), one per head.

    Parameters
    ----------
    nheads : int

    Returns
    -------
    list of float
        A geometric series that starts at 2 ** (-8 / n), with n the largest power of two up to nheads;
        the remaining heads have every second slope for 2 n heads.
    """
    power = 1 << (nheads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(nheads - power)]


class _Attention(torch.nn.Module):
    """Options that both modules share."""

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
        # why float(): model.half() converts buffers, too.
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
    """Self-attention over queries, keys and values in one tensor.

    Parameters
    ----------
    causal, softmax_scale, window_size, alibi_slopes, deterministic
        As in `cupy_flash.flash_attn.flash_attn_func`.
    attention_dropout : float
        Dropout probability while training.
    """

    def forward(
        self,
        qkv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: Any = None,
    ) -> Any:
        """Compute attention.

        Parameters
        ----------
        qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim) or, packed, (rows, 3, heads, head_dim)
        causal : bool, optional
            Default: that of the module.
        cu_seqlens : Tensor of int32, shape (sequences + 1,), optional
            Offsets of packed sequences.
        max_seqlen : int, optional
            The longest length.

        Returns
        -------
        Tensor, shape (batch, seqlen, heads, head_dim) or (rows, heads, head_dim)
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_Attention):
    """Cross-attention over keys and values in one tensor.

    Parameters
    ----------
    causal, softmax_scale, window_size, alibi_slopes, deterministic
        As in `cupy_flash.flash_attn.flash_attn_func`.
    attention_dropout : float
        Dropout probability while training.
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
        # why: flash-attn's two modules differ in the order of the last parameters.
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
        """Compute attention.

        Parameters
        ----------
        q : Tensor, shape (batch, seqlen_q, heads, head_dim) or, packed, (rows_q, heads, head_dim)
        kv : Tensor, shape (batch, seqlen_k, 2, heads_k, head_dim) or (rows_k, 2, heads_k, head_dim)
        causal : bool, optional
            Default: that of the module.
        cu_seqlens, cu_seqlens_k : Tensor of int32, shape (sequences + 1,), optional
            Offsets of packed queries and keys.
        max_seqlen, max_seqlen_k : int, optional
            The longest lengths.

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
