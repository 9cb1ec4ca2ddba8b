"""8-bit floats on Hopper's kernel for them, simulated, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import api, testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import hopper
from tests.float8_cases import E4M3, Float8Case, check, check_packed
from tests.public import quantized
from tests.simulator import sanitized
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]

POLICIES = ("late", "early", "random")
CAUSAL = (("causal", True), ("align", "bottom_right"))
# Tiles that end inside, at and beyond an edge; head dims between classes; one, two and more blocks of keys.
CASES = (
    Float8Case(),
    Float8Case((4, 2), (200, 300), (64, 64), options=CAUSAL),
    Float8Case((3, 1), (193, 257), (48, 40), sinks=True, options=(("window", (100, 20)), ("align", 5))),
    Float8Case((2, 2), (1, 129), (128, 128), batch=1, result="float16"),
    Float8Case((4, 2), (130, 420), (128, 128), scales=("batch", "heads", "batch"), options=CAUSAL),
    Float8Case((2, 1), (7, 9), (112, 96), layout="bshd", scales=("", "", "")),
    Float8Case((2, 2), (65, 200), (64, 64), alibi=True, options=(("align", "top_left"),)),
    Float8Case((2, 1), (70, 280), (128, 128), batch=1, options=(("softcap", 4.0), *CAUSAL)),
    Float8Case((2, 1), (40, 140), (128, 64), batch=1, options=(("scale", -0.1),)),
    Float8Case((2, 1), (130, 280), (256, 256), batch=1, options=CAUSAL),
    Float8Case((2, 2), (64, 130), (208, 248), batch=1, alibi=True, options=CAUSAL),
    # Heads of a group share a tile of queries.
    Float8Case((8, 1), (5, 300), (128, 128), batch=1, options=CAUSAL),
    Float8Case((8, 2), (40, 200), (64, 64), scales=("batch",) * 3, alibi=True, sinks=True, options=CAUSAL),
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated Hopper, small so that blocks take several tiles; its plans fail instead of falling back."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90a")
    monkeypatch.setattr(simulator, "multiprocessors", lambda _device=0: 3)
    monkeypatch.setattr(families, "FAMILIES", (hopper,))
    memo.forget()
    yield
    memo.forget()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_budget(case: Float8Case, policy: str) -> None:
    with simulator.schedule(policy, seed=3):
        check(case, "e4m3")


@pytest.mark.parametrize("case", [(4, 2, 600, 128), (2, 1, 400, 256)], ids="d{0[3]}".format)
def test_blocks_take_several_tiles(case: tuple[int, int, int, int]) -> None:
    """Every ring goes round more than once, O of a tile leaves while K of the next one comes."""
    *heads, keys, d = case
    check(Float8Case((heads[0], heads[1]), (200, keys), (d, d), batch=1, options=CAUSAL), "e4m3")


PACKED: tuple[tuple[int, dict[str, Any]], ...] = (
    (128, dict(CAUSAL)),
    (64, {}),
    (64, {"window": (60, 10), "align": "top_left", "softcap": 9.0}),
    (208, {"window": (90, 11), "align": "bottom_right"}),  # O leaves in two halves
)


@pytest.mark.parametrize(("head_dim", "options"), PACKED)
def test_packed(head_dim: int, options: dict[str, Any]) -> None:
    check_packed("e4m3", head_dim, **options)


@pytest.mark.parametrize("policy", ["early", "random"])
@pytest.mark.parametrize(("head_dim", "options"), PACKED)
def test_packed_on_schedules(head_dim: int, options: dict[str, Any], policy: str) -> None:
    with simulator.schedule(policy, seed=5):
        check_packed("e4m3", head_dim, **options)


def test_keys_in_use_end_before_the_rows() -> None:
    """What lies behind the keys in use, here NaN, is cleared before it meets a weight of 0."""
    q, k, v = (aligned((n, 2, 64), E4M3, 0.5) for n in (70, 200, 200))
    k[77:], v[77:] = np.nan, np.nan
    cu = [np.array([0, n], np.int32) for n in (70, 200)]
    o = cupy_flash.attention_varlen(q, k, v, *cu, seqused_k=np.array([77], np.int32))
    assert (o == np.float32(0.5)).all()


def test_rows_without_keys() -> None:
    """O = 0 and LSE = -inf, also for a whole tile of queries that sees no block of keys."""
    q, k, v = (aligned((1, 1, n, 64), E4M3, 1.0) for n in (400, 40, 40))
    scales = {"q_scale": np.full(1, 0.5, np.float32), "v_scale": np.full(1, 3, np.float32)}
    o, lse = cupy_flash.attention(*quantized(q, k, v, scales), window=(3, 3), align=-300, return_lse=True)
    alone = np.r_[0:297, 343:400]
    assert not o[0, 0, alone].any()
    assert np.isneginf(lse[0, 0, alone]).all()
    assert np.isfinite(lse[0, 0, 297:343]).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_key_and_feature_has_its_own_place(head_dim: int) -> None:
    """A query that sees one key returns that key's value: the order of keys in V^T is that of weights."""
    keys = 2 * hopper._FP8[head_dim, head_dim][0][1]
    v = aligned((1, 1, keys, head_dim), E4M3)
    v[...] = np.random.default_rng(0).integers(0, 256, v.shape, np.uint8).view(E4M3)
    v[np.isnan(v)] = 1
    q, k = (aligned((1, 1, keys, head_dim), E4M3, 1.0) for _ in "qk")
    o = cupy_flash.attention(q, k, v, window=(0, 0), align=0)
    np.testing.assert_array_equal(o.astype(np.float32), v.astype(np.float32))


