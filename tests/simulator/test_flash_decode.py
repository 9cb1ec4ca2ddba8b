"""flash_append, flash_decode and flash_combine: FP64 parity, hostile tables, cost, race and memory checks."""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from tests.checks import Device
from tests.kv_cases import KvCase, cases, check, check_one_length
from tests.public import cached, explained
from tests.simulator import sanitized

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]

# Every two values of every two features; the schedules take turns.
PAIRS = cases(
    head_dims=((64, 64), (64, 32), (40, 24)),
    rotary=(0, 16, 32),
    queries=(1, 3, 9),
    dtype=("float16", "bfloat16"),
)
POLICIES = ("late", "early", "random")


def on(arch: str, precision: str | None = "tf32x3") -> Any:
    """A simulated GPU, as a context."""
    return mock.patch.dict(os.environ, {"CUPY_FLASH_DRIVER": f"simulator:{arch}"}), Device(
        arch, np, float32_precision=precision
    )


@pytest.mark.parametrize("turn", range(len(PAIRS)), ids=lambda turn: str(PAIRS[turn]))
def test_pairs_of_features(turn: int) -> None:
    environment, device = on("sm_80")
    with environment, simulator.schedule(POLICIES[turn % 3], seed=turn + 1):
        check(PAIRS[turn], device)


