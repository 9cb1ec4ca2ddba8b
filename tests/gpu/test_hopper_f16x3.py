"""Float32 on a Hopper GPU by products of halves: the simulator's cases, and what tensor cores cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import driver
from cupy_flash.plan.families import f16x3, hopper
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward, only
from tests.simulator.forward_cases import numbered
from tests.simulator.test_hopper_f16x3 import FEATURES, GROUPED, drawn
from tests.simulator.test_hopper_f16x3_backward import KINDS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper_only(device: Device) -> Iterator[None]:
    """Make the plan fail instead of falling back, also of few rows."""
    if driver.arch(0) != "sm_90":
        pytest.skip(f"this GPU is {driver.arch(0)}; the kernels run on sm_90 only")
    with mock.patch.object(f16x3, "FEWEST_ROWS", 0), only(hopper):
        yield


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_cases_of_the_simulator(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_groups_share_tiles(case: Case, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=True)
    check_forward(case, device)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_rows(head_dim: int, mean: float, device: Device) -> None:
    """Errors of sums that a tensor core cuts off have one sign: with a mean they would add up."""
    q, k, v = (drawn(1, 2, n, head_dim, seed=i) for i, n in enumerate((256, 16384, 16384)))
    v += np.float32(mean)
    o, lse = cupy_flash.attention(*(device.array(x) for x in (q, k, v)), return_lse=True)
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, precision="tf32x3")


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_many_tiles_twenty_times(options: dict[str, Any], device: Device) -> None:
    """Blocks that share a counter give the same bits every time."""
    arrays = [device.array(drawn(2, 8, 1000, 128, seed=i)) for i in range(3)]
    first = cupy_flash.attention(*arrays, **options)
    for _ in range(20):
        assert (cupy_flash.attention(*arrays, **options) == first).all()


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_gradients_of_the_simulators_cases(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_gradients_of_long_rows(mean: float, device: Device) -> None:
    """As of the forward pass: sums over many tiles of queries, and of keys."""
    q, k, v, do = (drawn(1, 2, 8192, 64, seed=i) for i in range(4))
    do += np.float32(mean)
    arrays = [device.array(x) for x in (q, k, v)]
    o, lse = cupy_flash.attention(*arrays, return_lse=True, precision="tf32x3")
    gradients = cupy_flash.attention_backward(device.array(do), *arrays, o, lse)
    testing.assert_within_budget(gradients, q, k, v, do=do, precision="tf32x3")
