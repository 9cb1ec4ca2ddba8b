"""Adopt arrays of NumPy and CuPy, which share dtypes and strides."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import InvalidArgumentsError
from ..arrays import CPU, ArrayView, numpy_address
from ..public_names import public_name, type_phrase


def from_numpy(x: np.ndarray[Any, Any], name: str = "") -> ArrayView:
    """View a NumPy array."""
    dtype, strides = elements(x.dtype, x.strides)
    if strides is None:
        raise _no_elements(x, name)
    return ArrayView(numpy_address(x), x.shape, strides, dtype, CPU, "numpy", not x.flags.writeable, x)


def from_cupy(x: Any, name: str = "") -> ArrayView:
    """View a CuPy array."""
    dtype, strides = elements(x.dtype, x.strides)
    if strides is None:
        raise _no_elements(x, name)
    memory = x.data
    return ArrayView(memory.ptr, x.shape, strides, dtype, ("cuda", memory.device_id), "cupy", False, x)


@lru_cache(maxsize=4096)
def elements(dtype: np.dtype[Any], strides: tuple[int, ...]) -> tuple[str, tuple[int, ...] | None]:
    """The name of a dtype, and strides in elements; None if they are not whole or the byte order is foreign.

    why cached: computing both takes longer than the rest of adopting, and programs use few layouts.
    """
    size = dtype.itemsize
    odd = dtype.kind != "O" and size and any(s % size for s in strides)
    whole = None if odd or not dtype.isnative else tuple(s // size for s in strides) if size else strides
    return dtype.name, whole


def _no_elements(x: Any, name: str) -> InvalidArgumentsError:
    """The error for an array without strides in elements."""
    name = public_name(name)
    if not x.dtype.isnative:
        return foreign_order(x.dtype, name)
    return InvalidArgumentsError(
        f"{name} has strides {x.strides} that are not multiples of its {x.itemsize}-byte items.",
        hint=f"a contiguous copy, such as {name}.copy()",
    )


def foreign_order(dtype: np.dtype[Any], name: str) -> InvalidArgumentsError:
    """The error for an array in foreign byte order."""
    name = public_name(name)
    return InvalidArgumentsError(
        f"{name} has the foreign byte order of {dtype.str!r}.",
        hint=f"{name}.astype({name}.dtype.newbyteorder('='))",
    )


def refuse_rules(x: Any, name: str) -> ArrayView:
    """Refuse arrays with semantics of their own, such as masked arrays."""
    name = public_name(name)
    hint = f"numpy.asarray({name}), and mask= for what to leave out"
    if isinstance(x, np.ma.MaskedArray) and name in _LEFT_OUT:
        hint = f"{name}.filled({_LEFT_OUT[name]}), which leaves out what is masked"
    raise InvalidArgumentsError(f"{name} is {type_phrase(x)}, whose rules differ from an array's.", hint=hint)


# Fill values that mask a pair, for arguments that can mask.
_LEFT_OUT = {"mask": "False", "bias": "-numpy.inf"}
