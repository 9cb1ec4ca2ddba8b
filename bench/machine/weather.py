"""How much of the machine others use meanwhile: a timing taken beside other programs is theirs as well."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_TICK = 0.01  # seconds that the kernel counts in
# user, nice, system, irq, softirq and steal of the first line; idle and iowait lie between.
_BUSY = (1, 2, 3, 6, 7, 8)


class Moment(NamedTuple):
    """Seconds: on the wall, of all processors, of this process and the children that it has waited for."""

    wall: float
    busy: float
    own: float


def now() -> Moment:
    """This moment; where the system does not tell, nobody else is ever seen."""
    times = os.times()
    own = time.process_time() + times.children_user + times.children_system
    try:
        with _STAT.open() as stat:
            words = stat.readline().split()
    except OSError:
        return Moment(time.perf_counter(), own, own)
    return Moment(time.perf_counter(), sum(int(words[n]) for n in _BUSY) * _TICK, own)


def others(before: Moment, after: Moment) -> float:
    """The share of all processors that others used between two moments.

    What processors count comes in ticks, so that a tick more than ours is nobody's.
    """
    theirs = (after.busy - before.busy) - (after.own - before.own) - 1.2 * _TICK
    whole = (after.wall - before.wall) * (os.cpu_count() or 1)
    return max(0.0, theirs / whole) if whole else 0.0


# Above this a sample is set aside, if there are enough others.
CALM = 0.1
