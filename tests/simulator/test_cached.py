"""Forward kernels over a KV cache, in place and gathered: FP64 parity, hostile tables, cost, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan.families import decode
from tests import public
from tests.checks import Device
from tests.kv_cases import KvCase, cases, check, check_one_length
from tests.public import cached
from tests.simulator import sanitized

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]

POLICIES = ("late", "early", "random")


@contextmanager
def on(arch: str, without_decode: bool = True) -> Iterator[Device]:
    """A simulated GPU whose plans are this family's, however few the queries."""
    refused = mock.patch.object(decode, "refusals", return_value=["not in this test"])
    memo.forget()
    with mock.patch.dict(os.environ, {"CUPY_FLASH_DRIVER": f"simulator:{arch}"}):
        if without_decode:
            with refused:
                yield Device(arch, np, float32_precision="tf32x3")
        else:
            yield Device(arch, np, float32_precision="tf32x3")
    memo.forget()


# Every two values of every two features; the schedules take turns.
PAIRS = cases(
    head_dims=((64, 64), (64, 32), (40, 24)),
    rotary=(0, 16, 32),
    queries=(1, 9, 70),
    dtype=("float16", "bfloat16"),
    stored=("same",),
    splits=(None,),
)


@pytest.mark.parametrize("turn", range(len(PAIRS)), ids=lambda turn: str(PAIRS[turn]))
def test_pairs_of_features(turn: int) -> None:
    with on("sm_80") as device, simulator.schedule(POLICIES[turn % 3], seed=turn + 1):
        check(PAIRS[turn], device)


