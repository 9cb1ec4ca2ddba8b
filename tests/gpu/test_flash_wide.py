"""Forward attention of head dims above 256 on a GPU: the simulator's cases, and many tiles twenty times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cupy_flash.device import driver
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import flash, hopper
from tests.checks import Device, check_forward, only
from tests.gpu.calls import BANDS, check_forward_twenty_times
from tests.simulator.test_flash_wide import CASES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=[flash, hopper], ids=["flash", "hopper"])
def family_only(request: pytest.FixtureRequest, device: Device) -> Iterator[None]:
    """Make the plan fail instead of falling back."""
    arch = architecture(driver.arch(0))
    if arch.capability < 80 or request.param.NAME not in arch.families:
        pytest.skip(f"this GPU is {arch.name}, and has no such kernel")
    with only(request.param):
        yield


# CuPy has no bfloat16.
@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "float16"], ids=str)
def test_cases_of_the_simulator(case: Any, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.full_size
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(384, 384), (512, 512), (576, 512)])
def test_many_tiles_twenty_times(head_dim: int, head_dim_v: int, band: str, device: Device) -> None:
    check_forward_twenty_times(device, (head_dim, head_dim_v), 24, band)
