"""Attention over a prefix that the whole batch shares, for torch, with gradients; its keys are read once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..call.checks import flag
from ..call.options import RecordedPrefixOptions
from ..call.signature import takes
from ..shared_prefix import over_keys
from .functional import attention
from .inputs import check_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_with_shared_prefix"]

Tensor: TypeAlias = torch.Tensor


@takes(RecordedPrefixOptions)
def attention_with_shared_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[RecordedPrefixOptions],
) -> Any:
    """`attention` over the keys of a prefix that the whole batch shares, followed by each sequence's own.

    Equivalent to ``attention`` over ``prefix_k``, repeated for the batch, followed by ``k``, but the prefix
    is stored and read once for the queries of all sequences; its gradients are sums over the batch.

    Parameters
    ----------
    q, k, v : Tensor
        As in `attention`, of rank 4.
    prefix_k : Tensor, shape (heads_k, prefix, head_dim) or (1, heads_k, prefix, head_dim)
        With layout="bshd" (prefix, heads_k, head_dim). Every query attends to all of it.
    prefix_v : Tensor, shape (heads_k, prefix, head_dim_v)
        Like prefix_k.
    causal : bool
        Applies to each sequence's own keys, which must be as many as its queries.
    {options: As in `attention`.}
    return_lse : bool
        As in `attention`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with return_lse
        o (batch, heads_q, seqlen_q, head_dim_v) in the layout of q, lse (batch, heads_q, seqlen_q).

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `attention`.

    References
    ----------
    .. [1] J. Juravsky et al., "Hydragen", arXiv:2402.05099.
    """
    given = {"q": q, "k": k, "v": v, "prefix_k": prefix_k, "prefix_v": prefix_v}
    check_tensors(tuple(given), **given)
    o, lse = over_keys(torch, attention, q, k, v, (prefix_k, prefix_v), options)
    return (o, lse) if flag(return_lse, "return_lse") else o
