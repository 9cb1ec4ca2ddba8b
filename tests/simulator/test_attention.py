"""The public API on simulated kernels: the bodies and features of tests/cpu, at smaller sizes."""

from __future__ import annotations

import pytest

from tests.cases import Case, feature_cases, head_dim_cases
from tests.checks import Device, check_backward, check_forward

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]

FEATURE_CASES = feature_cases(
    lengths=((33, 33), (1, 1), (7, 7), (17, 35), (35, 17), (1, 40)),
    head_dims=((16, 16), (9, 7), (8, 33), (40, 1)),
    heads=((2, 2), (2, 1)),
)


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
class TestFeatures:
    """Every two values of every two features meet in some case."""

    def test_forward(self, case: Case, device: Device) -> None:
        check_forward(case, device)

    def test_backward(self, case: Case, device: Device) -> None:
        check_backward(case, device)


@pytest.mark.parametrize(
    "case", head_dim_cases((1, 8, 33, 64, 96, 160, 512), lengths=(5, 9), heads=(1, 1)), ids=str
)
class TestHeadDims:
    """Every class of head dims that is compiled, on and between its edges."""

    def test_forward(self, case: Case, device: Device) -> None:
        check_forward(case, device)

    def test_backward(self, case: Case, device: Device) -> None:
        check_backward(case, device)
