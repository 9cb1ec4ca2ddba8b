"""Hopper's own kernels on a Hopper GPU: the simulator's cases, many tiles, several streams, a CUDA graph.

What the simulator cannot show is here: blocks that run at the same time and share a counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import driver
from cupy_flash.plan.families import hopper
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward, only
from tests.gpu.calls import BANDS, check_forward_twenty_times, check_gradients_twenty_times, repeated
from tests.simulator import test_hopper_backward as backward
from tests.simulator.forward_cases import numbered
from tests.simulator.test_hopper_attention import (
    FEATURES,
    GROUPED,
    PLAIN_FEATURES,
    PLAIN_GROUPED,
    UNSEEN_CASES,
    WIDE,
)

pytestmark = pytest.mark.gpu

# CuPy has no bfloat16.
CASES = [case for case in (*FEATURES, *PLAIN_FEATURES, *WIDE) if case.dtype == "float16"]
UNSEEN = [name for name, case in UNSEEN_CASES.items() if case.dtype == "float16"]
GROUPED_CASES = [case for case in (*GROUPED, *PLAIN_GROUPED) if case.dtype == "float16"]
BACKWARD_CASES = [
    *(case for case in (*backward.FEATURES, *backward.PLAIN_FEATURES) if case.dtype == "float16"),
    *(replace(case, dtype="float16") for case in backward.WIDE_EDGES),
]


@pytest.fixture(autouse=True)
def hopper_only(device: Device) -> Iterator[None]:
    """Make the plan fail instead of falling back."""
    if driver.arch(0) != "sm_90":
        pytest.skip(f"this GPU is {driver.arch(0)}; the kernels run on sm_90 only")
    with only(hopper):
        yield


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_of_the_simulator(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("name", UNSEEN)
def test_unseen_blocks(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warpgroup that passes blocks over beside one that works on them."""
    numbered(monkeypatch, grouped=name == "group")
    check_forward(UNSEEN_CASES[name], device)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", GROUPED_CASES, ids=str)
def test_heads_of_a_group_in_one_tile(case: Case, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=True)
    check_forward(case, device)


@pytest.mark.full_size
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_many_tiles_twenty_times(head_dim: int, band: str, device: Device) -> None:
    check_forward_twenty_times(device, (head_dim, head_dim), 48, band)


@pytest.mark.full_size
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(("heads", "length"), [(48, 1500), (3, 6000)], ids=["one order", "two waves"])
def test_deterministic_gradients_twenty_times(
    heads: int, length: int, head_dims: tuple[int, int], band: str, device: Device
) -> None:
    check_gradients_twenty_times(device, head_dims, heads, band, length=length)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_the_simulator(case: Case, deterministic: bool, device: Device) -> None:
    check_backward(case, device, reproducible="run" if deterministic else None)


@pytest.mark.full_size
def test_streams_side_by_side(device: Device) -> None:
    """Calls on several streams have a counter each."""
    cupy: Any = device.xp
    (q, k, v, _), _ = repeated(device, 64, 48, 1500)
    expected = testing.to_numpy(cupy_flash.attention(q, k, v, **BANDS["causal"]))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    results = []
    for number in range(32):
        with streams[number % 4]:
            results.append(cupy_flash.attention(q, k, v, **BANDS["causal"]))
    cupy.cuda.runtime.deviceSynchronize()
    for result in results:
        np.testing.assert_array_equal(testing.to_numpy(result), expected)


@pytest.mark.full_size
def test_cuda_graph(device: Device) -> None:
    """Recorded once, replayed with other values while the pool hands out memory in between."""
    cupy: Any = device.xp
    (q, k, v, _), _ = repeated(device, 128, 48, 1000)
    out = cupy.empty_like(q)
    cupy_flash.attention(q, k, v, out=out, **BANDS["causal"])  # loads the kernel
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupy_flash.attention(q, k, v, out=out, **BANDS["causal"])
        graph = stream.end_capture()
        for factor in (1, -2):
            k *= factor
            filled = [cupy.full(64, 0x7F, cupy.uint8) for _ in range(100)]
            graph.launch(stream)
            stream.synchronize()
            replayed = testing.to_numpy(out)
            expected = testing.to_numpy(cupy_flash.attention(q, k, v, **BANDS["causal"]))
            np.testing.assert_array_equal(replayed, expected)
            del filled
