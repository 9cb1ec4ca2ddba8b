"""CPU share of other programs during a timing, which they would distort."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_TICK = 0.01  # seconds, the unit of /proc/stat
# Columns user, nice, system, irq, softirq and steal of the first line, without idle and iowait.
_BUSY = (1, 2, 3, 6, 7, 8)


class Sample(NamedTuple):
    """Seconds: wall clock, busy time of all CPUs, CPU time of this process and its finished children."""

    wall: float
    busy: float
    own: float


def sample() -> Sample:
    """Sample the clocks; without /proc/stat other programs always have a share of 0."""
    times = os.times()
    own = time.process_time() + times.children_user + times.children_system
    try:
        with _STAT.open() as stat:
            words = stat.readline().split()
    except OSError:
        return Sample(time.perf_counter(), own, own)
    return Sample(time.perf_counter(), sum(int(words[n]) for n in _BUSY) * _TICK, own)


def of_others(before: Sample, after: Sample) -> float:
    """The share of all CPUs that other programs used between two moments.

    Busy time is counted in ticks, so that a difference of one tick is rounding.
    """
    theirs = (after.busy - before.busy) - (after.own - before.own) - 1.2 * _TICK
    whole = (after.wall - before.wall) * (os.cpu_count() or 1)
    return max(0.0, theirs / whole) if whole else 0.0


# Samples with a larger share of other programs are discarded, if enough remain.
CALM = 0.1
