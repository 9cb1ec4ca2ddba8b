"""Time several implementations in turn: by the wall clock on a CPU, by events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any, NamedTuple, Protocol

from . import cpu_share

# `settle`: longest wait, sampling interval, and the CPU share that counts as idle. Threads of OpenBLAS spin
# for 2^28 cycles, 0.1 s.
SETTLE_SECONDS = 0.5
GLANCE_SECONDS = 0.01
QUIET = 0.1
# why: idle processors clock down: a first call takes 1.5 times as long, calls after 0.06 s do not.
WAKING_SECONDS = 0.06
LEAST_REPETITIONS = 2

Call = Callable[[], Any]
Stopwatch = Callable[[Call], float]


class Timing(NamedTuple):
    """Quartiles of a duration in seconds, number of samples, and the CPU share of other programs."""

    lower: float
    median: float
    upper: float
    samples: int
    others: float = 0.0

    @classmethod
    def of(cls, durations: list[float]) -> Timing:
        if len(durations) == 1:
            return cls(*durations * 3, 1)
        return cls(*quantiles(durations, n=4, method="inclusive"), len(durations))

    @property
    def noise(self) -> float:
        """Half the interquartile range, relative to the median."""
        return (self.upper - self.lower) / 2 / self.median if self.median else 0.0

    def row(self) -> dict[str, str]:
        """Columns of a result row."""
        times = {f"{name}_ms": f"{1e3 * getattr(self, name):.4f}" for name in ("lower", "median", "upper")}
        return times | {"samples": str(self.samples), "others": f"{self.others:.3f}"}

    def __str__(self) -> str:
        return f"{_ms(self.median)} ms ({_ms(self.lower)}..{_ms(self.upper)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def settle() -> None:
    """Wait until this process is idle.

    why: threads of OpenBLAS and OpenMP spin after their work. The next timed call would share cores with
    them, and take up to twice as long.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        wall, own = time.perf_counter(), time.process_time()
        time.sleep(GLANCE_SECONDS)
        if time.process_time() - own < QUIET * (time.perf_counter() - wall):
            return


def by_clock(call: Call) -> float:
    """Wall-clock seconds of a call, after untimed calls that warm up caches and threads."""
    return _awake(call, time.perf_counter)


def by_processor(call: Call) -> float:
    """CPU seconds of a call, summed over all threads.

    why: on a busy machine the wall clock includes time in which other programs run. A ratio of CPU times
    compares work; a ratio of wall-clock times also depends on how well threads share the work.
    """
    return _awake(call, time.process_time)


def _awake(call: Call, clock: Callable[[], float]) -> float:
    settle()
    awake = time.perf_counter() + WAKING_SECONDS
    call()
    while time.perf_counter() < awake:
        call()
    start = clock()
    call()
    return clock() - start


class Device(Protocol):
    """The methods of a GPU that timing by events needs."""

    def event(self) -> Any:
        """An event with record() and synchronize()."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two events that have happened."""

    def flush(self) -> None:
        """Enqueue a write that is larger than the L2 cache."""

    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""


def by_events(device: Device) -> Stopwatch:
    """Time calls by events on the GPU's stream, each with a cold L2 cache.

    why: the write that flushes the cache keeps the GPU busy while Python enqueues the call, so that the
    time between the events is that of the kernels, without Python.
    """

    def seconds(call: Call) -> float:
        start, end = device.event(), device.event()
        device.flush()
        start.record()
        call()
        end.record()
        end.synchronize()
        return device.elapsed(start, end)

    return seconds


def by_wall(device: Device) -> Stopwatch:
    """Time calls that wait for their results, by the wall clock, for streams without our events.

    why no pause as in `by_clock`: an idle GPU lowers its clocks.
    """

    def seconds(call: Call) -> float:
        device.flush()
        device.synchronize()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def alternate(
    ways: Mapping[str, tuple[Call, Stopwatch]],
    repetitions: int,
    seconds: float,
    warm_up: int = 1,
    calm: float = cpu_share.CALM,
) -> dict[str, Timing]:
    """Time each implementation in turn, so that all have the same conditions: clocks, power, other programs.

    Ends after `repetitions` rounds, or earlier when `seconds` have passed. Samples during which other
    programs used more than the share `calm` of the CPU are repeated, for at most twice that time more; if
    too few samples are calm, all count.
    """
    for call, stopwatch in ways.values():
        for _ in range(warm_up):
            stopwatch(call)
    begun = time.perf_counter()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    rounds = 0
    while rounds < 3 * repetitions:
        usable = min(sum(theirs <= calm for _, theirs in taken) for taken in samples.values())
        passed = time.perf_counter() - begun
        if rounds >= LEAST_REPETITIONS and passed > (seconds if usable >= LEAST_REPETITIONS else 3 * seconds):
            break
        if usable >= repetitions:
            break
        for name, (call, stopwatch) in ways.items():
            before = cpu_share.sample()
            duration = stopwatch(call)
            samples[name].append((duration, cpu_share.of_others(before, cpu_share.sample())))
        rounds += 1
    return {name: kept(taken, calm) for name, taken in samples.items()}


def kept(taken: list[tuple[float, float]], calm: float = cpu_share.CALM) -> Timing:
    """Quartiles of the calm samples, or of all samples if too few are calm."""
    usable = [sample for sample in taken if sample[1] <= calm]
    used = usable if len(usable) >= LEAST_REPETITIONS else taken
    theirs = sum(share for _, share in used) / len(used)
    return Timing.of([duration for duration, _ in used])._replace(others=theirs)
