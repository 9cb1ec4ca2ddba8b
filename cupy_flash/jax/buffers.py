"""Where the memory is that XLA hands to a callback."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["address"]

# Types that __cuda_array_interface__ has no code for; DLPack has.
_WITHOUT_CODE = frozenset(("bfloat16", "float8_e4m3fn"))

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def address(buffer: Any, dtype: str, on_cpu: bool) -> int:
    """The address of a buffer of a callback.

    why not 16 bits in place of bfloat16, which have a code: XLA copies an array to give it another type.
    why not np.asarray on a CPU: it takes 2.1 us where this takes 0.7, for each of the arrays of a call.
    """
    if on_cpu or dtype in _WITHOUT_CODE:
        capsule = buffer.__dlpack__()
        # A DLManagedTensor begins with the address of the elements.
        held = _pointer(capsule, b"dltensor")
        return ctypes.c_void_p.from_address(held or 0).value or 0
    return int(buffer.__cuda_array_interface__["data"][0])
