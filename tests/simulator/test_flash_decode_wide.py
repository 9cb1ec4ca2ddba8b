"""flash_decode_wide over keys and values: FP64 parity, hostile tables, drafts, cost, races, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import spans, testing
from cupy_flash.device import simulator
from tests.cpu.test_drafts import COUNT, PARENTS, ancestors, as_mask
from tests.kv_cases import KvCase, check
from tests.public import cached
from tests.simulator import sanitized
from tests.simulator.test_drafts import held, made
from tests.simulator.test_flash_decode import LIMITS, POLICIES, on

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]


def wide(**features: Any) -> KvCase:
    return KvCase(**{"head_dims": (512, 512), "heads": (8, 1), **features})


# Every tile; what is stored; kinds of caches, of scores and of rows; head dims; parts.
CASES = {
    "few": ("sm_86", wide()),
    "few_alone": ("sm_80", wide(dtype="bfloat16", causal=True, queries=2, heads=(8, 1))),
    "few_twice": ("sm_90", wide(kind="paged", new=3, sinks=True, heads=(16, 2), rotary=64)),
    "more": ("sm_86", wide(kind="paged", page=32, queries=4, causal=True, new=4)),
    "many": ("sm_80", wide(dtype="bfloat16", queries=5, causal=True, softcap=4.0, alibi="h")),
    "two_tiles": ("sm_90", wide(queries=12, causal=True, kind="indexed", window=(70, None), sinks=True)),
    "each_its_head": ("sm_120", wide(heads=(3, 3), new=1, layout="bshd", scale=-0.05)),
    "pages_of_one": ("sm_86", wide(kind="paged", page=1, lengths=(0, 37), room=40)),
    "odd_pages": ("sm_86", wide(kind="paged", page=7, lengths=(0, 37, 140), room=140, new=1)),
    "d384": ("sm_80", wide(head_dims=(384, 384), kind="paged", new=1)),
    "d264_v40": ("sm_86", wide(head_dims=(264, 40), dtype="bfloat16")),
    "d64_v320": ("sm_90", wide(head_dims=(64, 320), queries=5, causal=True)),
    "d300_v300": ("sm_86", wide(head_dims=(304, 300), heads=(5, 1))),
    "narrow_latents": ("sm_86", wide(latent=True, head_dims=(512, 448), new=1)),
    "parts": ("sm_80", wide(lengths=(420, 150, 0), room=448, sinks=True, splits=3, dtype="bfloat16")),
    "parts_few": ("sm_86", wide(lengths=(500, 300), room=512, kind="paged", window=(400, 0), splits=3)),
    "parts_many": ("sm_90", wide(lengths=(700, 300), room=704, queries=5, causal=True, splits=2)),
    "int8": ("sm_86", wide(stored="int8", kind="paged", new=2, scales="bh")),
    "int8_more": ("sm_86", wide(stored="int8", queries=3, causal=True, dtype="bfloat16")),
    "int8_many": ("sm_90", wide(stored="int8", queries=5, causal=True, head_dims=(400, 272), splits=2)),
    "e4m3": ("sm_80", wide(stored="e4m3", new=1, sinks=True, kind="indexed")),
    "e4m3_twice": ("sm_90", wide(stored="e4m3", dtype="bfloat16", kind="paged", page=7, room=140)),
    "e4m3_many": ("sm_80", wide(stored="e4m3", dtype="bfloat16", queries=9, causal=True, heads=(16, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    arch, case = CASES[name]
    environment, device = on(arch)
    for seed, policy in enumerate(POLICIES):
        with environment, simulator.schedule(policy, seed=seed):
            check(case, device)


@pytest.mark.parametrize("stored", ["same", "e4m3"])
@pytest.mark.parametrize("value", LIMITS)
def test_hostile_tables(value: int, stored: str) -> None:
    """The worst numbers touch nothing outside the cache; keys that lie nowhere are hidden."""
    case = wide(kind="paged", new=3, causal=True, lengths=(16, 37, 150), splits=2, stored=stored)
    given = case.inputs()
    given["block_table"][0, 1] = given["block_table"][1] = given["block_table"][2, 4] = value
    lengths = {-(2**31): (-(2**31), 37, 150), -1: (16, -1, 2**31 - 1), 2**31 - 1: (16, 37, 2**31 - 1)}
    given["cache_seqlens"] = np.array(lengths[value], np.int32)
    expected = testing.reference_with_kv_cache(**given, **case.options())
    guarded = {name: testing.hostile(given[name], style="aligned") for name in ("k_cache", "v_cache")}
    views = {**given, **{name: g.view for name, g in guarded.items()}}
    environment, _ = on("sm_86")
    with environment:
        o, lse = cached(**views, **case.options(), splits=2, check=False, return_lse=True)
    # why: values of e4m3 are times scales of up to 2.
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3 if stored == "same" else 1e-2)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)
    for g in guarded.values():
        g.check_guards()


DRAFTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "few": ("sm_86", {"heads": (2, 1), "kind": "paged"}, {}),
    "many, splits": ("sm_80", {"heads": (8, 1), "dtype": "bfloat16"}, {"splits": 2}),
    "8 bits": ("sm_90", {"heads": (4, 1), "stored": "int8"}, {}),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_trees_of_drafts(name: str) -> None:
    """As a mask over the cache."""
    arch, kinds, options = DRAFTS[name]
    given, lengths = made(head_dims=(512, 320), **kinds)
    held(arch, given, spans.tree(PARENTS), as_mask(ancestors()[None], lengths, 160), **options)
    assert given["q"].shape[2] == COUNT


@pytest.mark.parametrize(
    ("arch", "case", "kernel"),
    [
        ("sm_86", wide(), "flash_decode_wide_f16_d512_any_16x16"),
        ("sm_80", wide(), "flash_decode_wide_f16_d512_any_16x32"),
        ("sm_89", wide(queries=4), "flash_decode_wide_f16_d512_any_32x16"),
        ("sm_100", wide(queries=5, dtype="bfloat16"), "flash_decode_wide_bf16_d512_any_64x16"),
        ("sm_120", wide(stored="e4m3", kind="paged"), "flash_decode_wide_e4m3_f16_d512_any_16x16"),
        ("sm_90", wide(queries=64, heads=(32, 4), kind="paged"), "flash_decode_wide_f16_d512_any_64x16"),
        ("sm_86", wide(queries=160, heads=(32, 4)), "flash_forward_wide_f16_d512_band_64x64"),
        ("sm_75", wide(), "flash_forward_wide_f16_d512_band_32x64"),
        ("sm_75", wide(kind="paged"), "flash_forward_wide_f16_d512_band_32x64"),
    ],
)
def test_which_kernel(arch: str, case: KvCase, kernel: str) -> None:
    given = case.inputs()
    options = {"causal": True, "kv_cache": {}}
    for name in ("cache_seqlens", "block_table"):
        if name in given:
            options["kv_cache"][name] = given[name]
    caches = [given["k_cache"], given["v_cache"]]
    if case.stored != "same":
        codes = [x.view(np.int8 if case.stored == "int8" else np.uint8) for x in caches]
        caches = [cupy_flash.QuantizedCache(x, given[f"{n}_scale"]) for x, n in zip(codes, "kv", strict=True)]
    plan = cupy_flash.explain(given["q"], *caches, arch=arch, **options)
    assert f"kernel    {kernel}\n" in plan


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "turing": ("sm_75", {"stored": "int8"}, {}, "keys of head_dim 512 need the asynchronous copies of sm_80"),
    "wider": ("sm_80", {"head_dims": (520, 512), "stored": "int8"}, {}, "head_dim 520 is above 512"),
    "float32": ("sm_80", {"dtype": "float32"}, {"splits": 2}, "of float16 and bfloat16 like q, not float32"),
    "bits": ("sm_80", {"stored": "e4m3"}, {"reproducible": "batch"}, "in another order than a prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take(name: str) -> None:
    arch, changes, options, reason = REFUSED[name]
    environment, _ = on(arch)
    with environment, pytest.raises(cupy_flash.UnsupportedError, match=reason):
        cached(**wide(**changes).inputs(), **options)


@pytest.mark.parametrize(("stored", "size"), [("same", 2), ("int8", 1)])
def test_cost_is_the_theory(stored: str, size: int) -> None:
    """Each key and value is read once, and nothing meets a bank conflict."""
    case = wide(heads=(16, 1), lengths=(1024,), room=1024, splits=1, stored=stored)
    environment, device = on("sm_86")
    with environment, simulator.costs() as counted:
        check(case, device)
    ((_, cost),) = counted
    assert cost["mma_flops"] == 2 * 16 * 1024 * 1024
    # Beside the cache: Q; and the length, read by every thread.
    assert cost["global_load_bytes"] == size * 1024 * 1024 + 2 * 16 * 512 + 4 * 256
    for unit, cycles in (
        ("matrix_loads", "matrix_load_cycles"),
        ("copy_stores", "copy_store_cycles"),
    ):
        assert cost[cycles] == cost[unit], f"bank conflicts in {unit}"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("sm_86", ("few", "more", "odd_pages", "d300_v300", "int8")),
        ("sm_80", ("few_alone", "many", "parts", "e4m3", "e4m3_many")),
    ],
)
def test_sanitizers_find_nothing(sanitizer: str, arch: str, names: tuple[str, ...]) -> None:
    """No access out of bounds, no undefined behaviour, no race."""
    sanitized.run_cases(sanitizer, arch, __name__, names)
