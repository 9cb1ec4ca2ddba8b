"""attention_statistics for torch: the same call, also with tensors that require grad."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .. import statistics
from ..call.opaque import opaque
from ..call.options import StatisticsOptions
from ..call.signature import takes
from ..statistics import WANTED, AttentionStatistics
from .inputs import check_tensors, widen

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_statistics"]

Tensor: TypeAlias = torch.Tensor


@takes(StatisticsOptions)
@opaque
def attention_statistics(
    q: Tensor,
    k: Any,
    lse: Tensor | None = None,
    *,
    want: str | Collection[str] = WANTED,
    top_k: int = 8,
    cache_seqlens: Tensor | int | None = None,
    **options: Unpack[StatisticsOptions],
) -> AttentionStatistics:
    """`cupy_flash.attention_statistics` of tensors, which are detached.

    Parameters
    ----------
    q, k, lse, cache_seqlens, want, top_k
        As in `cupy_flash.attention_statistics`.
    sinks : Tensor, optional
        As in `cupy_flash.attention_statistics`; also 16-bit.
    {options: As in `cupy_flash.attention_statistics`.}

    Returns
    -------
    AttentionStatistics
        With tensors that do not require grad.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `cupy_flash.attention_statistics`.

    Notes
    -----
    It is a graph break under torch.compile.
    """
    check_tensors(lse=lse)
    given: Any = {**options}
    with torch.no_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(False):
        widen(given, q)
        return statistics.attention_statistics(
            q, k, lse, want=want, top_k=top_k, cache_seqlens=cache_seqlens, **given
        )
