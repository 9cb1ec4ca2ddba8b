"""Rows of what programs printed on an H200 that were no commands of bench, as far as they ran the library.

Of the file, candidates with patches and prototypes are left out: nobody can call them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from . import results
from .peers import OURS

FILE = results.RESULTS / "h200_2026-11-27.jsonl"
Printed = dict[str, Any]


@cache
def _lines() -> tuple[Printed, tuple[Printed, ...]]:
    """What the first line says of the machine, and the others."""
    machine, *lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return machine, tuple(lines)


def of(experiment: str) -> list[Printed]:
    return [line for line in _lines()[1] if line["experiment"] == experiment]


def _row(line: Printed, implementation: str, **measured: object) -> dict[str, str]:
    machine, _ = _lines()
    python, _, versions = machine["versions"].partition(", ")
    where = {"when": machine["date"], "commit": line["commit"], "gpu": machine["gpu"],
             "driver": machine["driver"], "python": python.removeprefix("python "),
             "versions": versions}  # fmt: skip
    row = dict.fromkeys(results.COLUMNS, "") | where | {"implementation": implementation}
    return row | {name: str(value) for name, value in measured.items() if value is not None}


def beside_efficient() -> Iterator[dict[str, str]]:
    """TFLOP/s beside torch's efficient attention."""
    for line in of("TFLOP/s beside torch's efficient attention, as printed"):
        case = {name: line[name] for name in ("dtype", "head_dim", "causal")} | {"seqlen": line["keys"]}
        yield from _both(line, case, "torch efficient", ("forward", "forward_efficient"),
                         ("backward", "backward_efficient"))  # fmt: skip


def beside_flash() -> Iterator[dict[str, str]]:
    """TFLOP/s of the kernels by mma.sync beside torch's flash attention."""
    for line in of("mma.sync beside torch flash"):
        dtype = line["dtype"].removeprefix("torch.")
        case = {"dtype": dtype, "head_dim": line["d"], "causal": line["causal"], "seqlen": line["s"]}
        yield from _both(line, case, "torch flash", ("fwd", "fwd_fa2"), ("bwd", "bwd_fa2"))


def _both(line: Printed, case: Printed, peer: str, *fields: tuple[str, str]) -> Iterator[dict[str, str]]:
    for passes, names in zip(("forward", "backward"), fields, strict=True):
        for who, name in zip((OURS.name, peer), names, strict=True):
            if line[name] is not None:
                yield _row(line, who, what=passes, passes=passes, tflops=line[name], **case)


def latents() -> Iterator[dict[str, str]]:
    """Decoding over latents of 576 in 16 bits, as their bytes in a second say: neither was printed."""
    for line in of("MLA"):
        yield _row(line, OURS.name, what="decode", passes="forward", head_dim=576,
                   batch=line["batch"], heads=line["heads"], seqlen=1, seqlen_k=line["keys"],
                   median_ms=line["ms"], tflops=line["tflops"], gb_per_s=line["gb_s"])  # fmt: skip


def float8_errors() -> list[list[str]]:
    """RMS errors over the RMS of O with 0.5 added to V, of the library as it was and of flash-attn 3."""
    found: dict[str, list[str]] = {}
    for line in _mean_of_half(of("candidates beside flash-attn 3")):
        head_dim, causal, keys = line["shape"].split(":")
        errors = [f"{line[name]:.1e}" for name in ("rms", "fa3_rms")]
        found[line["shape"]] = [head_dim, "causal" if causal == "1" else "", keys, *errors]
    return [found[shape] for shape in sorted(found, key=lambda shape: [int(n) for n in shape.split(":")])]


def _mean_of_half(lines: Iterable[Printed]) -> list[Printed]:
    """Of the folder without a patch."""
    return [line for line in lines if (line["folder"], line["dtype"], line["mean"]) == ("base", "fp8", 0.5)]
