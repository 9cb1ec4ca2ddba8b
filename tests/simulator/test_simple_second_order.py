"""simple_tangent.cu and simple_hessian.cu against FP64: every variant and pass, any two features."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cupy_flash
from cupy_flash.device import simulator
from tests.cases import BROADCASTS, Case
from tests.checks import Device
from tests.cpu import test_second_order as on_cpu
from tests.simulator.simple_kernels import FEATURE_CASES, VARIANT_CASES

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(128)]


@pytest.mark.parametrize("case", VARIANT_CASES, ids=str)
def test_every_variant(case: Case, device: Device) -> None:
    on_cpu.check(dataclasses.replace(case, bias="b11k", sinks=True), device)


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features_over_several_tiles(case: Case, device: Device) -> None:
    """In double precision, where an error of logic is far larger than one of rounding."""
    on_cpu.check(dataclasses.replace(case, dtype="float64", bias_dtype=None), device)


@pytest.mark.parametrize("passes", ["jvp", "hvp"])
def test_mistakes_show(passes: str, device: Device) -> None:
    """All that second order has, in one case: what tests/simulator/mutate.py runs for every mutant."""
    case = Case(batch=1, lengths=(70, 90), heads=(2, 1), bias="hqk", sinks=True, softcap=2.0, dropout=0.3,
                dlse=True, causal=True, align="bottom_right")  # fmt: skip
    arrays = case.inputs()
    arrays |= on_cpu.results_of(case, arrays)
    tangents = on_cpu.tangents_of(arrays)
    exact = on_cpu.expected(case, arrays, tangents)
    inputs, how = [arrays[name] for name in ("q", "k", "v", "o", "lse")], case.options(arrays)
    known = [exact.pop(name) for name in ("o", "lse")]
    if passes == "jvp":
        actual = cupy_flash.derivatives.jvp(*inputs, **tangents, **how)
        on_cpu.assert_close(dict(enumerate(actual)), dict(enumerate(known)), 64, case.dtype)
        return
    given = tuple(x.astype(np.float32) for x in known)
    actual = cupy_flash.derivatives.hvp(
        arrays["do"], *inputs, dlse=arrays["dlse"], jvp=given, **tangents, **how
    )._asdict()
    on_cpu.assert_close(actual, exact, 64, case.dtype)


@pytest.mark.parametrize("bias", BROADCASTS)
def test_dbias_of_every_broadcast(bias: str, device: Device) -> None:
    on_cpu.check(Case(dtype="float64", lengths=(70, 130), heads=(4, 2), bias=bias, softcap=3.0), device)


@pytest.mark.parametrize("align", [-200, -66, 66, 200])
def test_bands_that_miss_the_keys(align: int, device: Device) -> None:
    """Every derivative is written where no tile is visited, too."""
    on_cpu.check(
        Case(
            dtype="float64", lengths=(130, 70), window=(5, 4), align=align, bias="hq1", sinks=True, dlse=True
        ),
        device,
    )


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dbias", "dsinks"])
def test_a_missing_tangent_is_zero(name: str, device: Device) -> None:
    on_cpu.test_a_missing_tangent_is_zero(name)


def test_several_directions_are_each_of_them(device: Device) -> None:
    on_cpu.test_several_directions_are_each_of_them()


@pytest.mark.parametrize("used", [None, [5, 0, 3]])
def test_packed_sequences(used: list[int] | None, device: Device) -> None:
    on_cpu.test_packed_sequences_are_each_of_them(used)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_a_bit(policy: str, device: Device) -> None:
    case = Case(lengths=(65, 130), heads=(4, 2), bias="1hqk", sinks=True, dropout=0.1)
    arrays = case.inputs()
    arrays |= on_cpu.results_of(case, arrays)
    tangents = on_cpu.tangents_of(arrays)
    with simulator.schedule("late"):
        late = on_cpu.computed(case, arrays, tangents)
    with simulator.schedule(policy):
        other = on_cpu.computed(case, arrays, tangents)
    for name, x in late.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)
