"""cpu: the compiled core compared with NumPy, torch and JAX on the CPU, for docs/benchmarks/cpu.md."""

from __future__ import annotations

from statistics import geometric_mean

from ..measure import results
from ..measure.peers import OURS, chosen
from ..measure.session import Session, Settings
from ..work import Case

SHAPES = (
    Case(1, 8, 2048, 128),
    Case(1, 4, 4096, 64),
    Case(1, 8, 1024, 64),
    Case(8, 12, 256, 64),
    Case(1, 8, 128, 64),
    Case(1, 8, 64, 64),
)
DTYPES = ("float32", "bfloat16", "float16")


def run(settings: Settings) -> None:
    session = Session("cpu", settings._replace(device="cpu"))
    shapes = SHAPES[2:4] if settings.quick else SHAPES
    suite = [
        shape._replace(dtype=dtype, causal=causal, passes=passes)
        for dtype in DTYPES[: 1 if settings.quick else None]
        for shape in shapes
        for causal in (False, True)
        for passes in ("forward", "forward+backward")
    ]
    everyone = chosen(session.place, settings.peers)
    # why torch alone: in 16 bits the others take ten times as long, or have no support.
    torch_alone = [peer for peer in everyone if peer is OURS or peer.name.startswith("torch")]
    rows = [
        row
        for case in session.cases(suite)
        for row in session.measure(case, everyone if case.dtype == "float32" else torch_alone)
    ]
    found: dict[tuple[str, str], list[float]] = {}
    ours: dict[tuple[str, ...], float] = {}
    for row in map(results.pooled, results.runs(rows)):  # ours is the first of a case
        _, name, *case = results.identity(row)
        taken = float(row["median_ms"])
        if name == OURS.name:
            ours[tuple(case)] = taken
        elif tuple(case) in ours:
            found.setdefault((name, row["dtype"]), []).append(taken / ours[tuple(case)])
    for (name, dtype), ratios in found.items():
        print(
            f"{dtype}, as fast as {name}: geometric mean {geometric_mean(ratios):.2f}, "
            f"least {min(ratios):.2f}, of {len(ratios)} cases"
        )
    if rows:
        print(f"appended to {session.path}")
