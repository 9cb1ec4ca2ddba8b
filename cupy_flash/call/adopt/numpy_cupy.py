"""Adopting arrays of NumPy and CuPy, whose dtypes and strides are alike."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import InvalidArgumentsError
from ..arrays import CPU, ArrayView, numpy_address
from ..spelling import kind_of, spelled


def from_numpy(x: np.ndarray[Any, Any], name: str = "") -> ArrayView:
    """See an array of NumPy."""
    dtype, strides = elements(x.dtype, x.strides)
    if strides is None:
        raise _no_elements(x, name)
    return ArrayView(numpy_address(x), x.shape, strides, dtype, CPU, "numpy", not x.flags.writeable, x)


def from_cupy(x: Any, name: str = "") -> ArrayView:
    """See an array of CuPy."""
    dtype, strides = elements(x.dtype, x.strides)
    if strides is None:
        raise _no_elements(x, name)
    memory = x.data
    return ArrayView(memory.ptr, x.shape, strides, dtype, ("cuda", memory.device_id), "cupy", False, x)


@lru_cache(maxsize=4096)
def elements(dtype: np.dtype[Any], strides: tuple[int, ...]) -> tuple[str, tuple[int, ...] | None]:
    """Name of a dtype of this machine's byte order, and strides in elements; None if that cannot be said.

    why cached: both take longer than everything else here, and programs use few layouts.
    """
    size = dtype.itemsize
    odd = dtype.kind != "O" and size and any(s % size for s in strides)
    whole = None if odd or not dtype.isnative else tuple(s // size for s in strides) if size else strides
    return dtype.name, whole


def _no_elements(x: Any, name: str) -> InvalidArgumentsError:
    """Why an array has no strides in elements."""
    name = spelled(name)
    if not x.dtype.isnative:
        return foreign_order(x.dtype, name)
    return InvalidArgumentsError(
        f"{name} has strides {x.strides} that are not multiples of its {x.itemsize}-byte items.",
        hint=f"a contiguous copy, such as {name}.copy()",
    )


def foreign_order(dtype: np.dtype[Any], name: str) -> InvalidArgumentsError:
    """Why an array of another machine's byte order is refused."""
    name = spelled(name)
    return InvalidArgumentsError(
        f"{name} has the foreign byte order of {dtype.str!r}.",
        hint=f"{name}.astype({name}.dtype.newbyteorder('='))",
    )


def refuse_rules(x: Any, name: str) -> ArrayView:
    """Raise for what computes by rules of its own, such as a masked array."""
    name = spelled(name)
    hint = f"numpy.asarray({name}), and mask= for what to leave out"
    if isinstance(x, np.ma.MaskedArray) and name in _LEFT_OUT:
        hint = f"{name}.filled({_LEFT_OUT[name]}), which leaves out what is masked"
    raise InvalidArgumentsError(f"{name} is {kind_of(x)}, whose rules differ from an array's.", hint=hint)


# What leaves a pair out, in arrays that say it themselves.
_LEFT_OUT = {"mask": "False", "bias": "-numpy.inf"}
