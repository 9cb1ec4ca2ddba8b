"""`ArrayView`: an array of any library as pointer, shape, strides, dtype and device; and dtypes by name."""

from __future__ import annotations

import ctypes
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError

__all__ = [
    "ArrayView",
    "accumulator_of",
    "contiguous",
    "device_name",
    "dtype_name",
    "numpy_dtype",
    "numpy_view",
    "overlap",
    "overlaps_itself",
]

ITEM_BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4,
              "int8": 1, "uint8": 1, "float8_e4m3fn": 1}  # fmt: skip
CPU = ("cpu", 0)


class ArrayView(NamedTuple):
    """An array of any library, described without that library's types."""

    pointer: int  # address of element (0, ..., 0)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; 0 on a broadcast axis
    dtype: str  # NumPy's name of the dtype; "bfloat16" and "float8_e4m3fn" as in ml_dtypes
    device: tuple[str, int]  # ("cpu", 0) or ("cuda", ordinal)
    library: str  # "numpy", "cupy", "torch", "jax" or "dlpack"
    readonly: bool  # whether the owner forbids writing
    owner: Any  # keeps the memory alive

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    def permuted(self, *axes: int) -> ArrayView:
        """The same memory with its axes permuted."""
        return self._replace(
            shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes)
        )

    def lifted(self, rank: int) -> ArrayView:
        """The same memory with leading axes of length 1 added, up to this rank."""
        extra = rank - len(self.shape)
        if extra <= 0:
            return self
        return self._replace(shape=(1,) * extra + self.shape, strides=(0,) * extra + self.strides)

    def broadcast(self) -> ArrayView:
        """The same memory with stride 0 on axes of length 1, as the params structs of kernels need it."""
        strides = tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))
        return self._replace(strides=strides)

    def extent(self) -> tuple[int, int]:
        """Half-open range of addresses that the elements cover."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        low = high = 0
        for n, s in zip(self.shape, self.strides, strict=True):
            step = (n - 1) * s
            low, high = low + min(step, 0), high + max(step, 0)
        size = self.item_bytes
        return self.pointer + low * size, self.pointer + (high + 1) * size

    def aligned(self) -> bool:
        """Whether 16-byte copies can read its rows.

        True if each row is contiguous, every row starts on a 16-byte boundary, and the stride between rows is
        not negative.
        """
        if not self.in_rows():
            return False
        size = self.item_bytes
        bits = self.pointer
        for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True):
            if n != 1:
                bits |= s * size
        return bits % 16 == 0 and self.strides[-2] >= 0

    def in_rows(self) -> bool:
        """Whether each row is contiguous, and the stride between rows in bytes fits 32 bits.

        why the stride of heads for single rows: a tile may take rows from several heads.
        """
        steps = self.strides[-3:-1] if self.shape[-2] == 1 else self.strides[-2:-1]
        in_reach = all(-(2**31) <= step * self.item_bytes < 2**31 for step in steps)
        return (self.shape[-1] == 1 or self.strides[-1] == 1) and in_reach

    def has_tma_strides(self) -> bool:
        """Whether a TMA tensor map can describe its strides; it must be `aligned` too.

        No stride may be zero, negative, or 2**40 bytes or more.
        """
        return all(
            n <= 1 or 0 < s < 2**40 // self.item_bytes for n, s in zip(self.shape, self.strides, strict=True)
        )

    def numpy(self) -> np.ndarray[Any, Any]:
        """A NumPy array on the same memory; only for device "cpu"."""
        if self.device != CPU:
            raise AssertionError("numpy() of an array on a GPU")
        return numpy_view(self, self.shape, self.byte_strides(), self.dtype)

    def integers(self) -> np.ndarray[Any, Any]:
        """The elements of an array of integers; on a GPU this waits for the stream."""
        return self.numpy() if self.device == CPU else np.asarray(self.owner.tolist(), np.int64)

    def byte_strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        size = self.item_bytes
        return tuple(s * size for s in self.strides)

    def describe(self) -> str:
        """Shape and dtype, for tables of inputs."""
        where = "" if self.device == CPU else f" on {device_name(self.device)}"
        return f"{_tuple(self.shape)}  {self.dtype}{where}"


def device_name(device: tuple[str, int]) -> str:
    """The usual name of a device: "cpu" or "cuda:0"."""
    return device[0] if device == CPU else f"{device[0]}:{device[1]}"


def _tuple(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


_TYPE_STRINGS = {"bool": "|b1", "float16": "<f2", "bfloat16": "<u2", "float32": "<f4",
                 "float64": "<f8", "int32": "<i4", "int8": "|i1", "uint8": "|u1",
                 "float8_e4m3fn": "|u1"}  # fmt: skip
# Dtypes that NumPy has only with ml_dtypes.
_EXTENDED = ("bfloat16", "float8_e4m3fn")


class _Memory:
    """Exposes a view's memory to NumPy and keeps its owner alive."""

    def __init__(
        self, view: ArrayView, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: str
    ) -> None:
        self.owner = view.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer or 64, view.readonly),
            "shape": shape,
            "strides": byte_strides,
            "typestr": _TYPE_STRINGS[dtype],
        }