# One of every class of code: what computes, what is gathered, and from what.
CLASSES = {
    "hopper": ("sm_90a", KvCase(queries=70, new=70, causal=True, head_dims=(128, 128))),
    "hopper_turned": ("sm_90a", KvCase(queries=9, rotary=32, new=2, head_dims=(72, 64), sinks=True)),
    "hopper_window": ("sm_90a", KvCase(dtype="bfloat16", queries=40, window=(50, 0), softcap=4.0)),
    "flash_paged": ("sm_80", KvCase(kind="paged", queries=70, new=3, causal=True, alibi="bh")),
    "flash_selected": ("sm_80", KvCase(selected=40, queries=2, causal=True, sinks=True)),
    "flash_tf32x3": ("sm_80", KvCase(dtype="float32", kind="indexed", queries=20, rotary=32, new=1)),
    "flash_turing": ("sm_75", KvCase(kind="paged", queries=20, head_dims=(64, 48), sinks=True)),
    "simple_f64": ("sm_61", KvCase(dtype="float64", queries=3, new=2, rotary=16, tables="same", causal=True)),
    "simple_f64_paged": ("sm_80", KvCase(dtype="float64", kind="paged", page=32, window=(70, None))),
    "simple_f64_int8": ("sm_80", KvCase(dtype="float64", stored="int8", scales="bh", new=2)),
    "simple_f64_e4m3": ("sm_70", KvCase(dtype="float64", stored="e4m3", kind="paged", new=2)),
    "simple_wide": ("sm_80", KvCase(head_dims=(264, 64), kind="paged", new=1, rotary=8)),
    "flash_odd": (
        "sm_80",
        KvCase(head_dims=(31, 7), kind="paged", new=2, rotary=6, layout="bshd", last=True, interleaved=True),
    ),
    "flash_f32_int8": ("sm_80", KvCase(dtype="float32", stored="int8", kind="paged", new=1, sinks=True)),
    "flash_f32_e4m3": ("sm_80", KvCase(dtype="float32", stored="e4m3", scales="bh", new=5, alibi="h")),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    arch, case = CLASSES[name]
    for policy in POLICIES:
        with on(arch) as device, simulator.schedule(policy):
            check(case, device)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision_is_the_callers(precision: str) -> None:
    case = KvCase(dtype="float32", kind="paged", queries=2)
    with on("sm_80", without_decode=False):
        check(case, Device("sm_80", np, float32_precision=precision), precision=precision)


def explained(case: KvCase, **own: Any) -> str:
    made = case.inputs()
    names = ("cache_seqlens", "block_table", "cache_batch_idx", "k_scale", "v_scale")
    given = {name: made[name] for name in ("q", "k_cache", "v_cache", *names) if name in made}
    return public.explained({**given, **own}, causal=case.causal)


def test_many_queries_are_planned_here_and_few_are_not() -> None:
    """A prompt over a cache, without being asked."""
    long = {"heads": (16, 16), "lengths": (310,), "room": 320, "causal": True}
    with on("sm_80", without_decode=False) as device:
        for kind, queries in (("contiguous", 300), ("paged", 600)):
            case = KvCase(kind=kind, queries=queries, **long)
            text = explained(case)
            assert "cached    flash kernels over the cache, " in text
            assert "family    cached" in text
        check(KvCase(kind="contiguous", queries=300, **long), device)
        for queries, reason in (
            (1, "decode reads every key once for all 1 rows"),
            (20, "flash over the cache costs"),
        ):
            few = explained(KvCase(kind="paged", queries=queries, **long))
            assert "family    decode" in few
            assert f"skipped   cached: {reason}" in few
        asked = explained(KvCase(kind="paged", queries=400, **long), splits=2)
        assert "skipped   cached: does not split keys, and tuning.splits=2 is asked for" in asked


LIMITS = (-(2**31), -1, 2**31 - 1)


def test_one_length_for_all() -> None:
    with on("sm_80"):
        check_one_length(KvCase(kind="paged", new=3, queries=20, rotary=32, causal=True))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("value", LIMITS)
def test_hostile_lengths_and_tables(value: int, kind: str, arch: str) -> None:
    """Lengths and tables of the worst numbers touch nothing outside the cache, and give what is defined."""
    case = KvCase(kind=kind, new=3, queries=20, rotary=32, causal=True, lengths=(16, 37, 150))
    made = case.inputs()
    if kind == "paged":
        made["block_table"][0, 1] = made["block_table"][1] = made["block_table"][2, 4] = value
    made["cache_seqlens"] = np.array((16, value, 2**31 - 1), np.int32)
    guarded = {name: testing.hostile(made[name], style="aligned") for name in ("k_cache", "v_cache")}
    given = {**made, **{name: g.view for name, g in guarded.items()}}
    expected = testing.reference_with_kv_cache(**made, **case.options())
    with on(arch):
        o, lse = cached(**given, **case.options(), check=False, return_lse=True)
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)
    for name, g in guarded.items():
        g.check_guards()
        wanted = getattr(expected, name).astype(np.float64)
        np.testing.assert_allclose(g.view.astype(np.float64), wanted, atol=2e-3)


