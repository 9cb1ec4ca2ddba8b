"""simple_statistics.cu against FP64: every variant and pass, any two features, packed, all schedules."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import Spans, UnsupportedError
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from tests.block_cases import random_blocks
from tests.cases import Case
from tests.checks import Device
from tests.simulator.simple_kernels import FEATURE_CASES, LENGTH_CASES, VARIANT_CASES
from tests.statistic_checks import SUMS, assert_close, check_packed, check_statistics

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("case", VARIANT_CASES, ids=str)
def test_every_variant(case: Case, device: Device) -> None:
    check_statistics(dataclasses.replace(case, bias="b11k", sinks=True), device)


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features_over_several_tiles(case: Case, device: Device) -> None:
    """In double precision, where an error of logic is far larger than one of rounding."""
    check_statistics(dataclasses.replace(case, dtype="float64", bias_dtype=None), device)


@pytest.mark.parametrize("case", LENGTH_CASES, ids=str)
def test_lengths(case: Case, device: Device) -> None:
    check_statistics(case, device)


@pytest.mark.parametrize("policy", ["late", "early", "random"])
def test_schedules(policy: str, device: Device) -> None:
    """All that the passes have, in one case: what tests/simulator/mutate.py runs for every mutant."""
    case = Case(
        batch=1, lengths=(70, 150), heads=(2, 1), head_dims=(40, 16), bias="hqk", sinks=True, softcap=2.0,
        causal=True, align="bottom_right",
    )  # fmt: skip
    with simulator.schedule(policy):
        check_statistics(case, device)


@pytest.mark.parametrize("align", [-200, -66, 66, 200])
def test_bands_that_miss_the_keys(align: int, device: Device) -> None:
    check_statistics(Case(dtype="float64", lengths=(130, 70), window=(5, 4), align=align, sinks=True), device)


@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
def test_packed_is_dense_of_each_sequence(known: bool, device: Device) -> None:
    check_packed(device, "float64", known=known)


@pytest.mark.parametrize("name", ["spans", "blocks"])
def test_masks(name: str, device: Device) -> None:
    bounds = np.sort(RNG.integers(0, 66, (2, 1, 33, 1, 2)), axis=-1).astype(np.int32)
    mask = {"spans": Spans(bounds), "blocks": random_blocks(RNG, (2, 4), (33, 65), (16, 16))}[name]
    q, k = RNG.standard_normal((2, 4, 33, 16)), RNG.standard_normal((2, 2, 65, 16))
    assert_close(cupy_flash.attention_statistics(q, k, mask=mask, want=SUMS), q, k, 1, mask=mask)


def test_hidden_keys_and_seen_ones_of_nan(device: Device) -> None:
    q, k = RNG.standard_normal((1, 2, 40, 16)), RNG.standard_normal((1, 2, 40, 16))
    k[:, 0, 30] = np.nan
    made = cupy_flash.attention_statistics(q, k, causal=True, want=SUMS)
    assert np.isnan(made.key_sum[:, 0, 30]).all()
    assert np.isnan(made.key_max[:, 0, 30]).all()
    assert np.isnan(made.entropy[:, 0, 30:]).all()
    assert np.isfinite(made.entropy[:, 0, :30]).all()
    plain = cupy_flash.attention_statistics(q[:, :, :30], k, causal=True, align=0, want=SUMS)
    assert all(np.isfinite(x).all() for x in plain if x is not None)


@pytest.mark.parametrize(
    ("want", "steps"),
    [("key_max", {"by_key"}), ("entropy", {"by_query"}), (SUMS, {"by_key", "by_query"})],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_passes_are_those_that_are_wanted(want: Any, steps: set[str], device: Device) -> None:
    q = RNG.standard_normal((1, 1, 9, 8))
    lse = cupy_flash.attention(q, q, q, return_lse=True)[1]
    memo.forget()
    made = cupy_flash.attention_statistics(q, q, lse, want=want)
    found = {name.split("_f64")[0].removeprefix("simple_statistics_") for name in memo.kernels()}
    assert found == steps
    assert {n for n, x in made._asdict().items() if x is not None} == (
        {want} if isinstance(want, str) else set(want)
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"lists no largest weights \(top_k\)"),
        ({"want": "key_sum", "score": cupy_flash.score(lambda s, b, h, i, j: s * 2)}, "of score functions"),
        ({"want": "key_sum", "cache_seqlens": np.array([5], np.int32)}, "over a cache"),
    ],
    ids=["top_k", "function", "cache"],
)
def test_what_kernels_do_not_count_is_refused(given: dict[str, Any], says: str, device: Device) -> None:
    q = RNG.standard_normal((1, 2, 6, 8)).astype(np.float32)
    lse = np.zeros((1, 2, 6), np.float32)
    with pytest.raises(UnsupportedError, match=f"(?s)simple.*{says}.*Try: want= some of"):
        cupy_flash.attention_statistics(q, q, lse, **given)
