"""Where a random call has its arrays: between pages that nobody may touch, or on a GPU."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from cupy_flash import testing
from cupy_flash.call import outputs
from cupy_flash.call.adopt import adopt
from tests.cases import numpy_dtype

__all__ = ["OnDevice", "Pages"]

PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def between_pages(nbytes: int, *, before: bool) -> np.ndarray:
    """Bytes that a page without access follows, or that one precedes: a byte too far ends the process.

    They lie in memory of their own, which goes with the last array over it.
    """
    page = mmap.PAGESIZE
    room = -(-nbytes // page) * page
    memory = mmap.mmap(-1, room + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    every = np.frombuffer(memory, np.uint8)
    for guard in (every.ctypes.data, every.ctypes.data + page + room):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page if before else page + room - nbytes
    return every[start : start + nbytes]


def laid_out(shape: tuple[int, ...], style: str) -> tuple[list[int], int, int]:
    """Strides, first element and number of elements of a view whose rows have gaps, but not its ends.

    The styles are those of `testing.hostile`.
    """
    rank = len(shape)
    order = list(range(rank))
    if style == "transposed" and rank >= 2:
        order = [*order[1:], 0] if rank == 2 else [*order[1:-1], 0, rank - 1]
    strides, size = [0] * rank, 1
    for axis in reversed(order):
        step = 2 if style == "strided" and axis == rank - 1 else 1
        strides[axis] = size * step
        size *= max(1, shape[axis]) * step
        if style == "aligned":
            size += -size % 16
        elif style != "contiguous":
            size += 3
    total = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    first = 0
    if style == "reversed" and rank >= 2:
        first = (shape[-2] - 1) * strides[-2]
        strides[-2] = -strides[-2]
    return strides, first, total


class Pages:
    """Arrays of NumPy between guard pages; what is between their rows is NaN.

    Parameters
    ----------
    before : bool
        Whether arrays begin where a page without access ends; or they end where one begins.
    """

    precision = None

    def __init__(self, *, before: bool) -> None:
        self.before = before
        self._read: dict[str, testing.Guarded] = {}
        self._written: list[testing.Guarded] = []
        self._made: list[testing.Guarded] = []

    def _guarded(self, shape: tuple[int, ...], dtype: np.dtype, style: str, fill: Any) -> testing.Guarded:
        if 0 in shape:
            nothing = np.empty(shape, dtype)
            return testing.Guarded(nothing, nothing, nothing, (...,), np)
        strides, first, total = laid_out(shape, style)
        buffer = between_pages(total * dtype.itemsize, before=self.before).view(dtype)
        buffer[...] = {"b": True, "i": -(2**6) - 1, "u": 2**6 + 1}.get(dtype.kind, np.nan)
        view = np.lib.stride_tricks.as_strided(
            buffer[first:], shape, [stride * dtype.itemsize for stride in strides], writeable=True
        )
        view[...] = fill
        places = np.full(1, first)
        for n, stride in zip(shape, strides, strict=True):
            places = (places[:, None] + stride * np.arange(n)).reshape(-1)
        return testing.Guarded(view, buffer, buffer.copy(), (places,), np)

    def put(self, name: str, x: Any, style: str = "contiguous", *, changes: bool = False) -> Any:
        """An input; one that changes is written by the call."""
        x = np.asarray(x)
        guarded = self._guarded(x.shape, x.dtype, style, x)
        self._read[name] = guarded
        if changes:
            self._made.append(self._read.pop(name))
        return guarded.view

    def out(self, shape: tuple[int, ...], dtype: Any, style: str = "contiguous") -> Any:
        """An output of the caller's, every element of which a call has to write."""
        self._written.append(self._guarded(shape, np.dtype(dtype), style, testing.DEAD))
        return self._written[-1].view

    def synchronize(self) -> None:
        """Wait for what is computed."""

    @contextmanager
    def results(self) -> Iterator[None]:
        """What the library allocates for results lies between such pages, too."""

        _here.append(self)
        try:
            with mock.patch.object(outputs, "empty", _new_result):
                yield
        finally:
            _here.pop()

    def check(self) -> None:
        """Fail if an input has changed, a result has places that were not written, or a gap was written."""
        for name, guarded in self._read.items():
            try:
                guarded.check_untouched()
            except AssertionError as error:
                raise AssertionError(f"{error} ({name})") from error
        for guarded in self._made:
            guarded.check_guards()
        for guarded in self._written:
            guarded.check_written()


_here: list[Pages] = []
_empty = outputs.empty


def _new_result(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """In place of `outputs.empty`. why one for all: what is prepared once keeps it for later calls."""
    if not _here:
        return _empty(like, shape, dtype)
    return adopt(_here[-1].out(shape, numpy_dtype(dtype)), "output")


class OnDevice:
    """Arrays on a GPU, by a place of the benchmarks; CuPy's as views into buffers of NaN."""

    def __init__(self, place: Any, dtype: str) -> None:
        self._place = place
        self.precision = "tf32x3" if dtype == "float32" else None
        self._guarded: list[tuple[str, testing.Guarded, bool]] = []

    def put(self, name: str, x: Any, style: str = "contiguous", *, changes: bool = False) -> Any:
        """An input; one that changes is written by the call."""
        if style == "contiguous" or self._place.library != "cupy":  # torch has no negative strides
            return self._place.put(np.ascontiguousarray(x))
        guarded = testing.hostile(x, style=style, xp=self._place.cupy)
        self._guarded.append((name, guarded, changes))
        return guarded.view

    def synchronize(self) -> None:
        """Wait for what is computed."""
        self._place.synchronize()

    def check(self) -> None:
        """Fail if an input has changed, or anything beside what a call writes."""
        for name, guarded, changes in self._guarded:
            try:
                guarded.check_guards() if changes else guarded.check_untouched()
            except AssertionError as error:
                raise AssertionError(f"{error} ({name})") from error


def numpy_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """What there is among results, as NumPy's."""
    return {name: testing.to_numpy(x) for name, x in named.items() if x is not None}
