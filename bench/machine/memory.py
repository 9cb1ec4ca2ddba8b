"""Resident memory of this process, and its growth."""

from __future__ import annotations

import ctypes
from pathlib import Path

GROWTH_ALLOWED = 64e6


def resident() -> int:
    """Resident memory of this process in bytes; 0 where the system does not report it."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    # why: what glibc keeps of freed memory, between blocks in use, varies by hundreds of megabytes.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    return int(statm.read_text().split()[1]) * 4096


def growth(held: list[int]) -> int:
    """Growth in bytes over a series of readings: minimum of the last quarter less maximum of the second.

    why: FP64 references of many sizes make single readings vary; a leak raises all of them.
    """
    quarter = len(held) // 4
    if quarter < 5:
        return 0
    return max(0, min(held[-quarter:]) - max(held[quarter : 2 * quarter]))
