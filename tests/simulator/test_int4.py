"""4-bit caches on simulated GPUs: attention over what codes stand for, the CPU's codes, hostile tables."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import UnsupportedError, testing
from cupy_flash.device import simulator
from cupy_flash.testing.kv_cache import dequantized_int4
from tests.checks import NUMPY, Device
from tests.four_bit_cases import LENGTHS, call, wide
from tests.public import cached, explained, int4_parts
from tests.simulator import sanitized

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(12)]

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
STORED = [f"{x}_{part}" for x in "kv" for part in ("cache", "scale", "zero")]


def on(arch: str) -> Any:
    return mock.patch.dict(os.environ, {"CUPY_FLASH_DRIVER": f"simulator:{arch}"})


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in given.items()}


# kernel that answers, architecture, call, options: a head dim, a group size, a layout and a kernel each.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "d64": ("flash_decode_int4_f16_d64", "sm_80", {"dims": (64, 64), "groups": (32, 64), "new": 1}, {}),
    "d64 of 32": ("flash_decode_int4_bf16_d64", "sm_80",
                  {"dims": (32, 64), "groups": (32, 64), "dtype": "bfloat16"}, {"splits": 2}),
    "d128": ("flash_decode_int4_f16_d128", "sm_80",
             {"dims": (128, 128), "groups": (128, 64), "queries": 3, "page": 16, "new": 3},
             {"causal": True, "window": (30, None), "splits": 2}),
    "d128 of 96": ("flash_decode_int4_bf16_d128", "sm_80",
                   {"dims": (96, 128), "groups": (32, 128), "dtype": "bfloat16", "queries": 3,
                    "layout": "bshd"},
                   {"softcap": 3.0, "causal": True}),
    "d256": ("flash_decode_int4_f16_d256", "sm_80",
             {"dims": (256, 192), "groups": (64, 32), "page": 16, "new": 1},
             {"sinks": np.ones(4, np.float32)}),
    "d256 bf16": ("flash_decode_int4_bf16_d256", "sm_80",
                  {"dims": (256, 256), "groups": (128, 128), "dtype": "bfloat16", "queries": 2},
                  {"alibi_slopes": np.linspace(0.1, 0.5, 4, dtype=np.float32)}),
    "Turing": ("flash_decode_int4_f16_d128", "sm_75",
               {"dims": (128, 64), "groups": (32, 64), "page": 16, "new": 3}, {"causal": True}),
    "Turing d64": ("flash_decode_int4_f16_d64", "sm_75", {"dims": (64, 64), "groups": (64, 64)}, {}),
    "Turing d256": ("flash_decode_int4_f16_d256", "sm_75",
                    {"dims": (256, 256), "groups": (128, 64), "queries": 5}, {"causal": True, "splits": 2}),
    "gathered": ("flash_gather_int4_f16", "sm_80", {"queries": 3, "page": 3, "new": 1}, {"causal": True}),
    "gathered float": ("flash_gather_int4_f32", "sm_80", {"dtype": "float32", "queries": 2, "new": 2}, {}),
    "gathered double": ("flash_gather_int4_f64", "sm_61", {"dtype": "float64", "page": 16, "new": 1}, {}),
}  # fmt: skip


def made(kinds: dict[str, Any]) -> dict[str, Any]:
    return call("int4", **{**kinds, "dtype": DTYPES[kinds.get("dtype", "float16")]})


def check(kinds: dict[str, Any], options: dict[str, Any], device: Device = NUMPY) -> None:
    """No key or value is rounded; where pages are gathered first, to the dtype of q and no more."""
    gathered = bool(kinds.get("page", 0) % 16)
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
        np.testing.assert_array_equal(now[part], on_cpu[part])
    after = {n: x for n, x in now.items() if n not in ("k", "v")}
    after["cache_seqlens"] = LENGTHS + np.int32(kinds.get("new", 0))
    exact = testing.reference_with_kv_cache(
        **wide("int4", after, DTYPES[dtype] if gathered else np.float64), **rest
    )
    # why these: the weights and the result are rounded to 11 or 8 bits of values below 4
    limit = {"float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7, "float32": 2e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(o.astype(float), exact.o, atol=limit)
    np.testing.assert_allclose(lse, exact.lse, atol=1e-12 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_as_over_what_codes_stand_for(name: str) -> None:
    kernel, arch, kinds, options = CASES[name]
    for policy in ("late", "early"):
        with on(arch), simulator.schedule(policy), simulator.costs() as launched:
            check(kinds, options)
        assert any(one.startswith(kernel) for one, _ in launched), [one for one, _ in launched]


def test_exact_where_nothing_is_rounded() -> None:
    """One key is seen, so the result is its value, rounded once: every code, in every place of a row."""
    given = made({"dims": (128, 128), "groups": (128, 32), "queries": 1})
    rng = np.random.default_rng(7)
    given["v_cache"] = rng.integers(0, 256, given["v_cache"].shape).astype(np.uint8)
    given["cache_seqlens"] = np.array([1, 18, 45], np.int32)
    values = dequantized_int4(given["v_cache"], given["v_scale"], given["v_zero"])
    for arch in ("sm_75", "sm_80"):
        with on(arch):
            o = cached(**given, window=(0, 0))
        for b, length in enumerate(given["cache_seqlens"]):
            wanted = np.repeat(values[b, :, length - 1], 2, 0)
            half = np.spacing(np.abs(wanted).astype(np.float16)).astype(float) / 2
            # why the last factor: the weight is 1 up to 2^-23, which decides between two that are as near.
            assert (np.abs(o[b, :, 0] - wanted) <= half * 1.01).all()


def test_every_key_and_feature_is_its_own() -> None:
    """A query that is one feature scores that feature of a key, and the LSE of one key is its score."""
    given = made({"dims": (128, 64), "groups": (32, 64), "queries": 1})
    rng = np.random.default_rng(8)
    given["k_cache"] = rng.integers(0, 256, given["k_cache"].shape).astype(np.uint8)
    keys = dequantized_int4(given["k_cache"], given["k_scale"], given["k_zero"])
    given["cache_seqlens"] = np.array([3, 20, 41], np.int32)
    with on("sm_80"):
        for feature in range(0, 128, 7):
            given["q"][...] = 0
            given["q"][..., feature] = 1
            _, lse = cached(**given, window=(0, 0), scale=1.0, return_lse=True)
            for b, length in enumerate(given["cache_seqlens"]):
                wanted = np.repeat(keys[b, :, length - 1, feature], 2, 0).astype(np.float32)
                np.testing.assert_allclose(lse[b, :, 0], wanted, rtol=1e-6)


# size of keys, and of values up to and from key 64 on; what scales them and zeros are made of.
EXTREMES: dict[str, tuple[float, tuple[float, float]]] = {
    "small": (1.0, (1e-4, 1e-4)),
    "smallest": (1.0, (3e-6, 3e-6)),
    "large": (1e-2, (1e3, 1e3)),
    "larger later": (1.0, (1e-3, 1e3)),
    "smaller later": (1.0, (1e3, 1e-3)),
    "small keys": (1e-4, (1.0, 1.0)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", EXTREMES)
def test_scales_of_any_size(name: str, dtype: str) -> None:
    """Small and large, and beside each other: scores as float32 has them, O as weights of 16 bits allow."""
    of_keys, of_values = EXTREMES[name]
    rng = np.random.default_rng(11)
    keys, dims, batch = 300, 128, 2
    q = (
        rng.standard_normal((batch, 2, 2, dims))
        * np.array([1.0, 1e-3, 40.0, 1e-6]).reshape(1, 2, 2, 1)
        / of_keys
    )
    if dtype == "float16":
        q = np.clip(q, -6e4, 6e4)
    given: dict[str, Any] = {"q": q.astype(DTYPES[dtype]), "cache_seqlens": np.array([keys, 201], np.int32)}
    size = {"k": np.full((keys, 1), of_keys), "v": np.where(np.arange(keys) < 64, *of_values)[:, None]}
    for x, group in (("k", 64), ("v", 32)):
        rows = rng.standard_normal((batch, 1, keys, dims)) * size[x]
        rows[:, :, 3::7, :64] = size[x][3::7] * 1.5  # groups of one value: a scale of 0
        rows[:, :, 5::7] += 4 * size[x][5::7]  # far from 0, so that zeros weigh more than codes
        parts = int4_parts(rows.astype(np.float32), group=group)
        given |= dict(zip((f"{x}_cache", f"{x}_scale", f"{x}_zero"), parts, strict=True))
    options = {"return_lse": True, "scale": 0.05}
    exact = testing.reference_with_kv_cache(**wide("int4", given), scale=0.05)
    with on("sm_80"):
        o, lse = cached(**given, **options, splits=1)
    values = dequantized_int4(given["v_cache"], given["v_scale"], given["v_zero"])
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    # Of an element: one rounding of the result and two of a weight, half a unit of the largest of its column
    # at most, and of weights not all in one direction.
    limit = 2 * unit * np.abs(values).max(2, keepdims=True) + (2.0**-25 if dtype == "float16" else 0.0)
    assert (np.abs(o.astype(float) - exact.o) <= limit).all()
    np.testing.assert_allclose(lse, exact.lse, rtol=2e-6, atol=1e-5)


LIMITS = (-(2**31), -1, 2**31 - 1)


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
    """64 bytes of codes, and 8 of scales and zeros, for 128 features in groups of 64; no bank conflict."""
    given = made({"dims": (128, 128), "groups": (64, 64)})
    rng = np.random.default_rng(3)
    keys, heads = 512, 1
    cache = {}
    for x in "kv":
        normal = rng.standard_normal((1, heads, keys, 128)).astype(np.float32)
        parts = int4_parts(normal, group=64)
        cache |= dict(zip((f"{x}_cache", f"{x}_scale", f"{x}_zero"), parts, strict=True))
    q = given["q"][:1]
    with on("sm_80"), simulator.costs() as counted:
        cached(q, **cache, cache_seqlens=np.array([keys], np.int32), splits=1)
    ((_, cost),) = counted
    # Beside codes: a scale and a zero of each 32 features, which two of them share; Q; the length.
    assert cost["global_load_bytes"] == 2 * keys * (64 + 2 * 8) + 2 * 4 * 128 + 4 * 128
    # Beside both products: zeros with sums of segments of Q, and with weights; the sums, in four warps.
    product = 2 * 16 * 16 * 8
    assert cost["mma_flops"] == 2 * 16 * keys * 256 + keys // 16 * 3 * product + 4 * 8 * product
    for unit, cycles in (
        ("matrix_loads", "matrix_load_cycles"),
        ("shared_loads", "shared_load_cycles"),
        ("shared_stores", "shared_store_cycles"),
        ("copy_stores", "copy_store_cycles"),
    ):
        assert cost[cycles] == cost[unit], f"bank conflicts in {unit}"


def test_refused_by_name() -> None:
    def plan(given: dict[str, Any], arch: str) -> None:
        given.pop("layout")
        explained(given, arch=arch)

    with pytest.raises(UnsupportedError, match="4-bit codes with scales of float16, not float32"):
        plan(made({"units": "float32"}), "sm_80")
    given = made({})
    given["k_zero"] = np.repeat(given["k_zero"], 2, -1)[..., ::2]
    with pytest.raises(UnsupportedError, match="scales and zeros of 4-bit codes only with equal strides"):
        plan(given, "sm_90a")


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{arch}"
import numpy as np
from cupy_flash.device import simulator
from tests.public import cached
from tests.simulator.test_int4 import made
for policy in SCHEDULES:
    with simulator.schedule(policy):
        for value in {hostile}:
            given = made({{"dims": (64, 128), "page": 16, "new": 2, "queries": 2}})
            given["block_table"][1:, 1:] = value
            given["cache_seqlens"] = np.array([value, 17, 40], np.int32)
            cached(**given, splits=2, check=False)
        wide = {{"dims": (128, 96), "groups": (128, 32), "new": 3}}
        for kinds in (wide, {{"queries": 3, "page": 3, "new": 1}}):
            cached(**made(kinds), causal=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_sanitizers_find_nothing(sanitizer: str, arch: str) -> None:
    """No access out of bounds, no undefined behaviour, no race, with and without cp.async."""
    done = sanitized.run(sanitizer, _SANITIZED.format(arch=arch, hostile=sanitized.hostile(sanitizer)))
    assert done.returncode == 0, done.stderr[-3000:]
