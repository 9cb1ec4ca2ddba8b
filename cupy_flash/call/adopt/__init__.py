"""adopt: view an array of any library as an `ArrayView`, without a copy; one module per kind of library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayView
from .jax import from_jax, refuse_tracer
from .numpy_cupy import from_cupy, from_numpy, refuse_rules
from .protocols import from_protocol
from .torch import torch_adopter

__all__ = ["adopt"]


def adopt(x: Any, name: str) -> ArrayView:
    """View an array without copying it, and without importing a library that the caller has not imported.

    Parameters
    ----------
    x : array
        NumPy, CuPy, torch or JAX array, an object with ``__dlpack__`` or
        ``__cuda_array_interface__``, or a view already made.
    name : str
        Name of the array in errors.

    Returns
    -------
    ArrayView

    Raises
    ------
    InvalidArgumentsError
        Not an array, on an unknown kind of device, or one whose gradient would be lost.
    """
    kind = type(x)
    see = _SEEN.get(kind)
    if see is None:
        see = _SEEN[kind] = _adopter(x)
    return see(x, name)


def _adopter(x: Any) -> Callable[[Any, str], ArrayView]:
    """The adopting function for all objects of the type of x."""
    if isinstance(x, np.ndarray):
        return refuse_rules if isinstance(x, (np.matrix, np.ma.MaskedArray)) else from_numpy
    # why compare the whole first word: classes of cupy_flash are not CuPy arrays
    if type(x).__module__.partition(".")[0] == "cupy":
        return from_cupy
    torch, jax = (sys.modules.get(name) for name in ("torch", "jax"))
    if torch is not None and isinstance(x, torch.Tensor):
        return torch_adopter(type(x))
    if jax is not None and isinstance(x, jax.core.Tracer):
        return refuse_tracer
    if jax is not None and isinstance(x, jax.Array):
        return from_jax
    return from_protocol


# Adopting functions by type. why: checking each library in turn takes longer than adopting.
_SEEN: dict[type, Callable[[Any, str], ArrayView]] = {
    np.ndarray: from_numpy,
    ArrayView: lambda view, _: view,
}
