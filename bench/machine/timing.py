"""Time several ways of doing one thing side by side: on the CPU by the clock, on a GPU by events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any, NamedTuple, Protocol

from . import weather

# What `settle` waits for at most, looks at, and calls quiet. OpenBLAS's threads spin for 2^28 cycles, 0.1 s.
SETTLE_SECONDS = 0.5
GLANCE_SECONDS = 0.01
QUIET = 0.1
# why: after a rest processors are slow: the first call takes half as long again, those after 0.06 s do not.
WAKING_SECONDS = 0.06
LEAST_REPETITIONS = 2

Call = Callable[[], Any]
Stopwatch = Callable[[Call], float]


class Timing(NamedTuple):
    """Quartiles of a duration in seconds, of how many calls, and the share of processors others used."""

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
        """Half the distance of the quartiles, over the median."""
        return (self.upper - self.lower) / 2 / self.median if self.median else 0.0

    def row(self) -> dict[str, str]:
        """As columns of a result."""
        times = {f"{name}_ms": f"{1e3 * getattr(self, name):.4f}" for name in ("lower", "median", "upper")}
        return times | {"samples": str(self.samples), "others": f"{self.others:.3f}"}

    def __str__(self) -> str:
        return f"{_ms(self.median)} ms ({_ms(self.lower)}..{_ms(self.upper)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def settle() -> None:
    """Wait until this process does nothing.

    why: threads of OpenBLAS and OpenMP spin after their work. Whoever is timed next would share a core with
    them and take up to twice as long.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        wall, own = time.perf_counter(), time.process_time()
        time.sleep(GLANCE_SECONDS)
        if time.process_time() - own < QUIET * (time.perf_counter() - wall):
            return


def by_clock(call: Call) -> float:
    """Seconds of a call by the wall clock, after untimed ones so that caches and threads are its own."""
    return _awake(call, time.perf_counter)


def by_processor(call: Call) -> float:
    """The same of processor time, that of all threads together.

    why: beside other programs a call waits for its turn, and the wall tells their time as well. A ratio of
    two such times is one of work; that of the wall also says how well threads share it.
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
    """What timing by events needs of a GPU."""

    def event(self) -> Any:
        """An event with record() and synchronize()."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two events that have happened."""

    def flush(self) -> None:
        """Enqueue writing more than the L2 cache holds."""

    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""


def by_events(device: Device) -> Stopwatch:
    """Time calls by events on the GPU's own stream, each with a cold L2 cache.

    why: the write that empties the cache keeps the GPU busy while Python enqueues the call behind it, so
    that the time between the events is the kernels' own and holds no Python.
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
    """Time calls that wait for their own results, on a stream that our events do not see.

    why no pause as `by_clock` has: a GPU that waits lowers its clocks.
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
    calm: float = weather.CALM,
) -> dict[str, Timing]:
    """Time each way in turn, so that all meet the same weather: clocks, power, other programs.

    Ends after `repetitions` rounds, or earlier when `seconds` have passed. Samples during which other
    programs used more of the processors than `calm` are set aside and taken again, for at most twice that
    time more; where there are too few calm ones, all count.
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
            before = weather.now()
            duration = stopwatch(call)
            samples[name].append((duration, weather.others(before, weather.now())))
        rounds += 1
    return {name: kept(taken, calm) for name, taken in samples.items()}


def kept(taken: list[tuple[float, float]], calm: float = weather.CALM) -> Timing:
    """The quartiles of the calm samples, or of all if those are too few."""
    usable = [sample for sample in taken if sample[1] <= calm]
    used = usable if len(usable) >= LEAST_REPETITIONS else taken
    theirs = sum(share for _, share in used) / len(used)
    return Timing.of([duration for duration, _ in used])._replace(others=theirs)
