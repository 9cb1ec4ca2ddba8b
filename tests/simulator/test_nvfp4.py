"""NVFP4 caches on simulated GPUs: attention over what codes stand for, the CPU's codes, hostile tables."""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupy_flash import UnsupportedError, testing
from cupy_flash.device import simulator
from cupy_flash.testing.kv_cache import dequantized_nvfp4
from tests.checks import NUMPY, Device
from tests.four_bit_cases import E4M3, LENGTHS, PARTS, call, wide
from tests.public import cached, explained, nvfp4_parts
from tests.simulator import sanitized, test_int4
from tests.simulator.test_int4 import DTYPES, LIMITS, copied, on

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(12)]
STORED = [f"{x}_{part}" for x in "kv" for part in PARTS["nvfp4"]]

# kernel that answers, architecture, call, options: a head dim, a layout and a kernel each.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "d64": ("flash_decode_nvfp4_f16_d64", "sm_80", {"dims": (64, 64), "new": 1, "scales": (2,)}, {}),
    "d64 of 32": ("flash_decode_nvfp4_bf16_d64", "sm_80",
                  {"dims": (32, 64), "dtype": "bfloat16", "units": E4M3}, {"splits": 2}),
    "d128": ("flash_decode_nvfp4_f16_d128", "sm_80",
             {"dims": (128, 128), "queries": 3, "page": 16, "new": 3, "scales": (3, 2)},
             {"causal": True, "window": (30, None), "splits": 2}),
    "d128 of 96": ("flash_decode_nvfp4_bf16_d128", "sm_80",
                   {"dims": (96, 128), "dtype": "bfloat16", "queries": 3, "layout": "bshd"},
                   {"softcap": 3.0, "causal": True}),
    "d256": ("flash_decode_nvfp4_f16_d256", "sm_80", {"dims": (256, 192), "page": 16, "new": 1},
             {"sinks": np.ones(4, np.float32)}),
    "d256 bf16": ("flash_decode_nvfp4_bf16_d256", "sm_80",
                  {"dims": (256, 256), "dtype": "bfloat16", "queries": 2, "scales": (2,)},
                  {"alibi_slopes": np.linspace(0.1, 0.5, 4, dtype=np.float32)}),
    "Turing": ("flash_decode_nvfp4_f16_d128", "sm_75", {"dims": (128, 64), "page": 16, "new": 3},
               {"causal": True}),
    "Turing d64": ("flash_decode_nvfp4_f16_d64", "sm_75", {"dims": (64, 64), "scales": (2,)}, {}),
    "Turing d256": ("flash_decode_nvfp4_f16_d256", "sm_75", {"dims": (256, 256), "queries": 5},
                    {"causal": True, "splits": 2}),
    "gathered": ("flash_gather_nvfp4_f16", "sm_80", {"queries": 3, "page": 3, "new": 1, "scales": (2,)},
                 {"causal": True}),
    "gathered of 48": ("flash_gather_nvfp4_f16", "sm_80", {"dims": (48, 16), "new": 2}, {}),
    "gathered float": ("flash_gather_nvfp4_f32", "sm_80", {"dtype": "float32", "queries": 2, "new": 2,
                       "scales": (3, 2)}, {}),
    "gathered double": ("flash_gather_nvfp4_f64", "sm_61", {"dtype": "float64", "page": 16, "new": 1,
                        "scales": (2,)}, {}),
}  # fmt: skip


def made(kinds: dict[str, Any]) -> dict[str, Any]:
    return call("nvfp4", **{**kinds, "dtype": DTYPES[kinds.get("dtype", "float16")]})


