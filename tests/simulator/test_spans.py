"""Spans on the simple kernels, in the simulator: against FP64, dense masks, and which tiles are skipped."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_flash
from cupy_flash import spans
from cupy_flash.device import simulator
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.cpu import test_spans
from tests.span_cases import SpanCase, crossed

KINDS = [(by, n, lead) for by in (False, True) for n in (1, 2) for lead in ("", "bh")]
CASES = [
    *(SpanCase(Case(lengths=(130, 70), head_dims=(16, 8), heads=(4, 2)), *kind) for kind in KINDS),
    *crossed([

        {"lengths": (65, 130), "causal": True, "align": "bottom_right", "dtype": "float64"},
        {"lengths": (130, 65), "window": (20, 40), "align": 3, "bias": "1h11", "dtype": "float16"},
        {"lengths": (70, 190), "mask": "b1q1", "bias": "1hqk", "heads": (2, 1), "dlse": True},
        {"lengths": (66, 70), "softcap": 2.0, "alibi": "bh", "align": 7, "sinks": True, "dropout": 0.2},
        {"lengths": (1, 133), "heads": (4, 4), "layout": "bshd"},
        {"lengths": (133, 1), "bias": "qk"},
    ]),
]  # fmt: skip

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(24)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_are_what_the_specification_says(case: SpanCase, device: Device) -> None:
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]


def check_bits(case: SpanCase, reproducible: str | None = None) -> None:
    """Hold both passes of a case to those with a mask."""
    arrays, results = case.inputs(), []
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    for how in (case.options(arrays), case.with_mask(arrays)):
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
        grads = cupy_flash.attention_backward(do, q, k, v, o, lse, reproducible=reproducible, **how)
        results.append([o, lse, *(x for x in grads if x is not None)])
    for ours, theirs in zip(*results, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_mask(case: SpanCase, device: Device) -> None:
    check_bits(case)


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("lead", ["", "bh"])
def test_packed(by_query: bool, lead: str, device: Device) -> None:
    test_spans.test_packed(by_query, lead, device)


def test_tiles_between_documents_are_not_read(device: Device) -> None:
    """Documents of NaN beside one that sees nothing of them leave it as it is."""
    draw = np.random.default_rng(0)
    q, k, v, do = draw.standard_normal((4, 1, 2, 256, 16), np.float32)
    bounds = spans.documents([64, 128, 64])
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, mask=bounds)
    dq, dk, dv, *_ = cupy_flash.attention_backward(do, q, k, v, o, lse, mask=bounds)
    clean = [x[:, :, 64:192].copy() for x in (o, lse, dq, dk, dv)]
    for x in (q, k, v, do, o):
        x[:, :, :64] = x[:, :, 192:] = np.nan
    dirty_o, dirty_lse = cupy_flash.attention(q, k, v, return_lse=True, mask=bounds)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, mask=bounds)
    for ours, theirs in zip((dirty_o, dirty_lse, *grads[:3]), clean, strict=True):
        assert np.array_equal(ours[:, :, 64:192], theirs)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_a_bit(policy: str, device: Device) -> None:
    case = SpanCase(Case(lengths=(130, 130), heads=(4, 2), bias="1hqk"), intervals=2, lead="h")
    arrays, results = case.inputs(), []
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    for chosen in ("late", policy):
        with simulator.schedule(chosen):
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, **case.options(arrays))
            grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **case.options(arrays))
        results.append([x.tobytes() for x in (o, lse, *grads) if x is not None])
    assert results[0] == results[1]
