"""flash_decode_latent_sm90: FP64 parity, hostile numbers and tables, which kernel runs, cost, races."""

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
    few = {"latent": True, "head_dims": (576, 512), "heads": (64, 1), "room": 128, "lengths": (0, 37, 128)}
    return KvCase(**{**few, **features})


PAGED = {"kind": "paged", "page": 64}
# One tile and two, of one query and of drafts; kinds of caches; bands; narrower values; parts. The ring holds
# two tiles of 64 keys.
CASES = {
    "new_in_pages": ("sm_90", latents(**PAGED, new=1, sinks=True)),
    "drafts": ("sm_90", latents(dtype="bfloat16", heads=(40, 1), queries=2, causal=True, room=100)),
    "odd_rows": ("sm_90", latents(heads=(13, 1), queries=5, causal=True, new=5, **PAGED)),
    "two_latents": ("sm_90", latents(heads=(130, 2), head_dims=(576, 200), kind="indexed", layout="bshd")),
    "long": ("sm_90", latents(**PAGED, lengths=(320,), room=320, window=(280, None))),
    "parts": ("sm_90", latents(lengths=(300, 70), room=320, sinks=True, splits=2, **PAGED)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    arch, case = CASES[name]
    environment, device = on(arch)
    for seed, policy in enumerate(POLICIES):
        with environment, simulator.schedule(policy, seed=seed), simulator.costs() as counted:
            check(case, device)
        assert sum(name.startswith("flash_decode_latent_sm90_") for name, _ in counted) == 1


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_numbers_behind_the_last_key(kind: str) -> None:
    """Whatever lies in the cache behind the keys of a sequence weighs nothing."""
    case = latents(kind=kind, page=64, lengths=(37, 65))
    made = case.inputs()
    expected = testing.reference_with_kv_cache(**made, **case.options())
    keys, table = made["k_cache"], made.get("block_table", np.arange(2).reshape(2, 1))
    page = keys.shape[2]
    for entries, length in zip(table, case.lengths, strict=True):
        for number, slot in enumerate(entries):
            keys[slot, :, max(0, length - number * page) :] = np.nan
    given = {**made, "k_cache": LatentCache(keys, 512), "v_cache": None}
    environment, _ = on("sm_90")
    for policy in POLICIES:
        with environment, simulator.schedule(policy):
            o, lse = cached(**given, return_lse=True)
        np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3)
        np.testing.assert_allclose(lse, expected.lse, atol=1e-4)


@pytest.mark.parametrize("value", LIMITS)
def test_hostile_tables(value: int) -> None:
    """The worst numbers touch nothing outside the cache; keys that lie nowhere are hidden."""
    case = latents(**PAGED, new=1, lengths=(63, 37, 300), room=320, splits=2)
    made = case.inputs()
    made["block_table"][0, 0] = made["block_table"][1] = made["block_table"][2, 4] = value
    lengths = {-(2**31): (-(2**31), 37, 300), -1: (63, -1, 2**31 - 1), 2**31 - 1: (63, 37, 2**31 - 1)}
    made["cache_seqlens"] = np.array(lengths[value], np.int32)
    expected = testing.reference_with_kv_cache(**made, **case.options())
    guarded = testing.hostile(made["k_cache"], style="aligned")
    given = {**made, "k_cache": LatentCache(guarded.view, 512), "v_cache": None, "v": None}
    environment, _ = on("sm_90")
    with environment:
        o, lse = cached(**given, **case.options(), splits=2, check=False, return_lse=True)
    np.testing.assert_allclose(o.astype(np.float64), expected.o, atol=4e-3)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)
    guarded.check_guards()


KERNELS: dict[str, tuple[str, KvCase, dict[str, Any], str]] = {
    "64 rows": ("sm_90", latents(), {}, "kernel    flash_decode_latent_sm90_f16"),
    "drafts": ("sm_90", latents(heads=(16, 1), queries=4), {}, "kernel    flash_decode_latent_sm90_f16"),
    "few rows": ("sm_90", latents(heads=(63, 1)), {}, "takes 64 rows of a latent and more, not 63"),
    "pages": ("sm_90", latents(kind="paged", page=32), {}, "reads pages of 64 keys, not 32"),
    "softcap": ("sm_90", latents(), {"softcap": 4.0}, "its inner loop has no softcap"),
    "scale": ("sm_90", latents(), {"scale": -0.1}, "its inner loop has no scale <= 0"),
    "other GPUs": ("sm_100", latents(), {}, "kernel    flash_decode_wide_f16_d576v512_any_64x32"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_which_kernel(name: str) -> None:
    """The others stay with mma.sync, and the plan says why."""
    arch, case, options, line = KERNELS[name]
    made = case.inputs()
    given = {key: made[key] for key in ("cache_seqlens", "block_table") if key in made}
    cache = LatentCache(made["k_cache"], 512)
    plan = cupy_flash.explain(made["q"], cache, None, kv_cache=given, causal=True, arch=arch, **options)
    assert line in plan
    assert ("kernel    flash_decode_wide_f16" in plan) != ("kernel    flash_decode_latent_sm90_f16" in plan)


def test_a_broadcast_axis_stays_with_mma_sync() -> None:
    case = latents(lengths=(128, 128))
    made = case.inputs()
    one = np.broadcast_to(made["k_cache"][:1], made["k_cache"].shape)
    plan = cupy_flash.explain(
        made["q"], LatentCache(one, 512), None, kv_cache={"cache_seqlens": 9}, arch="sm_90"
    )
    assert "skipped   flash_decode_latent_sm90: bulk copies take strides above 0" in plan


def test_cost_is_the_theory() -> None:
    """Each latent is read once, by bulk copies alone, and nothing meets a bank conflict."""
    case = latents(lengths=(384,), room=384, splits=1)
    environment, device = on("sm_90")
    with environment, simulator.costs() as counted:
        check(case, device)
    ((_, cost),) = counted
    assert cost["mma_flops"] == 2 * 64 * 384 * (576 + 512)
    assert cost["bulk_load_bytes"] == 2 * 384 * 576
    for unit in ("matrix_load", "matrix_store"):
        assert cost[f"{unit}_cycles"] == cost[f"{unit}s"], f"bank conflicts in {unit}s"


@pytest.mark.slow
def test_threads_do_not_race() -> None:
    sanitized.run_cases("thread", "sm_90", __name__, ("parts",))
