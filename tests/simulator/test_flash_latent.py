"""flash_decode_wide: FP64 parity by latents and by a view, hostile tables, cost, races, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import LatentCache, testing
from cupy_flash.device import simulator
from tests.kv_cases import KvCase, check
from tests.public import cached
from tests.simulator import sanitized
from tests.simulator.test_flash_decode import LIMITS, POLICIES, on

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]


def latents(**features: Any) -> KvCase:
    return KvCase(**{"latent": True, "head_dims": (576, 512), "heads": (16, 1), **features})


# Every tile; kinds of caches, of scores and of rows; parts.
CASES = {
    "few": ("sm_86", latents()),
    "few_alone": ("sm_80", latents(dtype="bfloat16", causal=True, queries=2, heads=(5, 1))),
    "few_twice": ("sm_90", latents(kind="paged", new=3, sinks=True)),
    "more": ("sm_86", latents(kind="paged", page=32, heads=(20, 1), queries=2, causal=True, new=2,
                              rotary=64, last=True, interleaved=True)),
    "many": ("sm_80", latents(dtype="bfloat16", heads=(64, 1), softcap=4.0, alibi="h")),
    "two_tiles": ("sm_80", latents(heads=(128, 1), kind="indexed", window=(70, None), sinks=True)),
    "two_latents": ("sm_86", latents(heads=(4, 2), new=1, layout="bshd", scale=-0.05)),
    "pages_of_one": ("sm_86", latents(kind="paged", page=1, lengths=(0, 37), room=40)),
    "odd_pages": ("sm_86", latents(kind="paged", page=7, lengths=(0, 37, 140), room=140, new=1)),
    "selected": ("sm_86", latents(selected=45, queries=2, causal=True, lengths=(0, 37, 100))),
    "selected_pages": ("sm_86", latents(selected=45, kind="paged", heads=(20, 1), layout="bshd")),
    "narrow_values": ("sm_86", latents(head_dims=(576, 200))),
    "parts": ("sm_80", latents(lengths=(420, 150, 0), room=448, sinks=True, splits=3, dtype="bfloat16")),
    "parts_many": ("sm_90", latents(lengths=(500, 300), room=512, heads=(33, 1), window=(400, 0), splits=3)),
    "int8": ("sm_86", latents(stored="int8", kind="paged", page=7, room=140, new=2, scales="bh",
                              rotary=62, last=True)),
    "int8_many": ("sm_80", latents(stored="int8", dtype="bfloat16", heads=(40, 1), causal=True, splits=2)),
    "e4m3_more": ("sm_86", latents(stored="e4m3", dtype="bfloat16", heads=(20, 1), new=1, sinks=True)),
    "e4m3_selected": ("sm_90", latents(stored="e4m3", selected=99, heads=(5, 1), scales="bh")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    arch, case = CASES[name]
    environment, device = on(arch)
    for seed, policy in enumerate(POLICIES):
        with environment, simulator.schedule(policy, seed=seed):
            check(case, device)


@pytest.mark.parametrize("stored", ["same", "int8", "e4m3"])
@pytest.mark.parametrize("value", LIMITS)
def test_hostile_tables(value: int, stored: str) -> None:
    """The worst numbers touch nothing outside the cache; keys that lie nowhere are hidden."""
    case = latents(kind="paged", new=3, causal=True, lengths=(16, 37, 150), splits=2, stored=stored)
    made = case.inputs()
    made["block_table"][0, 1] = made["block_table"][1] = made["block_table"][2, 4] = value
    lengths = {-(2**31): (-(2**31), 37, 150), -1: (16, -1, 2**31 - 1), 2**31 - 1: (16, 37, 2**31 - 1)}
    made["cache_seqlens"] = np.array(lengths[value], np.int32)
    expected = testing.reference_with_kv_cache(**made, **case.options())
    guarded = testing.hostile(made["k_cache"], style="aligned")
    given = {**made, "k_cache": LatentCache(guarded.view, 512), "v_cache": None, "v": None}
    environment, _ = on("sm_86")
    with environment:
        o, lse = cached(**given, **case.options(), splits=2, check=False, return_lse=True)
    # why: values of 8 bits are times scales of up to 2, and a new one may be rounded to the next code.
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3 if stored == "same" else 1e-2)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)
    guarded.check_guards()
    rtol, atol = {"same": (1e-7, 2e-3), "int8": (0, 1), "e4m3": (1 / 8, 2.0**-9)}[stored]
    found, wanted = (x.astype(np.float64) for x in (guarded.view, expected.k_cache))
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def test_hostile_indices_of_8_bits() -> None:
    """Indices outside of the sequence are no keys; they touch nothing outside the cache."""
    case = latents(stored="int8", selected=45, kind="paged", lengths=(37, 100))
    made = case.inputs()
    made["indices"] = made["indices"].astype(np.int64)
    absent = np.zeros(made["indices"].shape, bool)
    for at, index in ((0, 2**63 - 1), (7, -(2**63)), (8, 2**31 + 3), (20, 100), (44, -2)):
        made["indices"][..., at], absent[..., at] = index, True
    named = {**made, "indices": np.where(absent, -1, made["indices"])}
    guarded = testing.hostile(made["k_cache"], style="aligned")
    environment, _ = on("sm_86")
    results = []
    with environment:
        for given in (made, named):
            caches = {"k_cache": LatentCache(guarded.view, 512), "v_cache": None, "v": None}
            results.append(cached(**{**given, **caches}, **case.options(), check=False, return_lse=True))
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert np.isfinite(results[0][1]).all()
    guarded.check_guards()


@pytest.mark.parametrize("splits", [1, 2])
def test_a_scale_of_nan_is_seen_in_its_sequence(splits: int) -> None:
    """O and LSE are NaN there, also where parts are merged, and have the same bits elsewhere."""
    case = latents(stored="int8", scales="bh", lengths=(37, 140, 20), room=144)
    made = case.inputs()
    given = {**made, "k_cache": LatentCache(made["k_cache"], 512), "v_cache": None, "v": None}
    worst = {**given, "k_scale": made["k_scale"].copy()}
    worst["k_scale"][1] = np.nan
    environment, _ = on("sm_86")
    with environment:
        clean, found = (cached(**x, **case.options(), splits=splits, return_lse=True) for x in (given, worst))
    for x, wanted in zip(found, clean, strict=True):
        assert np.isnan(x[1]).all()
        np.testing.assert_array_equal(x[[0, 2]], wanted[[0, 2]])


def test_a_view_is_latents() -> None:
    """Values that begin where keys do get the same kernels, and values that lie apart do not."""
    case = latents(lengths=(37, 5), room=48)
    made = case.inputs()
    q, kv, lengths = (made[name] for name in ("q", "k_cache", "cache_seqlens"))
    environment, _ = on("sm_86")
    with environment:
        one = cupy_flash.attention_with_kv_cache(q, LatentCache(kv, 512), cache_seqlens=lengths)
        other = cupy_flash.attention_with_kv_cache(q, kv, kv[..., :512], cache_seqlens=lengths)
        np.testing.assert_array_equal(one, other)
        apart = kv[..., :512].copy()
        of_two = cupy_flash.attention_with_kv_cache(q, kv, apart, cache_seqlens=lengths)
        np.testing.assert_allclose(of_two.astype(float), one.astype(float), rtol=0, atol=4e-3)
        for values, kernel in ((kv[..., :512], "flash_decode_wide"), (apart, "flash_forward_wide")):
            plan = cupy_flash.explain(q, kv, values, kv_cache={"cache_seqlens": lengths}, arch="sm_86")
            assert f"kernel    {kernel}_" in plan


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "turing": ("sm_75", {}, {}, "latents need the asynchronous copies of sm_80"),
    "float32": ("sm_80", {"dtype": "float32"}, {}, "latents of float16 and bfloat16 like q, not float32"),
    "other widths": ("sm_80", {"head_dims": (640, 512)}, {}, "latents of 576 numbers .* not 640 with 512"),
    "bits": ("sm_80", {}, {"reproducible": "batch"}, "adds in another order than a prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take(name: str) -> None:
    arch, changes, options, reason = REFUSED[name]
    made = latents(**changes).inputs()
    given = LatentCache(made["k_cache"], made["v_cache"].shape[3])
    environment, _ = on(arch)
    with environment, pytest.raises(cupy_flash.UnsupportedError, match=reason):
        cupy_flash.attention_with_kv_cache(made["q"], given, cache_seqlens=made["cache_seqlens"], **options)


@pytest.mark.parametrize(("stored", "size"), [("same", 2), ("int8", 1)])
def test_cost_is_the_theory(stored: str, size: int) -> None:
    """Each latent is read once, and nothing meets a bank conflict."""
    case = latents(lengths=(1024,), room=1024, splits=1, stored=stored)
    environment, device = on("sm_86")
    with environment, simulator.costs() as counted:
        check(case, device)
    ((_, cost),) = counted
    assert cost["mma_flops"] == 2 * 16 * 1024 * (576 + 512)
    # Beside latents: Q; and the length, read by every thread.
    assert cost["global_load_bytes"] == size * 1024 * 576 + 2 * 16 * 576 + 4 * 256
    for unit, cycles in (
        ("matrix_loads", "matrix_load_cycles"),
        ("copy_stores", "copy_store_cycles"),
    ):
        assert cost[cycles] == cost[unit], f"bank conflicts in {unit}"


def test_selected_keys_are_read_once() -> None:
    """As many bytes as of the same number of keys in a row, and an entry of the table for each of them."""
    case = latents(selected=64, lengths=(1024,), room=1024, splits=1)
    made = case.inputs()
    made["indices"][...] = np.random.default_rng(0).permutation(1024)[:64]
    environment, device = on("sm_86")
    with environment, simulator.costs() as counted:
        check(case, device, made)
        check(latents(lengths=(64,), room=64, splits=1), device)
    (_, chosen), (_, in_a_row) = counted
    entries = chosen.pop("global_load_bytes") - in_a_row.pop("global_load_bytes")
    assert entries == 64 * 4 * 8  # each of the 8 threads that copy a key reads its entry
    for cost in (chosen, in_a_row):
        del cost["global_load_sectors"]  # of rows of 1152 bytes, wherever NumPy has put them
    assert chosen == in_a_row


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("sm_86", ("few", "more", "odd_pages", "e4m3_more")),
        ("sm_80", ("few_alone", "many", "parts")),
    ],
)
def test_sanitizers_find_nothing(sanitizer: str, arch: str, names: tuple[str, ...]) -> None:
    """No access out of bounds, no undefined behaviour, no race."""
    sanitized.run_cases(sanitizer, arch, __name__, names)
