"""8-bit floats on mma.sync, simulated, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import api, prepare, testing
from cupy_flash.device import simulator
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import fp8
from tests.float8_cases import E4M3, Float8Case, check, check_packed
from tests.simulator import sanitized
from tests.simulator.test_hopper_fp8 import CASES as OF_HOPPER
from tests.simulator.test_hopper_fp8 import CAUSAL, PACKED
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]

POLICIES = ("late", "early", "random")
# What Hopper's kernel does not take: rows that start anywhere, in copies of 16, 4 and single bytes.
CASES = (
    *OF_HOPPER,
    Float8Case((2, 1), (70, 150), (40, 24), batch=1, style="strided"),
    Float8Case((2, 1), (33, 90), (52, 36), batch=1, style="padded", sinks=True, options=CAUSAL),
    Float8Case((2, 2), (130, 71), (91, 77), batch=1, result="float16", alibi=True, options=CAUSAL),
)


@pytest.fixture(autouse=True, params=["sm_120"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated GPU whose plans fail instead of falling back."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{request.param}")
    monkeypatch.setattr(families, "FAMILIES", (fp8,))
    prepare.forget()
    yield
    prepare.forget()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_budget(case: Float8Case, policy: str) -> None:
    with simulator.schedule(policy, seed=3):
        check(case, "e4m3")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("head_dim", "options"), PACKED)
def test_packed(head_dim: int, options: dict[str, Any], policy: str) -> None:
    with simulator.schedule(policy, seed=5):
        check_packed("e4m3", head_dim, **options)
