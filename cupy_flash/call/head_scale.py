"""A scale for each head: a call takes q times it, and the gradients of both come from that of their product.

why not in kernels: they have one number for all heads, and the product reads and writes q once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArgumentsError
from .adopt import adopt
from .checks import one_of
from .operands import FLOATS, check_place, row_operand, wrong
from .outputs import namespace

__all__ = ["HeadScale", "in_dtype", "scale_shape", "scaled_over_cache", "times"]


def scale_shape(shape: tuple[int, ...], q: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape in which a scale of (heads,) or (batch, heads) multiplies q.

    Parameters
    ----------
    shape, q : tuple of int
        Of both as they are given.
    layout : {"bhsd", "bshd"}
        That of q; packed rows are "bshd".
    """
    of_heads = len(q) - (2 if one_of(layout, ("bshd",)) else 3)  # others are refused where options are
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
    """Q times a factor, in the wider of their dtypes and then rounded to that of q; arrays of any library."""
    return in_dtype(q * factor, q.dtype)


def in_dtype(x: Any, dtype: Any) -> Any:
    """An array of any library in a dtype."""
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)


class HeadScale(NamedTuple):
    """A scale for each head of q.

    Attributes
    ----------
    factor : array
        In the shape in which it multiplies q, and in the dtype of the accumulator.
    shape : tuple of int
        As it was given.
    library : str
        Whose array it is.
    """

    factor: Any
    shape: tuple[int, ...]
    library: str

    @classmethod
    def of(cls, scale: Any, q: Any, layout: str) -> HeadScale | None:
        """That of a call; None if its scale is a number, or an array of one number that is of no head."""
        shape = getattr(scale, "shape", ())
        if not shape or not isinstance(shape, tuple):  # a number, or what is refused as one
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
            raise wrong("scale is of each head, and q has codes.", raw, "one number as scale")
        row_operand("scale", raw, (shape,), "float64" if raw["q"].dtype == "float64" else "float32")
        if not hasattr(q, "__mul__"):
            headline = "scale is of each head, and q is an array without arithmetic."
            raise wrong(headline, raw, "numpy.from_dlpack(q), or cupy.from_dlpack(q)")
        return cls(scale.reshape(factor), shape, raw["q"].library)

    def times(self, q: Any) -> Any:
        """Their product."""
        with np.errstate(all="ignore"):  # what overflows shows in the result, as in every other call
            return times(q, self.factor)

    def gradients(self, dq: Any, q: Any) -> tuple[Any, Any]:
        """Those of q and of the scale; dq is that of their product."""
        xp, wide = namespace(self.library), in_dtype(dq, self.factor.dtype)
        axes = tuple([axis for axis, n in enumerate(self.factor.shape) if n == 1])
        with np.errstate(all="ignore"):
            # why: a row that belongs to no sequence has no gradient, and may hold anything.
            products = xp.where(wide == 0, wide, wide * in_dtype(q, wide.dtype))
            return times(dq, self.factor), products.sum(axes).reshape(self.shape)


def scaled_over_cache(q: Any, options: dict[str, Any]) -> Any:
    """Q times a scale that is an array among the options of a call over a cache, where it becomes 1."""
    layout = "bshd" if options.get("cu_seqlens_q") is not None else options.get("layout", "bhsd")
    by_head = HeadScale.of(options["scale"], q, layout)
    if by_head is None:
        return q
    options["scale"] = 1.0
    return by_head.times(q)