# Head dims above 256: what is gathered has a mask of keys, which only the kernels of mma.sync take.
WIDE = {
    "in one piece": ("sm_90a", KvCase(queries=9, causal=True), "flash_forward_wide_sm90"),
    "slots": ("sm_86", KvCase(queries=9, kind="indexed", new=2), "flash_forward_wide"),
    "pages": ("sm_80", KvCase(queries=9, kind="paged", causal=True, window=(40, 3)), "flash_forward_wide"),
    "odd pages": ("sm_90a", KvCase(queries=70, kind="paged", page=7, room=140), "flash_forward_wide"),
    "pages, Turing": ("sm_75", KvCase(queries=40, kind="paged", causal=True), "flash_forward_wide"),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_heads(name: str) -> None:
    arch, case, kernel = WIDE[name]
    case = replace(case, head_dims=(512, 320), heads=(2, 1))
    with on(arch) as device, simulator.costs() as launched:
        for policy in POLICIES:
            with simulator.schedule(policy):
                check(case, device)
    assert sum(name.startswith(f"{kernel}_f16") for name, _ in launched) == len(POLICIES)


def test_what_stands_behind_the_keys_is_not_read() -> None:
    """Rows of a cache that are not in use may hold anything."""
    case = KvCase(queries=20, causal=True, lengths=(0, 37, 90), head_dims=(64, 64))
    for arch, kind in (("sm_80", "contiguous"), ("sm_90a", "contiguous"), ("sm_80", "paged")):
        one = KvCase(**{**case.__dict__, "kind": kind})
        made = one.inputs()
        with on(arch):
            wanted = cached(**made, causal=True)
            for b, length in enumerate(one.lengths):
                for name in ("k_cache", "v_cache"):
                    if kind == "contiguous":
                        made[name][b, :, length:] = np.nan
                        continue
                    for j in range(length, one.room):
                        made[name][made["block_table"][b, j // one.page], :, j % one.page] = np.nan
            found = cached(**made, causal=True)
        np.testing.assert_array_equal(found, wanted)


def test_workspace_of_the_caller() -> None:
    """It is used, and refused with the number of bytes if it is too small."""
    case = KvCase(kind="paged", rotary=32, new=1, queries=20)
    with on("sm_80") as device:
        workspace = np.zeros(400_000, np.uint8)
        with mock.patch.object(simulator, "empty", side_effect=AssertionError("workspace was allocated")):
            check(case, device, workspace=workspace)
        assert workspace.any()
        with pytest.raises(cupy_flash.InvalidArgumentsError, match=r"has 100 bytes, the call needs \d+ "):
            check(case, device, workspace=np.zeros(100, np.uint8))


REFUSED = {
    "int8 for float16": (
        {"stored": "int8", "head_dims": (520, 64)},
        "keys of int8 times their scale are not exact",
    ),
    "wide heads": ({"head_dims": (584, 64)}, "forward: above 576"),
    "split": ({"dtype": "float64", "splits": 2}, "does not split keys, and tuning.splits=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_their_reason(name: str) -> None:
    changes, reason = REFUSED[name]
    case = KvCase(**changes)
    with on("sm_80", without_decode=False), pytest.raises(cupy_flash.UnsupportedError, match=reason):
        cached(**case.inputs(), splits=case.splits)


def test_gathering_moves_every_key_once() -> None:
    """What flash_gather reads and writes: the keys in use, the length, an entry of the table for each key."""
    case = KvCase(kind="paged", lengths=(100,), room=160, heads=(2, 2), queries=20, head_dims=(64, 64))
    with on("sm_80") as device, simulator.costs() as counted:
        check(case, device)
    (gather,) = (cost for name, cost in counted if name.startswith("flash_gather"))
    rows = 100 * 2
    assert gather["global_store_bytes"] == rows * (64 + 64) * 2
    # Every lane reads the length of its warp's sequence, then its entry.
    assert gather["global_load_bytes"] == rows * (64 + 64) * 2 + 4 * 32 * (160 * 2 + rows)


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_80"
from unittest import mock
from cupy_flash.device import simulator
from cupy_flash.plan.families import decode
from tests.kv_cases import KvCase, check
from tests.checks import Device
from tests.public import cached
decode.refusals = lambda problem, arch: ["not in this test"]
hostile = KvCase(kind="paged", new=3, rotary=32, causal=True, queries=9)
device = Device("sm_80", float32_precision="tf32x3")
with simulator.schedule("late"):
    for value in (-2**31, 2**31 - 1):
        made = hostile.inputs()
        made["block_table"][:, 1:] = value
        made["cache_seqlens"][...] = (value, 40, 160)
        cached(**made, **hostile.options(), check=False)
with simulator.schedule("early"):
    check(KvCase(kind="paged", new=2, rotary=32, queries=20, causal=True, lengths=(40, 3)), device)
    check(KvCase(dtype="float64", stored="e4m3", lengths=(70, 3), heads=(2, 1), new=1), device)
    check(KvCase(dtype="float32", stored="int8", lengths=(70, 3), heads=(2, 1), new=1), device)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
