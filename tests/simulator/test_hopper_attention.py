"""The public API on Hopper's own kernels, simulated, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import choose, families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import hopper
from tests import kv_cases
from tests.cases import Case, feature_cases
from tests.checks import Device, check_forward
from tests.kv_cases import KvCase
from tests.simulator import sanitized
from tests.simulator.forward_cases import (
    FEW_LENGTHS,
    GROUPS,
    LENGTHS,
    PLAIN,
    POLICIES,
    TAKEN,
    check_key_that_is_not_a_number,
    check_large_scores,
    check_masked_keys,
    check_packed,
    check_rows_without_keys,
    numbered,
    small_gpu,
    under,
)
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]

DTYPES = {"dtype": ("float16", "bfloat16")}
HEAD_DIMS = ((64, 64), (40, 24), (96, 96), (128, 72))
FEATURES = feature_cases(LENGTHS, HEAD_DIMS, **TAKEN, **DTYPES)
PLAIN_FEATURES = feature_cases(LENGTHS, HEAD_DIMS, **TAKEN, **DTYPES, **PLAIN)
OF_GROUPS = {**TAKEN, **DTYPES, "heads": GROUPS}
GROUPED = feature_cases(FEW_LENGTHS, HEAD_DIMS, **OF_GROUPS)
PLAIN_GROUPED = feature_cases(FEW_LENGTHS, HEAD_DIMS, **OF_GROUPS, **PLAIN)
# Every class, and head dims between: the rest comes as zeros.
WIDE = tuple(
    Case(
        lengths=(130, 280), heads=(2, 1), batch=1, causal=True, align="bottom_right", style="aligned", **case
    )
    for case in (
        {"dtype": "float16", "head_dims": (192, 128)},
        {"dtype": "bfloat16", "head_dims": (136, 128)},
        {"dtype": "bfloat16", "head_dims": (192, 192), "softcap": 4.0},
        {"dtype": "float16", "head_dims": (160, 152)},
        {"dtype": "float16", "head_dims": (256, 256)},
        {"dtype": "bfloat16", "head_dims": (200, 248), "alibi": "h"},
    )
)
ALL_FAMILIES = families.FAMILIES


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield from small_gpu(monkeypatch, "sm_90a", hopper)


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=[str(case) for case in FEATURES])
def test_features(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=False)
    with under(number):
        check_forward(FEATURES[number], device)


@pytest.mark.parametrize("number", range(len(PLAIN_FEATURES)), ids=[str(case) for case in PLAIN_FEATURES])
def test_plain_features(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=False)
    with under(number):
        check_forward(PLAIN_FEATURES[number], device)


@pytest.mark.parametrize("number", range(len(GROUPED)), ids=[str(case) for case in GROUPED])
def test_grouped_features(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=True)
    with under(number):
        check_forward(GROUPED[number], device)


@pytest.mark.parametrize("number", range(len(PLAIN_GROUPED)), ids=[str(case) for case in PLAIN_GROUPED])
def test_plain_grouped_features(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=True)
    with under(number):
        check_forward(PLAIN_GROUPED[number], device)


# Tiles whose last blocks of keys some of their warpgroups do not see: bands, ends, groups and classes.
UNSEEN = {
    "causal": {"lengths": (400, 400), "causal": True, "align": "top_left"},
    "more_keys": {"lengths": (300, 420), "causal": True, "align": "bottom_right"},
    "fewer_keys": {"lengths": (420, 300), "causal": True, "align": "bottom_right"},
    "no_key_at_first": {"lengths": (200, 300), "causal": True, "align": -70},
    "no_query_at_last": {"lengths": (130, 600)},
    "window": {"lengths": (400, 400), "window": (100, 20), "align": "top_left"},
    "window_behind": {"lengths": (400, 500), "window": (200, 0), "align": -70},
    "any": {"lengths": (300, 330), "causal": True, "align": "bottom_right", "softcap": 3.0, "alibi": "h"},
    "sinks": {"lengths": (257, 300), "causal": True, "align": "top_left", "sinks": True, "heads": (2, 1)},
    "group": {"lengths": (150, 400), "causal": True, "align": 190, "heads": (4, 1)},
    "bf16": {"lengths": (193, 385), "causal": True, "align": "top_left", "dtype": "bfloat16"},
    "96": {"lengths": (300, 400), "head_dims": (96, 96), "causal": True, "align": 30},
    "128": {"lengths": (300, 300), "head_dims": (128, 128), "causal": True, "align": "top_left"},
    "192/128": {"lengths": (200, 330), "head_dims": (192, 128), "causal": True, "align": 60},
    "256": {"lengths": (200, 250), "head_dims": (256, 256), "causal": True, "align": "top_left"},
    "256_idle": {"lengths": (60, 500), "head_dims": (256, 256)},
}
UNSEEN_CASES = {
    name: Case(
        **{"dtype": "float16", "batch": 1, "heads": (1, 1), "head_dims": (64, 64), "style": "aligned", **case}
    )
    for name, case in UNSEEN.items()
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", UNSEEN_CASES)
def test_unseen_blocks(name: str, policy: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=name == "group")
    with simulator.schedule(policy, seed=7):
        check_forward(UNSEEN_CASES[name], device)


@pytest.mark.parametrize("policy", POLICIES)
def test_unseen_blocks_of_a_cache(policy: str, monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Keys end inside a block, whose rest all warpgroups clear, also those that pass it over."""
    monkeypatch.setattr(families, "FAMILIES", ALL_FAMILIES)
    case = KvCase(
        queries=190, room=512, lengths=(200, 130, 290), heads=(1, 1), head_dims=(64, 64), causal=True
    )
    with simulator.schedule(policy, seed=1), simulator.costs() as counted:
        kv_cases.check(case, device)
    assert hopper._forward("f16", (64, 64), "band").name in dict(counted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_heads(case: Case, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_forward(case, device)


@pytest.mark.parametrize("keys", [300, 60])
@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}], ids=["alike", "banded"])
def test_blocks_take_several_tiles(options: dict[str, Any], keys: int) -> None:
    """Dealt out where all are the same work, else from a counter; keys of the next one come early.

    Three and more tiles each, so that stages of Q are used again; with one block of keys nothing but O keeps
    the producer from it.
    """
    case = Case(
        dtype="float16",
        batch=1,
        heads=(8, 2),
        lengths=(200, keys),
        head_dims=(64, 64),
        style="aligned",
        **options,
    )
    q, k, v = (case.inputs()[name] for name in "qkv")
    chosen = choose.choose(choose.Problem("forward", "float16", None, 1, 8, 2, 200, keys, 64, 64, 0.125,
                                      right=0 if options else None), "sm_90a", 3)  # fmt: skip
    assert chosen.launches[0].grid == (3, 1, 1)
    assert chosen.launches[0].head_bits == 2, "800 rows of four heads are 5 tiles, four times 200 are 8"
    assert chosen.zeroed == (("next_tile",) if options else ())
    views = [testing.hostile(x, style="aligned").view for x in (q, k, v)]
    o, lse = cupy_flash.attention(*views, return_lse=True, **options)
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, **options)


