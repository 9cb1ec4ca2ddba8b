"""The public API on CuPy arrays: the bodies, features and sizes of tests/cpu."""

from __future__ import annotations

import pytest

from tests.cases import Case, feature_cases, head_dim_cases, length_cases
from tests.checks import Device, run_both

# Gradients of head dims above 256 on tensor cores: edges of tiles, both classes, rows that start anywhere.
WIDE = tuple(
    Case(
        dtype="float16",
        heads=(4, 2),
        lengths=lengths,
        head_dims=head_dims,
        align="bottom_right",
        sinks=number % 2 == 0,
        style=("aligned", "padded")[number % 2],
        **({}, {"causal": True}, {"window": (40, 3)})[number % 3],
    )
    for number, (lengths, head_dims) in enumerate(
        (
            ((130, 257), (512, 512)),
            ((257, 130), (384, 384)),
            ((33, 65), (257, 257)),
            ((64, 31), (488, 300)),
            ((1000, 700), (512, 512)),
        )
    )
)

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
    *WIDE,
]


@pytest.mark.gpu
@pytest.mark.sampled(120)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes(case: Case, device: Device) -> None:
    """Every pair of features, every length, every head dim."""
    run_both(case, device)
