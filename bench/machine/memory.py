"""Resident memory of this process, and its growth."""

from __future__ import annotations

from pathlib import Path

GROWTH_ALLOWED = 64e6


def resident() -> int:
    """Resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096


def growth(held: list[int]) -> int:
    """Growth in bytes over a series of readings: minimum of the last quarter less maximum of the second.

    why: FP64 references of many sizes make single readings vary; a leak raises all of them.
    """
    quarter = len(held) // 4
    if quarter < 5:
        return 0
    return max(0, min(held[-quarter:]) - max(held[quarter : 2 * quarter]))
