"""Float32 on Hopper by products of halves (f16x3), simulated, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.plan.families import f16x3, hopper
from tests.cases import feature_cases
from tests.checks import Device, check_forward
from tests.simulator.forward_cases import (
    FEW_LENGTHS,
    GROUPS,
    LENGTHS,
    PLAIN,
    POLICIES,
    TAKEN,
    check_packed,
    check_rows_without_keys,
    numbered,
    small_gpu,
    under,
)
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]

OF_FLOATS = {**TAKEN, **PLAIN, "dtype": ("float32",)}
HEAD_DIMS = ((64, 64), (40, 24), (96, 96), (128, 72), (128, 128))
FEATURES = feature_cases(LENGTHS, HEAD_DIMS, **OF_FLOATS)
GROUPED = feature_cases(FEW_LENGTHS, HEAD_DIMS, **{**OF_FLOATS, "heads": GROUPS})


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(f16x3, "FEWEST_ROWS", 0)
    yield from small_gpu(monkeypatch, "sm_90a", hopper)


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=[str(case) for case in FEATURES])
def test_features(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=False)
    with under(number):
        check_forward(FEATURES[number], device)


@pytest.mark.parametrize("number", range(len(GROUPED)), ids=[str(case) for case in GROUPED])
def test_grouped_features(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=True)
    with under(number):
        check_forward(GROUPED[number], device)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    held = [testing.hostile(x, style="aligned") for x in (q, k, v)]
    out = testing.dead((*q.shape[:3], v.shape[3]), np.dtype(np.float32), style="aligned")
    o, lse = cupy_flash.attention(*(x.view for x in held), out=out.view, return_lse=True, **options)
    out.check_written()
    for x in held:
        x.check_untouched()
    return {"o": o, "lse": lse}


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("grouped", [False, True])
def test_packed(head_dim: int, policy: str, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=grouped)
    lengths = ((5, 64, 0, 170, 1, 130, 3, 64), (9, 64, 12, 0, 200, 331, 64, 257))
    with simulator.schedule(policy, seed=5):
        check_packed(
            "float32", head_dim, lengths=lengths, with_sinks=False, precision="tf32x3", causal=True,
            align="bottom_right",
        )  # fmt: skip


def test_keys_in_use_end_before_the_rows() -> None:
    q, k, v = (aligned((n, 2, 64), np.float32, 0.5) for n in (70, 200, 200))
    k[77:], v[77:] = np.nan, np.nan
    cu = [np.array([0, n], np.int32) for n in (70, 200)]
    o = cupy_flash.attention_varlen(q, k, v, *cu, seqused_k=np.array([77], np.int32))
    assert (o == np.float32(0.5)).all()


def test_rows_without_keys() -> None:
    check_rows_without_keys("float32", 64)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_key_and_feature_has_its_own_place(head_dim: int) -> None:
    """A query that sees one key returns that key's value, within the halves' error."""
    v = drawn(1, 1, 300, head_dim)
    q, k = (aligned((1, 1, 300, head_dim), np.float32, 1.0) for _ in "qk")
    o = attend(q, k, v, window=(0, 0), align=0)["o"]
    np.testing.assert_allclose(o, v, rtol=2**-21, atol=2**-38 * np.abs(v).max())


# Factors on q, k and v.
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1e30), (1e20, 1e-20, 1), (1e-30, 1e30, 1e-30), (1e-12, 1, 1e-36)], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_magnitude(sizes: tuple[float, float, float], head_dim: int) -> None:
    """Powers of two carry what halves cannot."""
    q, k, v = (drawn(1, 1, 140, head_dim, seed=i) * np.float32(x) for i, x in enumerate(sizes))
    testing.assert_within_budget(attend(q, k, v), q, k, v, precision="tf32x3")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_magnitudes_that_differ_from_block_to_block(head_dim: int) -> None:
    """Each block of keys has powers of two of its own, and the sums of a row go across them."""
    q, k, v = (drawn(1, 1, 600, head_dim, seed=i) for i in range(3))
    size = np.exp2(np.arange(600) // 64 * 9 - 40).astype(np.float32)[:, None]
    k, v = k * np.minimum(size, 1), v * size
    testing.assert_within_budget(attend(q, k, v), q, k, v, precision="tf32x3")


@pytest.mark.parametrize("which", range(3))
def test_a_spread_within_a_block_that_halves_hold(which: int) -> None:
    """2^17 between elements of a tile: still every bit that counts."""
    arrays = [drawn(1, 1, 200, 64, seed=i) for i in range(3)]
    arrays[which] *= np.exp2(np.random.default_rng(9).integers(-15, 1, (200, 1))).astype(np.float32)
    testing.assert_within_budget(attend(*arrays), *arrays, precision="tf32x3")


def test_a_wider_spread_within_a_block_costs_what_is_documented() -> None:
    """An element is off by at most 2^-22 of itself, or 2^-39 of the largest of its tile."""
    v = drawn(1, 1, 128, 64) * np.exp2(np.random.default_rng(9).integers(-60, 1, (128, 1))).astype(np.float32)
    q, k = (aligned((1, 1, 128, 64), np.float32, 1.0) for _ in "qk")
    o = attend(q, k, v, window=(0, 0), align=0)["o"]
    # 2^-22 three times: V, its rest times P's, and a sum that a GPU cuts off.
    bound = np.maximum(3 * 2.0**-22 * np.abs(v), 2.0**-39 * np.abs(v).max())
    assert (np.abs(o - v.astype(np.float64)) <= bound).all()


def test_zeros_and_subnormals() -> None:
    q, k, v = drawn(1, 1, 130, 64), aligned((1, 1, 130, 64), np.float32, 0.0), drawn(1, 1, 130, 64)
    testing.assert_within_budget(attend(q, k, v), q, k, v, precision="tf32x3")
    assert not attend(q, k, np.zeros_like(v))["o"].any()
    k = v * np.float32(1e-40)
    testing.assert_within_budget(attend(q, k, v), q, k, v, precision="tf32x3")
    assert np.isfinite(attend(q, v, k)["o"]).all()


def test_nan_and_infinity_stay_with_who_sees_them() -> None:
    """As by tf32x3 both become NaN, and the scale of a tile is that of its finite elements."""
    for bad in (np.nan, np.inf, -np.inf):
        q, k, v = (drawn(1, 1, 200, 64, seed=i) for i in range(3))
        k[0, 0, 150] = bad
        part = attend(q, k, v, causal=True, align="top_left")
        assert np.isnan(part["o"][0, 0, 150:]).all()
        # Rows before see nothing of it.
        testing.assert_within_budget(
            {"o": part["o"][:, :, :150], "lse": part["lse"][:, :, :150]},
            q[:, :, :150], k[:, :, :150], v[:, :, :150], precision="tf32x3", causal=True, align="top_left",
        )  # fmt: skip


def test_large_scores() -> None:
    """Scores that need the running maximum, and a row whose maximum comes with the last block."""
    q, k, v = (drawn(1, 1, 400, 64, seed=i) for i in range(3))
    q *= np.float32(40)
    k[0, 0, 0] = q[0, 0, 0]
    testing.assert_within_budget(attend(q, k, v), q, k, v, precision="tf32x3")


@pytest.mark.parametrize(
    "variant", [v for v in f16x3.variants() if "forward" in v.kernel], ids=lambda v: v.name
)
def test_cost_is_the_theory(variant: Any) -> None:
    """Three products, one exponential for each pair, every tile copied once for each block that reads it."""
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    rows, keys = 2 * m, 3 * n
    q, k, v = (
        aligned(shape, np.float32, 0.5) for shape in ((1, 2, rows, d), (1, 1, keys, d), (1, 1, keys, dv))
    )
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, return_lse=True)
    (split_name, split), (name, cost) = counted
    assert (split_name[:15], name) == ("flash_split_f16", variant.name)
    pairs, tiles = 2 * rows * keys, 4
    assert cost["mma_flops"] == 3 * 2 * pairs * (d + dv)
    units = 16 * (2 * rows // 64 + 2 * tiles * keys // n)
    assert cost["bulk_load_bytes"] == 4 * (2 * rows * d + tiles * keys * (d + dv)) + units
    assert cost["global_store_bytes"] == 4 * 2 * rows * (dv + 1)
    elements = 2 * rows * d + keys * (d + dv)
    assert split["global_load_bytes"] == 4 * elements
    assert split["global_store_bytes"] == 4 * elements + units * 0 + 16 * (2 * rows // 64 + 2 * keys // n)
