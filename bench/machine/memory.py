"""What memory a process holds, and whether that grows."""

from __future__ import annotations

from pathlib import Path

GROWTH_ALLOWED = 64e6


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096


def growth(held: list[int]) -> int:
    """How much memory grew, of readings one after the other: the last quarter's least over the second's most.

    why: FP64 references of many sizes come and go, so that single readings say little; a leak lifts them all.
    """
    quarter = len(held) // 4
    if quarter < 5:
        return 0
    return max(0, min(held[-quarter:]) - max(held[quarter : 2 * quarter]))
