"""Caches of latents (MLA) on NumPy arrays: FP64 parity, what is stored, what is refused and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import (
    InvalidArgumentsError,
    LatentCache,
    QuantizedArray,
    QuantizedCache,
    Rotary,
    UnsupportedError,
)
from cupy_flash.testing.kv_cache import rotate
from tests.checks import Device
from tests.kv_cases import KvCase, check
from tests.public import cached

pytestmark = pytest.mark.usefixtures("cpu_family")

CASES = (
    [
        KvCase(latent=True, head_dims=(576, 512), heads=(16, 1), dtype=dtype, **features)
        for dtype, features in (
            ("float16", {"kind": "paged", "page": 7, "room": 161, "new": 2}),
            ("bfloat16", {"queries": 3, "causal": True, "sinks": True, "kind": "indexed"}),
            ("float32", {"new": 1, "layout": "bshd", "softcap": 3.0}),
            ("float64", {"kind": "paged", "new": 5, "window": (50, None)}),
        )
    ]
    + [
        KvCase(latent=True, head_dims=(576, 512), heads=(16, 1), dtype="bfloat16"),
        KvCase(latent=True, head_dims=(20, 12), heads=(4, 2), dtype="float32", new=3),
        KvCase(
            latent=True, head_dims=(576, 512), heads=(8, 1), stored="int8", scales="bh", kind="paged", new=2
        ),
        KvCase(latent=True, head_dims=(48, 32), heads=(4, 2), stored="e4m3", dtype="bfloat16", new=3),
    ]
    + [
        KvCase(latent=True, last=True, rotary=rotary, head_dims=dims, heads=(4, 1), **features)
        for dims, rotary, features in (
            ((576, 512), 64, {"kind": "paged", "new": 2, "interleaved": True, "dtype": "bfloat16"}),
            ((47, 21), 26, {"queries": 3, "causal": True, "dtype": "float64"}),
            (
                (47, 21),
                8,
                {"new": 70, "queries": 70, "interleaved": True, "dtype": "float32", "tables": "same"},
            ),
            ((80, 64), 16, {"new": 2, "stored": "int8", "kind": "indexed"}),
            ((80, 64), 14, {"new": 3, "stored": "e4m3", "interleaved": True, "scales": "bh"}),
        )
    ]
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: KvCase) -> None:
    check(case, Device("cpu"))


def inputs() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 1, 20), (2, 1, 16, 20), (2, 1, 1, 20))
    q, kv, new = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, kv, new


def test_a_view_says_the_same() -> None:
    """Of new latents too, with or without their values."""
    q, kv, new = inputs()
    results = []
    for given in (
        lambda x: ((LatentCache(x, 12),), {"k": new}),
        lambda x: ((x, x[..., :12]), {"k": new}),
        lambda x: ((x, x[..., :12]), {"k": new, "v": new[..., :12]}),
    ):
        cache = kv.copy()
        caches, options = given(cache)
        o = cupy_flash.attention_with_kv_cache(q, *caches, cache_seqlens=7, **options)
        np.testing.assert_array_equal(cache[:, :, 7], new[:, :, 0])
        results.append(o)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_memory_tells_latents_from_arrays_of_their_shape() -> None:
    """A call is remembered by the kinds of its arrays; where they lie is one of these."""
    q, kv, _ = inputs()
    room = np.zeros((2, 1, 16, 40), np.float32)[..., :20]
    room[...] = kv
    others = np.zeros((2, 1, 16, 40), np.float32)[..., :12]
    for values, word in (
        (room[..., :12], "latents"),
        (others, "cache of float32"),
        (room[..., :12], "latents"),
    ):
        text = cupy_flash.explain(q, room, values, kv_cache={"cache_seqlens": 7})
        assert word in text
        o = cupy_flash.attention_with_kv_cache(q, room, values, cache_seqlens=7)
        assert o.any() == (values is not others)


def two_scales(codes: np.ndarray) -> tuple[QuantizedCache, QuantizedCache]:
    return QuantizedCache(codes, np.float32([1])), QuantizedCache(codes[..., :12], np.float32([1]))


def test_a_view_says_the_same_in_8_bits() -> None:
    """With one scale, of which two arrays are taken as long as nothing is stored."""
    q, kv, new = inputs()
    codes, scale = np.rint(kv * 30).clip(-127, 127).astype(np.int8), np.float32([1 / 30])
    results = []
    for given in (
        lambda x: ((LatentCache(QuantizedCache(x, scale), 12),), {"k": new}),
        lambda x: ((QuantizedCache(x, scale), QuantizedCache(x[..., :12], scale)), {"k": new}),
    ):
        cache = codes.copy()
        caches, options = given(cache)
        o = cupy_flash.attention_with_kv_cache(q, *caches, cache_seqlens=7, **options)
        np.testing.assert_array_equal(cache[:, :, 7], np.rint(new[:, :, 0] / scale).clip(-127, 127))
        results.append(o)
    np.testing.assert_array_equal(results[0], results[1])
    keys, values = two_scales(codes)
    doubled = values._replace(scale=np.float32([2]))
    one = cupy_flash.attention_with_kv_cache(q, keys, values, cache_seqlens=7)
    two = cupy_flash.attention_with_kv_cache(q, keys, doubled, cache_seqlens=7)
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)


TURNED: dict[str, dict[str, Any]] = {
    "plain": {},
    "from elsewhere": {"rotary_seqlens": np.int32([3, 0])},
    "pages": {"block_table": np.int32([[3, 0], [1, 2]])},
    "a prefix": {"prefix_k": np.random.default_rng(2).standard_normal((1, 5, 21))},
    "on read": {"rotate_cache": True},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", TURNED)
def test_rotated_by_the_call_as_before_it(name: str, interleaved: bool) -> None:
    """The last features of q and of new latents, whose values keep their bits."""
    rng, options, lengths = np.random.default_rng(1), dict(TURNED[name]), np.int32([7, 4])
    q, new = rng.standard_normal((2, 4, 3, 21)), rng.standard_normal((2, 1, 2, 21))
    kv = rng.standard_normal((4, 1, 8, 21) if name == "pages" else (2, 1, 16, 21))
    new[0, 0, 0, :4] = 5e-324, -0.0, 1e300, -1e-300
    cos, sin = np.cos(angles := 6 * rng.random((40, 4))), np.sin(angles)

    def turned(x: np.ndarray, first: Any) -> np.ndarray:
        rows = np.arange(x.shape[2])
        return np.stack(
            [rotate(y, n + rows, cos, sin, interleaved, True) for y, n in zip(x, first, strict=True)]
        )

    before = lengths + 5 * (name == "a prefix")
    if name == "a prefix":
        options["prefix_v"] = options["prefix_k"][..., :13]
    before, first = (options.get("rotary_seqlens", at) for at in (before, before + 2 - 3))
    asked = {"v_cache": None, "cache_seqlens": lengths, "causal": True, "return_lse": True, **options}
    latents, rotated = kv.copy(), turned(kv, (0, 0)) if name == "on read" else kv.copy()
    found = cached(
        q, LatentCache(latents, 13), k=new, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        rotary_last=True, **asked,
    )  # fmt: skip
    for unused in ("rotary_seqlens", "rotate_cache"):
        asked.pop(unused, None)
    wanted = cached(turned(q, first), LatentCache(rotated, 13), k=turned(new, before), **asked)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    if name == "on read":
        for b, n in enumerate(lengths):
            kv[b, :, n : n + 2] = new[b]
        assert latents.tobytes() == kv.tobytes()
        return
    assert latents[..., :13].tobytes() == rotated[..., :13].tobytes()
    np.testing.assert_allclose(latents, rotated, rtol=1e-12, atol=1e-12)


def test_first_features_may_be_rotated_on_read() -> None:
    """Latents are stored as they come, so that values are not rotated with the keys."""
    q, kv, new = inputs()
    angles = np.random.default_rng(1).standard_normal((16, 4))
    how = {"cache_seqlens": 7, "k": new}
    how |= {"rotary": Rotary(*(f(angles).astype(np.float32) for f in (np.cos, np.sin)), on_read=True)}
    apart = kv.copy(), kv[..., :12].copy()
    o = cupy_flash.attention_with_kv_cache(q, LatentCache(kv, 12), None, **how)
    wanted = cupy_flash.attention_with_kv_cache(q, *apart, v=new[..., :12].copy(), **how)
    np.testing.assert_allclose(o, wanted, atol=1e-6)


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "v_cache beside it": (lambda q, kv, _: (q, LatentCache(kv, 12), kv[..., :12]), InvalidArgumentsError,
                          "k_cache is a LatentCache, v_cache is an ndarray"),
    "as v_cache": (lambda q, kv, _: (q, kv, LatentCache(kv, 12)), InvalidArgumentsError,
                   "v_cache is a LatentCache"),
    "no v_cache": (lambda q, kv, _: (q, kv), InvalidArgumentsError, "v_cache is None"),
    "columns beyond": (lambda q, kv, _: (q, LatentCache(kv, 21)), InvalidArgumentsError, "head_dim_v is 21"),
    "all columns": (lambda q, kv, _: (q, LatentCache(kv, 20)), InvalidArgumentsError, "head_dim_v is 20"),
    "a float": (lambda q, kv, _: (q, LatentCache(kv, 12.0)), InvalidArgumentsError, "head_dim_v is 12.0"),
    "no array": (lambda q, kv, _: (q, LatentCache([1.0], 12)), InvalidArgumentsError, "latents is a list"),
    "codes of 4 bits": (lambda q, kv, _: (q, LatentCache(QuantizedCache(kv, kv, kv), 12)), UnsupportedError,
                        "latents is a QuantizedCache of 4 bits"),
    "an array of attention": (lambda q, kv, _: (q, LatentCache(QuantizedArray(kv, kv), 12)), UnsupportedError,
                              "latents is a QuantizedArray"),
    "int8 without a scale": (lambda q, kv, _: (q, LatentCache(kv.astype(np.int8), 12)), InvalidArgumentsError,
                             "k_cache.scale is not given"),
    "two scales of new latents": (lambda q, kv, new: (q, *two_scales(kv.astype(np.int8)), {"k": new}),
                                  InvalidArgumentsError, "two arrays of scales"),
    "values of new latents": (
        lambda q, kv, new: (q, LatentCache(kv, 12), None, {"k": new, "v": new[..., :12]}),
        InvalidArgumentsError, "v is given with a LatentCache"),
    "values that lie apart": (
        lambda q, kv, new: (q, kv, kv[..., :12], {"k": new, "v": new[..., :12].copy()}),
        InvalidArgumentsError, "v is not the first columns of k"),
    "rotation": (
        lambda q, kv, new: (q, LatentCache(kv, 12), None, {"k": new, "rotary": Rotary(*kv[:, 0, :, :4])}),
        InvalidArgumentsError, "first features of q, and of new latents"),
    "rotation of q alone": (
        lambda q, kv, new: (q, LatentCache(kv, 12), None, {"rotary": Rotary(*kv[:, 0, :, :4])}),
        InvalidArgumentsError, "first features of q, and of new latents"),
    "rotation of values": (
        lambda q, kv, new: (
            q, LatentCache(kv, 12), None, {"k": new, "rotary": Rotary(*kv[:, 0, :, :5], last=True)}),
        InvalidArgumentsError, "last 10 features of new latents, whose first 12 are values too"),
    "rotation of views": (
        lambda q, kv, new: (q, kv, kv[..., :12], {"k": new, "rotary": Rotary(*kv[:, 0, :, :4])}),
        InvalidArgumentsError, "first 8 features of new latents, whose first 12 are values too"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, kind, says = REFUSED[name]
    q, kv, new = inputs()
    before = kv.copy()
    q, k_cache, *more = make(q, kv, new)
    v_cache, options = (*more, None, {})[:2] if len(more) != 1 else (more[0], {})
    with pytest.raises(kind, match=says) as raised:
        cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=7, **options)
    assert "Try:" in str(raised.value)
    np.testing.assert_array_equal(kv, before)
