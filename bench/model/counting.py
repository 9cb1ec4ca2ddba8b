"""Counts of operations per row and per (query, key) pair of kernels, from the simulator, in costs.csv."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cupy_flash
from cupy_flash.call import outputs
from cupy_flash.call.adopt import adopt
from cupy_flash.call.arrays import numpy_dtype
from cupy_flash.device import simulator
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import f64, variants

from ..work import FLOAT8, Case, drawn

TABLE = Path(__file__).parent / "costs.csv"
COLUMNS = ("target", "variant", "head_dim", "counter", "per_row", "per_pair")
# Two lengths that every tile divides: a count is per_row * S + per_pair * S * S.
SHORT, LONG = 384, 768

Counts = dict[str, tuple[float, float]]


def counted(arch: str, case: Case, **options: Any) -> dict[str, Counts]:
    """Run a case's kernels for one head in the simulator: variant -> counter -> (per row, per pair).

    Raises
    ------
    SimulatorUnavailable
        There is no g++.
    """
    short, long = (_launches(arch, case, length, options) for length in (SHORT, LONG))
    found: dict[str, Counts] = {}
    for (variant, a), (_, b) in zip(short, long, strict=True):
        counts: Counts = {}
        for name in a:
            per_pair = (b[name] * SHORT - a[name] * LONG) / (SHORT * LONG * (LONG - SHORT))
            counts[name] = ((a[name] - per_pair * SHORT**2) / SHORT, per_pair)
        found[variant] = {name: pair for name, pair in counts.items() if any(pair)}
    return found


def _launches(
    arch: str, case: Case, length: int, options: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, int]]]:
    one = Case(1, 1, length, case.head_dim, case.dtype)
    host = drawn(one.shapes() | {"o": one.shapes()["q"]}, case.dtype, 0)
    do, q, k, v, o = (_aligned(host[name]) for name in ("do", "q", "k", "v", "o"))
    lse = _aligned(np.full(q.shape[:3], 5.0, np.float64 if case.dtype == "float64" else np.float32))

    def empty(like: object, shape: tuple[int, ...], dtype: str) -> object:  # noqa: ARG001
        return adopt(_aligned(np.zeros(shape, numpy_dtype(dtype))), "output")

    with (
        mock.patch.dict(os.environ, {"CUPY_FLASH_DRIVER": f"simulator:{arch}"}),
        mock.patch.object(outputs, "empty", empty),
        simulator.costs() as launches,
    ):
        if case.passes == "forward":
            cupy_flash.attention(q, k, v, **options)
        elif case.passes == "jvp":
            cupy_flash.derivatives.jvp(q, k, v, o, lse, dq=q, dk=k, dv=v, **options)
        elif case.passes == "hvp":
            cupy_flash.derivatives.hvp(do, q, k, v, o, lse, jvp=(o, lse), dq=q, dk=k, dv=v, **options)
        else:
            cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    return list(launches)


def _aligned(x: np.ndarray) -> np.ndarray:
    """Copy to a 128-byte boundary, as in GPU memory."""
    raw = np.zeros(x.nbytes + 127, np.uint8)
    start = -raw.ctypes.data % 128
    copy: np.ndarray = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def kept(arch: str) -> list[Case]:
    """The cases of an architecture with kernels in costs.csv."""
    row = architecture(arch)
    short = "float16" if row.capability < 80 else "bfloat16"
    kinds = [(short, d) for d in (64, 128, 256)]
    if row.capability >= 80:
        kinds += [("float32", 64), ("float32", 128)]
    cases = [
        Case(1, 1, 1024, head_dim, dtype, passes=passes)
        for passes in ("forward", "backward")
        for dtype, head_dim in kinds
    ]
    if row.capability >= 80:
        cases += [Case(1, 1, 1024, 512, short, passes="backward")]
        cases += [
            Case(1, 1, 1024, head_dim, short, passes=passes)
            for passes in ("jvp", "hvp")
            for head_dim in (64, 128)
        ]
        cases += [Case(1, 1, 1024, 512, short)]
    if any(f64.variants(row)):
        cases += [Case(1, 1, 1024, head_dim, "float64") for head_dim in (64, 128)]
        cases += [Case(1, 1, 1024, 64, "float64", passes="backward")]
    if {"hopper", "fp8"} & {*row.families}:
        cases += [Case(1, 1, 1024, head_dim, FLOAT8) for head_dim in (64, 128, 256)]
    return cases


def write(archs: tuple[str, ...]) -> int:
    """Recount for these architectures, and remove rows of kernels that no longer exist; return the number."""
    held = {tuple(row[name] for name in COLUMNS[:4]): row for row in _rows()}
    compiled = {
        target: {v.name for own in architecture(target).targets for v in variants(own)} for target, *_ in held
    }
    rows = {key: row for key, row in held.items() if key[1] in compiled[key[0]]}
    count = 0
    for target in dict.fromkeys(architecture(arch).target for arch in archs):
        for case in kept(target):
            for variant, counts in counted(target, case).items():
                count += 1
                for name, (per_row, per_pair) in counts.items():
                    row = (target, variant, str(case.head_dim), name, f"{per_row:.6g}", f"{per_pair:.6g}")
                    rows[row[:4]] = dict(zip(COLUMNS, row, strict=True))
    with TABLE.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for _, row in sorted(rows.items()))
    table.cache_clear()
    return count


def _rows() -> list[dict[str, str]]:
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as text:
        return list(csv.DictReader(text))


@cache
def table() -> dict[tuple[str, str, int], Counts]:
    """Read costs.csv: (target, variant, head_dim) -> counter -> (per row, per pair)."""
    found: dict[tuple[str, str, int], Counts] = {}
    for row in _rows():
        counts = found.setdefault((row["target"], row["variant"], int(row["head_dim"])), {})
        counts[row["counter"]] = (float(row["per_row"]), float(row["per_pair"]))
    return found
