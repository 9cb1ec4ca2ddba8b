"""The buffers that XLA passes to a callback: their devices, addresses and views."""

from __future__ import annotations

import ctypes
from typing import Any

from ..call.arrays import CPU, ArrayView, contiguous

__all__ = ["address", "device_of", "view_of"]

# Dtypes without a type code in __cuda_array_interface__; DLPack has them.
_WITHOUT_CODE = frozenset(("bfloat16", "float8_e4m3fn"))

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def device_of(buffer: Any) -> tuple[str, int]:
    """The device of a buffer."""
    kind, ordinal = buffer.__dlpack_device__()
    return CPU if kind == 1 else ("cuda", ordinal)


def address(buffer: Any, dtype: str, device: tuple[str, int]) -> int:
    """The address of a buffer of this dtype on this device.

    why not pass bfloat16 as uint16, which has a type code: XLA copies an array to change its type.
    why not np.asarray on a CPU: it takes 2.1 us instead of 0.7, for each array of a call.
    """
    if device == CPU or dtype in _WITHOUT_CODE:
        capsule = buffer.__dlpack__()
        # The first field of a DLManagedTensor is the address of the elements.
        held = _pointer(capsule, b"dltensor")
        return ctypes.c_void_p.from_address(held or 0).value or 0
    return int(buffer.__cuda_array_interface__["data"][0])


def view_of(buffer: Any, dtype: str) -> ArrayView:
    """A view of a buffer of this dtype."""
    device, shape = device_of(buffer), tuple(buffer.shape)
    # why numpy: on a CPU intermediate arrays are NumPy's.
    library = "numpy" if device == CPU else "jax"
    return ArrayView(
        address(buffer, dtype, device), shape, contiguous(shape), dtype, device, library, False, buffer
    )
