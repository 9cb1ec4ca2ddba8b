"""Float64 on the tensor cores of a GPU: the simulator's cases, and many tiles twenty times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cupy_flash
from cupy_flash.device import driver
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import f64, flash
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward, only
from tests.gpu.calls import BANDS, check_forward_twenty_times, check_gradients_twenty_times
from tests.simulator import test_flash_backward_f64
from tests.simulator.test_flash_f64 import CASES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def family_only() -> Iterator[None]:
    """Make the plan fail instead of falling back."""
    arch = architecture(driver.arch(0))
    if not any(f64.variants(arch)):
        pytest.skip(f"this GPU is {arch.name}, and has no such kernel")
    with only(flash):
        yield


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_of_the_simulator(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", test_flash_backward_f64.CASES, ids=str)
def test_gradients_of_the_simulator(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_key_and_feature_has_its_own_place(head_dim: int, device: Device) -> None:
    """A query that sees one key returns the bits of that key's value: products with 1 and 0 are exact."""
    v = np.random.default_rng(1).standard_normal((1, 1, 300, head_dim))
    ones = device.array(np.ones_like(v))
    o = cupy_flash.attention(ones, ones, device.array(v), window=(0, 0), align=0)
    assert bool((o == device.array(v)).all())


@pytest.mark.full_size
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles_twenty_times(head_dim: int, band: str, device: Device) -> None:
    check_forward_twenty_times(device, (head_dim, head_dim), 24, band, "float64")


@pytest.mark.full_size
@pytest.mark.parametrize("band", BANDS)
def test_gradients_of_many_tiles_twenty_times(band: str, device: Device) -> None:
    check_gradients_twenty_times(device, (64, 64), 24, band, "float64")
