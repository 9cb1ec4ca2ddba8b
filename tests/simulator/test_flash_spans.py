"""Spans and a BlockMask on the kernels of Turing and Ampere, simulated: against FP64 and dense masks."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.device import simulator
from tests import block_cases, span_cases
from tests.block_cases import BlockCase
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.masked_case import MaskedCase
from tests.simulator.test_spans import KINDS, check_bits
from tests.span_cases import SpanCase

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.usefixtures("tensor_cores_only"),
    pytest.mark.parametrize("device", ["sm_75", "sm_80"], indirect=True),
]

WIDE = Case(dtype="float16", lengths=(140, 200), head_dims=(64, 64), heads=(4, 2))
FIELDS = [
    {"lengths": (65, 200), "causal": True, "align": "bottom_right", "dtype": "float16"},
    {"lengths": (200, 130), "window": (20, 40), "align": 3, "bias": "1h11", "dtype": "float16"},
    {"lengths": (70, 190), "mask": "b1q1", "bias": "1hqk", "heads": (2, 1), "dtype": "float16"},
    {"lengths": (66, 150), "softcap": 2.0, "alibi": "bh", "align": 7, "sinks": True, "dtype": "float16"},
    {"lengths": (140, 140), "dropout": 0.2, "dtype": "float16", "head_dims": (128, 128)},
    {"lengths": (1, 133), "heads": (4, 4), "layout": "bshd", "dtype": "float16", "style": "aligned"},
    {"lengths": (133, 1), "bias": "qk", "dtype": "float16"},
]
SPANS = [*(SpanCase(WIDE, *kind) for kind in KINDS), *span_cases.crossed(FIELDS)]
BLOCKS = [
    *(BlockCase(WIDE, size, lead) for size in ((16, 16), (128, 128), (16, 64)) for lead in ("", "bh")),
    *block_cases.crossed(FIELDS),
]
CASES: list[MaskedCase] = [*SPANS, *BLOCKS]


def _skip_gradients(device: Device) -> None:
    if device.name == "sm_75":
        pytest.skip("gradients with spans and blocks are those of the simple kernels there")


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_are_what_the_specification_says(case: MaskedCase, device: Device) -> None:
    check_forward(case, device)  # type: ignore[arg-type]
    if device.name != "sm_75":
        check_backward(case, device)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SPANS[::4], *BLOCKS[::4]], ids=str)
def test_deterministic_gradients(case: MaskedCase, device: Device) -> None:
    _skip_gradients(device)
    check_backward(case, device, reproducible="run")  # type: ignore[arg-type]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_mask(case: MaskedCase, device: Device) -> None:
    _skip_gradients(device)
    check_bits(case, reproducible="run")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes(dtype: str, device: Device) -> None:
    if device.name == "sm_75":
        pytest.skip("bfloat16 and float32 need the tensor cores of sm_80")
    case = Case(dtype=dtype, lengths=(70, 140), head_dims=(64, 40))
    masked: list[MaskedCase] = [SpanCase(case, intervals=2)]
    if dtype == "bfloat16":  # blocks are refused in float32, see below
        masked.append(BlockCase(case, (16, 32)))
    for each in masked:
        check_forward(each, device)  # type: ignore[arg-type]
        check_backward(each, device)  # type: ignore[arg-type]


def test_float32_is_refused_by_name(device: Device) -> None:
    q = np.ones((1, 1, 64, 64), np.float32)
    blocks = cupy_flash.BlockMask(np.ones((1, 1), np.int32), np.zeros((0, 64, 8), np.uint8))
    with pytest.raises(UnsupportedError, match="does not support a BlockMask in float32"):
        cupy_flash.attention(q, q, q, mask=blocks, precision="tf32x3")


def test_products_of_blocks_that_are_not_seen_are_not_computed(device: Device) -> None:
    draw = np.random.default_rng(0)
    q, k, v = draw.standard_normal((3, 1, 1, 256, 64)).astype(np.float16)
    flops = []
    for share in (16, 4):
        table = (np.arange(16) < share).astype(np.int32).reshape(4, 4)
        with simulator.costs() as counted:
            cupy_flash.attention(q, k, v, mask=cupy_flash.BlockMask(table, np.zeros((0, 64, 8), np.uint8)))
        flops.append(sum(cost["mma_flops"] for _, cost in counted))
    assert flops[1] * 4 == flops[0] > 0
