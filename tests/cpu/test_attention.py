"""The public API on NumPy arrays, over sizes, head dims and combinations of features."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.cases import Case, feature_cases, head_dim_cases, length_cases
from tests.checks import Device, check_backward, run_both

FEATURE_CASES = feature_cases(
    lengths=((64, 64), (1, 1), (7, 7), (65, 63), (63, 127), (127, 65), (1, 127), (130, 5)),
    head_dims=((32, 32), (64, 64), (33, 31), (80, 96), (8, 1)),
)


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features(case: Case, device: Device) -> None:
    """Every two values of every two features meet in some case."""
    run_both(case, device)


@pytest.mark.parametrize("case", length_cases(), ids=str)
def test_lengths(case: Case, device: Device) -> None:
    """One query, one key, around a tile edge, several tiles, more queries than keys."""
    run_both(case, device)


@pytest.mark.parametrize("case", head_dim_cases(), ids=str)
def test_head_dims(case: Case, device: Device) -> None:
    """On and between tile edges, and another head dim for v."""
    run_both(case, device)


@pytest.mark.parametrize(
    "tile",
    [pytest.param((1, 1), marks=pytest.mark.slow), (16, 16), (64, 32), (17, 300), (1000, 1000)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_tile_on_the_cpu(dtype: str, tile: tuple[int, int], device: Device) -> None:
    lengths = (65, 130) if tile != (1, 1) else (9, 70)  # of which each pair is a tile
    case = Case(dtype=dtype, lengths=lengths, window=(40, 3), align="bottom_right", mask="b11k", dropout=0.25)
    run_both(case, device, tuning=cupy_flash.Tuning(tile=tile))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_jobs_share(dtype: str, device: Device) -> None:
    """A key head of so many rows that the core gives each of two jobs dK, dV and dsinks of its own."""
    case = Case(dtype=dtype, batch=1, heads=(2, 1), lengths=(700, 60), head_dims=(16, 24),
                align="bottom_right", causal=True, sinks=True, dlse=True)  # fmt: skip
    run_both(case, device)


def test_backward_of_our_own_forward(device: Device) -> None:
    for case in FEATURE_CASES[:12]:
        given = case.inputs()
        options = case.options(given)
        q, k, v = (given[name] for name in "qkv")
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        gradients = cupy_flash.attention_backward(
            given["do"], q, k, v, o, lse, dlse=given.get("dlse"), **options
        )
        testing.assert_within_budget(gradients, q, k, v, do=given["do"], dlse=given.get("dlse"), **options)


def test_same_bits_every_time_and_on_request(device: Device) -> None:
    case = Case(lengths=(127, 300), heads=(4, 2), bias="1111", sinks=True)
    first = check_backward(case, device)
    again = check_backward(case, device)
    asked = check_backward(case, device, reproducible="run")
    for name in first._fields:
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
        assert np.array_equal(getattr(first, name), getattr(asked, name)), name


def test_layouts_and_ranks_give_the_same_bits(device: Device) -> None:
    case = Case(batch=1, causal=True)
    q, k, v = (case.inputs()[name] for name in "qkv")
    o = cupy_flash.attention(q, k, v, causal=True)
    turned = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    bshd = cupy_flash.attention(*turned, causal=True, layout="bshd")
    assert bshd.shape == (1, 64, 2, 32)
    assert np.array_equal(bshd.swapaxes(1, 2), o)
    assert np.array_equal(cupy_flash.attention(q[0], k[0], v[0], causal=True), o[0])
    for head in range(2):
        alone = cupy_flash.attention(q[0, head], k[0, head], v[0, head], causal=True)
        testing.assert_within_budget({"o": alone}, q[0, head], k[0, head], v[0, head], causal=True)


def test_dropout_is_a_function_of_seed_and_position(device: Device) -> None:
    """With v the identity, the output shows the kept set itself."""
    case = Case(lengths=(40, 40), head_dims=(16, 40), dropout=0.5)
    given = case.inputs()
    eye = np.broadcast_to(np.eye(40, dtype=np.float32), given["v"].shape)
    kept = []
    for seed in (1, 1, 2, 2**63):
        for tile in ((8, 8), (64, 64)):
            o = cupy_flash.attention(
                given["q"], given["k"], eye, dropout=0.5, seed=seed, tuning=cupy_flash.Tuning(tile=tile)
            )
            exact = testing.reference_attention(given["q"], given["k"], eye, dropout=0.5, seed=seed)
            assert np.array_equal(o != 0, exact.o != 0), "the kept set is the documented one"
            kept.append(o != 0)
    assert np.array_equal(kept[0], kept[3])
    assert not np.array_equal(kept[0], kept[4])
    assert not np.array_equal(kept[4], kept[6]), "the high half of the seed counts"
    assert 0.45 < kept[0].mean() < 0.55


def test_merge_of_parts_is_the_whole(device: Device) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        case = Case(dtype=dtype, lengths=(33, 100), sinks=True)
        given = case.inputs()
        q, k, v = (given[name] for name in "qkv")
        cut = 37
        first = cupy_flash.attention(q, k[:, :, :cut], v[:, :, :cut], sinks=given["sinks"], return_lse=True)
        second = cupy_flash.attention(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
        o, lse = cupy_flash.merge(*first, *second)
        testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, sinks=given["sinks"])


def test_naive_attention_is_within_the_budget(device: Device) -> None:
    for case in FEATURE_CASES:
        if not case.dropout:
            given = case.inputs()
            q, k, v = (given[name] for name in "qkv")
            options = case.options(given)
            options.pop("dropout"), options.pop("seed")
            result = cupy_flash.naive_attention(q, k, v, **options)
            testing.assert_within_budget(result, q, k, v, **options)


def test_configured_attention_is_attention(device: Device) -> None:
    given = Case().inputs()
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    config = dataclasses.replace(cupy_flash.default_config(32), softcap=5.0).with_causal().with_dropout(0.1)
    flash = cupy_flash.FlashAttention(config)
    options = {"causal": True, "softcap": 5.0, "dropout": 0.1, "seed": 3}
    o, lse = flash(q, k, v, seed=3, return_lse=True)
    assert np.array_equal(o, cupy_flash.attention(q, k, v, **options))
    got = flash.backward(do, q, k, v, o, lse, seed=3)
    expected = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    assert np.array_equal(got.dq, expected.dq)
    assert config.softmax_scale == 32**-0.5
    assert cupy_flash.causal_config(32) == cupy_flash.default_config(32).with_causal()
