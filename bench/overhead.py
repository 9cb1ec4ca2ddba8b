"""What a call costs besides its arithmetic: import, adopting arrays, checking, planning, and a tiny call."""

from __future__ import annotations

import subprocess
import sys
import timeit
from collections.abc import Callable
from statistics import median

import numpy as np

import cupy_flash
from cupy_flash.arrays import adopt
from cupy_flash.plan import choose
from cupy_flash.problem import Options, describe

from .machine import machine
from .results import append

# Name -> limit in microseconds, None where the project sets none.
LIMITS = {
    "import cupy_flash, beside the interpreter's start": 150e3,
    "adopt one NumPy array": 2.0,
    "describe a call": None,
    "plan, found in the cache": 5.0,
    "attention on NumPy arrays of 4 x 8": None,
}


def _import_seconds(module: str) -> float:
    """Median time of a fresh interpreter that imports a module, less one that imports nothing."""

    def run(code: str) -> float:
        command = [sys.executable, "-c", code]
        return timeit.timeit(lambda: subprocess.run(command, check=True), number=1)

    pairs = [(run(f"import {module}"), run("pass")) for _ in range(9)]
    return median(a - b for a, b in pairs)


def _call_seconds(call: Callable[[], object]) -> float:
    """Best of several averages: what the call costs when nothing interrupts it."""
    number = 2000
    return min(timeit.repeat(call, number=number, repeat=9)) / number


def run() -> None:
    """Measure, print and append to bench/results/overhead.csv."""
    q = k = v = np.ones((1, 1, 4, 8), np.float32)
    arrays, options = {"q": q, "k": k, "v": v}, Options()
    problem = describe("forward", arrays, options)[0]
    seconds = (
        _import_seconds("cupy_flash"),
        _call_seconds(lambda: adopt(q, "q")),
        _call_seconds(lambda: describe("forward", arrays, options)),
        _call_seconds(lambda: choose(problem, "sm_80", 108)),
        _call_seconds(lambda: cupy_flash.attention(q, k, v)),
    )
    where = machine()
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    rows = []
    for (what, limit), duration in zip(LIMITS.items(), seconds, strict=True):
        bound = "" if limit is None else f"  limit {limit:.0f} us"
        print(f"{what:<52} {duration * 1e6:10.2f} us{bound}")
        rows.append({**where, "what": what, "us": f"{duration * 1e6:.2f}"})
    print(f"appended to {append('overhead.csv', rows)}")
