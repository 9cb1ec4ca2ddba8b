"""8-bit floats on mma.sync, simulated, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import fp8
from tests.float8_cases import E4M3, Float8Case, check, check_packed
from tests.simulator import sanitized
from tests.simulator.test_hopper_fp8 import CASES as OF_HOPPER
from tests.simulator.test_hopper_fp8 import (
    CAUSAL,
    PACKED,
    POLICIES,
    test_every_key_and_feature_has_its_own_place,  # noqa: F401 - these three run here too, on this device
    test_large_scores,  # noqa: F401
    test_rows_without_keys,  # noqa: F401
)
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]

# What Hopper's kernel does not take: rows that start anywhere, in copies of 8, 4 and single bytes.
CASES = (
    *OF_HOPPER,
    Float8Case((2, 1), (70, 150), (40, 24), batch=1, style="padded"),
    Float8Case((2, 1), (33, 90), (52, 36), batch=1, style="padded", sinks=True, options=CAUSAL),
    Float8Case(
        (2, 2), (130, 71), (91, 77), batch=1, style="padded", result="float16", alibi=True, options=CAUSAL
    ),
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated GPU whose plans fail instead of falling back."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_120")
    monkeypatch.setattr(families, "FAMILIES", (fp8,))
    memo.forget()
    yield
    memo.forget()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_budget(case: Float8Case, policy: str) -> None:
    with simulator.schedule(policy, seed=3):
        check(case, "e4m3")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("head_dim", "options"), PACKED)
def test_packed(head_dim: int, options: dict[str, Any], policy: str) -> None:
    with simulator.schedule(policy, seed=5):
        check_packed("e4m3", head_dim, **options)


def test_keys_in_use_end_before_the_rows() -> None:
    """What lies behind the keys in use, here NaN, is not read."""
    q, k, v = (aligned((n, 2, 64), E4M3, 0.5) for n in (70, 200, 200))
    k[77:], v[77:] = np.nan, np.nan
    cu = [np.array([0, n], np.int32) for n in (70, 200)]
    o = cupy_flash.attention_varlen(q, k, v, *cu, seqused_k=np.array([77], np.int32))
    assert (o == np.float32(0.5)).all()


@pytest.mark.parametrize("variant", [*fp8.variants(architecture("sm_120"))], ids=lambda v: v.name)
def test_cost_is_the_theory(variant: Any) -> None:
    """Products, exponentials, bytes and matrices are the least possible, without a bank conflict."""
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
    assert cost["global_load_bytes"] >= 2 * rows * d + tiles * keys * (d + dv)
    assert cost["global_store_bytes"] == 2 * 2 * rows * dv + 4 * 2 * rows
    # 8 rows of 16 bytes at a time: K and V once per warp and block of keys, Q once or as often as K.
    warps = variant.threads // 32
    q_reads = 1 if dict(variant.macros)["CF_Q_IN_REGISTERS"] == "1" else keys // n
    assert cost["matrix_loads"] == (tiles * warps * keys * (d + dv) + q_reads * 2 * rows * d) // 128
    assert cost["barriers"] == tiles * variant.threads * (2 * (keys // n) + 1 + (q_reads == 1))
    for what in ("shared_loads", "shared_stores", "matrix_loads", "copy_stores"):
        assert cost[f"{what[:-1]}_cycles"] == cost[what], f"bank conflicts in {what}"


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_120"
from cupy_flash.device import simulator
from tests.simulator import sanitized
from tests.simulator.test_flash_fp8 import CASES, check, check_packed
for policy in SCHEDULES:
    with simulator.schedule(policy):
        check(CASES[1], "e4m3")
        check_packed("e4m3", 128, causal=True, align="bottom_right", **sanitized.PACKED)
check(CASES[9], "e4m3")
check(CASES[-1], "e4m3")
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race; padded and packed."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
