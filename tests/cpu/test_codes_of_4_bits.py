"""Caches of 4-bit codes: read as the floats they stand for, written as specified, or refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import InvalidArgumentsError, testing
from cupy_flash.quantized import dequantize, int8
from cupy_flash.testing.kv_cache import dequantized_int4, dequantized_nvfp4
from tests.four_bit_cases import BATCH, E4M3, HEADS, LENGTHS, PARTS, ROOM, call, wide
from tests.public import cached, dequantized, int4_parts, nvfp4_parts

pytestmark = pytest.mark.usefixtures("cpu_family")
of_both = pytest.mark.parametrize("kind", PARTS)

ONES = np.ones(4, np.float32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int4, one query": ({}, {}),
    "int4, groups of 128, float32": ({"dims": (128, 256), "groups": (128, 128), "units": "float32"}, {}),
    "int4, few queries, causal": ({"queries": 3}, {"causal": True, "window": (30, None)}),
    "int4, many queries": ({"queries": 20}, {"causal": True, "softcap": 3.0, "sinks": ONES}),
    "int4, pages": ({"page": 16}, {}),
    "int4, pages of 3 keys": ({"page": 3, "queries": 2}, {}),
    "int4, the other layout": ({"layout": "bshd"}, {}),
    "int4, float16": ({"dtype": "float16"}, {}),
    "int4, float64": ({"dtype": "float64", "units": "float32"}, {}),
    "nvfp4, one query": ({}, {}),
    "nvfp4, scales of heads, head_dim 48": ({"dims": (48, 16), "scales": (2,)}, {}),
    "nvfp4, few queries, causal": (
        {"queries": 3, "scales": (3, 2)}, {"causal": True, "window": (30, None)},
    ),
    "nvfp4, many queries": (
        {"queries": 20, "scales": (2,)}, {"causal": True, "softcap": 3.0, "sinks": ONES},
    ),
    "nvfp4, pages": ({"page": 16, "units": E4M3}, {}),
    "nvfp4, pages of 3 keys": ({"page": 3, "queries": 2}, {}),
    "nvfp4, the other layout": ({"layout": "bshd", "units": E4M3}, {}),
    "nvfp4, float16": ({"dtype": "float16"}, {}),
    "nvfp4, float64": ({"dtype": "float64", "scales": (2,)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_over_the_floats_that_codes_stand_for(name: str) -> None:
    kinds, options = CASES[name]
    kind = name.partition(",")[0]
    given = call(kind, **kinds) | options
    o, lse = cached(**given, return_lse=True)
    reference = testing.reference_with_kv_cache(**given)
    limits = {"float16": 2e-3, "float32": 2e-5 if kind == "int4" else 4e-5, "float64": 1e-10}
    limit = limits[kinds.get("dtype", "float32")]
    np.testing.assert_allclose(o.astype(float), reference.o, atol=limit)
    np.testing.assert_allclose(lse, reference.lse, atol=limit)


@of_both
def test_packed_queries(kind: str) -> None:
    given = call(kind, queries=2, new=1, layout="bshd", scales=(2,) if kind == "nvfp4" else None)
    apart = given | {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    wanted = cached(**apart)
    rows = {n: given[n].reshape(-1, *given[n].shape[2:]) for n in "qkv"}
    cut = np.arange(4, dtype=np.int32)
    o = cached(**given | rows, cu_seqlens_q=2 * cut, cu_seqlens_k_new=cut)
    np.testing.assert_allclose(o, wanted.reshape(o.shape), atol=2e-5)


@of_both
def test_behind_a_shared_prefix(kind: str) -> None:
    given = call(kind)
    prefix = {f"prefix_{x}": np.ones((2, 9, dim), np.float32) for x, dim in (("k", 64), ("v", 128))}
    o = cached(**given, **prefix)
    wanted = cached(**wide(kind, given, np.float32), **prefix)
    np.testing.assert_allclose(o, wanted, atol=2e-5)


@of_both
def test_tables_that_lead_outside(kind: str) -> None:
    given = call(kind, page=16, new=2)
    given["block_table"][1] = 10**6
    given["block_table"][0, 0] = -1
    o, lse = cached(**given, check=False, return_lse=True)
    assert not o[:2].any()
    assert (lse[:2] == -np.inf).all()


# ---- int4


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("units", ["float16", "float32"])
def test_new_int4_keys_are_stored_as_the_specification_says(units: str, page: int) -> None:
    """At odd lengths, in their places only: code 0 is the lowest of a group, 15 the highest."""
    given = call("int4", new=3, units=units, page=page)
    angles = np.random.default_rng(1).random((ROOM, 8)).astype(np.float32)
    turned = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    o = cached(**given, **turned)
    floats = wide("int4", before)
    stored = testing.reference_with_kv_cache(**floats, **turned)
    for x, wanted in (("k", stored.k_cache), ("v", stored.v_cache)):
        parts = [given[f"{x}_{part}"] for part in ("cache", "scale", "zero")]
        fresh = (wanted != floats[f"{x}_cache"]).any(-1)
        assert fresh.sum() == BATCH * 3 * HEADS[1]
        for part in ("cache", "scale", "zero"):
            kept, now = before[f"{x}_{part}"][~fresh], given[f"{x}_{part}"][~fresh]
            np.testing.assert_array_equal(now, kept)
        rows = wanted[fresh].reshape(fresh.sum(), parts[1].shape[-1], -1)
        low, high = rows.min(-1), rows.max(-1)
        unit = np.finfo(units).eps
        np.testing.assert_allclose(parts[2][fresh], low, atol=8 * unit)
        np.testing.assert_allclose(parts[1][fresh], (high - low) / 15, atol=8 * unit)
        found = dequantized_int4(*(part[fresh] for part in parts)).reshape(rows.shape)
        step = parts[1][fresh].astype(float)[..., None]
        assert (np.abs(found - rows) <= step * 0.5 + 16 * unit).all()
    after = {n: x for n, x in given.items() if n not in ("k", "v")}
    after["cache_seqlens"] = LENGTHS + np.int32(3)
    wanted = testing.reference_with_kv_cache(**after, **turned).o
    np.testing.assert_allclose(o, wanted, atol=2e-5)


def test_what_is_stored_is_what_int4_makes() -> None:
    given = call("int4", new=1)
    given["cache_seqlens"] = 7
    cached(**given)
    for x, group in (("k", 32), ("v", 64)):
        for part, wanted in zip(("cache", "scale", "zero"), int4_parts(given[x], group=group), strict=True):
            np.testing.assert_array_equal(given[f"{x}_{part}"][:, :, 7:8], wanted)


def test_scales_and_zeros_lie_as_they_like() -> None:
    """Each with strides of its own, read and written."""
    given = call("int4", new=3, groups=(32, 32))
    apart = given | {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    apart |= {f"{x}_scale": np.asfortranarray(given[f"{x}_scale"]) for x in "kv"}
    np.testing.assert_array_equal(cached(**apart), cached(**given))
    for x in "kv":
        for part in PARTS["int4"]:
            np.testing.assert_array_equal(apart[f"{x}_{part}"], given[f"{x}_{part}"])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_int4_and_back(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 128)).astype(dtype)
    x[0], x[1, :32] = 3, np.arange(32)
    codes, scale, zero = int4_parts(x, group=32)
    found = dequantized(codes, scale, zero, dtype="float64")
    np.testing.assert_allclose(found, dequantized_int4(codes, scale, zero), atol=1e-12)
    worst = np.repeat(scale.astype(float), 32, -1) / 2 + np.abs(x) * 2e-3 + 1e-3
    assert (np.abs(found - x) <= worst).all()
    np.testing.assert_array_equal(found[0], 3)


# ---- NVFP4


def test_every_code_and_every_scale_of_nvfp4() -> None:
    """One key is seen, so the result is its value, bit for bit; NaN where its scale is."""
    given = call("nvfp4", dims=(16, 256))
    given["v_cache"][...] = np.arange(128) % 16 * 17
    given["v_cache"][:, :, ::2] += 1
    keys = np.arange(BATCH * 2 * ROOM, dtype=np.uint8).reshape(BATCH, 2, ROOM, 1)
    given["v_block_scale"][...] = keys
    values = dequantized_nvfp4(given["v_cache"], given["v_block_scale"])
    values[np.broadcast_to((keys & 127) == 127, values.shape)] = np.nan
    for length in range(1, ROOM + 1):
        given["cache_seqlens"] = length
        o = cached(**given, window=(0, 0))
        np.testing.assert_array_equal(o[:, :, 0], np.repeat(values[:, :, length - 1], 2, 1))


@pytest.mark.parametrize("units", ["uint8", E4M3], ids=["bits", "float8"])
@pytest.mark.parametrize("page", [0, 16])
def test_new_keys_are_stored_as_nvfp4_makes_them(units: Any, page: int) -> None:
    """At odd lengths, in their places only."""
    given = call("nvfp4", new=3, units=units, page=page, scales=(2,))
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    o = cached(**given)
    for x in "kv":
        made = nvfp4_parts(given[x] / given[f"{x}_scale"][:, None, None])
        for part, wanted in zip(("cache", "block_scale"), made, strict=True):
            now, expected = given[f"{x}_{part}"], before[f"{x}_{part}"]
            for b in range(BATCH):
                for t in range(3):
                    at = int(LENGTHS[b]) + t
                    slot, row = (given["block_table"][b, at // page], at % page) if page else (b, at)
                    expected[slot, :, row] = wanted[b, :, t].view(expected.dtype)
            np.testing.assert_array_equal(now.view(np.uint8), expected.view(np.uint8))
    after = {n: x for n, x in given.items() if n not in ("k", "v")}
    after["cache_seqlens"] = LENGTHS + np.int32(3)
    np.testing.assert_allclose(o, testing.reference_with_kv_cache(**after).o, atol=4e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_new_keys_are_rotated_first(interleaved: bool) -> None:
    given = call("nvfp4", new=3, dtype="float64", scales=(2,))
    angles = np.random.default_rng(1).random((ROOM, 8))
    turned = {
        "rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "rotary_interleaved": interleaved,
    }  # fmt: skip
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    o = cached(**given, **turned)
    wanted = testing.reference_with_kv_cache(**(given | before), **turned)
    np.testing.assert_allclose(o, wanted.o, atol=1e-10)
    floats = wide("nvfp4", given)
    np.testing.assert_array_equal(floats["k_cache"], wanted.k_cache)
    np.testing.assert_array_equal(floats["v_cache"], wanted.v_cache)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
def test_nvfp4_is_the_format(dtype: Any) -> None:
    """Against ml_dtypes, which rounds to both of its types to nearest, ties to even."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 64)) * rng.choice([1e-6, 1e-2, 1.0, 1e2, 5e3], (200, 1))
    x[0], x[1, :16] = (
        0,
        [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6],
    )
    x = x.astype(dtype)
    acc: Any = np.float64 if dtype == "float64" else np.float32
    rows = x.astype(acc).reshape(200, 4, 16)
    scale = np.minimum(np.abs(rows).max(-1) / acc(6), acc(448)).astype(E4M3)
    codes, found = nvfp4_parts(x)
    np.testing.assert_array_equal(found, scale.view(np.uint8))
    by = scale.astype(acc)[..., None]
    exact = (
        np.clip(rows / np.where(by > 0, by, np.inf), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(float) * by
    )
    np.testing.assert_array_equal(dequantized(codes, found, dtype="float64"), exact.reshape(200, 64))
    np.testing.assert_array_equal(dequantized_nvfp4(codes, found), exact.reshape(200, 64))


# ---- what is refused


def of_groups(groups: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.ones((BATCH, 2, ROOM, groups), dtype)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "int4, a zero alone": ({"k_scale": None}, "codes of 4 bits and k_cache.scale is not given"),
    "int4, of keys alone": ({"v_zero": None}, "codes of 4 bits and v_cache.zero is not given"),
    "int4, of values alone": ({"k_zero": None}, "codes of 4 bits and k_cache.zero is not given"),
    "int4, of another cache": ({"k_scale": of_groups(2, np.float16)[:, :, 1:]}, "k_cache.scale has"),
    "int4, scales of heads": ({"v_scale": np.ones(2, np.float16)}, "v_cache.scale has rank 1, not 4"),
    "int4, groups of 16": (
        {n: of_groups(4, np.float16) for n in ("k_scale", "k_zero")}, "k_cache.scale has",
    ),
    "int4, groups that do not divide": (
        {n: of_groups(3, np.float16) for n in ("v_scale", "v_zero")}, "v_cache.scale has",
    ),
    "int4, no group": (
        {n: of_groups(0, np.float16) for n in ("v_scale", "v_zero")}, "v_cache.scale has"),
    "int4, other groups of zeros": ({"v_zero": of_groups(4, np.float16)}, "v_cache.scale has"),
    "int4, two dtypes": ({"v_scale": of_groups(2, np.float32)}, "v_cache.scale has dtype float32"),
    "int4, integers": ({n: of_groups(2, np.int8) for n in ("k_scale", "k_zero")}, "has dtype int8"),
    "int4, codes of 8 bits": (
        {n: of_groups(d, np.int8) for n, d in (("k_cache", 32), ("v_cache", 64))},
        "k_cache has dtype int8",
    ),
    "int4, an odd head_dim": (
        {"q": np.ones((BATCH, 4, 1, 63), np.float32)}, "q has head_dim 63, k_cache has 64",
    ),
    "nvfp4, of keys alone": ({"v_block_scale": None}, "and v_cache.block_scale is not given"),
    "nvfp4, of values alone": ({"k_block_scale": None}, "and k_cache.block_scale is not given"),
    "nvfp4, of another cache": ({"k_block_scale": of_groups(4)[:, :, 1:]}, "k_cache.block_scale has shape"),
    "nvfp4, scales of heads": (
        {"v_block_scale": np.ones(2, np.uint8)}, "v_cache.block_scale has rank 1, not 4",
    ),
    "nvfp4, groups of 32": ({"k_block_scale": of_groups(2)}, "k_cache.block_scale has shape"),
    "nvfp4, no group": ({"v_block_scale": of_groups(0)}, "v_cache.block_scale has shape"),
    "nvfp4, floats": ({"v_block_scale": of_groups(8, np.float16)}, "v_cache.block_scale has dtype float16"),
    "nvfp4, integers": ({"k_block_scale": of_groups(4, np.int8)}, "k_cache.block_scale has dtype int8"),
    "nvfp4, zeros too": (
        {n: of_groups(2, np.float16) for n in ("k_zero", "v_zero")}, "k_cache.zero and k_cache.block_scale"),
    "nvfp4, codes of 8 bits": (
        {n: of_groups(d, np.int8) for n, d in (("k_cache", 32), ("v_cache", 64))},
        "k_cache.block_scale is given, and k_cache has dtype int8",
    ),
    "nvfp4, a scale for a key": ({"k_scale": of_groups(4, np.float32)}, "k_scale"),
    "nvfp4, float16 for a head": ({"v_scale": np.ones(2, np.float16)}, "v_cache.scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    changes, message = REFUSED[name]
    given = call(name.partition(",")[0], new=1) | changes
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(InvalidArgumentsError, match=message) as caught:
        cached(**given)
    assert "Try: " in str(caught.value)
    for n, x in before.items():
        np.testing.assert_array_equal(given[n], x)


@of_both
def test_scales_that_cannot_be_written(kind: str) -> None:
    given, part = call(kind, new=1), PARTS[kind][-1]
    given[f"v_{part}"].flags.writeable = False
    with pytest.raises(InvalidArgumentsError, match=rf"v_cache\.{part} is read-only"):
        cached(**given)


@pytest.mark.parametrize(
    ("make", "x", "how", "message"),
    [
        (int4_parts, np.ones((2, 48), np.float32), {"group": 32}, "group is 32, for an x of shape"),
        (int4_parts, np.ones((2, 64), np.float32), {"group": 16}, "group is 16"),
        (int4_parts, np.ones((2, 64), np.int8), {}, "x has dtype int8"),
        (int4_parts, np.ones((2, 0), np.float32), {}, r"group is 64, for an x of shape \(2, 0\)"),
        (int4_parts, np.ones((), np.float32), {}, r"group is 64, for an x of shape \(\)"),
        (int4_parts, np.ones((2, 64), np.float32), {"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        (nvfp4_parts, np.ones((2, 40), np.float32), {}, r"x has shape \(2, 40\)"),
        (nvfp4_parts, np.ones((2, 64), np.int8), {}, "x has dtype int8"),
        (nvfp4_parts, np.ones((2, 0), np.float32), {}, r"x has shape \(2, 0\)"),
        (nvfp4_parts, np.ones((), np.float32), {}, r"x has shape \(\)"),
        (lambda x: dequantized(*int4_parts(x), dtype="int8"), np.ones((2, 64)), {}, "dtype is 'int8'"),
        (lambda x: dequantize(int8(x)), np.ones((1, 1, 1, 4)), {}, "has neither zero nor block_scale"),
    ],
)
def test_quantize_refuses(make: Any, x: np.ndarray, how: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message):
        make(x, **how)