# One of every class of code: what is stored, head dim, ring, registers instead of cp.async, three products.
CLASSES = {
    "turing_f16_d64": ("sm_75", KvCase(kind="paged", new=1, rotary=64)),
    "turing_int8_d128": ("sm_75", KvCase(stored="int8", head_dims=(128, 120), splits=2)),
    "turing_e4m3_d256": ("sm_75", KvCase(stored="e4m3", head_dims=(256, 256), kind="paged", page=32)),
    "f16_d128": ("sm_80", KvCase(head_dims=(128, 128), queries=2, causal=True, splits=2)),
    "bf16_d256": ("sm_80", KvCase(dtype="bfloat16", head_dims=(200, 256), kind="paged", alibi="h")),
    "e4m3_d128": ("sm_80", KvCase(dtype="bfloat16", stored="e4m3", head_dims=(128, 128), new=1)),
    "int8_d256": ("sm_80", KvCase(stored="int8", head_dims=(256, 128), softcap=4.0, kind="paged")),
    "tf32x3_d64": ("sm_80", KvCase(dtype="float32", new=1, rotary=32, sinks=True, splits=2)),
    "tf32x3_d128": ("sm_80", KvCase(dtype="float32", head_dims=(100, 128), kind="paged", queries=5)),
    "tf32x3_d256": ("sm_80", KvCase(dtype="float32", head_dims=(256, 256), window=(70, None))),
    "small_memory": ("sm_86", KvCase(head_dims=(128, 128), heads=(32, 2), kind="paged", splits=3)),
    "parts_f16": ("sm_80", KvCase(lengths=(2000, 600, 0), room=2048, heads=(2, 1), sinks=True, splits=3)),
    "parts_tf32x3": (
        "sm_80",
        KvCase(dtype="float32", lengths=(900, 300), room=960, heads=(2, 1), window=(700, 0), splits=4),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    arch, case = CLASSES[name]
    environment, device = on(arch)
    for policy in POLICIES:
        with environment, simulator.schedule(policy):
            check(case, device)


def test_splits_are_planned() -> None:
    """A batch of one with a long cache is cut into parts without being asked; each sequence by its length."""
    case = KvCase(lengths=(2000,), room=2048, heads=(2, 1), kind="paged", page=64)
    environment, device = on("sm_80")
    with environment:
        inputs = case.inputs()
        named = {name: inputs[name] for name in ("cache_seqlens", "block_table")}
        text = cupy_flash.explain(*(inputs[n] for n in ("q", "k_cache", "v_cache")), kv_cache=named)
        assert "splits    4 of 32 steps; 4 thread blocks, 216 at once" in text
        check(case, device)


LIMITS = (-(2**31), -1, 2**31 - 1)


@pytest.mark.parametrize("value", LIMITS)
def test_hostile_tables(value: int) -> None:
    """Lengths and tables of the worst numbers touch nothing outside the cache, and give what is defined."""
    case = KvCase(kind="paged", new=3, rotary=32, causal=True, lengths=(16, 37, 150), splits=2)
    made = case.inputs()
    made["block_table"][0, 1] = made["block_table"][1] = made["block_table"][2, 4] = value
    lengths = {-(2**31): (-(2**31), 37, 150), -1: (16, -1, 2**31 - 1), 2**31 - 1: (16, 37, 2**31 - 1)}
    made["cache_seqlens"] = np.array(lengths[value], np.int32)
    guarded = {name: testing.hostile(made[name], style="aligned") for name in ("k_cache", "v_cache")}
    given = {**made, **{name: g.view for name, g in guarded.items()}}
    expected = testing.reference_with_kv_cache(**made, **case.options())
    environment, _ = on("sm_80")
    with environment:
        o, lse = cached(**given, **case.options(), splits=2, check=False, return_lse=True)
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)
    for name, g in guarded.items():
        g.check_guards()
        wanted = getattr(expected, name).astype(np.float64)
        np.testing.assert_allclose(g.view.astype(np.float64), wanted, atol=2e-3)


def test_one_length_for_all() -> None:
    environment, _ = on("sm_80")
    with environment:
        check_one_length(KvCase(kind="paged", new=3, rotary=32, causal=True, splits=2))


def test_slots_far_apart() -> None:
    """Slots more than 2^31 elements from each other: addresses are 64 bits wide."""
    page, pages, step = 16, 3, 2**31 + 2**7
    try:
        memory = np.zeros(pages * step, np.float16)  # reserved; where nothing lies, never touched
    except MemoryError:
        pytest.skip("this machine does not reserve 12 GiB of memory that nobody touches")
    memory = memory[-memory.ctypes.data % 16 // 2 :]
    rng = np.random.default_rng(0)
    shape, strides = (pages, 1, page, 64), (2 * step, 2 * page * 64, 2 * 64, 2)
    k, v = (np.lib.stride_tricks.as_strided(memory[n * 4096 :], shape, strides) for n in (0, 1))
    for x in (k, v):
        x[...] = rng.standard_normal(shape)
    q = rng.standard_normal((1, 2, 1, 64)).astype(np.float16)
    given = {"cache_seqlens": 48, "block_table": np.array([[2, 0, 1]], np.int32)}
    environment, _ = on("sm_80")
    with environment:
        o = cached(q, k, v, **given)
    near = [np.ascontiguousarray(x) for x in (k, v)]
    expected = testing.reference_with_kv_cache(q, *near, **given)
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=2e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_workspace_of_the_caller(splits: int) -> None:
    """It is used, kept within, and refused with the number of bytes if it is too small."""
    case = KvCase(rotary=32, new=1, splits=splits)
    environment, device = on("sm_80")
    with environment:
        workspace = np.zeros(20000, np.uint8)
        with mock.patch.object(simulator, "empty", side_effect=AssertionError("workspace was allocated")):
            check(case, device, workspace=workspace)
        assert workspace.any()
        with pytest.raises(cupy_flash.InvalidArgumentsError, match=r"has 100 bytes, the call needs \d+ "):
            check(case, device, workspace=np.zeros(100, np.uint8))
        with pytest.raises(cupy_flash.InvalidArgumentsError, match="not contiguous"):
            check(case, device, workspace=np.zeros((200, 200), np.uint8)[:, ::2])


PASSED_BY = {
    "float64": ({"dtype": "float64"}, "not float64"),
    "int8 for float32": ({"dtype": "float32", "stored": "int8"}, "reads int8 for queries of float16"),
    "wide heads": (
        {"dtype": "float32", "head_dims": (264, 64)},
        "keys of head_dim 264 of float16 and bfloat16 like q, not float32",
    ),
    "odd heads": ({"head_dims": (63, 64)}, "16-byte boundaries"),
}


@pytest.mark.parametrize("name", PASSED_BY)
def test_what_it_does_not_take_others_do(name: str) -> None:
    """And the plan names the reason."""
    changes, reason = PASSED_BY[name]
    case = KvCase(**changes)
    environment, device = on("sm_80")
    with environment:
        made = case.inputs()
        names = ("q", "k_cache", "v_cache", "cache_seqlens", "k_scale", "v_scale")
        text = explained({name: made[name] for name in names if name in made})
        assert re.search(rf"^skipped   decode: .*{reason}", text, re.MULTILINE)
        check(case, device)


# ---- cost: tests/golden/costs holds the counts; here what must hold by theory

COSTS = {
    "f16": ("sm_80", KvCase(head_dims=(128, 128), lengths=(1024,), room=1024, heads=(16, 1), splits=1), 2),
    "tf32x3": ("sm_80", KvCase(dtype="float32", lengths=(512,), room=512, heads=(16, 1), splits=1), 4),
    "e4m3": (
        "sm_80",
        KvCase(stored="e4m3", head_dims=(128, 128), lengths=(1024,), room=1024, heads=(16, 1), splits=1),
        1,
    ),
    "paged": (
        "sm_80",
        KvCase(kind="paged", lengths=(1024,), room=1024, heads=(16, 1), splits=1, layout="bshd"),
        2,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost_is_the_theory(name: str) -> None:
    """Each key and value is read once, as it is stored, and nothing meets a bank conflict."""
    arch, case, size = COSTS[name]
    environment, device = on(arch)
    with environment, simulator.costs() as counted:
        check(case, device)
    ((_, cost),) = counted
    (dim, dim_v), keys, rows = case.head_dims, case.lengths[0], 16
    item = 4 if case.dtype == "float32" else 2
    products = 3 if case.dtype == "float32" else 1
    assert cost["mma_flops"] == 2 * rows * keys * (dim + dim_v) * products
    # Beside K and V: Q; the length, and an entry of the table for each step of a warp, read by every lane.
    entries = 4 * 32 * keys // 16 if case.kind == "paged" else 0
    assert cost["global_load_bytes"] == size * keys * (dim + dim_v) + item * rows * dim + 4 * 128 + entries
    for unit, cycles in (
        ("matrix_loads", "matrix_load_cycles"),
        ("shared_loads", "shared_load_cycles"),
        ("shared_stores", "shared_store_cycles"),
        ("copy_stores", "copy_store_cycles"),
    ):
        assert cost[cycles] == cost[unit], f"bank conflicts in {unit}"


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{arch}"
from cupy_flash.device import simulator
from tests.kv_cases import KvCase, check
from tests.checks import Device
from tests.public import cached
hostile = KvCase(kind="paged", new=3, rotary=32, causal=True)
for policy in SCHEDULES:
    with simulator.schedule(policy):
        for value in {hostile}:
            made = hostile.inputs()
            made["block_table"][:, 1:] = value
            made["cache_seqlens"][...] = (value, 40, 160)
            cached(**made, **hostile.options(), splits=2, check=False)
        check(KvCase(kind="paged", new=2, rotary=32, queries=3, causal=True, splits=2), Device("{arch}"))
        check(KvCase(stored="e4m3", lengths=(70, 3), heads=(2, 1), splits=2), Device("{arch}"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_sanitizers_find_nothing(sanitizer: str, arch: str) -> None:
    """No access out of bounds, no undefined behaviour, no race, with and without cp.async."""
    done = sanitized.run(sanitizer, _SANITIZED.format(arch=arch, hostile=sanitized.hostile(sanitizer)))
    assert done.returncode == 0, done.stderr[-3000:]
