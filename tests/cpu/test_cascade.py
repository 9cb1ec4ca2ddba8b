"""A prefix that a batch shares: as if it lay before every sequence, what is refused, and where keys stand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError, testing
from tests.public import cached

pytestmark = pytest.mark.usefixtures("cpu_family")

BATCH, PREFIX, ROOM, DIMS = 3, 37, 48, (16, 24)
LENGTHS = np.array([0, 3, 40], np.int32)


def arrays(
    queries: int = 1, heads: tuple[int, int] = (4, 2), new: int = 0, dtype: Any = np.float64
) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    made = {"q": rng.standard_normal((BATCH, heads[0], queries, DIMS[0]))}
    for name, dim in (("k", DIMS[0]), ("v", DIMS[1])):
        made[f"{name}_cache"] = rng.standard_normal((BATCH, heads[1], ROOM, dim))
        made[f"prefix_{name}"] = rng.standard_normal((heads[1], PREFIX, dim))
        if new:
            made[name] = rng.standard_normal((BATCH, heads[1], new, dim))
    return {name: x.astype(dtype) for name, x in made.items()} | {"cache_seqlens": LENGTHS}


def as_one(given: dict[str, Any]) -> dict[str, Any]:
    """The same call over caches that begin with the prefix."""
    whole = {name: x for name, x in given.items() if not name.startswith("prefix_")}
    for name in "kv":
        prefix = np.repeat(
            given[f"prefix_{name}"].reshape(1, -1, *given[f"prefix_{name}"].shape[-2:]), BATCH, 0
        )
        whole[f"{name}_cache"] = np.concatenate([prefix, given[f"{name}_cache"]], axis=2)
    whole["cache_seqlens"] = given["cache_seqlens"] + np.int32(PREFIX)
    return whole


def tables(count: int = PREFIX + ROOM) -> dict[str, Any]:
    angles = np.random.default_rng(3).random((count, 4)) * 6
    return {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}


def swapped(given: dict[str, Any]) -> dict[str, Any]:
    """In the other layout."""
    return {
        name: x.swapaxes(-2, -3) if getattr(x, "ndim", 0) >= 3 and name != "mask" else x
        for name, x in given.items()
    }


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12, rtol=1e-12)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one query": ({}, {}),
    "multi-query": ({"heads": (6, 1), "queries": 3}, {}),
    "causal, queries before the first own key": ({"queries": 5}, {"causal": True}),
    "a window that begins in the prefix": ({"queries": 5}, {"window": (20, None)}),
    "a window on both sides": ({"queries": 5}, {"window": (3, 2)}),
    "a window open to the right": ({"queries": 2}, {"window": (2**31 - 1, 2**31 - 1), "causal": True}),
    "sinks, softcap, scale": (
        {"queries": 2}, {"sinks": np.array([0.5, -1, 2, 0]), "softcap": 3.0, "scale": -0.2},
    ),
    "new keys": ({"queries": 4, "new": 4}, {"causal": True}),
    "rotation": ({"queries": 2, "new": 2}, {"causal": True, **tables()}),
    "rotation of pairs": ({"new": 1}, {"rotary_interleaved": True, **tables()}),
    "rotation of the last": ({"queries": 2, "new": 2}, {"rotary_last": True, **tables()}),
    "rotation from elsewhere": (
        {"queries": 2, "new": 2}, {"rotary_seqlens": np.array([5, 0, 9], np.int32), **tables()},
    ),
    "left padding": ({"queries": 2}, {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", CASES)
def test_as_if_it_lay_before_every_sequence(name: str, layout: str) -> None:
    kinds, options = CASES[name]
    given = arrays(**kinds) | options
    whole = as_one(given)
    if name == "left padding":
        given["cache_leftpad"] = pads = np.array([0, 2, 7], np.int32)
        seen = np.ones((BATCH, 1, 1, PREFIX + ROOM), bool)
        for b, pad in enumerate(pads):
            seen[b, ..., PREFIX : PREFIX + pad] = False
        whole["mask"] = seen
    if layout == "bshd":
        given, whole = swapped(given), swapped(whole)
    wanted = cached(**whole, layout=layout, return_lse=True)
    found = cached(**given, layout=layout, return_lse=True)
    close(found, wanted)
    for x in "kv":
        own = whole[f"{x}_cache"][:, :, PREFIX:] if layout == "bhsd" else whole[f"{x}_cache"][:, PREFIX:]
        close([given[f"{x}_cache"]], [own])
    out = np.full_like(found[0], np.nan)
    assert cached(**given, layout=layout, out=out) is out
    if "k" not in given:
        np.testing.assert_array_equal(out, found[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 1)}, tables()], ids=", ".join)
def test_packed_queries_and_pages(options: dict[str, Any]) -> None:
    """Sequences of as many queries as they like, some rows of none, over pages."""
    given = arrays(queries=1) | options
    rng = np.random.default_rng(0)
    given["q"] = rng.standard_normal((9, 4, DIMS[0]))
    given["cu_seqlens_q"] = np.array([0, 2, 3, 8], np.int32)
    given["seqused_q"] = np.array([2, 0, 4], np.int32)
    given["cache_seqlens"] = np.array([2, 0, 40], np.int32)
    wanted = cached(**as_one(given), return_lse=True)
    place = rng.permutation(BATCH * 3).astype(np.int32).reshape(BATCH, 3)
    for x in "kv":
        cache = given[f"{x}_cache"]
        pages = np.empty((BATCH * 3, 2, 16, cache.shape[3]))
        for b in range(BATCH):
            for n in range(3):
                pages[place[b, n]] = cache[b, :, 16 * n : 16 * n + 16]
        given[f"{x}_cache"] = pages
    found = cached(**given, block_table=place, return_lse=True)
    close(found, wanted)
    assert not found[0][[2, 7, 8]].any()


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda x: np.dtype(x).name
)
def test_as_exact_as_in_one_piece(dtype: Any) -> None:
    given = arrays(queries=2, dtype=dtype) | {"cache_seqlens": np.array([5, 17, 40], np.int32)}
    o, lse = cached(**given, causal=True, return_lse=True)
    whole = as_one(given)
    for b, length in enumerate(whole["cache_seqlens"]):
        k, v = (whole[f"{x}_cache"][b : b + 1, :, :length] for x in "kv")
        found = {"o": o[b : b + 1], "lse": lse[b : b + 1]}
        testing.assert_within_budget(found, given["q"][b : b + 1], k, v, causal=True, align=int(length) - 2)


def test_an_int8_cache_behind_a_prefix() -> None:
    given = arrays(queries=2)
    scale = np.array([0.5, 0.25], np.float64)
    rng = np.random.default_rng(1)
    stored = {f"{x}_cache": rng.integers(-9, 9, given[f"{x}_cache"].shape).astype(np.int8) for x in "kv"}
    wide = {name: x * scale[:, None, None] for name, x in stored.items()}
    wanted = cached(**as_one(given | wide), return_lse=True)
    found = cached(**given | stored, k_scale=scale, v_scale=scale, return_lse=True)
    close(found, wanted)


def test_one_length_and_no_key() -> None:
    given = arrays() | {"cache_seqlens": 0}
    found = cached(**given, window=(5, None), return_lse=True)
    q, k, v = given["q"], given["prefix_k"][None, :, -6:], given["prefix_v"][None, :, -6:]
    wanted = cupy_flash.attention(q, np.repeat(k, BATCH, 0), np.repeat(v, BATCH, 0), return_lse=True)
    close(found, wanted)
    none = {f"prefix_{x}": given[f"prefix_{x}"][:, :0] for x in "kv"}
    o, lse = cached(**given | none, return_lse=True)
    assert not o.any()
    assert (lse == -np.inf).all()


# ---- queries that stand inside the prefix, before the keys of their own


INSIDE: dict[str, dict[str, Any]] = {
    "every key": {},
    "causal": {"causal": True},
    "a window": {"window": (30, 4)},
    "a window that ends at the query": {"window": (30, 0)},
    "pairs of neighbours": {"rotary_interleaved": True},
    "the last features": {"rotary_last": True},
    "the last pairs of neighbours": {"rotary_last": True, "rotary_interleaved": True},
    "positions of its own": {"rotary_seqlens": np.array([4, 0, 9], np.int32)},
}
BEFORE = {"no own keys": [0, 0, 0], "none, few, many": LENGTHS, "all": [1, 2, 4]}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("new", [0, 2, 9])
@pytest.mark.parametrize("name", INSIDE)
def test_rotation_of_queries_inside_the_prefix(name: str, new: int, layout: str) -> None:
    """More queries than own keys, and than the prefix has keys, and fewer or as many new keys."""
    for lengths in BEFORE.values():
        for queries in (9, PREFIX + 12):
            given = arrays(queries=queries, new=new) | tables() | INSIDE[name]
            given["cache_seqlens"] = np.minimum(lengths, ROOM - new).astype(np.int32)
            if name == "positions of its own":
                given |= tables(queries + 9)
            whole = as_one(given)
            if layout == "bshd":
                given, whole = swapped(given), swapped(whole)
            wanted = cached(**whole, layout=layout, return_lse=True)
            found = cached(**given, layout=layout, return_lse=True)
            close(found, wanted)
            axis = 1 if layout == "bshd" else 2
            for x in "kv":
                close([given[f"{x}_cache"]], [np.split(whole[f"{x}_cache"], [PREFIX], axis)[1]])


@pytest.mark.parametrize("longest", [None, 13])
@pytest.mark.parametrize(
    "options", [{}, {"window": (None, 3)}, {"rotary_interleaved": True}, {"rotary_last": True}], ids=", ".join
)
def test_rotation_of_packed_queries_inside_the_prefix(options: dict[str, Any], longest: int | None) -> None:
    """Sequences with more queries than keys, with new keys of other numbers, and with none of either."""
    given = arrays() | tables() | options | {"max_seqlen_q": longest}
    rng = np.random.default_rng(0)
    given["q"] = rng.standard_normal((17, 4, DIMS[0]))
    given["cu_seqlens_q"] = np.array([0, 13, 13, 16], np.int32)
    given["seqused_q"] = np.array([12, 0, 3], np.int32)
    given["k"], given["v"] = (rng.standard_normal((6, 2, dim)) for dim in DIMS)
    given["cu_seqlens_k_new"] = np.array([0, 2, 5, 6], np.int32)
    given["cache_seqlens"] = np.array([3, 0, 1], np.int32)
    whole = as_one(given)
    wanted = cached(**whole, return_lse=True)
    found = cached(**given, return_lse=True)
    close(found, wanted)
    for x in "kv":
        close([given[f"{x}_cache"]], [whole[f"{x}_cache"][:, :, PREFIX:]])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda x: np.dtype(x).name)
def test_rotation_inside_the_prefix_is_as_exact_as_in_one_piece(dtype: Any) -> None:
    given = arrays(queries=9, new=2, dtype=dtype) | {"cache_seqlens": np.array([0, 3, 4], np.int32)}
    turns = {name: x.astype(dtype) for name, x in tables().items()}
    wide = {name: x.astype(np.float64) for name, x in given.items() if name != "cache_seqlens"}
    exact = cached(**as_one(given | wide), **{name: x.astype(np.float64) for name, x in turns.items()})
    ours, one = (
        np.abs(cached(**x, **turns).astype(np.float64) - exact).max() for x in (given, as_one(given))
    )
    assert ours <= 2 * one + float(ml_dtypes.finfo(dtype).eps), (ours, one)


def test_rotation_inside_the_prefix_over_an_int8_cache() -> None:
    scale = np.array([0.05, 0.1])
    given = arrays(queries=9, new=2) | tables() | {"cache_seqlens": np.array([0, 3, 4], np.int32)}
    for x in "kv":
        given[f"{x}_cache"] = np.rint(given[f"{x}_cache"] / 0.1).astype(np.int8)
    before = {f"{x}_cache": given[f"{x}_cache"].copy() for x in "kv"}
    found = cached(**given, k_scale=scale, v_scale=scale)
    places = np.arange(ROOM) - given["cache_seqlens"][:, None]
    for name, x in before.items():
        changed = (given[name] != x).any((1, 3))
        assert (changed == ((places >= 0) & (places < 2))).all()
        given[name] = given[name] * scale[:, None, None]
    given["cache_seqlens"] += 2
    del given["k"], given["v"]
    close([found], [cached(**as_one(given))])


# ---- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no values": ({"prefix_v": None}, "prefix has no values"),
    "no keys": ({"prefix_k": None}, "prefix has no keys"),
    "other heads": ({"prefix_k": np.zeros((4, PREFIX, 16))}, r"prefix\[0\] has shape"),
    "other features": ({"prefix_v": np.zeros((2, PREFIX, 16))}, r"prefix\[1\] has shape"),
    "one for each": ({"prefix_k": np.zeros((BATCH, 2, PREFIX, 16))}, r"prefix\[0\] has shape"),
    "two axes": ({"prefix_k": np.zeros((PREFIX, 16))}, r"prefix\[0\] has shape"),
    "other lengths": ({"prefix_k": np.zeros((2, 5, 16))}, r"prefix\[0\] has 5 keys, prefix\[1\] 37"),
    "another dtype": ({"prefix_k": np.zeros((2, PREFIX, 16), np.float32)}, r"prefix\[0\] has dtype float32"),
    "q of rank 3": ({"q": np.zeros((4, 1, 16))}, "q has rank 3"),
    "another layout": ({"layout": "sbhd"}, "layout is 'sbhd'"),
    "ALiBi": ({"alibi_slopes": np.ones(4)}, "alibi_slopes is given with a shared prefix"),
    "the same bits": ({"reproducible": "batch"}, "reproducible is given with a shared prefix"),
    "keys that are not rotated": ({"rotate_cache": True, **tables()}, "rotary.on_read is given"),
    "short tables": (tables(PREFIX + ROOM - 1), "for a capacity of 48"),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens is None"),
    "lengths beyond": ({"cache_seqlens": 49}, "the capacity is 48 keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    changes, message = REFUSED[name]
    given = arrays(new=1) | changes
    before = given["k_cache"].copy()
    with pytest.raises((InvalidArgumentsError, UnsupportedError), match=message) as caught:
        cached(**given)
    assert "Try: " in str(caught.value)
    np.testing.assert_array_equal(given["k_cache"], before)


def test_short_tables_are_refused_for_queries_inside_the_prefix_too() -> None:
    given = arrays(queries=9, new=1) | tables(PREFIX + ROOM - 1)
    with pytest.raises(InvalidArgumentsError, match="for a capacity of 48"):
        cached(**given)


@pytest.mark.slow
def test_a_long_prefix_is_read_once_for_all() -> None:
    """64 sequences on 16384 shared keys: at least 4 times less processor time than by shared pages.

    why 8 heads: their 67 MB are more than caches hold. Of 2 heads, 17 MB, pages are read from a large L3,
    and the products alone decide: 4.0 to 4.1 times.
    """
    rng, (heads, prefix, own, page) = np.random.default_rng(0), (8, 16384, 128, 128)
    shared = rng.standard_normal((2, heads, prefix, 64), np.float32)
    caches = rng.standard_normal((2, 64, heads, own, 64), np.float32)
    q, lengths = rng.standard_normal((64, heads, 1, 64), np.float32), np.full(64, 100, np.int32)
    pages = [
        np.concatenate([x.reshape(heads, -1, page, 64).swapaxes(0, 1), y])
        for x, y in zip(shared, caches, strict=True)
    ]
    count = prefix // page
    table = np.empty((64, count + 1), np.int32)
    table[:, :count], table[:, count] = np.arange(count), count + np.arange(64)
    ways: dict[str, Callable[[], Any]] = {
        "prefix": lambda: cached(q, *caches, cache_seqlens=lengths, prefix_k=shared[0], prefix_v=shared[1]),
        "pages": lambda: cached(q, *pages, cache_seqlens=lengths + np.int32(prefix), block_table=table),
    }
    np.testing.assert_allclose(ways["prefix"](), ways["pages"](), atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, call in ways.items():
            begun = time.process_time()
            call()
            times[name].append(time.process_time() - begun)
    assert min(times["pages"]) >= 4 * min(times["prefix"]), times
