"""layers: attention between torch's linear layers, as in models.

After a layer, torch's threads spin, and the caches hold other arrays. Only attention is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import geometric_mean, median
from typing import Any

from ..machine import timing
from ..measure.peers import OURS
from ..measure.session import Session, Settings
from ..work import Case

SHAPES = (
    Case(1, 8, 64, 64),
    Case(1, 8, 128, 64),
    Case(1, 8, 256, 64),
    Case(8, 12, 256, 64),
    Case(1, 8, 512, 64),
    Case(1, 8, 1024, 64),
    Case(1, 8, 1024, 128),
)
DTYPES = ("float32", "bfloat16")
Attention = Callable[..., Any]


def run(settings: Settings) -> None:
    try:
        import torch
    except ImportError as error:
        print(f"torch's layers are what it is about, and torch is not installed ({error}).")
        return
    from cupy_flash.torch import scaled_dot_product_attention as ours

    session = Session("layers", settings._replace(device="cpu"))
    ways: dict[str, Attention] = {OURS.name: ours, "torch": torch.nn.functional.scaled_dot_product_attention}
    suite = [
        shape._replace(dtype=dtype, causal=causal)
        for dtype in DTYPES[: 1 if settings.quick else None]
        for shape in SHAPES[:: 3 if settings.quick else 1]
        for causal in (False, True)
    ]
    ratios: dict[str, list[float]] = {}
    for case in session.cases(suite):
        with torch.no_grad():
            times = alternate(torch, case, ways, 10 if settings.quick else 40)
        rows = []
        for name, took in times.items():
            rate = f"{case.flops() / took.median / 1e12:.4g}"
            rows.append(session.row(case, name, **took.row(), tflops=rate))
            session.say(f"{case} {name:16} {took!s:>32}")
        session.append(rows)
        ratios.setdefault(str(case), []).append(times["torch"].median / times[OURS.name].median)
    for dtype in DTYPES:
        found = [median(of_case) for name, of_case in ratios.items() if f" {dtype} " in name]
        if found:
            mean, least = geometric_mean(found), min(found)
            print(f"{dtype}, as fast as torch: geometric mean {mean:.2f}, least {least:.2f}")
    if ratios:
        print(f"appended to {session.path}")


def alternate(
    torch: Any, case: Case, ways: dict[str, Attention], repetitions: int
) -> dict[str, timing.Timing]:
    """Time the attention of a layer by each implementation in turn."""
    attentions = {name: _layer(torch, case, attend) for name, attend in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions + 3):
        for name, layer in attentions.items():
            taken[name].append(next(layer))
    return {name: timing.Timing.of(durations[3:]) for name, durations in taken.items()}


def _layer(torch: Any, case: Case, attend: Attention) -> Iterator[float]:
    """Yield the seconds of attention in each run of a layer: the QKV product, attention, output product."""
    width, shape = case.heads * case.head_dim, (case.batch, case.seqlen, 3, case.heads, case.head_dim)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)
    x, into, out = (
        torch.randn(rows, width, generator=generator, dtype=dtype) / scale
        for rows, scale in ((case.batch * case.seqlen, 1), (3 * width, width**0.5), (width, width**0.5))
    )
    while True:
        qkv = (x @ into.T).view(shape).permute(2, 0, 3, 1, 4)
        q, k, v = (part.contiguous() for part in qkv)
        begun = time.perf_counter()
        o = attend(q, k, v, is_causal=case.causal)
        taken = time.perf_counter() - begun
        o.transpose(1, 2).reshape(-1, width) @ out.T
        yield taken
