"""attention as a function that JAX differentiates, compiled once for arrays and options of a kind."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..call.given import Options
from ..call.head_scale import times
from .call import alike
from .primitives import attention

__all__ = ["attend"]


@functools.partial(jax.jit, static_argnums=(1, 2))
def attend(
    arrays: dict[str, Any],
    options: Options,
    longest: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """O and LSE with their derivatives; packed sequences have their longest lengths.

    why jit: outside of one JAX would trace the callback anew at each call.
    """
    given = dict(zip(arrays, alike(*arrays.values()), strict=True))
    if "scale" in given:
        given["q"], given["scale"] = _scaled_queries(given["q"], given["scale"])
    return attention(given, options, longest)


def _scaled_queries(q: Any, scale: Any) -> tuple[Any, Any]:
    """Queries and a number that give the same products, and their derivatives, those by the scale too.

    why a number: it is not rounded to the dtype of q. A scale of 0 would hide in dQ what its own gradient is
    made of; one that is not finite gives NaN here, as it does in JAX, where a call refuses it.
    """
    if scale.ndim:  # one for each head
        number = jnp.ones((), scale.dtype)
        instead = times(q, scale)
    else:
        usable = jnp.isfinite(scale) & (scale != 0)
        number = jax.lax.stop_gradient(jnp.where(usable, scale, 1))
        instead = jnp.where(usable, q, jnp.broadcast_to((0 * scale).astype(q.dtype), q.shape))
    # why finite: a row that belongs to no sequence has no gradient, and may hold anything.
    wide = jnp.where(jnp.isfinite(q), q, 0).astype(scale.dtype)
    derivative = (wide * (scale / number)).astype(q.dtype)
    # Its value is that of the first, its derivative that of the last: the difference is 0.
    fixed = jax.lax.stop_gradient
    return fixed(instead) + (derivative - fixed(derivative)), number