def numpy_view(
    view: ArrayView, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: str
) -> np.ndarray[Any, Any]:
    """A NumPy array with this shape, these strides and this dtype at the address of a view in main memory."""
    array = np.asarray(_Memory(view, shape, byte_strides, dtype))
    return array.view(numpy_dtype(dtype)) if dtype in _EXTENDED else array


@lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype for one of our names; ml_dtypes has the extended ones."""
    if name not in _EXTENDED:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"NumPy knows {name} only through ml_dtypes, which is not installed.",
            hint="pip install ml_dtypes",
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def numpy_address(x: np.ndarray[Any, Any]) -> int:
    """Address of the first element; 0 for an empty array."""
    if not x.size:
        return 0
    # why not __array_interface__ always: it describes the whole array, which takes four times as long.
    if x.flags.c_contiguous and x.flags.writeable and x.dtype.isbuiltin == 1:
        return ctypes.addressof(ctypes.c_char.from_buffer(x))  # type: ignore[arg-type]
    address: int = x.__array_interface__["data"][0]
    return address


TORCH_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32",
                 "torch.float64": "float64", "torch.bool": "bool", "torch.int32": "int32",
                 "torch.int8": "int8", "torch.uint8": "uint8",
                 "torch.float8_e4m3fn": "float8_e4m3fn"}  # fmt: skip


def dtype_name(dtype: Any) -> str | None:
    """Our name for a dtype given as in NumPy, CuPy, torch or JAX: numpy.float16, torch.bfloat16, "float32".

    None if it is not a dtype.
    """
    if isinstance(dtype, str):
        return dtype
    if dtype is None:  # why: numpy.dtype(None) is float64
        return None
    if type(dtype).__module__ == "torch":
        return TORCH_DTYPES.get(str(dtype), str(dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # why: deprecated aliases are refused too
            known: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, Warning):
        return None
    return str(known.name)


def accumulator_of(dtype: str) -> str:
    """The dtype of scores, sums, LSE, sinks and ALiBi slopes, for a dtype of q."""
    return "float64" if dtype == "float64" else "float32"


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays share memory; True if NumPy cannot decide it with bounded work."""
    (a_low, a_high), (b_low, b_high) = a.extent(), b.extent()
    if a_high <= b_low or b_high <= a_low:
        return False
    kinds = ((x.shape, x.byte_strides(), x.dtype) for x in (a, b))
    return _share_memory(b.pointer - a.pointer, *kinds)


@lru_cache(maxsize=4096)
def _share_memory(distance: int, *kinds: tuple[tuple[int, ...], tuple[int, ...], str]) -> bool:
    """`overlap` of two arrays that begin this number of bytes apart.

    why cached: two caches in one array are as far apart in every call.
    """
    # why this is safe: NumPy compares addresses and never reads the memory.
    first, second = (
        np.asarray(
            _Memory(
                ArrayView(2**46 + n * distance, shape, (), dtype, CPU, "", True, None), shape, strides, dtype
            )
        )
        for n, (shape, strides, dtype) in enumerate(kinds)
    )
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(view: ArrayView) -> bool:
    """Whether two elements share memory, or may do so.

    why: some views with interleaved axes are refused although no elements overlap; for an output, that is the
    safe side.
    """
    if 0 in view.shape:
        return False
    span = 1
    for stride, n in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span = stride * (n - 1) + span
    return False
