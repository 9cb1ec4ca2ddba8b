"""cpu: the compiled core beside NumPy, torch and JAX on the CPU, in the shapes of the README's table."""

from __future__ import annotations

from math import exp, log

from ..measure import results
from ..measure.peers import OURS
from ..measure.session import Session, Settings
from ..work import Case

SHAPES = (
    Case(1, 8, 2048, 128),
    Case(1, 4, 4096, 64),
    Case(1, 8, 1024, 64),
    Case(8, 12, 256, 64),
)


def run(settings: Settings) -> None:
    session = Session("cpu", settings._replace(device="cpu"))
    shapes = SHAPES[2:] if settings.quick else SHAPES
    suite = [
        shape._replace(causal=causal, passes=passes)
        for shape in shapes
        for causal in (False, True)
        for passes in ("forward", "forward+backward")
    ]
    rows = [row for case in session.cases(suite) for row in session.measure(case)]
    logarithms: dict[str, list[float]] = {}
    ours: dict[tuple[str, ...], float] = {}
    for row in map(results.pooled, results.runs(rows)):  # ours is the first of a case
        _, name, *case = results.identity(row)
        taken = float(row["median_ms"])
        if name == OURS.name:
            ours[tuple(case)] = taken
        elif tuple(case) in ours:
            logarithms.setdefault(name, []).append(log(taken / ours[tuple(case)]))
    for name, ratios in logarithms.items():
        mean = exp(sum(ratios) / len(ratios))
        print(
            f"as fast as {name}: geometric mean {mean:.2f}, least {exp(min(ratios)):.2f}, "
            f"of {len(ratios)} cases"
        )
    print(f"appended to {session.path}")
