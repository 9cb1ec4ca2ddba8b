"""Attention over a shared prefix for JAX: its keys are read once; with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ..call.checks import flag
from ..call.options import RecordedPrefixOptions
from ..call.signature import takes
from ..shared_prefix import over_keys
from .functional import attention
from .numbers import as_arrays, own_promotion

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_with_shared_prefix"]


@own_promotion()
@takes(RecordedPrefixOptions)
def attention_with_shared_prefix(
    q: Any,
    k: Any,
    v: Any,
    prefix_k: Any,
    prefix_v: Any,
    *,
    return_lse: bool = False,
    **options: Unpack[RecordedPrefixOptions],
) -> Any:
    """`attention` over keys of a prefix that the whole batch shares, followed by each sequence's own keys.

    Equivalent to ``attention`` over ``prefix_k``, repeated for the batch, followed by ``k``, but the prefix
    is stored and read once, for the queries of all sequences; its gradients are sums over the batch.

    Parameters
    ----------
    q, k, v : Array
        As in `attention`, of rank 4.
    prefix_k : Array, shape (heads_k, prefix, head_dim) or (1, heads_k, prefix, head_dim)
        With layout="bshd" (prefix, heads_k, head_dim). Every query sees all of it.
    prefix_v : Array, shape (heads_k, prefix, head_dim_v)
        Like prefix_k.
    causal : bool
        Causal over each sequence's own keys, which are as many as its queries.
    {options: As in `attention`.}
    return_lse : bool
        As in `attention`.

    Returns
    -------
    Array, or (Array, Array) with return_lse
        o (batch, heads_q, seqlen_q, head_dim_v) in the layout of q, lse (batch, heads_q, seqlen_q).

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `attention`, while tracing.

    References
    ----------
    .. [1] J. Juravsky et al., "Hydragen", arXiv:2402.05099.
    """
    named = {"q": q, "k": k, "v": v, "prefix_k": prefix_k, "prefix_v": prefix_v}
    q, k, v, *prefix = as_arrays(named).values()
    o, lse = over_keys(jnp, attention, q, k, v, (prefix[0], prefix[1]), options)
    return (o, lse) if flag(return_lse, "return_lse") else o
