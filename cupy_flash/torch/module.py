"""FlashAttention as a torch module."""

from __future__ import annotations

from typing import Any

import torch

from ..config import AttentionConfig, takes_a_config
from ..errors import InvalidArgumentsError
from .functional import attention

__all__ = ["FlashAttention"]


class FlashAttention(torch.nn.Module):
    """Attention with a fixed configuration, without parameters.

    Parameters
    ----------
    config : AttentionConfig
        Its dropout applies only in training mode, with seeds drawn as in `attention`. Its tuning must be
        None, because tuning is not supported with autograd.
    """

    @takes_a_config
    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        if config.tuning is not None:
            raise InvalidArgumentsError(
                f"tuning is {config.tuning}; the module plans its own.", hint="tuning=None"
            )
        self.config = config

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arrays: Any) -> Any:
        """Call `attention` with the options of the configuration.

        Parameters
        ----------
        q, k, v : Tensor
            As in `attention`.
        **arrays
            Options that are arrays, and seed and return_lse.

        Returns
        -------
        Tensor, or (Tensor, Tensor) with return_lse
        """
        # why not of other objects: `attention` says what they are. Nested tensors have size() but no shape.
        if isinstance(q, torch.Tensor) and q.dim() and q.size(-1) != self.config.head_dim:
            raise InvalidArgumentsError(
                f"q has head_dim {q.size(-1)}, the configuration {self.config.head_dim}.",
                hint=f"default_config({q.size(-1)})",
            )
        options = self.config.options()
        del options["tuning"]
        if not self.training:
            options["dropout"] = 0.0
        return attention(q, k, v, **options, **arrays)

    def extra_repr(self) -> str:
        """The configuration, for printing a model."""
        return repr(self.config)
