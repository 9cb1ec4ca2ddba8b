"""flash_decode_in_order: FP64 parity, the bits of the prompts' kernel, hostile tables, cost, races."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan.families import decode, flash
from tests.checks import Device
from tests.kv_cases import KvCase, check
from tests.public import cached, explained
from tests.simulator import sanitized

pytestmark = [pytest.mark.simulator]

SAME: dict[str, Any] = {"reproducible": "batch", "return_lse": True}
# One of every class of code: dtype, blocks of 64, 32 or 16 keys, registers instead of cp.async; and what
# scores meet.
ROOM: dict[str, Any] = {"room": 704, "lengths": (0, 137, 704)}
CLASSES = {
    "f16_d64": ("sm_80", KvCase(kind="paged", new=2, rotary=32, queries=3, causal=True, **ROOM)),
    "d64_window": ("sm_80", KvCase(window=(90, 0), room=704, lengths=(704, 600, 30))),
    "f16_d128": ("sm_80", KvCase(head_dims=(128, 120), sinks=True, softcap=4.0, kind="indexed", **ROOM)),
    "bf16_d256": ("sm_86", KvCase(dtype="bfloat16", head_dims=(200, 256), alibi="h", layout="bshd", **ROOM)),
    "turing_d64": ("sm_75", KvCase(head_dims=(64, 40), kind="paged", alibi="bh", sinks=True, **ROOM)),
    "turing_d128": ("sm_75", KvCase(head_dims=(128, 128), window=(70, 0), queries=2, new=1, **ROOM)),
    "tf32x3_d64": ("sm_80", KvCase(dtype="float32", kind="paged", window=(70, 0), queries=3, **ROOM)),
    "tf32x3_d256": ("sm_86", KvCase(dtype="float32", head_dims=(256, 200), kind="paged", **ROOM)),
    "two tiles": ("sm_80", KvCase(heads=(9, 1), queries=3, causal=True, kind="paged", page=32, **ROOM)),
}
QUICK = ("f16_d64",)
SOME = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CLASSES]


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 512 keys, by which kernels are compiled and planned alike."""
    monkeypatch.setattr(flash, "CHUNK_KEYS", 512)
    memo.forget()
    yield
    memo.forget()


def on(arch: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    return Device(arch, np, float32_precision=None)


def by_prompts() -> Any:
    """The prompts' kernel over the cache instead, as a context."""
    return mock.patch.object(decode, "refusals", return_value=["not in this test"])


def both_ways(case: KvCase, inputs: dict[str, np.ndarray], **options: Any) -> None:
    """The bits of o and of lse are those of the prompts' kernel."""
    made = []
    for context in (mock.patch.object(decode, "append", decode.append), by_prompts()):
        with context:
            memo.forget()
            given = {name: x.copy() for name, x in inputs.items()}
            made.append(cached(**given, **case.options(), **SAME, **options))
    memo.forget()
    for actual, expected in zip(*made, strict=True):
        assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("short_chunks")
def test_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences that are empty, full, and in part there; chunks are different blocks'."""
    arch, case = CLASSES[name]
    device = on(arch, monkeypatch)
    for policy in ("late", "early", "random"):
        with simulator.schedule(policy):
            check(case, device, reproducible="batch")
    made = case.inputs()
    names = ("q", "k_cache", "v_cache", "cache_seqlens", "block_table", "cache_batch_idx", "k", "v")
    asked = {name: made[name] for name in names if name in made}
    text = explained(asked, layout=case.layout, reproducible="batch")
    assert "kernel    flash_decode_in_order" in text
    assert "in the order of prompts" in text
    assert "2 of 512 keys, one per thread block" in text


@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("short_chunks")
def test_the_bits_of_the_prompts_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, case = CLASSES[name]
    on(arch, monkeypatch)
    both_ways(case, case.inputs())


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
@pytest.mark.usefixtures("short_chunks")
def test_hostile_tables(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that lie nowhere, whole blocks of keys and parts of one; lengths of the worst numbers."""
    on("sm_80", monkeypatch)
    case = KvCase(kind="paged", lengths=(16, 37, 150), queries=2, causal=True)
    made = case.inputs()
    made["block_table"][0, 1] = made["block_table"][1] = made["block_table"][2, 4:6] = value
    made["cache_seqlens"] = np.array([16, value, 150], np.int32)
    both_ways(case, made, check=False)
    guarded = {name: testing.hostile(made[name], style="aligned") for name in ("k_cache", "v_cache")}
    given = {**made, **{name: g.view for name, g in guarded.items()}}
    o, _ = cached(**given, **case.options(), **SAME, check=False)
    expected = testing.reference_with_kv_cache(**made, **case.options())
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3)


@pytest.mark.usefixtures("short_chunks")
def test_1_to_64_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in so many blocks, by the room of a cache; a row of a prompt, of one block, has the same bits."""
    on("sm_80", monkeypatch)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 1, 64 * 512, 64), np.float32).astype(np.float16)
    q = rng.standard_normal((1, 2, 1, 64)).astype(np.float16)
    for used, parts in ((60, (1, 2, 3, 64)), (530, (3, 7, 33)), (4096, (8, 64))):
        with by_prompts(), monkeypatch.context() as within:
            within.setattr(flash, "MOST_PARTS_BYTES", 0)
            memo.forget()
            row = cupy_flash.attention(q, k[:, :, :used], v[:, :, :used], **SAME)
        memo.forget()
        for n in parts:
            room = k[:, :, : 512 * n], v[:, :, : 512 * n]
            asked = {"cache_seqlens": used}
            text = cupy_flash.explain(q, *room, kv_cache=asked, arch="sm_80", reproducible="batch")
            assert n == 1 or f"chunks    {n} of 512 keys, one per thread block" in text
            made = cached(q, *room, **asked, **SAME)
            for actual, expected in zip(made, row, strict=True):
                assert actual.tobytes() == expected.tobytes(), f"{used} keys in {n} parts"


