"""Spans on the tensor-core kernels of Turing and Ampere, in the simulator: against FP64 and dense masks."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.simulator.test_spans import check_bits
from tests.span_cases import SpanCase, crossed

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.usefixtures("tensor_cores_only"),
    pytest.mark.parametrize("device", ["sm_75", "sm_80"], indirect=True),
]

KINDS = [(by, n, lead) for by in (False, True) for n in (1, 2) for lead in ("", "bh")]
WIDE = Case(dtype="float16", lengths=(140, 200), head_dims=(64, 64), heads=(4, 2))
CASES = [
    *(SpanCase(WIDE, *kind) for kind in KINDS),
    *crossed([
        {"lengths": (65, 200), "causal": True, "align": "bottom_right", "dtype": "float16"},
        {"lengths": (200, 130), "window": (20, 40), "align": 3, "bias": "1h11", "dtype": "float16"},
        {"lengths": (70, 190), "mask": "b1q1", "bias": "1hqk", "heads": (2, 1), "dtype": "float16"},
        {"lengths": (66, 150), "softcap": 2.0, "alibi": "bh", "align": 7, "sinks": True, "dtype": "float16"},
        {"lengths": (140, 140), "dropout": 0.2, "dtype": "float16", "head_dims": (128, 128)},
        {"lengths": (1, 133), "heads": (4, 4), "layout": "bshd", "dtype": "float16", "style": "aligned"},
        {"lengths": (133, 1), "bias": "qk", "dtype": "float16"},
    ]),
]  # fmt: skip


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_are_what_the_specification_says(case: SpanCase, device: Device) -> None:
    check_forward(case, device)  # type: ignore[arg-type]
    if device.name != "sm_75":
        check_backward(case, device)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_deterministic_gradients(case: SpanCase, device: Device) -> None:
    if device.name == "sm_75":
        pytest.skip("gradients with spans are those of the simple kernels there")
    check_backward(case, device, reproducible="run")  # type: ignore[arg-type]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_mask(case: SpanCase, device: Device) -> None:
    if device.name == "sm_75":
        pytest.skip("gradients with spans are those of the simple kernels there")
    check_bits(case, reproducible="run")


@pytest.mark.slow
def test_other_dtypes(device: Device) -> None:
    if device.name == "sm_75":
        pytest.skip("bfloat16 and float32 need the tensor cores of sm_80")
    for dtype in ("bfloat16", "float32"):
        case = SpanCase(Case(dtype=dtype, lengths=(70, 140), head_dims=(64, 40)), intervals=2)
        check_forward(case, device)  # type: ignore[arg-type]
        check_backward(case, device)  # type: ignore[arg-type]
