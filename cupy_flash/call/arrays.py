"""An array of any library as pointer, shape, strides, dtype and device; dtypes by name; who shares memory."""

from __future__ import annotations

import ctypes
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError

__all__ = [
    "ArrayView",
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
    """An array of some library, seen without that library.

    Attributes
    ----------
    pointer : int
        Address of element (0, ..., 0).
    shape, strides : tuple of int
        Strides in elements; 0 on a broadcast axis.
    dtype : str
        NumPy's name of the dtype; "bfloat16" for that.
    device : (str, int)
        ("cpu", 0) or ("cuda", ordinal).
    library : str
        "numpy", "cupy", "torch", "jax" or "dlpack".
    readonly : bool
        Whether the owner forbids writing.
    owner : object
        Keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]
    library: str
    readonly: bool
    owner: Any

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    def permuted(self, *axes: int) -> ArrayView:
        """The same memory with its axes in another order."""
        return self._replace(
            shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes)
        )

    def lifted(self, rank: int) -> ArrayView:
        """The same memory with axes of length 1 in front, up to this rank."""
        extra = rank - len(self.shape)
        if extra <= 0:
            return self
        return self._replace(shape=(1,) * extra + self.shape, strides=(0,) * extra + self.strides)

    def broadcast(self) -> ArrayView:
        """The same memory with stride 0 wherever the length is 1, as the kernels' params want it."""
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
        """Whether copies of 16 bytes can read it row by row.

        Its rows are in one piece, every one starts on a 16-byte boundary, and the step from row to row is
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
        """Whether each row is in one piece, and the step from row to row in bytes fits 32 bits.

        So do single rows of several heads, which may be rows of one tile.
        """
        steps = self.strides[-3:-1] if self.shape[-2] == 1 else self.strides[-2:-1]
        in_reach = all(-(2**31) <= step * self.item_bytes < 2**31 for step in steps)
        return (self.shape[-1] == 1 or self.strides[-1] == 1) and in_reach

    def boxable(self) -> bool:
        """Whether a tensor map can describe it, if it is `aligned` too.

        No axis stands still or goes backwards, and no step is 2**40 bytes or more.
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
        """The numbers of an array of integers; on a GPU this waits for the stream."""
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
    """A device as people write it: "cpu" or "cuda:0"."""
    return device[0] if device == CPU else f"{device[0]}:{device[1]}"


def _tuple(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


_TYPE_STRINGS = {"bool": "|b1", "float16": "<f2", "bfloat16": "<u2", "float32": "<f4",
                 "float64": "<f8", "int32": "<i4", "int8": "|i1", "uint8": "|u1",
                 "float8_e4m3fn": "|u1"}  # fmt: skip
# What NumPy knows through ml_dtypes only.
_EXTENDED = ("bfloat16", "float8_e4m3fn")


class _Memory:
    """Hands a view's memory to NumPy and keeps its owner alive."""

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
    """A NumPy array of this shape at the address of a view, in main memory."""
    array = np.asarray(_Memory(view, shape, byte_strides, dtype))
    return array.view(numpy_dtype(dtype)) if dtype in _EXTENDED else array


@lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of one of our names; those of ml_dtypes from there."""
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
    """Address of the first element; 0 if there is none."""
    if not x.size:
        return 0
    # why: NumPy's interface describes the whole array, which takes four times as long as its buffer.
    if x.flags.c_contiguous and x.flags.writeable and x.dtype.isbuiltin == 1:
        return ctypes.addressof(ctypes.c_char.from_buffer(x))  # type: ignore[arg-type]
    address: int = x.__array_interface__["data"][0]
    return address


TORCH_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32",
                 "torch.float64": "float64", "torch.bool": "bool", "torch.int32": "int32",
                 "torch.int8": "int8", "torch.uint8": "uint8",
                 "torch.float8_e4m3fn": "float8_e4m3fn"}  # fmt: skip


def dtype_name(dtype: Any) -> str | None:
    """Our name of a dtype as NumPy, CuPy, torch or JAX write it: numpy.float16, torch.bfloat16, "float32".

    None if it is no dtype.
    """
    if isinstance(dtype, str):
        return dtype
    if dtype is None:  # why: NumPy takes it for float64
        return None
    if type(dtype).__module__ == "torch":
        return TORCH_DTYPES.get(str(dtype), str(dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an old alias is no dtype either
            known: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, Warning):
        return None
    return str(known.name)


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array whose last axis lies densest."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays share memory; True if that is too hard to tell."""
    (a_low, a_high), (b_low, b_high) = a.extent(), b.extent()
    if a_high <= b_low or b_high <= a_low:
        return False
    # Only addresses are looked at: memory of a GPU is not touched.
    first, second = (np.asarray(_Memory(x, x.shape, x.byte_strides(), x.dtype)) for x in (a, b))
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(view: ArrayView) -> bool:
    """Whether two elements share memory; exact for strided views without interleaved axes.

    why: an axis whose step is smaller than what the axes inside it span is refused as well, although a
    few such views (interleaved ones) are sound: for an output this is the safe side.
    """
    if 0 in view.shape:
        return False
    span = 1
    for stride, n in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span = stride * (n - 1) + span
    return False
