"""A scale per head: the call computes with q * scale, and splits the gradient of that product.

why not in kernels: they take one scale for all heads, and the product reads and writes q only once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArgumentsError
from .adopt import adopt
from .arrays import accumulator_of
from .checks import one_of
from .operands import FLOATS, check_place, row_operand, wrong
from .outputs import namespace

__all__ = ["HeadScale", "in_dtype", "scale_shape", "scaled_over_cache", "times"]


def scale_shape(shape: tuple[int, ...], q: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape that broadcasts a scale (heads,) or (batch, heads) over q; packed rows are "bshd"."""
    of_heads = len(q) - (2 if one_of(layout, ("bshd",)) else 3)  # `check_options` refuses other layouts
    axes: tuple[int, ...] = ()
    if of_heads >= 0 and shape == (q[of_heads],):
        axes = (of_heads,)
    elif len(q) == 4 and shape == (q[0], q[of_heads]):
        axes = (0, of_heads)
    if not axes:
        raise InvalidArgumentsError(
            f"scale has shape {shape}, and q {q}.",
            hint="a scale of one element; or of each head: (heads_q,), or with a batch (batch, heads_q)",
        )
    return tuple([n if axis in axes else 1 for axis, n in enumerate(q)])


def times(q: Any, factor: Any) -> Any:
    """Q times a factor, computed in the wider dtype and rounded to that of q; arrays of any library."""
    return in_dtype(q * factor, q.dtype)


def in_dtype(x: Any, dtype: Any) -> Any:
    """An array of any library cast to a dtype."""
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)


class HeadScale(NamedTuple):
    """A scale per head of q."""

    factor: Any  # array: the scale, reshaped to broadcast over q, in the accumulator dtype
    shape: tuple[int, ...]  # shape as given
    library: str  # library of the array

    @classmethod
    def of(cls, scale: Any, q: Any, layout: str) -> HeadScale | None:
        """The scale of a call; None if it is a number, or an array of one element that is not per head."""
        shape = getattr(scale, "shape", ())
        if not shape or not isinstance(shape, tuple):  # a number, or refused by the check of numbers
            return None
        shape = tuple(shape)
        raw = {"q": adopt(q, "q"), "scale": adopt(scale, "scale")}
        try:
            factor = scale_shape(shape, raw["q"].shape, layout)
        except InvalidArgumentsError:
            if math.prod(shape) == 1:
                return None
            raise
        check_place("scale", raw)
        if raw["q"].dtype not in FLOATS:
            raise wrong(
                "scale has one number per head, and q is a QuantizedArray.", raw, "one number as scale"
            )
        row_operand("scale", raw, (shape,), accumulator_of(raw["q"].dtype))
        if not hasattr(q, "__mul__"):
            headline = "scale has one number per head, and q is an array without arithmetic."
            raise wrong(headline, raw, "numpy.from_dlpack(q), or cupy.from_dlpack(q)")
        return cls(scale.reshape(factor), shape, raw["q"].library)

    def times(self, q: Any) -> Any:
        """Q times the scale."""
        with np.errstate(all="ignore"):  # why: overflow shows in the result, as in other calls
            return times(q, self.factor)

    def gradients(self, dq: Any, q: Any) -> tuple[Any, Any]:
        """The gradients of q and of the scale, from dq, the gradient of their product."""
        xp, wide = namespace(self.library), in_dtype(dq, self.factor.dtype)
        axes = tuple([axis for axis, n in enumerate(self.factor.shape) if n == 1])
        with np.errstate(all="ignore"):
            # why where: a row of no sequence has gradient 0, and its q may hold NaN.
            products = xp.where(wide == 0, wide, wide * in_dtype(q, wide.dtype))
            return times(dq, self.factor), products.sum(axes).reshape(self.shape)


def scaled_over_cache(q: Any, options: dict[str, Any]) -> Any:
    """Multiply q by a scale per head in the options of a call over a cache, and set that scale to 1."""
    layout = "bshd" if options.get("cu_seqlens_q") is not None else options.get("layout", "bhsd")
    by_head = HeadScale.of(options.get("scale"), q, layout)
    if by_head is None:
        return q
    options["scale"] = 1.0
    return by_head.times(q)
