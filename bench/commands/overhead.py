"""Overhead of a call besides its arithmetic: import, adopting arrays, checking, planning, adapters.

Every number is the best of many averages over a millisecond or two, so that other processes hardly count; the
overhead of an adapter is its time less that of cupy_flash.attention with the same results. The numbers of
import and first call are CPU times of fresh processes, with bytecode on disk.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.call.adopt import adopt
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.device import cuda, driver
from cupy_flash.dispatch import backends, memo
from cupy_flash.plan.choose import choose

from ..machine import fresh
from ..machine.conditions import machine
from ..measure.results import append

BLOCK_SECONDS = 2e-3
BLOCKS = 400


class Row(NamedTuple):
    """One line: what is measured, microseconds, and the project's limit; None without one."""

    what: str
    us: float
    limit: float | None = None


def _call_us(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The best of several averages of each call, measured in turn: its time without interruptions."""
    for call in calls.values():
        call()
    one = {name: min(timeit.repeat(call, number=1, repeat=9)) for name, call in calls.items()}
    number = {name: max(1, round(BLOCK_SECONDS / seconds)) for name, seconds in one.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(BLOCKS):
        for name, call in calls.items():
            best[name] = min(best[name], timeit.timeit(call, number=number[name]) / number[name])
    return {name: seconds * 1e6 for name, seconds in best.items()}


class Missing(Exception):
    """Rows cannot be measured on this machine; the message says why, and which rows."""


class NoGpu:
    """A driver with empty kernels, so that a call on a GPU takes only our own time."""

    pointer = 0

    def arch(self, _device: int) -> str:
        return "sm_90"

    def multiprocessors(self, _device: int) -> int:
        return 132

    def current_stream(self, *_: object) -> int:
        return 0

    def empty(self, *_: object) -> NoGpu:
        return self

    def load(self, *_: object) -> NoGpu:
        return self

    def launch(self, *_: object) -> None:
        pass

    clear = launch

    def encode_tensor_map(self, *_: object) -> bytes:
        return bytes(128)


class _Ampere(NoGpu):
    """The same for a GPU with kernels without tensor maps."""

    def arch(self, _device: int) -> str:
        return "sm_80"

    def multiprocessors(self, _device: int) -> int:
        return 108


def _calls() -> dict[str, Callable[[], object]]:
    q = k = v = np.ones((2, 8, 128, 128), np.float16)
    lse = np.ones((2, 8, 128), np.float32)
    rows, cut = np.ones((300, 8, 128), np.float16), np.array([0, 100, 300], np.int32)
    new, cache = np.ones((2, 8, 1, 128), np.float16), np.ones((2, 8, 1024, 128), np.float16)
    lengths, no_check = np.array([5, 7], np.int32), cupy_flash.Tuning(check=False)
    return {
        "attention": lambda: cupy_flash.attention(q, k, v, causal=True),
        "attention with lse": lambda: cupy_flash.attention(q, k, v, causal=True, return_lse=True),
        "attention_backward": lambda: cupy_flash.attention_backward(q, q, k, v, q, lse, causal=True),
        # Offsets in NumPy arrays are read and checked in every call; those on a GPU are not.
        "attention_varlen": lambda: cupy_flash.attention_varlen(
            rows, rows, rows, cut, cut, max_seqlen_q=200, max_seqlen_k=200, causal=True
        ),
        "attention_with_kv_cache": lambda: cupy_flash.attention_with_kv_cache(
            new, cache, cache, cache_seqlens=lengths, k=new, v=new, tuning=no_check
        ),
    }


def _to_launch() -> list[Row]:
    rows = []
    for arch, gpu in (("sm_90", NoGpu()), ("sm_80", _Ampere())):
        with patch.object(memo, "driver_of", lambda *_, gpu=gpu: gpu):
            us = _call_us(_calls())
        limit = {"attention": 20.0, "attention with lse": 20.0}
        without = "without CuPy and the driver"
        rows += [Row(f"{name} to launch on {arch}, {without}", us[name], limit.get(name)) for name in us]
    return rows


def _by_either_driver() -> list[Row]:
    """A call on a GPU until it returns, through CuPy and through libcuda: only the launch differs."""
    import torch

    if not torch.cuda.is_available():
        raise Missing("torch sees no GPU: a call by CuPy, and one by the driver's own library")
    q, out = (torch.empty(1, 1, 1, 64, dtype=torch.float16, device="cuda:0") for _ in range(2))
    rows = []
    for name, way in (("CuPy", driver), ("the driver's own library", cuda)):
        with patch.object(backends, "gpu_driver", lambda _library, way=way: way):
            try:
                us = _call_us({name: lambda: cupy_flash.attention(q, q, q, out=out)})
            except UnsupportedError as error:
                print(f"{str(error).splitlines()[0]} A call by {name} is left out")
                continue
        rows.append(Row(f"attention on a GPU to return, by {name}", us[name]))
    return rows


def _over_a_stand_in() -> list[Row]:
    """Host time of a launch, through CuPy and through libcuda, on a machine without a GPU."""
    from tests.virtual_gpu import build, host_time, wheels  # why here: GPU machines may lack the tests

    if reason := build.unavailable():
        raise Missing(f"{reason}: launches over a stand-in for the driver")
    wheel = wheels.WHEELS[1]
    try:
        first = host_time.first_call()
        found = host_time.measure(wheel)
    except (FileNotFoundError, wheels.Unreachable) as error:
        raise Missing(f"{error}: launches over a stand-in for the driver") from error
    over = f"over a stand-in for the driver that does nothing (CuPy {wheel.version})"
    alone = f"by {host_time.LIBRARY}, over a stand-in for the driver"
    return [
        Row(f"first attention on torch tensors {alone}: plan, load, launch", first),
        *(Row(f"{what} by {by}, {over}", us) for (what, by), us in found.items()),
    ]


def _cold() -> list[Row]:
    q = "q = numpy.ones((1, 1, 4, 8), numpy.float32)"
    numpy, ours, _, call = fresh.least_us(
        ["import numpy", "import cupy_flash", q, "cupy_flash.attention(q, q, q)"]
    )
    return [
        Row("import cupy_flash, and with it NumPy, in a fresh process", numpy + ours, 150e3),
        Row("import cupy_flash, after NumPy", ours),
        Row("first attention on NumPy arrays of 4 x 8, after the import", call),
    ]


def _core() -> list[Row]:
    q = k = v = np.ones((1, 1, 4, 8), np.float32)
    arrays, options = {"q": q, "k": k, "v": v}, Options()
    problem, _, raw = describe("forward", arrays, options)
    us = _call_us(
        {
            "adopt": lambda: adopt(q, "q"),
            "describe": lambda: describe("forward", arrays, options),
            "again": lambda: memo.prepared("forward", raw, options, False),
            "plan": lambda: choose(problem, "sm_80", 108),
            "call": lambda: cupy_flash.attention(q, k, v),
        }
    )
    return [
        Row("adopt one NumPy array", us["adopt"], 2.0),
        Row("describe a call, the first of its kind", us["describe"]),
        Row("find what was prepared for calls of its kind", us["again"]),
        Row("plan, found in the cache", us["plan"], 5.0),
        Row("attention on NumPy arrays of 4 x 8", us["call"]),
    ]


def _torch() -> list[Row]:
    import torch

    from cupy_flash.torch import attention

    q = torch.ones(1, 1, 4, 8)
    leaf = q.clone().requires_grad_()
    us = _call_us(
        {
            "adopt": lambda: adopt(q, "q"),
            "core": lambda: cupy_flash.attention(q, q, q),
            "core with lse": lambda: cupy_flash.attention(q, q, q, return_lse=True),
            "plain": lambda: attention(q, q, q),
            "recorded": lambda: attention(leaf, leaf, leaf),
        }
    )
    torchs, _, ours, _, call = fresh.least_us(
        ["import torch", "import cupy_flash", "import cupy_flash.torch", "q = torch.ones(1, 1, 4, 8)",
         "cupy_flash.torch.attention(q, q, q)"], 5
    )  # fmt: skip
    return [
        Row("import torch", torchs),
        Row("import cupy_flash.torch, after torch and cupy_flash", ours),
        Row("first attention on torch tensors of 4 x 8, after the import", call),
        Row("adopt one torch tensor", us["adopt"], 2.0),
        Row("cupy_flash.torch beyond attention, no gradient", us["plain"] - us["core"], 8.0),
        Row("cupy_flash.torch beyond attention, recorded", us["recorded"] - us["core with lse"], 20.0),
    ]


def _jax() -> list[Row]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    from cupy_flash.jax import attention

    q = np.ones((1, 1, 4, 8), np.float32)
    x, jitted = jax.numpy.asarray(q), jax.jit(attention)
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in (x.shape, x.shape[:-1])]
    nothing = jax.jit(buffer_callback(lambda *_: None, results))
    us = _call_us(
        {
            "adopt": lambda: adopt(x, "q"),
            "core with lse": lambda: cupy_flash.attention(q, q, q, return_lse=True),
            "nothing": lambda: nothing(x, x, x)[0].block_until_ready(),
            "jitted": lambda: jitted(x, x, x).block_until_ready(),
            "at once": lambda: attention(x, x, x).block_until_ready(),
        }
    )
    jaxs, _, ours, _, call = fresh.least_us(
        ["import jax", "import cupy_flash", "import cupy_flash.jax", "q = jax.numpy.ones((1, 1, 4, 8))",
         "jax.jit(cupy_flash.jax.attention)(q, q, q).block_until_ready()"], 5
    )  # fmt: skip
    return [
        Row("import jax", jaxs),
        Row("import cupy_flash.jax, after jax and cupy_flash", ours),
        Row("first jitted attention on JAX arrays of 4 x 8, after the import, compiled", call),
        Row("a jitted callback of JAX's own on as many arrays, which does nothing", us["nothing"]),
        Row("adopt one JAX array", us["adopt"], 2.0),
        Row("cupy_flash.jax beyond attention on NumPy, jitted", us["jitted"] - us["core with lse"], 15.0),
        Row("cupy_flash.jax beyond attention on NumPy, at once", us["at once"] - us["core with lse"]),
    ]


def run() -> None:
    """Measure, print and append to bench/results/overhead.csv."""
    rows = _cold() + _core() + _to_launch()
    for module, measure in (
        ("torch", _by_either_driver),
        ("torch", _over_a_stand_in),
        ("torch", _torch),
        ("jax", _jax),
    ):
        if find_spec(module) is None:
            print(f"{module} is not installed: its rows are left out")
            continue
        try:
            rows += measure()
        except Missing as reason:
            print(f"{reason}: left out")
    where = machine()
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    for what, us, limit in rows:
        print(f"{what:<52} {us:10.2f} us" + ("" if limit is None else f"  limit {limit:.0f} us"))
    lines = [{**where, "what": row.what, "us": f"{row.us:.2f}"} for row in rows]
    print(f"appended to {append('overhead.csv', lines)}")