def test_large_scores() -> None:
    """Scores that need the running maximum, and a row whose maximum comes with the last block."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, 1, 400, 64)).astype(E4M3) for _ in range(3))
    k[0, 0, 0] = q[0, 0, 0]
    scales = {"q_scale": np.full(1, 40, np.float32), "k_scale": np.full(1, 30, np.float32)}
    views = [testing.hostile(x, style="aligned").view for x in (q, k, v)]
    o, lse = cupy_flash.attention(*quantized(*views, scales), return_lse=True)
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, precision="e4m3", **scales)


def test_scales_that_the_host_cannot_see_give_nan_or_a_result() -> None:
    """A scale of 0 or below, which only calls in main memory refuse, writes nothing beyond the result."""
    with mock.patch.object(api, "check_scales", return_value=None):
        q = testing.hostile(np.ones((1, 1, 64, 64), E4M3), style="aligned")
        out = testing.dead((1, 1, 64, 64), np.dtype(np.float16), style="aligned")
        wrong = cupy_flash.QuantizedArray(q.view, -np.ones(1, np.float32))
        cupy_flash.attention(wrong, q.view, q.view, out=out.view)
    out.check_written()


VARIANTS = [v for v in hopper.variants(architecture("sm_90")) if v.kernel == "flash_forward_fp8_sm90"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_cost_is_the_theory(variant: Any) -> None:
    """Products, exponentials and bytes are the least possible; V is turned once, without a bank conflict."""
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    rows, keys = 2 * m, 3 * n
    shapes = ((1, 2, rows, d), (1, 1, keys, d), (1, 1, keys, dv))
    q, k, v = (aligned(shape, E4M3, 0.5) for shape in shapes)
    out = aligned((1, 2, rows, dv), np.float16)
    options = {"softcap": 3.0} if variant.mask == "any" else {}
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, out=out, return_lse=True, **options)
    ((name, cost),) = counted
    assert name == variant.name
    pairs, tiles = 2 * rows * keys, 4
    assert cost["mma_flops"] == 2 * pairs * (d + dv)
    if variant.mask == "band":
        assert cost["exps"] == pairs + 4 * pairs // n + 8 * 2 * rows
    assert cost["bulk_load_bytes"] == 2 * rows * d + tiles * keys * (d + dv)
    assert cost["bulk_store_bytes"] == 2 * 2 * rows * dv
    assert cost["global_store_bytes"] == 4 * 2 * rows
    # 8 rows of 16 bytes at a time: O of 16 bits; V, read and written once per tile of queries.
    turned = tiles * keys * dv // 128
    assert cost["matrix_stores"] == 2 * rows * dv // 64 + turned
    assert cost["matrix_loads"] == turned
    for what in ("shared_loads", "shared_stores", "matrix_loads", "matrix_stores"):
        assert cost[f"{what[:-1]}_cycles"] == cost[what], f"bank conflicts in {what}"


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_90a"
from cupy_flash.device import simulator
from tests.simulator import sanitized
from tests.simulator.test_hopper_fp8 import CASES, check, check_packed
for policy in SCHEDULES:
    with simulator.schedule(policy):
        check(CASES[1], "e4m3")
        check_packed("e4m3", 128, causal=True, align="bottom_right", **sanitized.PACKED)
check(CASES[9], "e4m3")
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race; padded and packed."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
