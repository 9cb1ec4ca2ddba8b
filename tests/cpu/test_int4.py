"""Caches of 4-bit codes: read as the floats they stand for, written as specified, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import InvalidArgumentsError, testing
from cupy_flash.testing.kv_cache import dequantized_int4
from tests.public import cached, dequantized, int4_parts

pytestmark = pytest.mark.usefixtures("cpu_family")

BATCH, ROOM, HEADS = 3, 48, (4, 2)
LENGTHS = np.array([0, 17, 44], np.int32)


def call(
    dims: tuple[int, int] = (64, 128),
    groups: tuple[int, int] = (32, 64),
    units: str = "float16",
    queries: int = 1,
    new: int = 0,
    dtype: str = "float32",
    layout: str = "bhsd",
    page: int = 0,
) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    made: dict[str, Any] = {"cache_seqlens": LENGTHS, "layout": layout}
    normal = {"q": rng.standard_normal((BATCH, HEADS[0], queries, dims[0]))}
    slots, rows = (BATCH * ROOM // page + 2, page) if page else (BATCH, ROOM)
    for name, dim, group in zip("kv", dims, groups, strict=True):
        x = rng.standard_normal((slots, HEADS[1], rows, dim)).astype(np.float32) + np.float32(0.5)
        made[f"{name}_cache"], made[f"{name}_scale"], made[f"{name}_zero"] = int4_parts(
            x, group=group, dtype=units
        )
        if new:
            normal[name] = rng.standard_normal((BATCH, HEADS[1], new, dim))
    made |= {name: x.astype(dtype) for name, x in normal.items()}
    if page:
        table = rng.permutation(slots)[: BATCH * ROOM // page]
        made["block_table"] = table.reshape(BATCH, -1).astype(np.int32)
    if layout == "bshd":
        made |= {n: x.swapaxes(1, 2) for n, x in made.items() if getattr(x, "ndim", 0) == 4}
    return made


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one query": ({}, {}),
    "groups of 128, float32": ({"dims": (128, 256), "groups": (128, 128), "units": "float32"}, {}),
    "few queries, causal": ({"queries": 3}, {"causal": True, "window": (30, None)}),
    "many queries": ({"queries": 20}, {"causal": True, "softcap": 3.0, "sinks": np.ones(4, np.float32)}),
    "pages": ({"page": 16}, {}),
    "pages of 3 keys": ({"page": 3, "queries": 2}, {}),
    "the other layout": ({"layout": "bshd"}, {}),
    "float16": ({"dtype": "float16"}, {}),
    "float64": ({"dtype": "float64", "units": "float32"}, {}),
}


def wide(given: dict[str, Any], dtype: Any = np.float64) -> dict[str, Any]:
    """The same call over the floats that its codes stand for."""
    rest = {n: x for n, x in given.items() if n not in ("k_scale", "k_zero", "v_scale", "v_zero")}
    for x in "kv":
        rest[f"{x}_cache"] = dequantized_int4(
            *(given[f"{x}_{part}"] for part in ("cache", "scale", "zero"))
        ).astype(dtype)
    return rest


@pytest.mark.parametrize("name", CASES)
def test_as_over_the_floats_that_codes_stand_for(name: str) -> None:
    kinds, options = CASES[name]
    given = call(**kinds) | options
    o, lse = cached(**given, return_lse=True)
    reference = testing.reference_with_kv_cache(**given)
    limit = 2e-3 if kinds.get("dtype") == "float16" else 1e-10 if kinds.get("dtype") == "float64" else 2e-5
    np.testing.assert_allclose(o.astype(float), reference.o, atol=limit)
    np.testing.assert_allclose(lse, reference.lse, atol=limit)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("units", ["float16", "float32"])
def test_new_keys_are_stored_as_the_specification_says(units: str, page: int) -> None:
    """At odd lengths, in their places only: code 0 is the lowest of a group, 15 the highest."""
    given = call(new=3, units=units, page=page)
    angles = np.random.default_rng(1).random((ROOM, 8)).astype(np.float32)
    turned = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    o = cached(**given, **turned)
    floats = wide(before)
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


def test_what_is_stored_is_what_quantize_makes() -> None:
    given = call(new=1)
    given["cache_seqlens"] = 7
    cached(**given)
    for x, group in (("k", 32), ("v", 64)):
        for part, wanted in zip(("cache", "scale", "zero"), int4_parts(given[x], group=group), strict=True):
            np.testing.assert_array_equal(given[f"{x}_{part}"][:, :, 7:8], wanted)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_quantize_and_back(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 128)).astype(dtype)
    x[0], x[1, :32] = 3, np.arange(32)
    codes, scale, zero = int4_parts(x, group=32)
    found = dequantized(codes, scale, zero, dtype="float64")
    np.testing.assert_allclose(found, dequantized_int4(codes, scale, zero), atol=1e-12)
    worst = np.repeat(scale.astype(float), 32, -1) / 2 + np.abs(x) * 2e-3 + 1e-3
    assert (np.abs(found - x) <= worst).all()
    np.testing.assert_array_equal(found[0], 3)


def test_packed_queries() -> None:
    given = call(queries=2, new=1, layout="bshd")
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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a zero alone": ({"k_scale": None}, "codes of 4 bits and k_cache.scale is not given"),
    "of keys alone": ({"v_zero": None}, "codes of 4 bits and v_cache.zero is not given"),
    "of values alone": ({"k_zero": None}, "codes of 4 bits and k_cache.zero is not given"),
    "of another cache": ({"k_scale": np.ones((BATCH, 2, ROOM + 1, 2), np.float16)}, "k_cache.scale has"),
    "scales of heads": ({"v_scale": np.ones(2, np.float16)}, "v_cache.scale has rank 1, not 4"),
    "groups of 16": (
        {n: np.ones((BATCH, 2, ROOM, 4), np.float16) for n in ("k_scale", "k_zero")}, "k_cache.scale has",
    ),
    "groups that do not divide": (
        {n: np.ones((BATCH, 2, ROOM, 3), np.float16) for n in ("v_scale", "v_zero")}, "v_cache.scale has",
    ),
    "no group": (
        {n: np.ones((BATCH, 2, ROOM, 0), np.float16) for n in ("v_scale", "v_zero")}, "v_cache.scale has"),
    "other groups of zeros": ({"v_zero": np.ones((BATCH, 2, ROOM, 4), np.float16)}, "v_cache.scale has"),
    "two dtypes": ({"v_scale": np.ones((BATCH, 2, ROOM, 2), np.float32)}, "v_cache.scale has dtype float32"),
    "integers": ({n: np.ones((BATCH, 2, ROOM, 2), np.int8) for n in ("k_scale", "k_zero")}, "has dtype int8"),
    "codes of 8 bits": (
        {n: np.ones((BATCH, 2, ROOM, d), np.int8) for n, d in (("k_cache", 32), ("v_cache", 64))},
        "k_cache has dtype int8",
    ),
    "an odd head_dim": ({"q": np.ones((BATCH, 4, 1, 63), np.float32)}, "q has head_dim 63, k_cache has 64"),
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
    given["v_zero"].flags.writeable = False
    with pytest.raises(InvalidArgumentsError, match=r"v_cache\.zero is read-only"):
        cached(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": np.ones((2, 48), np.float32), "group": 32}, "group is 32, for an x of shape"),
        ({"x": np.ones((2, 64), np.float32), "group": 16}, "group is 16"),
        ({"x": np.ones((2, 64), np.int8)}, "x has dtype int8"),
        ({"x": np.ones((2, 64), np.float32), "dtype": "bfloat16"}, "dtype is 'bfloat16'"),
    ],
    ids=["that does not divide", "too small", "integers", "bfloat16"],
)
def test_quantize_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message):
        int4_parts(**given)
