"""Rows from the output of programs on an H200 that were not commands of bench, where they ran the library.

Patched candidates and prototypes in the file are left out, as they cannot be called.
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
    """The first line, which describes the machine, and all other lines."""
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
    """TFLOP/s, compared with torch's efficient attention."""
    for line in of("TFLOP/s beside torch's efficient attention, as printed"):
        case = {name: line[name] for name in ("dtype", "head_dim", "causal")} | {"seqlen": line["keys"]}
        yield from _both(line, case, "torch efficient", ("forward", "forward_efficient"),
                         ("backward", "backward_efficient"))  # fmt: skip


def beside_flash() -> Iterator[dict[str, str]]:
    """TFLOP/s of the mma.sync kernels, compared with torch's flash attention."""
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
    """Decode over latents of 576 columns in 16 bits; neither was printed, but both follow from the GB/s."""
    for line in of("MLA"):
        yield _row(line, OURS.name, what="decode", passes="forward", head_dim=576,
                   batch=line["batch"], heads=line["heads"], seqlen=1, seqlen_k=line["keys"],
                   median_ms=line["ms"], tflops=line["tflops"], gb_per_s=line["gb_s"])  # fmt: skip


def float8_errors() -> list[list[str]]:
    """RMS errors relative to the RMS of O, with 0.5 added to V, of the library then and of flash-attn 3."""
    found: dict[str, list[str]] = {}
    for line in _mean_of_half(of("candidates beside flash-attn 3")):
        head_dim, causal, keys = line["shape"].split(":")
        errors = [f"{line[name]:.1e}" for name in ("rms", "fa3_rms")]
        found[line["shape"]] = [head_dim, "causal" if causal == "1" else "", keys, *errors]
    return [found[shape] for shape in sorted(found, key=lambda shape: [int(n) for n in shape.split(":")])]


def _mean_of_half(lines: Iterable[Printed]) -> list[Printed]:
    """Lines of the unpatched folder, in float8, with a mean of 0.5."""
    return [line for line in lines if (line["folder"], line["dtype"], line["mean"]) == ("base", "fp8", 0.5)]
