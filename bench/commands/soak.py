"""soak: random right calls of the whole public API against FP64, with new seeds, for minutes or hours.

On the CPU each call runs in a process of its own kind (`tests.random_calls`), its arrays between pages that
nobody may touch; one that fails, crashes or hangs is made smaller and printed as a program. On a GPU several
threads compute, each with a stream of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from cupy_flash.cpu.core import isa
from tests import sanitized
from tests.random_calls.dense import Dense
from tests.random_calls.memory import OnDevice
from tests.random_calls.server import Server
from tests.random_calls.trial import KINDS, Outcome, Trial, draw, smaller

from ..machine import place as places
from ..machine.blas import one_thread
from ..machine.memory import GROWTH_ALLOWED, growth, resident
from ..measure.session import progress, write

# Seconds for making one finding smaller, and how many are printed.
SHRINKING, PRINTED = 30.0, 5
# A draw that asks for what is refused tests an error; more of them are time lost.
REFUSED_ALLOWED = 0.25


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="end after so many calls")
    parser.add_argument("--seed", type=int, help="default: the time; it is printed")
    parser.add_argument("--isa", action="append", metavar="NAME",
                        help="library of the CPU core, or numpy; may repeat (default: all)")  # fmt: skip
    parser.add_argument("--dtype", action="append", metavar="NAME", help="may repeat (default: all)")
    parser.add_argument("--call", action="append", choices=tuple(KINDS), help="may repeat (default: all)")
    parser.add_argument("--sanitize", choices=tuple(sanitized.SANITIZERS),
                        help="compile the core with this sanitizer first")  # fmt: skip
    parser.add_argument("--threads", type=int, default=3, help="on a GPU, each with a stream of its own")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")


def run(chosen: argparse.Namespace) -> int:
    place, sentences = places.find(chosen.device)
    print(*sentences, sep="\n")
    seed = int(time.time()) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    return on_cpu(chosen, seed) if place.library == "numpy" else on_gpu(chosen, seed, place)


# ---- on the CPU


def libraries_of(chosen: argparse.Namespace) -> tuple[str, ...]:
    """What computes: every library that this CPU runs, and NumPy; with a sanitizer the best one."""
    if chosen.isa:
        return tuple(chosen.isa)
    here = [one.name for one in isa.runnable()]
    return tuple(here[:1]) if chosen.sanitize else (*here, "numpy")


def on_cpu(chosen: argparse.Namespace, seed: int) -> int:
    """Draw and check until the time or the count is over."""
    names, dtypes = libraries_of(chosen), tuple(chosen.dtype or dtypes_of("numpy"))
    print(f"libraries {', '.join(names)}; {', '.join(dtypes)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server()
        if chosen.sanitize:
            sanitized.build(chosen.sanitize, Path(folder), [one for one in isa.ISAS if one.name in names])
            server = Server(chosen.sanitize, Path(folder))
        try:
            return _checked(chosen, seed, names, dtypes, server)
        finally:
            server.stop()


def _checked(
    chosen: argparse.Namespace, seed: int, names: tuple[str, ...], dtypes: tuple[str, ...], server: Server
) -> int:
    random_, start = random.Random(seed), time.monotonic()
    counts: Counter[str] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    for _ in progress(_until(start + 60 * chosen.minutes, chosen.count), "soak"):  # type: ignore[arg-type]
        trial = draw(random_, names, dtypes, tuple(chosen.call or ()))
        outcome = server.ask(trial)
        counts["wrong" if outcome.wrong else outcome.kind] += 1
        if outcome.wrong:
            kind = (type(trial.call).__name__, outcome.kind)
            found[kind] += 1
            if found[kind] == 1 and len(found) <= PRINTED:
                write(f"after {time.monotonic() - start:.0f} s and {counts.total()} calls: {outcome.kind}")
                write(_report(*made_smaller(trial, outcome, server)))
    total = max(1, counts.total())
    grown = 0 if chosen.sanitize else growth(server.held)  # a sanitizer keeps what is freed for a while
    print(
        f"soak: seed {seed}: {counts.total()} calls in {(time.monotonic() - start) / 60:.1f} minutes: "
        f"{counts['right']} right, {counts['refused']} refused ({counts['refused'] / total:.0%}), "
        f"{counts['wrong']} wrong; memory grew by {grown / 1e6:.1f} MB"
    )
    for (call, way), n in found.most_common():
        print(f"{n} of {call}: {way}")
    refused = counts.total() > 200 and counts["refused"] > REFUSED_ALLOWED * counts.total()
    if refused:
        print(f"more than {REFUSED_ALLOWED:.0%} refused: draws have to be changed")
    return int(bool(found) or refused or grown > GROWTH_ALLOWED)


def _until(end: float, count: int | None) -> Iterator[int]:
    """Numbers, until a time or a count."""
    done = 0
    while time.monotonic() < end and (count is None or done < count):
        yield done
        done += 1


def made_smaller(trial: Trial, outcome: Outcome, server: Server) -> tuple[Trial, Outcome]:
    """The smallest trial found in half a minute that fails the same way."""
    end, again = time.monotonic() + SHRINKING, True
    while again:
        again = False
        for less in smaller(trial):
            if time.monotonic() > end:
                return trial, outcome
            now = server.ask(less)
            if now.kind == outcome.kind:
                trial, outcome, again = less, now, True
                break
    return trial, outcome


def _report(trial: Trial, outcome: Outcome) -> str:
    return f"{outcome.text.strip()}\n{trial.script()}\n"


# ---- on a GPU


def dtypes_of(library: str) -> tuple[str, ...]:
    """CuPy has no bfloat16, and NumPy none without that package."""
    some = ("float16", "float32", "float64")
    has = library != "cupy" and importlib.util.find_spec("ml_dtypes") is not None
    return (*some, "bfloat16") if has else some


class Soak:
    """Threads that check problems until the time, the count or somebody's patience ends."""

    def __init__(self, place: Any, seed: int, minutes: float, count: int | None) -> None:
        self.place, self.seed = place, seed
        self.end = time.monotonic() + 60 * minutes
        self.left = count
        self.done, self.failures = 0, []  # type: tuple[int, list[str]]
        self._lock = threading.Lock()
        self.dtypes = dtypes_of(place.library)

    def _take(self) -> bool:
        with self._lock:
            if time.monotonic() > self.end or (self.left is not None and self.left <= 0):
                return False
            if self.left is not None:
                self.left -= 1
            return True

    def work(self, thread: int) -> None:
        draw = random.Random(1_000_003 * thread + self.seed)
        with _stream(self.place):
            while self._take():
                case = Dense.draw_plain(draw, self.dtypes)
                try:
                    case.check(OnDevice(self.place, case.dtype))
                except Exception:  # why any: each is a finding
                    report = f"{case}\n{traceback.format_exc(limit=-3)}"
                    with self._lock:
                        self.failures.append(report)
                with self._lock:
                    self.done += 1

    def run(self, threads: int) -> None:
        workers = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