def check(kinds: dict[str, Any], options: dict[str, Any], device: Device = NUMPY) -> None:
    """Keys and values are exact, in the dtype of q too."""
    dtype = kinds.get("dtype", "float16")
    given = made(kinds)
    now, on_cpu = device.arrays(copied(given)), copied(given)
    o, lse = map(
        testing.to_numpy,
        cached(**now, **device.arrays(options), return_lse=True),
    )
    now = {n: testing.to_numpy(x) if isinstance(given[n], np.ndarray) else x for n, x in now.items()}
    rest = {n: x for n, x in options.items() if n != "splits"}
    with mock.patch.dict(os.environ):
        os.environ.pop("CUPY_FLASH_DRIVER", None)
        cached(**on_cpu, **rest)
    for part in STORED:  # the same codes, in the same places
        np.testing.assert_array_equal(now[part].view(np.uint8), on_cpu[part].view(np.uint8))
    after = {n: x for n, x in now.items() if n not in ("k", "v")}
    after["cache_seqlens"] = LENGTHS + np.int32(kinds.get("new", 0))
    exact = testing.reference_with_kv_cache(**after, **rest)
    # why these: the weights and the result are rounded to 11 or 8 bits of values below 8
    limit = {"float16": 8 * 2.0**-10, "bfloat16": 8 * 2.0**-7, "float32": 4e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(o.astype(float), exact.o, atol=limit)
    # A key that is gathered is rounded once if it has a scale beside that of its block.
    loose = 2e-2 if "page" in kinds and "scales" in kinds else 2e-4
    np.testing.assert_allclose(lse, exact.lse, atol=1e-12 if dtype == "float64" else loose)


@pytest.mark.parametrize("name", CASES)
def test_as_over_what_codes_stand_for(name: str) -> None:
    kernel, arch, kinds, options = CASES[name]
    for policy in ("late", "early"):
        with on(arch), simulator.schedule(policy), simulator.costs() as launched:
            check(kinds, options)
        assert any(one.startswith(kernel) for one, _ in launched), [one for one, _ in launched]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exact_where_nothing_is_rounded(dtype: str) -> None:
    """One key is seen, so the result is its value, bit for bit: every code in every place, every scale."""
    given = made({"dims": (128, 128), "queries": 1, "dtype": dtype})
    rng = np.random.default_rng(7)
    given["v_cache"] = rng.integers(0, 256, given["v_cache"].shape).astype(np.uint8)
    numbers = [b for b in range(256) if b & 127 != 127]
    given["v_block_scale"] = rng.permutation(np.resize(numbers, given["v_block_scale"].size)).astype(np.uint8)
    given["v_block_scale"] = given["v_block_scale"].reshape(given["k_block_scale"].shape)
    given["cache_seqlens"] = np.array([1, 18, 45], np.int32)
    values = dequantized_nvfp4(given["v_cache"], given["v_block_scale"]).astype(DTYPES[dtype])
    for arch in ("sm_75", "sm_80") if dtype == "float16" else ("sm_80",):
        with on(arch):
            for back in range(16):
                lengths = np.maximum(given["cache_seqlens"] - back, 1)
                o = cached(**given | {"cache_seqlens": lengths.astype(np.int32)}, window=(0, 0))
                for b, length in enumerate(lengths):
                    np.testing.assert_array_equal(o[b, :, 0], np.repeat(values[b, :, length - 1], 2, 0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_key_and_feature_is_its_own(dtype: str) -> None:
    """A query that is one feature scores that feature of a key, and the LSE of one key is its score."""
    given = made({"dims": (128, 64), "queries": 1, "dtype": dtype})
    rng = np.random.default_rng(8)
    given["k_cache"] = rng.integers(0, 256, given["k_cache"].shape).astype(np.uint8)
    keys = dequantized_nvfp4(given["k_cache"], given["k_block_scale"])
    given["cache_seqlens"] = np.array([3, 20, 41], np.int32)
    with on("sm_80"):
        for feature in range(0, 128, 7):
            given["q"][...] = 0
            given["q"][..., feature] = 1
            _, lse = cached(**given, window=(0, 0), scale=1.0, return_lse=True)
            for b, length in enumerate(given["cache_seqlens"]):
                wanted = np.repeat(keys[b, :, length - 1, feature], 2, 0)
                np.testing.assert_allclose(lse[b, :, 0], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_new_keys_are_rotated_first(kind: str, interleaved: bool) -> None:
    """What is stored is the rotated key, to a step: another rounding may take the next code."""
    make = test_int4.made if kind == "int4" else made
    given = make({"dims": (64, 64), "new": 3, "page": 16, "queries": 2})
    angles = np.random.default_rng(1).random((48, 8)).astype(np.float32)
    turned = {
        "rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "rotary_interleaved": interleaved,
    }  # fmt: skip
    now, meant = copied(given), functools.partial(wide, kind)
    with on("sm_80"):
        o = cached(**now, **turned, causal=True)
    stored = testing.reference_with_kv_cache(**meant(given), **turned, causal=True)
    found, before = meant(now)["k_cache"], meant(given)["k_cache"]
    fresh = (stored.k_cache != before).any(-1)
    assert fresh.sum() == 3 * 3 * 2
    np.testing.assert_array_equal(found[~fresh], before[~fresh])
    rows, wanted = (
        x[fresh].reshape(fresh.sum(), -1, 16 if kind == "nvfp4" else 32) for x in (found, stored.k_cache)
    )
    largest = np.abs(wanted).max(-1, keepdims=True)
    # A code is half of 2 / 6 of the largest at most, a fifteenth of the range at most.
    assert (np.abs(rows - wanted) <= largest * (0.18 if kind == "nvfp4" else 0.07)).all()
    after = {n: x for n, x in now.items() if n not in ("k", "v")}
    after["cache_seqlens"] = LENGTHS + np.int32(3)
    wanted_o = testing.reference_with_kv_cache(**meant(after), **turned, causal=True).o
    np.testing.assert_allclose(o.astype(float), wanted_o, atol=8 * 2.0**-10)


@pytest.mark.parametrize("value", LIMITS)
def test_hostile_tables(value: int) -> None:
    """What leads outside the cache is not read, nor written; the rest is as on the CPU."""
    given = made({"dims": (64, 128), "page": 16, "new": 2, "queries": 2})
    given["block_table"][1] = given["block_table"][2, 1] = value
    given["cache_seqlens"] = np.array([value, 17, 40], np.int32)
    guarded = {name: testing.hostile(given[name], style="aligned") for name in STORED}
    on_cpu = copied(given)
    with on("sm_80"):
        o, lse = cached(**given | {name: g.view for name, g in guarded.items()}, check=False, return_lse=True)
    wanted, wanted_lse = cached(**on_cpu, check=False, return_lse=True)
    np.testing.assert_allclose(o.astype(float), wanted.astype(float), atol=4e-3)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-3)
    for name, g in guarded.items():
        g.check_guards()
        np.testing.assert_array_equal(g.view, on_cpu[name])


def test_cost_is_the_theory() -> None:
    """64 bytes of codes and 8 of scales for 128 features; no bank conflict."""
    rng = np.random.default_rng(3)
    keys, heads = 512, 1
    cache = {}
    for x in "kv":
        parts = nvfp4_parts(rng.standard_normal((1, heads, keys, 128)).astype(np.float32))
        cache |= dict(zip((f"{x}_cache", f"{x}_block_scale"), parts, strict=True))
    q = made({"dims": (128, 128)})["q"][:1]
    with on("sm_80"), simulator.costs() as counted:
        cached(q, **cache, cache_seqlens=np.array([keys], np.int32), splits=1)
    ((_, cost),) = counted
    assert cost["global_load_bytes"] == 2 * keys * (64 + 8) + 2 * 4 * 128 + 4 * 128
    assert cost["mma_flops"] == 2 * 16 * keys * 256
    for unit, cycles in (
        ("matrix_loads", "matrix_load_cycles"),
        ("shared_loads", "shared_load_cycles"),
        ("shared_stores", "shared_store_cycles"),
        ("copy_stores", "copy_store_cycles"),
    ):
        assert cost[cycles] == cost[unit], f"bank conflicts in {unit}"


def test_refused_by_name() -> None:
    given = made({})
    given["k_block_scale"] = np.repeat(given["k_block_scale"], 2, -1)[..., ::2]
    given.pop("layout")
    with pytest.raises(UnsupportedError, match="those of a key contiguous"):
        explained(given, arch="sm_90a")


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{arch}"
import numpy as np
from cupy_flash.device import simulator
from tests.public import cached
from tests.simulator.test_nvfp4 import made
for policy in SCHEDULES:
    with simulator.schedule(policy):
        for value in {hostile}:
            given = made({{"dims": (64, 128), "page": 16, "new": 2, "queries": 2}})
            given["block_table"][1:, 1:] = value
            given["cache_seqlens"] = np.array([value, 17, 40], np.int32)
            cached(**given, splits=2, check=False)
        for kinds in ({{"dims": (128, 96), "new": 3}}, {{"queries": 3, "page": 3, "new": 1}}):
            cached(**made(kinds), causal=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_sanitizers_find_nothing(sanitizer: str, arch: str) -> None:
    """No access out of bounds, no undefined behaviour, no race, with and without cp.async."""
    done = sanitized.run(sanitizer, _SANITIZED.format(arch=arch, hostile=sanitized.hostile(sanitizer)))
    assert done.returncode == 0, done.stderr[-3000:]
