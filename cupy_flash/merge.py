"""merge: combine two partial results over disjoint sets of keys, exactly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .call.adopt import adopt
from .call.arrays import accumulator_of, device_name
from .call.checks import one_of
from .call.head_scale import in_dtype
from .call.opaque import opaque
from .call.operands import FLOATS, table_of
from .call.outputs import namespace
from .call.signature import Array, takes
from .call.values import LAYOUTS
from .errors import InvalidArgumentsError

__all__ = ["merge", "merge_parts"]


@takes()
@opaque
def merge(o_a: Array, lse_a: Any, o_b: Array, lse_b: Any, *, layout: str = "bhsd") -> tuple[Array, Any]:
    """Combine attention over two disjoint sets of keys into attention over their union.

    With ``w_x = exp(lse_x - lse)`` and ``lse = log(exp(lse_a) + exp(lse_b))``, the result is
    ``o = w_a o_a + w_b o_b``. A part with zero weight is not read: if its lse is -inf, its o may hold
    any values, also NaN, and its gradients are 0. If both parts are empty, o = 0 and lse = -inf.

    Parameters
    ----------
    o_a, o_b : array, shape (batch, heads, seqlen_q, head_dim_v), or of rank 2 or 3
        Partial results, of one dtype.
    lse_a, lse_b : array, shape (batch, heads, seqlen_q)
        Their log-sum-exps, natural logarithm. Attention sinks must be in one part only.
    layout : {"bhsd", "bshd"}
        Layout of o_a and o_b.

    Returns
    -------
    o : array
        Shape and dtype of o_a.
    lse : array
        Shape and dtype of lse_a.

    Raises
    ------
    InvalidArgumentsError
        Shapes, dtypes, devices or libraries differ.
    """
    raw = {name: adopt(x, name) for name, x in
           (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b))}  # fmt: skip
    if not one_of(layout, LAYOUTS):
        raise InvalidArgumentsError(f"layout is {layout!r}.", hint='layout="bhsd" or layout="bshd"')
    for name in ("o", "lse"):
        for what in ("shape", "dtype", "device", "library"):
            x, y = (getattr(raw[name + part], what) for part in ("_a", "_b"))
            if x != y:
                raise InvalidArgumentsError(
                    f"{name}_a has {what} {x}, {name}_b has {y}.",
                    table_of(raw),
                    hint="two results of attention(..., return_lse=True) for the same queries",
                )
    shape = raw["o_a"].shape
    rows = shape[:-1]
    if layout == "bshd" and len(shape) >= 3:
        rows = (*shape[:-3], shape[-2], shape[-3])
    if len(shape) < 2 or raw["lse_a"].shape != rows:
        raise InvalidArgumentsError(
            f"lse_a has shape {raw['lse_a'].shape}, o_a {shape}: lse must be {rows}.",
            table_of(raw),
            hint='lse as returned, (batch, heads, seqlen_q); layout="bshd" if o has that layout',
        )
    if raw["lse_a"].library != raw["o_a"].library or raw["lse_a"].device != raw["o_a"].device:
        raise InvalidArgumentsError(
            f"o_a is a {raw['o_a'].library} array on {device_name(raw['o_a'].device)}, "
            f"lse_a a {raw['lse_a'].library} array on {device_name(raw['lse_a'].device)}.",
            table_of(raw),
            hint="o and lse as attention(..., return_lse=True) returns them",
        )
    for name, allowed in (("o_a", FLOATS), ("lse_a", (accumulator_of(raw["o_a"].dtype),))):
        if raw[name].dtype not in allowed:
            raise InvalidArgumentsError(
                f"{name} has dtype {raw[name].dtype}, not {' or '.join(allowed)}.",
                table_of(raw),
                hint="o and lse as attention(..., return_lse=True) returns them",
            )
    swapped = layout == "bshd" and len(shape) >= 3
    merged, lse = merge_parts(namespace(raw["o_a"].library), ((o_a, lse_a), (o_b, lse_b)), swapped)
    return in_dtype(merged, o_a.dtype), lse


def merge_parts(xp: Any, parts: Sequence[tuple[Any, Any]], swapped: bool = False) -> tuple[Any, Any]:
    """The formula of `merge` for any number of parts, with o in the accumulator dtype.

    Parameters
    ----------
    xp : module
        Namespace of the arrays: numpy, cupy, torch or jax.numpy; traced JAX arrays are supported.
    parts : sequence of (array, array)
        o and lse of each, as in `merge`.
    swapped : bool
        Whether rows come before heads in o ("bshd"); in lse, heads come first.
    """
    top = functools.reduce(xp.maximum, [lse for _, lse in parts])
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    # why halves: the difference of two finite numbers may overflow. why -400: exp(-800) is 0 in every dtype,
    # with a derivative of 0; -inf would make the derivative NaN.
    weights = [xp.exp(2 * xp.clip(lse / 2 - top / 2, -400, None)) for _, lse in parts]
    total = sum(weights[1:], weights[0])
    empty = total == 0
    safe = xp.where(empty, xp.ones_like(total), total)
    weighted = []
    for (o, _), weight in zip(parts, weights, strict=True):
        share = weight / safe
        share = (xp.swapaxes(share, -1, -2) if swapped else share)[..., None]
        # why where: a part with weight 0 may hold any values; some libraries never write o of an empty part.
        weighted.append(xp.where(share == 0, xp.zeros_like(o), o) * share)
    lse = xp.where(empty, xp.full_like(top, -xp.inf), top + xp.log(safe))
    return sum(weighted[1:], weighted[0]), lse
