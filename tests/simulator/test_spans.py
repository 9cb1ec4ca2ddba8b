"""Spans and a BlockMask on the simple kernels, simulated: against FP64, dense masks, and skipped tiles."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_flash
from cupy_flash import block_mask, spans
from cupy_flash.device import simulator
from tests import block_cases, span_cases
from tests.block_cases import BlockCase
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.cpu import test_masks
from tests.masked_case import MaskedCase
from tests.span_cases import SpanCase

KINDS = [(by, n, lead) for by in (False, True) for n in (1, 2) for lead in ("", "bh")]
PLAIN = Case(lengths=(130, 70), head_dims=(16, 8), heads=(4, 2))
FIELDS = [
    {"lengths": (65, 130), "causal": True, "align": "bottom_right", "dtype": "float64"},
    {"lengths": (130, 65), "window": (20, 40), "align": 3, "bias": "1h11", "dtype": "float16"},
    {"lengths": (70, 190), "mask": "b1q1", "bias": "1hqk", "heads": (2, 1), "dlse": True},
    {"lengths": (66, 70), "softcap": 2.0, "alibi": "bh", "align": 7, "sinks": True, "dropout": 0.2},
    {"lengths": (1, 133), "heads": (4, 4), "layout": "bshd"},
    {"lengths": (133, 1), "bias": "qk"},
]
BLOCKS = [
    *(BlockCase(PLAIN, size, lead) for size in ((16, 16), (64, 64), (32, 128)) for lead in ("", "bh")),
    *block_cases.crossed(FIELDS),
]
CASES: list[MaskedCase] = [*(SpanCase(PLAIN, *kind) for kind in KINDS), *span_cases.crossed(FIELDS), *BLOCKS]

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(24)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_are_what_the_specification_says(case: MaskedCase, device: Device) -> None:
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]


def check_bits(case: MaskedCase, reproducible: str | None = None) -> None:
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
def test_bits_are_those_of_the_mask(case: MaskedCase, device: Device) -> None:
    check_bits(case)


@pytest.mark.parametrize("kind", ["spans by key", "spans by query", "blocks"])
@pytest.mark.parametrize("lead", ["", "bh"])
def test_packed(kind: str, lead: str, device: Device) -> None:
    test_masks.test_packed(kind, lead, device)


def test_numbers_without_bits_see_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody looks at a table: what is wrong in it is not used as an index."""
    monkeypatch.setattr("cupy_flash.dispatch.memo.check_blocks", lambda blocks, raw: None)
    draw = np.random.default_rng(0)
    q, k, v = draw.standard_normal((3, 1, 2, 64, 16), np.float32)
    made = block_mask(lambda b, h, i, j: j <= i, None, None, 64, 64, block=32)
    wrong, right = made.table.copy(), made.table.copy()
    wrong[0, 0, 1], right[0, 0, 1] = (2**30, -5), 0
    o = cupy_flash.attention(q, k, v, mask=made._replace(table=wrong))
    assert np.array_equal(o, cupy_flash.attention(q, k, v, mask=made._replace(table=right)))


@pytest.mark.parametrize("kind", ["spans", "blocks"])
def test_tiles_between_documents_are_not_read(kind: str, device: Device) -> None:
    """Documents of NaN beside one that sees nothing of them leave it as it is."""
    draw = np.random.default_rng(0)
    q, k, v, do = draw.standard_normal((4, 1, 2, 256, 16), np.float32)
    mask: object = spans.documents([64, 128, 64])
    if kind == "blocks":
        document = np.repeat([0, 1, 2], [64, 128, 64])
        mask = block_mask(lambda b, h, i, j: document[i] == document[j], None, None, 256, 256, block=64)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, mask=mask)
    dq, dk, dv, *_ = cupy_flash.attention_backward(do, q, k, v, o, lse, mask=mask)
    clean = [x[:, :, 64:192].copy() for x in (o, lse, dq, dk, dv)]
    for x in (q, k, v, do, o):
        x[:, :, :64] = x[:, :, 192:] = np.nan
    dirty_o, dirty_lse = cupy_flash.attention(q, k, v, return_lse=True, mask=mask)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, mask=mask)
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


@pytest.mark.parametrize("name", ["jvp", "hvp"])
def test_second_order(name: str, device: Device) -> None:
    case = BLOCKS[-4]
    arrays = case.inputs()
    q, k, v, do = (arrays[x] for x in ("q", "k", "v", "do"))
    results = []
    for how in (case.options(arrays), case.with_mask(arrays)):
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
        call = cupy_flash.derivatives.jvp if name == "jvp" else cupy_flash.derivatives.hvp
        first = () if name == "jvp" else (do,)
        results.append([x for x in call(*first, q, k, v, o, lse, dq=q, dk=k, dv=v, **how) if x is not None])
    for ours, theirs in zip(*results, strict=True):
        assert np.array_equal(ours, theirs)