PACKED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("float16", 128, {"causal": True, "align": "bottom_right"}),
    ("float16", 64, {"causal": True, "align": "bottom_right"}),
    ("float16", 256, {"causal": True, "align": "top_left"}),
    ("bfloat16", 64, {}),
    ("bfloat16", 64, {"window": (60, 10), "align": "top_left", "softcap": 9.0}),
)


@pytest.mark.parametrize("grouped", [False, True], ids=["by_head", "grouped"])
@pytest.mark.parametrize(("dtype", "head_dim", "options"), PACKED)
def test_packed(
    dtype: str, head_dim: int, options: dict[str, Any], grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(monkeypatch, grouped=grouped)
    check_packed(dtype, head_dim, **options)


@pytest.mark.parametrize("policy", ["early", "random"])
@pytest.mark.parametrize("grouped", [False, True], ids=["by_head", "grouped"])
@pytest.mark.parametrize(("dtype", "head_dim", "options"), PACKED)
def test_packed_on_schedules(
    dtype: str,
    head_dim: int,
    options: dict[str, Any],
    grouped: bool,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbered(monkeypatch, grouped=grouped)
    with simulator.schedule(policy, seed=5):
        check_packed(dtype, head_dim, **options)


def test_masked_keys_may_hold_anything() -> None:
    check_masked_keys(lengths=(70, 300), head_dims=(64, 64))


@pytest.mark.parametrize("key", [0, 8])
def test_a_key_that_is_not_a_number(key: int) -> None:
    for options in ({}, {"softcap": 5.0}):
        check_key_that_is_not_a_number(key, 300, 64, **options)


def test_a_scale_next_to_nothing() -> None:
    """All scores are 0 then, and every first one is a maximum all the same."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, 1, 200, 64)).astype(np.float16) for n in range(3))
    q, k, v = (testing.hostile(x, style="aligned").view for x in (q, k, v))
    o, lse = cupy_flash.attention(q, k, v, scale=1e-42, return_lse=True)
    np.testing.assert_allclose(o, np.broadcast_to(v.astype(float).mean(2, keepdims=True), o.shape), atol=1e-3)
    np.testing.assert_allclose(lse, np.log(200), rtol=1e-6)


def test_rows_without_keys() -> None:
    check_rows_without_keys("float16", 64)


def test_large_scores() -> None:
    check_large_scores(400, 64, 50)


# bf16 is the same code but for the element.
F16 = [
    v for v in hopper.variants(architecture("sm_90")) if v.kernel == "flash_forward_sm90" and v.dtype == "f16"
]


def test_a_group_reads_its_keys_once() -> None:
    """24 queries of 8 heads fill one tile; and its O leaves without a bank conflict too."""
    q, k, v = (aligned((1, heads, n, 64), np.float16, 0.5) for heads, n in ((8, 24), (1, 256), (1, 256)))
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, out=aligned(q.shape, np.float16), return_lse=True)
    ((_, cost),) = counted
    assert cost["bulk_load_bytes"] == 2 * 64 * (192 + 2 * 256)
    assert cost["bulk_store_bytes"] == 2 * 64 * 192
    assert cost["matrix_store_cycles"] == cost["matrix_stores"]


@pytest.mark.parametrize("variant", F16, ids=lambda v: v.name)
def test_cost_is_the_theory(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, exponentials and bytes are the least possible; nothing meets a bank conflict."""
    numbered(monkeypatch, grouped=False)
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    rows, keys = 2 * m, 3 * n
    shapes = ((1, 2, rows, d), (1, 1, keys, d), (1, 1, keys, dv))
    q, k, v = (aligned(shape, np.float16, 0.5) for shape in shapes)
    out = aligned((1, 2, rows, dv), np.float16)
    options: dict[str, Any] = {"softcap": 3.0} if variant.mask == "any" else {}
    if variant.mask == "spans":
        options["mask"] = cupy_flash.Spans(np.full((1, keys, 2), (0, rows), np.int32))
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, out=out, return_lse=True, **options)
    *before, (name, cost) = counted
    assert [other.split("_f16_")[0] for other, _ in before] == ["flash_reach"] * (variant.mask == "spans")
    assert name == variant.name
    pairs, tiles = 2 * rows * keys, 4
    assert cost["mma_flops"] == 2 * pairs * (d + dv)
    if variant.mask != "any":
        # One per pair; per row and lane of the quad one at first, two at last.
        assert cost["exps"] == pairs + 4 * 3 * 2 * rows
    assert cost["bulk_load_bytes"] == 2 * (2 * rows * d + tiles * keys * (d + dv))
    assert cost["bulk_store_bytes"] == 2 * 2 * rows * dv
    assert cost["global_store_bytes"] == 4 * 2 * rows
    assert cost["matrix_stores"] == 2 * rows * dv // 64
    for what in ("shared_loads", "shared_stores", "matrix_stores"):
        assert cost[f"{what[:-1]}_cycles"] == cost[what], f"bank conflicts in {what}"


@pytest.mark.parametrize("variant", [v for v in F16 if v.mask == "band"], ids=lambda v: v.name)
def test_unseen_blocks_are_not_multiplied(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a causal tile a warpgroup multiplies the blocks up to its last key, and one where it sees none."""
    numbered(monkeypatch, grouped=False)
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    length = 3 * m - 70  # the last warpgroup has no query
    q, k, v = (aligned((1, 1, length, width), np.float16, 0.5) for width in (d, d, dv))
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, causal=True, align="top_left")
    ((name, cost),) = counted
    assert name == variant.name
    read = multiplied = 0
    for tile in range(0, length, m):
        blocks = -(-min(tile + m, length) // n)
        read += blocks
        for first in range(tile, tile + m, 64):
            multiplied += -(-min(first + 64, length) // n) if first < length else 1
    assert multiplied < m // 64 * read
    assert cost["mma_flops"] == 2 * 64 * n * (d + dv) * multiplied
    assert cost["bulk_load_bytes"] == 2 * (3 * m * d + read * n * (d + dv))


# ---------------------------------------------------------------------- what it leaves to others


def refused(**changes: Any) -> str:
    """Why the family passes a call on, which must be answered all the same."""
    shape = changes.pop("shape", (1, 2, 64, 64))
    q, k, v = (changes.pop(name, aligned(shape, np.float16, 0.5)) for name in "qkv")
    families.FAMILIES, alone = ALL_FAMILIES, families.FAMILIES
    memo.forget()
    try:
        text = cupy_flash.explain(q, k, v, **changes)
        assert np.isfinite(cupy_flash.attention(q, k, v, **changes)).all()
    finally:
        families.FAMILIES = alone
    found = [line.partition("hopper: ")[2] for line in text.splitlines() if "hopper: " in line]
    assert found, text
    return "; ".join(found)


def test_refusals() -> None:
    x = aligned((1, 2, 64, 64), np.float16, 0.5)
    off = aligned((1, 2, 64, 65), np.float16, 0.5)[..., 1:]
    one_head = np.broadcast_to(aligned((1, 1, 64, 64), np.float16, 0.5), x.shape)
    for changes, reason in (
        ({"mask": np.ones((64, 64), bool)}, "its inner loop has no mask"),
        ({"bias": np.zeros(64, np.float16), "dropout": 0.1, "seed": 1}, "no bias or dropout"),
        ({"q": off}, "16-byte boundaries"),
        ({"k": one_head}, "broadcast axis"),
        ({"v": x[:, ::-1]}, "strides above 0"),
        ({"shape": (1, 1, 8, 512), "softcap": 3.0}, "head_dim 512, above 256, has no softcap"),
        ({name: aligned((1, 1, 8, 64), np.float64, 0.5) for name in "qkv"}, "not float64"),
    ):
        assert reason in refused(**changes)


def test_a_higher_minor_is_not_this_gpu() -> None:
    problem = choose.Problem("forward", "float16", None, 1, 1, 1, 64, 64, 64, 64, 0.125)
    assert not hopper.refusals(problem, architecture("sm_90"))
    assert hopper.refusals(problem, architecture("sm_91")) == ["its code runs on sm_90 only, not on sm_91"]


# ---------------------------------------------------------------------- sanitizers

_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_90a"
from cupy_flash.device import simulator
from tests.simulator import sanitized
from tests.simulator.test_hopper_attention import (
    WIDE, Device, check_forward, check_packed, np, numbered, pytest)
for policy, grouped in (("late", False), ("early", True)):
    with simulator.schedule(policy), pytest.MonkeyPatch.context() as monkeypatch:
        numbered(monkeypatch, grouped=grouped)
        check_forward(WIDE[0], Device("sm_90a", np))
        check_packed("float16", 64, causal=True, align="bottom_right", **sanitized.PACKED)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race; padded and packed."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