@contextmanager
def _stream(place: Any) -> Iterator[None]:
    """A stream of this thread's own on a GPU."""
    context: Any = nullcontext()
    if place.library == "torch":
        context = place.torch.cuda.stream(place.torch.cuda.Stream())
    elif place.library == "cupy":
        context = place.cupy.cuda.Stream(non_blocking=True)
    with context:
        yield


def on_gpu(chosen: argparse.Namespace, seed: int, place: Any) -> int:
    """Draw and check in several threads."""
    with one_thread():
        soak, start = Soak(place, seed, chosen.minutes, chosen.count), time.monotonic()
        held: list[int] = []
        ticker = threading.Thread(target=_watch, args=(soak, chosen.minutes, held), daemon=True)
        ticker.start()
        soak.run(chosen.threads)
    grown = growth(held)
    for failure in soak.failures[:PRINTED]:
        print(failure, file=sys.stderr)
    minutes = (time.monotonic() - start) / 60
    print(
        f"soak on {place.gpu or 'CPU'}: {soak.done} problems in {minutes:.1f} minutes on "
        f"{chosen.threads} threads, {len(soak.failures)} failed; memory grew by {grown / 1e6:.1f} MB"
    )
    if grown > GROWTH_ALLOWED:
        print(f"memory is not flat: more than {GROWTH_ALLOWED / 1e6:.0f} MB")
    return int(bool(soak.failures) or grown > GROWTH_ALLOWED)


def _watch(soak: Soak, minutes: float, held: list[int]) -> None:
    """Note the memory held each second, behind a progress bar."""
    for _ in progress(list(range(max(1, round(60 * minutes)))), "soak"):
        if time.monotonic() > soak.end:
            return
        time.sleep(1)
        held.append(resident())
