"""Spans in NumPy: which tiles their intervals reach, and which pairs of a tile are visible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .tiles import Block, Box, cut_out

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

# Queries or keys per cell; each cell has a minimum and a maximum of the bounds. why: a tile spans a few
# cells, so that skipping it reads 1/64 of the bounds.
CELL = 64


class TileSpans:
    """The spans of a problem, for tiles: the bounds of `describe`, by key head.

    They are (1 or batch, key heads or 1, group or 1, queries or keys, bounds).
    """

    def __init__(self, problem: Problem, bounds: Array) -> None:
        assert problem.spans is not None
        self._by_query = problem.spans.by_query
        self._start, self._stop = bounds[..., 0::2], bounds[..., 1::2]
        cells = np.arange(0, bounds.shape[3], CELL)
        full = self._start < self._stop
        far = np.iinfo(np.int32).max
        # For each cell and interval: the least start and the greatest stop, without empty intervals.
        self._first = np.minimum.reduceat(np.where(full, self._start, far), cells, axis=3)
        self._end = np.maximum.reduceat(np.where(full, self._stop, 0), cells, axis=3)

    def visible(self, box: Box, block: Block) -> tuple[Array | None, bool]:
        """Return the visible pairs of a tile, or None if all are visible, and whether none is.

        Visible pairs are a boolean array (batch, key heads, group or 1, m, n).
        """
        i0, i1, j0, j1 = block
        own, along = ((i0, i1), (j0, j1)) if self._by_query else ((j0, j1), (i0, i1))
        cells = slice(own[0] // CELL, -(-own[1] // CELL))
        first, end = (cut_out(x, box, cells) for x in (self._first, self._end))
        if not ((first < along[1]) & (end > along[0])).any():
            return None, True
        start, stop = (cut_out(x, box, slice(*own))[..., None] for x in (self._start, self._stop))
        if ((start <= along[0]) & (stop >= along[1])).any(axis=4).all():
            return None, False
        positions = np.arange(*along, dtype=np.int32)
        kept = np.logical_or.reduce((start <= positions) & (positions < stop), axis=4)
        return (kept if self._by_query else kept.swapaxes(-1, -2)), not bool(kept.any())
