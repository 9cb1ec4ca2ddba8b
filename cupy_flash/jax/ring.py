"""Ring attention inside `jax.shard_map`, by collective permutes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..call.checks import flag
from ..call.options import Options, RecordedRingOptions
from ..call.signature import takes
from ..merge import united
from ..ring import check_parts, halves
from .call import alike, backward, forward
from .functional import check

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ring_attention"]


class _Around(NamedTuple):
    """What a call holds fixed."""

    axis_name: Any
    causal: bool
    options: Options
    deterministic: bool

    def ranks(self) -> int:
        """Devices on the ring."""
        return int(jax.lax.psum(1, self.axis_name))

    def pass_on(self, arrays: Any) -> Any:
        """Arrays of the device before this one."""
        ranks = self.ranks()
        return jax.lax.ppermute(arrays, self.axis_name, [(r, (r + 1) % ranks) for r in range(ranks)])

    def axis(self, x: Any) -> int:
        """The axis of rows in q, k, v and o; in lse it is the last."""
        return -3 if self.options.layout == "bshd" and x.ndim > 2 else -2

    def half(self, x: Any, late: bool) -> Any:
        """One of the two stretches of a part."""
        axis = self.axis(x)
        rows = halves(x.shape[axis])[late]
        return jax.lax.slice_in_dim(x, rows.start, rows.stop, axis=axis % x.ndim)


def _beside(x: Any, axis: int, late: bool, fill: float) -> Any:
    """One stretch as a part, the other one filled."""
    other = jnp.full_like(x, fill)
    return jnp.concatenate((other, x) if late else (x, other), axis=axis)


def _by_origin(around: _Around, step: int, early: Any, late: Any, operands: Any) -> Any:
    """`early` for keys from nearer the front than this device's, `late` for those from further back.

    why cond: which of them it is differs from device to device, and only one is computed; both are half a
    square.
    """
    return jax.lax.cond(jax.lax.axis_index(around.axis_name) >= step, early, late, *operands)


def _part(around: _Around, step: int, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """O and LSE over the keys that have come `step` devices far."""
    if not around.causal or step == 0:
        return forward({"q": q, "k": k, "v": v}, around.options._replace(causal=around.causal))

    def early(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return forward({"q": q, "k": around.half(k, False), "v": around.half(v, False)}, around.options)

    def late(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        o, lse = forward({"q": around.half(q, True), "k": k, "v": v}, around.options)
        return _beside(o, around.axis(o), True, 0), _beside(lse, -1, True, -jnp.inf)

    o, lse = _by_origin(around, step, early, late, (q, k, v))
    return o, lse


def _shares(around: _Around, step: int, arrays: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """What the keys that have come `step` devices far give to the gradients of q, k and v."""
    options, deterministic = around.options, around.deterministic

    def all_of_it(
        q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, dlse: Any, causal: bool = False
    ) -> tuple[Any, Any, Any]:
        given = {"q": q, "k": k, "v": v}
        grads = backward(given, o, lse, do, dlse, options._replace(causal=causal), deterministic)
        return grads["q"], grads["k"], grads["v"]

    def early(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any, Any]:
        dq, dk, dv = all_of_it(q, around.half(k, False), around.half(v, False), *rest)
        return dq, *(_beside(x, around.axis(x), False, 0) for x in (dk, dv))

    def late(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, dlse: Any) -> tuple[Any, Any, Any]:
        q, o, do = (around.half(x, True) for x in (q, o, do))
        lse, dlse = (x[..., halves(x.shape[-1])[1]] for x in (lse, dlse))
        dq, dk, dv = all_of_it(q, k, v, o, lse, do, dlse)
        return _beside(dq, around.axis(dq), True, 0), dk, dv

    if not around.causal or step == 0:
        q, k, v, o, lse, do, dlse = arrays
        return all_of_it(q, k, v, o, lse, do, dlse, around.causal)
    dq, dk, dv = _by_origin(around, step, early, late, arrays)
    return dq, dk, dv


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ring(q: Any, k: Any, v: Any, around: _Around) -> tuple[Any, Any]:
    swapped = around.axis(q) == -3
    o, lse = _part(around, 0, q, k, v)
    o = _wide(o)
    for step in range(1, around.ranks()):
        k, v = around.pass_on((k, v))
        part, part_lse = _part(around, step, q, k, v)
        o, lse = united(jnp, o, lse, _wide(part), part_lse, swapped)
    return o.astype(q.dtype), lse


def _ring_forward(q: Any, k: Any, v: Any, around: _Around) -> tuple[Any, Any]:
    o, lse = _ring(q, k, v, around)
    return (o, lse), (q, k, v, o, lse)


def _ring_backward(around: _Around, saved: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    q, k, v, o, lse = saved
    home = (q, k, v)
    sums = [jnp.zeros_like(_wide(x)) for x in home]
    for step in range(around.ranks()):
        shares = _shares(around, step, (q, k, v, o, lse, *cotangents))
        if step + 1 < around.ranks():
            k, v = around.pass_on((k, v))
        sums = [total + share for total, share in zip(sums, shares, strict=True)]
        sums[1:] = around.pass_on(tuple(sums[1:]))
    dq, dk, dv = (x.astype(like.dtype) for x, like in zip(sums, home, strict=True))
    return dq, dk, dv


_ring.defvjp(_ring_forward, _ring_backward)


@takes(RecordedRingOptions)
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    axis_name: Any,
    *,
    return_lse: bool = False,
    **options: Unpack[RecordedRingOptions],
) -> Any:
    """`attention` over a sequence of which every device along a mesh axis holds a part, with gradients.

    Parameters
    ----------
    q, k, v : Array
        This device's parts, of one length on all devices: the rows `cupy_flash.ring.positions` names, in that
        order. The whole sequence attends to itself.
    axis_name : str
        Of the mesh axis that `jax.shard_map` cuts the sequence along.
    {options: As in `attention`.}
    return_lse : bool
        As in `attention`.

    Returns
    -------
    Array, or (Array, Array) with return_lse
        This device's rows.

    Raises
    ------
    InvalidArguments, Unsupported
        As in `attention`, while tracing; also an odd number of rows with causal.
    """
    deterministic = flag(options.pop("deterministic", False), "deterministic")
    causal = flag(options.pop("causal", False), "causal")
    values = Options(**options)
    check({"q": q, "k": k, "v": v}, values)
    around = _Around(axis_name, causal, values, deterministic)
    check_parts(q.shape[around.axis(q)], k.shape[around.axis(k)])
    o, lse = _ring(*alike(q, k, v), around)
    return (o, lse) if return_lse else o
