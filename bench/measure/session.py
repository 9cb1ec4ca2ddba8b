"""Measure cases and compare peers: print a table, and append each row to a file at once."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..machine import ceilings, conditions, place, timing
from ..machine.nvml import State
from ..work import Case
from . import accuracy, results
from .peers import OURS, Peer, Skipped, chosen

# Repetitions of every case in a run, interleaved with all other cases: a machine's speed drifts over seconds
# and minutes, which consecutive rounds do not show.
VISITS = 4


class Settings(NamedTuple):
    """Settings of the command line.

    Attributes
    ----------
    quick : bool
        Fewer and smaller cases, fewer repetitions.
    device : {"auto", "cpu", "gpu"}
    peers : str or None
        Comma-separated parts of names of peers; None for all.
    only : str
        Measure cases whose label contains this.
    results : Path
        Folder of the CSV files, or one file for all.
    minutes : float or None
        Start no case after this time; None for no limit.
    resume : bool
        Skip cases that already have a row of this commit and machine.
    threads : int or None
        Threads of NumPy and torch on the CPU; None for their defaults.
    """

    quick: bool = False
    device: str = "auto"
    peers: str | None = None
    only: str = ""
    results: Path = results.RESULTS
    minutes: float | None = None
    resume: bool = False
    threads: int | None = None


class Session:
    """One run of one subcommand: the place, its ceilings, the file.

    Parameters
    ----------
    what : str
        Name of the subcommand.
    settings : Settings
    bounded : bool
        Whether rows are compared with ceilings; if not, these are not measured.
    """

    def __init__(self, what: str, settings: Settings, bounded: bool = True) -> None:
        self.what, self.settings, self._bounded = what, settings, bounded
        self.begun = time.monotonic()
        self.place, sentences = place.find(settings.device)
        self._threads = _limited(settings.threads)
        for sentence in sentences:
            print(sentence)
        self.where = dict(conditions.surroundings(self.place)) | {"threads": str(settings.threads or "")}
        print(" · ".join(f"{name} {value}" for name, value in self.where.items() if value))
        if bounded:
            self.ceilings = ceilings.measure(self.place, settings.quick)
            print(self.ceilings)
        self.path = settings.results
        if self.path.suffix != ".csv":
            self.path /= f"{what}.csv"
        self._skipped: set[tuple[str, str]] = set()
        self._errors: dict[tuple[str, Case], accuracy.Accuracy] = {}

    def out_of_time(self) -> bool:
        minutes = self.settings.minutes
        return minutes is not None and time.monotonic() - self.begun > 60 * minutes

    def cases(
        self,
        cases: Iterable[Case],
        visits: int = VISITS,
        first: Callable[[Any], str] = lambda _case: OURS.name,
    ) -> Iterator[Case]:
        """Yield the selected cases, `visits` times in turn, without repetitions that the file already has.

        `first` returns the implementation of a case's first row, by which existing repetitions are counted.
        """
        cases = list(cases)
        wanted = [case for case in cases if self.settings.only in str(case)]
        if cases and not wanted:
            print(f"no label contains {self.settings.only!r}. Try: a part of one, such as {str(cases[0])!r}")
        held = [self._held(case, first(case)) for case in wanted]
        due = [
            (visit, case)
            for visit in range(visits)
            for case, n in zip(wanted, held, strict=True)
            if visit >= n
        ]
        visited = due[0][0] if due else 0
        for visit, case in progress(due, self.what):
            # why again: the machine may have been busy at the first measurement
            if visit != visited and self._bounded:
                visited = visit
                self.ceilings = self.ceilings.or_better(ceilings.measure(self.place, self.settings.quick))
            if self.out_of_time():
                print(f"{self.settings.minutes:g} minutes are over; not measured: {case} and what follows.")
                return
            yield case

    def _held(self, case: Case, implementation: str) -> int:
        """Repetitions of a case in the file to resume."""
        if not self.settings.resume:
            return 0
        mine = self.row(case, implementation)
        same = (*results.IDENTITY, "commit", "gpu", "cpu")
        return sum(all(row.get(n) == mine.get(n, "") for n in same) for row in results.read(self.path))

    def row(self, case: Case | None, implementation: str, **measured: Any) -> dict[str, str]:
        """A row of this run with the given measurements; other measurements are empty."""
        row = dict.fromkeys(results.COLUMNS, "")
        row |= {name: value for name, value in self.where.items() if name in row}
        row |= {"what": self.what, "implementation": implementation, "load": conditions.load()}
        if case is not None:
            row |= {name: str(value) for name, value in case._asdict().items() if value is not None}
        return row | {name: str(value) for name, value in measured.items()}

    def append(self, rows: Iterable[Mapping[str, str]], state: State | None = None) -> None:
        """Write rows, with clock and power of the GPU."""
        now = {} if state is None else {"clock_mhz": state.clock_mhz, "watts": state.watts}
        known = {name: f"{value:.0f}" for name, value in now.items() if value is not None}
        results.append(self.path, [dict(row) | known for row in rows], results.COLUMNS)

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        write(line)

    def skipped(self, name: str, reason: object) -> None:
        """Print that a peer is skipped, once per reason."""
        if (name, str(reason)) not in self._skipped:
            self._skipped.add((name, str(reason)))
            write(f"  {name} {reason}.")

    def ready(self, case: Case, peers: Iterable[Peer]) -> tuple[dict[str, Peer], dict[str, timing.Call], Any]:
        """Prepare all peers of a case; skip those that cannot run it."""
        able: dict[str, Peer] = {}
        calls: dict[str, timing.Call] = {}
        try:
            inputs = self.place.inputs(case)
        except (MemoryError, RuntimeError) as error:
            self.say(f"{case}: not measured, its inputs do not fit: {error}".splitlines()[0][:200])
            return able, calls, None
        for peer in peers:
            try:
                calls[peer.name] = peer.ready(case, inputs, self.place)
                able[peer.name] = peer
            except Skipped as reason:
                self.skipped(peer.name, reason)
        return able, calls, inputs

    def measure(self, case: Case, peers: list[Peer] | None = None) -> list[dict[str, str]]:
        """Time a case once with all peers, print the rows and append them."""
        able, calls, inputs = self.ready(case, peers or chosen(self.place, self.settings.peers))
        if not calls:
            return []
        ways = {name: (calls[name], peer.stopwatch(self.place)) for name, peer in able.items()}
        repetitions, seconds = (2, 1.0) if self.settings.quick else (7, 3.0)
        # On a CPU the stopwatch itself warms up.
        times = timing.alternate(ways, repetitions, seconds, warm_up=int(self.place.name == "gpu"))
        state = self._at_work(calls[next(iter(calls))], next(iter(times.values())).median)
        errors = {name: self.errors_of(peer, case) for name, peer in able.items()}
        notes = dict.fromkeys(able, "")
        if isinstance(case, Case) and case.passes != "backward":
            for name, call in calls.items():
                try:
                    full = accuracy.of_rows(call()[0], case, inputs)
                except Exception as reason:  # why any: the timing is valid without this comparison
                    self.skipped(name, f"was not compared at full size: {reason}".splitlines()[0])
                    continue
                if full > accuracy.most_of_rows(errors[name].error, case):
                    notes[name] = f"WRONG at full size: error {full:.1e}"
        rows = [
            self._measured(case, name, times[name], errors[name], notes[name], able[name]) for name in able
        ]
        self.append(rows, state)
        self._print(case, rows, times, state)
        return rows

    def _at_work(self, call: timing.Call, seconds: float) -> State:
        """Clocks and power of the GPU under load; they fall within milliseconds afterwards."""
        for _ in range(min(200, max(3, round(0.03 / seconds)))) if self.place.name == "gpu" else ():
            call()
        state: State = self.place.state()
        self.place.synchronize()
        return state

    def errors_of(self, peer: Peer, case: Case) -> accuracy.Accuracy:
        """Errors of a peer against FP64 in a case, cached; NaN if they cannot be measured."""
        known = self._errors.get((peer.name, case))
        if known is not None:
            return known
        try:
            found = accuracy.measure(peer.prepare, case, self.place)
        except Exception as reason:  # why any: peers refuse small problems in their own ways
            self.skipped(peer.name, f"was not compared with FP64: {reason}".splitlines()[0])
            found = accuracy.Accuracy(float("nan"), float("nan"))
        self._errors[peer.name, case] = found
        return found

    def _measured(
        self, case: Case, name: str, took: timing.Timing, exact: accuracy.Accuracy, note: str, peer: Peer
    ) -> dict[str, str]:
        least, bound = self.ceilings.least_seconds(case)
        return self.row(
            case, name,
            **took.row(),
            tflops=f"{case.flops() / took.median / 1e12:.4g}",
            gb_per_s=f"{case.traffic() / took.median / 1e9:.4g}",
            matrix_tflops=f"{self.ceilings.flops.get(case.dtype, 0) / 1e12:.4g}",
            copy_gb_per_s=f"{self.ceilings.bytes_per_second / 1e9:.4g}",
            ceiling_ms=f"{least * 1e3:.4f}", bound=bound, of_ceiling=f"{least / took.median:.3f}",
            error=f"{exact.error:.1e}", of_budget=f"{exact.of_budget:.2g}", note=note,
            variant=variant(case, self.place) if peer is OURS else "",
        )  # fmt: skip

    def _print(
        self, case: Case, rows: list[dict[str, str]], times: Mapping[str, timing.Timing], state: Any
    ) -> None:
        least, bound = self.ceilings.least_seconds(case)
        cpu_share = str(state) if self.place.name == "gpu" else f"load {conditions.load()}"
        write(f"{case}: {case.flops():.3g} FLOP, at least {least * 1e3:.4g} ms ({bound}); {cpu_share}")
        first = times[rows[0]["implementation"]].median
        for row in rows:
            took = times[row["implementation"]]
            rate = ceilings.per_second(case.flops() / took.median)
            write(
                f"  {row['implementation']:24} {took!s:>32} {rate:>14}"
                f" {100 * float(row['of_ceiling']):4.0f} % {took.median / first:6.2f}x"
                f"  error {row['error']}, {row['of_budget']} of budget {row['note']}"
            )
        for line in _model_lines(case, self.place, rows):
            write(line)


def _model_lines(case: Case, place: place.Place, rows: list[dict[str, str]]) -> list[str]:
    """Lines of the cost model for our own row; empty for unknown GPUs and packed sequences."""
    if place.name == "cpu" or not isinstance(case, Case):
        return []
    if not rows or rows[0]["implementation"] != OURS.name:
        return []
    from ..model import cost_model

    return cost_model.compared(case, place.arch(), place.gpu, float(rows[0]["median_ms"]) / 1e3)


def variant(case: Case, place: place.Place) -> str:
    """The kernels that we run for a case."""
    if place.name == "cpu":
        # why here: rented GPU machines may lack packages that the CPU path imports
        from cupy_flash.cpu import choose

        found = choose.core()
        return "numpy" if isinstance(found, str) else f"core_{found[0].name}"
    return " ".join(launch.variant.name for launch in case.plan(place.arch()).launches)


def _limited(threads: int | None) -> Any:
    """Limit the threads of NumPy and torch for the rest of the process."""
    if threads is None:
        return None
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(threads)
    from threadpoolctl import threadpool_limits

    return threadpool_limits(threads, user_api="blas")


def progress(items: list[Any], title: str) -> Iterable[Any]:
    """Show a progress bar over items, if there is a terminal and tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[Any] = tqdm(items, title, file=sys.stderr, disable=None, leave=False)
    return bar


def write(line: str) -> None:
    """Print a line above the progress bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(line, flush=True)
    else:
        tqdm.write(line)
        sys.stdout.flush()
