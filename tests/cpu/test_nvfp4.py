"""NVFP4 caches: read as the floats they stand for, written as the format says, or refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import InvalidArgumentsError, testing
from cupy_flash.testing.kv_cache import dequantized_nvfp4
from tests.public import cached, dequantized, nvfp4_parts

pytestmark = pytest.mark.usefixtures("cpu_family")

BATCH, ROOM, HEADS = 3, 48, (4, 2)
LENGTHS = np.array([0, 17, 44], np.int32)
STORED = [f"{x}_{part}" for x in "kv" for part in ("cache", "block_scale")]


def call(
    dims: tuple[int, int] = (64, 128),
    queries: int = 1,
    new: int = 0,
    dtype: Any = "float32",
    layout: str = "bhsd",
    page: int = 0,
    scales: tuple[int, ...] | None = None,
    units: str = "uint8",
) -> dict[str, Any]:
    """A call over such caches; `scales` is the shape of k_scale and v_scale."""
    rng = np.random.default_rng(2)
    made: dict[str, Any] = {"cache_seqlens": LENGTHS, "layout": layout}
    normal = {"q": rng.standard_normal((BATCH, HEADS[0], queries, dims[0]))}
    slots, rows = (BATCH * ROOM // page + 2, page) if page else (BATCH, ROOM)
    for name, dim in zip("kv", dims, strict=True):
        x = rng.standard_normal((slots, HEADS[1], rows, dim)).astype(np.float32) + np.float32(0.5)
        made[f"{name}_cache"], made[f"{name}_block_scale"] = nvfp4_parts(x)
        if units != "uint8":
            made[f"{name}_block_scale"] = made[f"{name}_block_scale"].view(units)
        if new:
            normal[name] = rng.standard_normal((BATCH, HEADS[1], new, dim))
    made |= {name: x.astype(dtype) for name, x in normal.items()}
    if page:
        table = rng.permutation(slots)[: BATCH * ROOM // page]
        made["block_table"] = table.reshape(BATCH, -1).astype(np.int32)
    if layout == "bshd":
        made |= {n: x.swapaxes(1, 2) for n, x in made.items() if getattr(x, "ndim", 0) == 4}
    if scales is not None:
        acc = "float64" if np.dtype(dtype) == "float64" else "float32"
        made |= {f"{x}_scale": rng.uniform(0.5, 2, scales).astype(acc) for x in "kv"}
    return made


E4M3: Any = ml_dtypes.float8_e4m3fn
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one query": ({}, {}),
    "scales of heads, head_dim 48": ({"dims": (48, 16), "scales": (2,)}, {}),
    "few queries, causal": ({"queries": 3, "scales": (3, 2)}, {"causal": True, "window": (30, None)}),
    "many queries": (
        {"queries": 20, "scales": (2,)}, {"causal": True, "softcap": 3.0, "sinks": np.ones(4, np.float32)},
    ),
    "pages": ({"page": 16, "units": E4M3}, {}),
    "pages of 3 keys": ({"page": 3, "queries": 2}, {}),
    "the other layout": ({"layout": "bshd", "units": E4M3}, {}),
    "float16": ({"dtype": "float16"}, {}),
    "float64": ({"dtype": "float64", "scales": (2,)}, {}),
}  # fmt: skip


def wide(given: dict[str, Any], dtype: Any = np.float64) -> dict[str, Any]:
    """The same call over the floats that its codes stand for, but for k_scale and v_scale."""
    rest = {n: x for n, x in given.items() if "block_scale" not in n}
    for x in "kv":
        rest[f"{x}_cache"] = dequantized_nvfp4(given[f"{x}_cache"], given[f"{x}_block_scale"]).astype(dtype)
    return rest


@pytest.mark.parametrize("name", CASES)
def test_as_over_the_floats_that_codes_stand_for(name: str) -> None:
    kinds, options = CASES[name]
    given = call(**kinds) | options
    o, lse = cached(**given, return_lse=True)
    reference = testing.reference_with_kv_cache(**given)
    limit = 2e-3 if kinds.get("dtype") == "float16" else 1e-10 if kinds.get("dtype") == "float64" else 4e-5
    np.testing.assert_allclose(o.astype(float), reference.o, atol=limit)
    np.testing.assert_allclose(lse, reference.lse, atol=limit)


def test_every_code_and_every_scale() -> None:
    """One key is seen, so the result is its value, bit for bit; NaN where its scale is."""
    given = call(dims=(16, 256))
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
def test_new_keys_are_stored_as_quantize_makes_them(units: Any, page: int) -> None:
    """At odd lengths, in their places only."""
    given = call(new=3, units=units, page=page, scales=(2,))
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
    given = call(new=3, dtype="float64", scales=(2,))
    angles = np.random.default_rng(1).random((ROOM, 8))
    turned = {
        "rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "rotary_interleaved": interleaved,
    }  # fmt: skip
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    o = cached(**given, **turned)
    wanted = testing.reference_with_kv_cache(**(given | before), **turned)
    np.testing.assert_allclose(o, wanted.o, atol=1e-10)
    floats = wide(given)
    np.testing.assert_array_equal(floats["k_cache"], wanted.k_cache)
    np.testing.assert_array_equal(floats["v_cache"], wanted.v_cache)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
def test_quantize_is_the_format(dtype: Any) -> None:
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


def test_packed_queries() -> None:
    given = call(queries=2, new=1, layout="bshd", scales=(2,))
    apart = given | {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    wanted = cached(**apart)
    rows = {n: given[n].reshape(-1, *given[n].shape[2:]) for n in "qkv"}
    cut = np.arange(4, dtype=np.int32)
    o = cached(**given | rows, cu_seqlens_q=2 * cut, cu_seqlens_k_new=cut)
    np.testing.assert_allclose(o, wanted.reshape(o.shape), atol=2e-5)


def test_behind_a_shared_prefix() -> None:
    given = call()
    prefix = {f"prefix_{x}": np.ones((2, 9, dim), np.float32) for x, dim in (("k", 64), ("v", 128))}
    o = cached(**given, **prefix)
    wanted = cached(**wide(given, np.float32), **prefix)
    np.testing.assert_allclose(o, wanted, atol=2e-5)


def test_tables_that_lead_outside() -> None:
    given = call(page=16, new=2)
    given["block_table"][1] = 10**6
    given["block_table"][0, 0] = -1
    o, lse = cached(**given, check=False, return_lse=True)
    assert not o[:2].any()
    assert (lse[:2] == -np.inf).all()


def of_groups(groups: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.ones((BATCH, 2, ROOM, groups), dtype)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of keys alone": ({"v_block_scale": None}, "codes of 4 bits and v_cache.block_scale is not given"),
    "of values alone": ({"k_block_scale": None}, "codes of 4 bits and k_cache.block_scale is not given"),
    "of another cache": (
        {"k_block_scale": np.ones((BATCH, 2, ROOM + 1, 4), np.uint8)}, "k_cache.block_scale has shape",
    ),
    "scales of heads": ({"v_block_scale": np.ones(2, np.uint8)}, "v_cache.block_scale has rank 1, not 4"),
    "groups of 32": ({"k_block_scale": of_groups(2)}, "k_cache.block_scale has shape"),
    "no group": ({"v_block_scale": of_groups(0)}, "v_cache.block_scale has shape"),
    "floats": ({"v_block_scale": of_groups(8, np.float16)}, "v_cache.block_scale has dtype float16"),
    "integers": ({"k_block_scale": of_groups(4, np.int8)}, "k_cache.block_scale has dtype int8"),
    "zeros too": (
        {n: of_groups(2, np.float16) for n in ("k_zero", "v_zero")}, "k_cache.zero and k_cache.block_scale"),
    "codes of 8 bits": (
        {n: np.ones((BATCH, 2, ROOM, d), np.int8) for n, d in (("k_cache", 32), ("v_cache", 64))},
        "k_cache.block_scale is given, and k_cache has dtype int8",
    ),
    "a scale for a key": ({"k_scale": of_groups(4, np.float32)}, "k_scale"),
    "float16 for a head": ({"v_scale": np.ones(2, np.float16)}, "v_cache.scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    changes, message = REFUSED[name]
    given = call(new=1) | changes
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(InvalidArgumentsError, match=message) as caught:
        cached(**given)
    assert "Try: " in str(caught.value)
    for n, x in before.items():
        np.testing.assert_array_equal(given[n], x)


def test_scales_that_cannot_be_written() -> None:
    given = call(new=1)
    given["v_block_scale"].flags.writeable = False
    with pytest.raises(InvalidArgumentsError, match=r"v_cache\.block_scale is read-only"):
        cached(**given)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((2, 40), np.float32), r"x has shape \(2, 40\)"),
        (np.ones((2, 64), np.int8), "x has dtype int8"),
    ],
    ids=["no groups of 16", "integers"],
)
def test_quantize_refuses(x: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message):
        nvfp4_parts(x)
