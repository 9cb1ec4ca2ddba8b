"""Adopting arrays of JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import InvalidArgumentsError
from ..arrays import CPU, ArrayView, contiguous, numpy_address
from .numpy_cupy import elements


def refuse_tracer(_x: Any, _name: str) -> ArrayView:
    """Refuse an array traced by jit or grad."""
    raise InvalidArgumentsError(
        "a traced JAX array was given to cupy_flash.attention, which is not a JAX primitive.",
        hint="cupy_flash.jax.attention, which is; or call it outside of jit and grad",
    )


def from_jax(x: Any, _name: str = "") -> ArrayView:
    """View a JAX array, as read-only."""
    devices = x.devices()
    device = next(iter(devices))
    if device.platform == "cpu":
        array = np.asarray(x)
        dtype, strides = elements(array.dtype, array.strides)
        # why not always numpy_address: it takes 1 us. An array on several devices has no one buffer pointer.
        alone = len(devices) == 1 and not array.flags.owndata
        pointer = x.unsafe_buffer_pointer() if alone else numpy_address(array)
        return ArrayView(pointer, array.shape, strides or (), dtype, CPU, "jax", True, (x, array))
    # why not __cuda_array_interface__: it raises for bfloat16.
    return ArrayView(
        x.unsafe_buffer_pointer(),
        x.shape,
        contiguous(x.shape),
        x.dtype.name,
        ("cuda", device.local_hardware_id or 0),
        "jax",
        True,
        x,
    )
