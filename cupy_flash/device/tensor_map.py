"""Tensor maps, the descriptors of tensors for Hopper's bulk copies (TMA), encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TensorMap", "encode", "has_context"]

# Bytes of an item, and CUtensorMapDataType, by dtype.
# why 0 (bytes) for float8: tensor maps have no 8-bit float, and copies do not depend on the type.
ITEM = {"uint8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8}
_TYPES = {"uint8": 0, "float8_e4m3fn": 0, "int32": 3, "float16": 6, "float32": 7, "float64": 8,
          "bfloat16": 9}  # fmt: skip
# CUtensorMapSwizzle by bytes.
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}

_BYTES, _ALIGNMENT = 128, 64
_NOT_INTERLEAVED, _PROMOTE_TO_L2_256B, _ZEROS_OUTSIDE = 0, 3, 0


class TensorMap(NamedTuple):
    """The contents of a tensor map, except the address of its first element."""

    dtype: str
    shape: tuple[int, ...]  # extents, the contiguous axis first; up to five
    strides: tuple[int, ...]  # bytes, one for every axis but the first; multiples of 16
    box: tuple[int, ...]  # extents of the tile that one copy moves, each up to 256
    swizzle: int = 128  # {0, 32, 64, 128}: width of the swizzle pattern in bytes

    def check(self, pointer: int) -> None:
        """Raise ValueError with the reasons, which the driver's error does not give."""
        rank, inner = len(self.shape), self.box[0] * ITEM[self.dtype]
        complaints = [
            (not 1 <= rank <= 5, f"rank {rank} is not 1 to 5"),
            (len(self.strides) != rank - 1 or len(self.box) != rank, "strides or box do not fit the rank"),
            (pointer % 16 != 0, f"address {pointer:#x} is not a multiple of 16"),
            (
                any(s % 16 or not 0 <= s < 1 << 40 for s in self.strides),
                f"{self.strides} are not multiples of 16",
            ),
            (any(not 1 <= n <= 1 << 32 for n in self.shape), f"extents {self.shape} are not 1 to 2**32"),
            (any(not 1 <= n <= 256 for n in self.box), f"box {self.box} is not 1 to 256"),
            (inner % 16 != 0, f"the box is {inner} bytes wide, no multiple of 16"),
            (self.swizzle not in SWIZZLES, f"swizzle {self.swizzle} is not 0, 32, 64 or 128"),
            (
                self.swizzle != 0 and inner > self.swizzle,
                f"the box is {inner} bytes wide, the swizzle {self.swizzle}",
            ),
        ]
        if reasons := [text for wrong, text in complaints if wrong]:
            raise ValueError("cannot encode the tensor map: " + "; ".join(reasons))


LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver library.

    why unchecked: `driver` and `libcuda` refuse a driver before CUDA 12.0, which brought tensor maps.
    """
    return ctypes.CDLL(LIBRARY)


def _array(
    kind: type[ctypes.c_uint32 | ctypes.c_uint64], values: Sequence[int]
) -> ctypes.Array[ctypes.c_uint32]:
    return (kind * len(values))(*values)  # type: ignore[return-value]


def has_context() -> bool:
    """Whether the calling thread has a CUDA context, which encoding needs."""
    context = ctypes.c_void_p()
    failed = _driver().cuCtxGetCurrent(ctypes.byref(context))
    return not failed and context.value is not None


@functools.lru_cache(maxsize=4096)
def encode(tensor: TensorMap, pointer: int) -> bytes:
    """Encode the tensor map of an array at this address; the last 4096 are cached.

    It has 128 bytes, which a params struct holds at a multiple of 64. ValueError if the driver cannot encode
    it.
    """
    tensor.check(pointer)
    rank = len(tensor.shape)
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(_TYPES[tensor.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(pointer),
        _array(ctypes.c_uint64, tensor.shape),
        _array(ctypes.c_uint64, tensor.strides or (0,)),
        _array(ctypes.c_uint32, tensor.box),
        _array(ctypes.c_uint32, (1,) * rank),
        ctypes.c_int(_NOT_INTERLEAVED),
        ctypes.c_int(SWIZZLES[tensor.swizzle]),
        ctypes.c_int(_PROMOTE_TO_L2_256B),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    if status:
        raise ValueError(
            f"cannot encode the tensor map: the driver returns {status} for {tensor} at {pointer:#x}"
        )
    return ctypes.string_at(place, _BYTES)
