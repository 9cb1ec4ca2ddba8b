"""Progress of the NumPy path, counted in (query, key) pairs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..call.problem import Problem

SECONDS = 0.1  # between two reports

__all__ = ["SECONDS", "Count", "count", "counting", "pairs"]


class Count:
    """Counts finished pairs of a call, of `total`, and reports the finished share, 0 to 1, to `tell`."""

    def __init__(self, total: int, tell: Callable[[float], Any]) -> None:
        self._total, self._tell = max(total, 1), tell
        self._done, self._told_at = 0, time.monotonic()

    def add(self, pairs: int) -> None:
        """Count finished pairs, and report if `SECONDS` have passed since the last report."""
        self._done += pairs
        now = time.monotonic()
        if now - self._told_at >= SECONDS:
            self._told_at = now
            self._tell(self._done / self._total)


class _CountOfThread(threading.local):
    """The current Count of this thread; None while no call reports progress."""

    of: Count | None = None


_here = _CountOfThread()


@contextmanager
def counting(of: Count | None) -> Iterator[None]:
    """Count the pairs of this thread for a call; with None, do not count."""
    before, _here.of = _here.of, of
    try:
        yield
    finally:
        _here.of = before


def count(problem: Problem, first: int, stop: int) -> None:
    """Count the pairs of queries first to stop of a key head as finished."""
    if _here.of is not None:
        band, keys = problem.band, problem.seqlen_k
        _here.of.add(band.pairs(stop, keys) - band.pairs(first, keys))


def pairs(problem: Problem, arrays: dict[str, np.ndarray[Any, Any]]) -> int:
    """All pairs that a call will count; arrays as in `each_sequence`."""
    p = problem
    if not p.packed or p.cache is not None:  # an upper bound for a cache: calls over it report only their end
        return p.batch * p.heads_k * p.band.pairs(p.seqlen_q, p.seqlen_k)
    of_q, of_k = (np.diff(arrays[name]) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    total = 0
    of_q = arrays.get("seqused_q", of_q)
    for rows, keys in zip(of_q.tolist(), arrays.get("seqused_k", of_k).tolist(), strict=True):
        offset = p.offset + (keys - rows if p.offset_from_end else 0)
        total += p.band._replace(offset=offset).pairs(rows, keys)
    return p.heads_k * total
