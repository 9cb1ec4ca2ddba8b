"""Draw trials and check them on the CPU until the time or the count is over; what fails is made smaller."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.machine.memory import GROWTH_ALLOWED, growth
from bench.measure.session import progress, write
from cupy_flash.cpu.core import isa, sources
from cupy_flash.cpu.core.locate import locate
from tests import sanitized

from .server import Server
from .trial import KINDS, Outcome, Trial, draw, smaller

__all__ = ["hunt", "made_smaller"]

# Seconds for making one finding smaller, how many are, and how many are printed.
SHRINKING, PRINTED, LISTED = 30.0, 5, 20
# A draw that asks for what is refused tests an error; more of them are time lost.
REFUSED_ALLOWED = 0.25


def libraries_of(chosen: argparse.Namespace) -> tuple[str, ...]:
    """What computes: every library that is built and runs here, and NumPy; with a sanitizer the best one."""
    if chosen.isa:
        return tuple(chosen.isa)
    runnable = isa.runnable()
    if chosen.sanitize:
        return sources.choices(runnable[:1])
    return (*sources.choices(one for one in runnable if locate(one) is not None), "numpy")


def hunt(chosen: argparse.Namespace, seed: int, dtypes: tuple[str, ...]) -> int:
    """Draw and check until the time or the count is over; 1 if anything is wrong."""
    names = libraries_of(chosen)
    if unknown := {*(chosen.call or ())} - {*KINDS}:
        raise SystemExit(f"--call {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    print(f"libraries {', '.join(names)}; {', '.join(dtypes)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server()
        if chosen.sanitize:
            sanitized.build(
                chosen.sanitize,
                Path(folder),
                [one for one in isa.ISAS if one.name in map(isa.name_of, names)],
            )
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
            elif found.total() <= LISTED:
                write(f"again: {outcome.kind}\n{trial.script()}")
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
