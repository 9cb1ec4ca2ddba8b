"""Arrays that expose stray reads and writes: views inside larger buffers full of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["DEAD", "STYLES", "Guarded", "dead", "hostile"]

# Layouts of the view in its buffer; in each of them guards surround the view on every axis.
STYLES = ("padded", "aligned", "transposed", "strided", "reversed")

# A value that no correct attention result has, exact in every floating dtype.
DEAD = -1.5 * 2.0**14


@dataclass(frozen=True, eq=False)
class Guarded:
    """A view and the buffer around it.

    Attributes
    ----------
    view : array
        The array for the function under test.
    buffer : array
        The whole memory, guards included.
    before : array
        A copy of the buffer before the call.
    inside : tuple
        The index of the view's elements in the buffer.
    xp : module
        ``numpy`` or ``cupy``.
    """

    view: Any
    buffer: Any
    before: Any
    inside: tuple[Any, ...]
    xp: Any

    def check_guards(self) -> None:
        """Raise an AssertionError if anything outside the view was written."""
        now, before = self.buffer.copy(), self.before.copy()
        now[self.inside] = before[self.inside]
        _same_bytes(now, before, "a guard zone was written", self.xp)

    def check_untouched(self) -> None:
        """Raise an AssertionError if the view or a guard was written; for inputs."""
        _same_bytes(self.buffer, self.before, "an input or its guard zone was written", self.xp)

    def check_written(self) -> None:
        """Raise an AssertionError if an element of the view is still ``DEAD``, or a guard was written."""
        self.check_guards()
        left = (self.view == self.view.dtype.type(DEAD)).sum()
        if int(left):
            raise AssertionError(f"{int(left)} of {self.view.size} elements were never written")


def hostile(array: Any, *, style: str = "padded", xp: Any = np) -> Guarded:
    """Place the values of an array in a view inside a larger buffer full of NaN.

    Parameters
    ----------
    array : array
        A NumPy array.
    style : str
        One of ``STYLES``: "padded" (odd offset and row stride, last axis contiguous), "aligned"
        (rows start on 16-byte boundaries of the buffer), "transposed" (the axes are in another
        order in memory), "strided" (every second element of the last axis), "reversed"
        (negative stride along the sequence).
    xp : module
        ``numpy`` or ``cupy``, which makes the arrays.

    Returns
    -------
    Guarded
    """
    array = np.asarray(array)
    guarded = _embed(array.shape, array.dtype, style, xp)
    guarded.view[...] = xp.asarray(array)
    return Guarded(guarded.view, guarded.buffer, guarded.buffer.copy(), guarded.inside, xp)


def dead(shape: tuple[int, ...], dtype: Any, *, style: str = "padded", xp: Any = np) -> Guarded:
    """Make an output array, filled with ``DEAD``, inside a larger buffer full of NaN.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype
    style, xp
        As in `hostile`.

    Returns
    -------
    Guarded
    """
    guarded = _embed(tuple(shape), np.dtype(dtype), style, xp)
    guarded.view[...] = DEAD
    return Guarded(guarded.view, guarded.buffer, guarded.buffer.copy(), guarded.inside, xp)


def _embed(shape: tuple[int, ...], dtype: np.dtype, style: str, xp: Any) -> Guarded:
    """Make the buffer and the view."""
    if style not in STYLES:
        raise ValueError(f"style is {style!r}, not one of {STYLES}")
    rank = len(shape)
    # Order of the axes in memory; "transposed" rotates all but the last two into a new order.
    order = list(range(rank))
    if style == "transposed" and rank >= 2:
        order = [*order[1:], 0] if rank == 2 else [*order[1:-1], 0, rank - 1]
    step = [1] * rank
    if rank and style == "strided":
        step[-1] = 2
    before, after = [1] * rank, [2] * rank
    if rank and style == "aligned":
        lanes = 16 // dtype.itemsize
        before[-1], after[-1] = lanes, lanes + -shape[-1] % lanes
    extents = [before[a] + shape[a] * step[a] + after[a] for a in order]
    fill: Any = {"b": True, "i": -(2**6) - 1, "u": 2**6 + 1}.get(dtype.kind, np.nan)
    buffer = xp.empty(extents, dtype)
    buffer[...] = fill
    inside: list[Any] = []
    for axis in order:
        low, high = before[axis], before[axis] + shape[axis] * step[axis]
        if style == "reversed" and rank >= 2 and axis == rank - 2:
            inside.append(slice(high - 1, low - 1, -1))
        else:
            inside.append(slice(low, high, step[axis]))
    # why the ellipsis: without it a 0-dimensional array becomes a number instead of a view
    here = (*inside, ...)
    view = buffer[here].transpose([order.index(axis) for axis in range(rank)])
    return Guarded(view, buffer, None, tuple(inside), xp)


def _same_bytes(now: Any, before: Any, what: str, xp: Any) -> None:
    """Compare the bytes of two arrays, so that NaN equals NaN and every bit counts."""
    now, before = (xp.ascontiguousarray(x).reshape(-1).view(xp.uint8) for x in (now, before))
    if not bool((now == before).all()):
        raise AssertionError(f"{what}: {int((now != before).sum())} bytes differ")
