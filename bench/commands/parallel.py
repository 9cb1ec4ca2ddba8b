"""parallel: times of a long sequence over several GPUs for each schedule, by a model: a projection."""

from __future__ import annotations

import argparse
import math
from functools import cache
from itertools import pairwise

from ..measure import results
from ..model.parallel import PASSES, SCHEDULES, Sequence, seconds

TOKENS = (32_768, 131_072, 1_048_576)
RANKS = (8, 16, 64, 512)
HEADS, HEADS_K, HEAD_DIM = 64, 8, 128


@cache
def _measured(passes: str) -> tuple[tuple[int, float], ...]:
    """Length and TFLOP/s of square calls without a mask on an H200, the newest row of each length."""
    found: dict[int, tuple[str, float]] = {}
    for row in results.read(results.RESULTS / f"{passes}.csv"):
        wanted = {"implementation": "cupy_flash", "gpu": "NVIDIA H200", "dtype": "bfloat16", "heads_k": "",
                  "head_dim": str(HEAD_DIM), "causal": "False", "passes": passes, "note": ""}  # fmt: skip
        if all(row[name] == value for name, value in wanted.items()):
            length = int(row["seqlen"])
            found[length] = max(found.get(length, ("", 0.0)), (row["when"], float(row["tflops"])))
    return tuple((length, tflops) for length, (_, tflops) in sorted(found.items()))


def rate(passes: str, rows: float) -> float:
    """FLOP per second of a square call, interpolated in log(length), and constant beyond the ends."""
    points = _measured(passes)
    for (a, low), (b, high) in pairwise(points):
        if rows < b:
            share = max(0.0, math.log(rows / a) / math.log(b / a))
            return (low + share * (high - low)) * 1e12
    return points[-1][1] * 1e12


def milliseconds(tokens: int, ranks: int, schedule: str) -> float | None:
    """Milliseconds of a forward and a backward pass; None if the schedule cannot split the heads."""
    x = Sequence(tokens, HEADS, HEADS_K, HEAD_DIM, ranks)
    each = [seconds(schedule, passes, x, rate) for passes in PASSES]
    return None if None in each else sum(time for time in each if time is not None) * 1e3


def table() -> str:
    """One row per length and number of GPUs, with the fastest schedule in bold."""
    lines = [
        "| tokens | GPUs | ring | all-to-all | all-gather | work alone |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tokens in TOKENS:
        for ranks in RANKS:
            times = [milliseconds(tokens, ranks, schedule) for schedule in SCHEDULES]
            best = min(time for time in times if time is not None)
            cells = [
                "" if time is None else f"**{time:.4g}**" if time == best else f"{time:.4g}" for time in times
            ]
            x = Sequence(tokens, HEADS, HEADS_K, HEAD_DIM, ranks)
            alone = sum(x.flops(passes) / rate(passes, tokens) for passes in PASSES) * 1e3
            lines.append(f"| {tokens} | {ranks} | {' | '.join(cells)} | {alone:.4g} |")
    return "\n".join(lines) + "\n"


def run(_chosen: argparse.Namespace) -> int:
    print("PROJECTION from measured rates of one GPU and links as data sheets state them.")
    print(
        f"Milliseconds, forward and backward, causal: {HEADS} heads, {HEADS_K} of keys, head dim {HEAD_DIM}."
    )
    print(table(), end="")
    return 0
