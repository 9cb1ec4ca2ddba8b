"""check: compare the results of this installation with FP64, and print a summary or a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from .. import info
from ..cubins import on_demand
from .cases import Case
from .places import Place, find
from .primitives import primitives_of
from .report import Found
from .run import run_cases
from .speed import speed_of
from .table import COMMON, EVERY

__all__ = ["COMMON", "EVERY", "Found", "check"]

_CLEAR = "\r\x1b[K"


def check(
    device: str = "auto",
    *,
    quick: bool = False,
    seed: int = 0,
    cases: Sequence[Case] | None = None,
    with_speed: bool = True,
) -> Found:
    """Check the installation on a device of this machine.

    Parameters
    ----------
    device : {"auto", "gpu", "cpu"}
        "auto" is a GPU if CuPy or torch can use one, else the CPU.
    quick : bool
        Run the most common cases only, and a tenth of the time for speed.
    seed : int
        Seed of the random data.
    cases : sequence of Case, optional
        Cases to run instead of the primitives and the table.
    with_speed : bool
        Also time the standard calls.

    Returns
    -------
    Found
    """
    facts = info.facts()
    places, notes = find(device)
    problems = facts["problems"]
    if device == "cpu":
        problems = [problem for problem in problems if problem.startswith("cpu:")]
    if not places:
        notes = [*notes, "neither CuPy nor torch reaches a GPU here"]
        return Found(facts, "", None, tuple(notes), tuple(problems), (), (), seed, 0.0)
    place = places[0]
    chosen = (*primitives_of(places), *(COMMON if quick else EVERY)) if cases is None else cases
    if device == "auto" and facts["gpus"] and not place.on_gpu:
        notes.append("there is a GPU, but neither CuPy nor torch with CUDA reaches it: the CPU is checked")
    start = time.perf_counter()
    before = set(on_demand.COMPILED)
    policy = on_demand.policy("allow")  # no package has kernels of score functions
    try:
        outcomes = run_cases(
            chosen, places, seed, lambda n, case: _progress(f"{n + 1} of {len(chosen)}: {case}")
        )
        seconds = time.perf_counter() - start
        timings = speed_of(place, quick, lambda name: _progress(f"speed: {name}")) if with_speed else []
    finally:
        on_demand.policy(policy)
        _progress("")
    for folder in sorted(on_demand.COMPILED - before):
        notes.append(f"kernels of a score function of this check were compiled, and stay in {folder}")
    gpu = next((row for row in facts["gpus"] if row["ordinal"] == place.ordinal), None)
    return Found(
        facts, _where(places, facts), gpu, tuple(notes), tuple(problems), tuple(outcomes), tuple(timings),
        seed, seconds,
    )  # fmt: skip


def _where(places: Sequence[Place], facts: dict[str, Any]) -> str:
    """Short description of the device and the libraries of the arrays."""
    place, libraries = places[0], " and ".join(place.library for place in places)
    title = place.title
    if not place.on_gpu:
        row = facts["runs"][0]
        title = f"{row['on']}: {row['with']}"
    return f"{title}; arrays of {libraries}"


def _progress(text: str) -> None:
    """Show progress on one line of a terminal, which each call overwrites."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"{_CLEAR}{text[:79]}", end="", file=sys.stderr, flush=True)
