"""Dual numbers: a score function in Python, run on them, gives the specification of its derivative.

This shares no code with `cupy_flash.program`, so that a mistake there cannot be repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Dual"]


def _parts(x: Any) -> tuple[Any, Any]:
    return (x.value, x.slope) if isinstance(x, Dual) else (x, 0.0)


def _chosen(condition: Any, a: Any, b: Any) -> Dual:
    (a, da), (b, db) = _parts(a), _parts(b)
    return Dual(np.where(condition, a, b), np.where(condition, da, db))


# Derivative of a function of one argument; for two arguments, a pair of partial derivatives.
_SLOPES: dict[str, Callable[..., Any]] = {
    "exp": lambda x: np.exp(x),
    "exp2": lambda x: np.log(2) * np.exp2(x),
    "log": lambda x: 1 / x,
    "tanh": lambda x: 1 - np.tanh(x) ** 2,
    "sqrt": lambda x: 0.5 / np.sqrt(x),
    "absolute": lambda x: np.sign(x),
    "negative": lambda x: -1.0,
    "square": lambda x: 2 * x,
    "add": lambda x, y: (1.0, 1.0),
    "subtract": lambda x, y: (1.0, -1.0),
    "multiply": lambda x, y: (y, x),
    "divide": lambda x, y: (1 / y, -x / y**2),
    "power": lambda x, y: (y * x ** (y - 1.0), 0.0),
    "minimum": lambda x, y: (x <= y, x > y),
    "maximum": lambda x, y: (x >= y, x < y),
}


class Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of values with their derivatives in one direction.

    Parameters
    ----------
    value, slope : array
        Values and derivatives, which broadcast to each other.
    """

    def __init__(self, value: Any, slope: Any) -> None:
        self.value, self.slope = value, slope

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        assert method == "__call__"
        values, slopes = zip(*map(_parts, inputs), strict=True)
        result = ufunc(*values)
        if result.dtype == np.bool_:
            return result
        by_each = _SLOPES[ufunc.__name__](*values)
        by_each = by_each if isinstance(by_each, tuple) else (by_each,)
        with np.errstate(all="ignore"):
            # why where: an operand with derivative 0 adds 0, even if the slope is infinite.
            moved = [np.where(np.equal(d, 0), 0.0, np.multiply(by, d))
                     for by, d in zip(by_each, slopes, strict=True)]  # fmt: skip
        return Dual(result, sum(moved))

    def __array_function__(self, function: Any, _types: Any, args: Any, _options: Any) -> Any:
        if function is np.clip:
            x, low, high = args
            return np.minimum(np.maximum(x, low), high)
        assert function is np.where
        return _chosen(*args)
