"""attention as a function that JAX differentiates, compiled once per set of shapes, dtypes and options."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..call.given import Options
from ..call.head_scale import times
from .call import vary_alike
from .primitives import attention

__all__ = ["attend"]


@functools.partial(jax.jit, static_argnums=(1, 2))
def attend(
    arrays: dict[str, Any],
    options: Options,
    longest: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """Compute O and LSE, with derivatives; longest is (max_seqlen_q, max_seqlen_k) of packed sequences.

    why jit: outside of jit JAX would trace the callback again in each call.
    """
    given = dict(zip(arrays, vary_alike(*arrays.values()), strict=True))
    if "scale" in given:
        given["q"], given["scale"] = _scaled_queries(given["q"], given["scale"])
    return attention(given, options, longest)


def _scaled_queries(q: Any, scale: Any) -> tuple[Any, Any]:
    """Return queries and a scalar with the same products and the same derivatives, also by the scale.

    why a scalar: it is not rounded to the dtype of q. A scale of 0 is multiplied into q instead, since its
    gradient could not be recovered from dQ; so is one that is not finite, which gives NaN, as in JAX's own
    functions (`cupy_flash.attention` refuses it).
    """
    if scale.ndim:  # one per head
        number = jnp.ones((), scale.dtype)
        instead = times(q.astype(scale.dtype), scale).astype(q.dtype)  # dtypes may be kept from mixing
    else:
        # why not != 0: XLA divides by a subnormal number as by 0.
        usable = jnp.isfinite(scale) & (jnp.abs(scale) >= jnp.finfo(scale.dtype).tiny)
        number = jax.lax.stop_gradient(jnp.where(usable, scale, 1))
        # why not jnp.where over q: with an explicit mesh both cases would need its sharding.
        instead = q * jnp.where(usable, 1, 0 * scale).astype(q.dtype)
    # why finite: rows outside of all packed sequences have no gradient, and may hold anything.
    wide = jnp.where(jnp.isfinite(q), q, 0).astype(scale.dtype)
    derivative = (wide * (scale / number)).astype(q.dtype)
    # The value of `instead` with the derivative of `derivative`: the added difference is 0.
    fixed = jax.lax.stop_gradient
    return fixed(instead) + (derivative - fixed(derivative)), number