def test_what_prompts_add_in_other_blocks_is_theirs() -> None:
    """Classes of head dims whose prompts have more keys in a block than decode has."""
    for arch, dtype, head_dim, keys in (
        ("sm_75", np.float16, 192, (16, 32)),
        ("sm_100", np.float32, 192, (16, 32)),
    ):
        q, cache = np.zeros((1, 2, 1, head_dim), dtype), np.zeros((1, 2, 64, head_dim), dtype)
        asked = {"kv_cache": {"cache_seqlens": 64}, "arch": arch, "reproducible": "batch"}
        text = cupy_flash.explain(q, cache, cache, **asked)
        assert (
            "skipped   decode: sums over {} keys at once, a prompt with these head dims over {}".format(*keys)
            in text
        )
        assert "kernel    flash_forward" in text
        widest = np.zeros((1, 2, 64, 256), dtype)
        assert "flash_decode_in_order" in cupy_flash.explain(widest[:, :, :1], widest, widest, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_cost_is_the_theory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are read once, where they lie, for all heads of a group; without bank conflicts."""
    device = on("sm_80", monkeypatch)
    case = KvCase(head_dims=(128, 128), lengths=(512,), room=512, heads=(16, 1), kind=kind)
    with simulator.costs() as counted:
        check(case, device, reproducible="batch")
    ((_, cost),) = counted
    assert cost["mma_flops"] == 2 * 16 * 512 * 256
    # Beside K and V: Q; the length, and an entry of the table for each 16 keys, read by every lane.
    entries = 4 * 32 * 512 // 16 if kind == "paged" else 0
    assert cost["global_load_bytes"] == 2 * 512 * 256 + 2 * 16 * 128 + 4 * 128 + entries
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
from cupy_flash.plan.families import flash
from tests.kv_cases import KvCase, check
from tests.checks import Device
from tests.public import cached
flash.CHUNK_KEYS = 128
hostile = KvCase(kind="paged", new=3, rotary=32, causal=True)
for policy in SCHEDULES:
    with simulator.schedule(policy):
        for value in (-2**31, 2**31 - 1):
            made = hostile.inputs()
            made["block_table"][:, 1:] = value
            made["cache_seqlens"][...] = (value, 40, 160)
            cached(**made, **hostile.options(), reproducible="batch", check=False)
        case = KvCase(kind="paged", new=2, rotary=32, queries=3, causal=True)
        check(case, Device("{arch}"), reproducible="batch")
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_sanitizers_find_nothing(sanitizer: str, arch: str) -> None:
    """No access out of bounds, no undefined behaviour, no race, with and without cp.async."""
    done = sanitized.run(sanitizer, _SANITIZED.format(arch=arch))
    assert done.returncode == 0, done.stderr[-3000:]
