"""Calls that the tests of the compiled core share."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by name then)
import numpy as np
import pytest

import cupy_flash
from cupy_flash.cpu import threads
from cupy_flash.cpu.core import family
from tests.paths import ROOT

SIZES = (2, 4, 384, 32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def results(
    shape: tuple[int, int, int, int] = SIZES, heads_k: int = 2, dtype: str = "float32", **options
) -> list[np.ndarray]:
    batch, _, seqlen, dim = shape
    do, q = normal(*shape).astype(dtype), normal(*shape, seed=1).astype(dtype)
    k, v = (normal(batch, heads_k, seqlen, dim, seed=s).astype(dtype) for s in (2, 3))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    along = {"dq": do, "dk": v, "dv": k, **options}
    tangents = cupy_flash.derivatives.jvp(q, k, v, o, lse, **along)
    second = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, jvp=tangents, **along)
    softmax = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    sums = cupy_flash.attention_statistics(q, k, want=("key_sum", "key_max", "entropy"), **softmax)
    return [o, lse, *tangents, *(x for x in (*gradients, *second, *sums) if x is not None)]


def run(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    # why: scripts/test lets glibc keep freed memory, and some of this code measures what is given back.
    inherited = {name: x for name, x in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def before_jobs(monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]) -> None:
    """A stand-in for an OpenMP does the jobs of every call, after `look` in the thread of the call."""
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def parallel(function: int, of: int, count: int, _flags: int) -> None:
        look()
        for _ in range(count):
            work(function)(of)

    kinds = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    stand_in = ctypes.CFUNCTYPE(None, *kinds)(parallel)
    monkeypatch.setattr(threads, "team", lambda *_: ctypes.cast(stand_in, ctypes.c_void_p).value)
    monkeypatch.setattr(family, "workers", lambda *_: 2)
    q = normal(1, 2, 64, 16)
    for _ in range(32):  # which helpers may compute, after a team that was late
        cupy_flash.attention(q, q, q, return_lse=True)  # not repeated without Python
