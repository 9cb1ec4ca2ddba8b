"""attention_statistics on a GPU: the simulator's cases."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.checks import Device
from tests.simulator.simple_kernels import FEATURE_CASES, VARIANT_CASES
from tests.statistic_checks import check_statistics

pytestmark = pytest.mark.gpu


# CuPy has no bfloat16.
@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "case", [case for case in (*VARIANT_CASES, *FEATURE_CASES) if case.dtype != "bfloat16"], ids=str
)
def test_cases_of_the_simulator(case: Case, device: Device) -> None:
    check_statistics(case, device)
