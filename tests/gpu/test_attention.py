"""The public API on CuPy arrays: the bodies, features and sizes of tests/cpu."""

from __future__ import annotations

import pytest

from tests.cases import Case, feature_cases, head_dim_cases, length_cases
from tests.checks import Device, check_backward, check_forward

# CuPy has no bfloat16; tests of the torch adapter cover it on the GPU.
DTYPES = ("float16", "float32", "float64")

CASES = [
    *feature_cases(
        lengths=((64, 64), (1, 1), (7, 7), (65, 63), (63, 127), (127, 65), (1, 127), (130, 5)),
        head_dims=((32, 32), (64, 64), (33, 31), (80, 96), (8, 1)),
        dtype=DTYPES,
        bias_dtype=(None, *DTYPES),
    ),
    *length_cases(),
    *(case for case in head_dim_cases() if case.dtype in DTYPES),
]


@pytest.mark.gpu
@pytest.mark.sampled(120)
@pytest.mark.parametrize("case", CASES, ids=str)
class TestAttention:
    """Every pair of features, every length, every head dim."""

    def test_forward(self, case: Case, device: Device) -> None:
        check_forward(case, device)

    def test_backward(self, case: Case, device: Device) -> None:
        check_backward(case, device)
