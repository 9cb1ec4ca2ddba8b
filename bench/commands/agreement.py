"""agreement: cost of comparing calls between processes, relative to a step over 8,192 tokens.

Two processes on this machine, over gloo. The cost of a comparison is the difference of two small calls, with
and without it, each the minimum of many; a step is a forward and a backward pass, with one comparison each.
"""

from __future__ import annotations

import argparse
import tempfile
import timeit
from pathlib import Path
from typing import Any

from ..machine.conditions import machine
from ..measure.results import append

RANKS, TOKENS, HEADS, HEAD_DIM = 2, 8192, 8, 64
CALLS, STEPS = 300, 3
FILE = "agreement.csv"
COMPARISON = f"a comparison, {RANKS} processes over gloo"
STEP = f"a step over {TOKENS} tokens, {HEADS} heads of {HEAD_DIM}, {RANKS} processes over gloo"


def _process(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from cupy_flash.torch import ring_attention

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/start", rank=rank, world_size=RANKS)

    def least(repeat: int, tokens: int, agreement: Any) -> float:
        x = torch.randn(1, HEADS, tokens // RANKS, HEAD_DIM, requires_grad=repeat == STEPS)

        def call() -> None:
            o = ring_attention(x, x, x, causal=True, schedule="ring", agreement=agreement)
            if x.requires_grad:
                o.sum().backward()

        call()
        return min(timeit.repeat(call, number=1, repeat=repeat)) * 1e3

    # why in turn: the load of the machine changes.
    small = [[least(CALLS, 2 * RANKS, agreement) for agreement in ("call", "never")] for _ in range(3)]
    compared, alone = (min(times) for times in zip(*small, strict=True))
    step = least(STEPS, TOKENS, "call")
    if rank == 0:
        (Path(folder) / "found").write_text(f"{compared - alone} {step}")
    dist.destroy_process_group()


def run(_chosen: argparse.Namespace) -> None:
    """Measure, print and append to bench/results/agreement.csv."""
    import torch

    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (folder,), nprocs=RANKS)  # type: ignore[attr-defined]
        times = [float(x) for x in (Path(folder) / "found").read_text().split()]
    lines = [
        {**where, "what": what, "ms": f"{ms:.4g}"} for what, ms in zip((COMPARISON, STEP), times, strict=True)
    ]
    for line in lines:
        print(f"{line['what']:<64} {line['ms']:>8} ms")
    print(f"appended to {append(FILE, lines)}")
