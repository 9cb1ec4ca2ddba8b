"""Products of floats by AMX: each float is the sum of three bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.call.problem import Cache
from cupy_flash.cpu import choose
from cupy_flash.cpu.core import family, isa, locate, sources
from cupy_flash.info import info_text
from tests.cpu.core_calls import normal
from tests.plan_cases import BASE

MINE = isa.runnable()[0] if isa.runnable() else isa.ISAS[0]
LONG = BASE._replace(dtype="float32", seqlen_q=512, seqlen_k=512)
Forward = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture(autouse=True)
def amx(core: locate.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by AMX for any number of rows and keys, on a CPU that has them."""
    if not sources.multiplies(MINE, sources.AMX) or locate.locate(MINE, sources.AMX) is None:
        pytest.skip("this CPU has no AMX, or the library is not built")
    monkeypatch.setenv(isa.OVERRIDE, MINE.name + isa.BY_AMX)


@pytest.fixture
def by_floats(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """The same call by multiply-adds."""

    def forward(*arrays: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        with monkeypatch.context() as within:
            within.setenv(isa.OVERRIDE, MINE.name + isa.FLOATS)
            found: tuple[np.ndarray, np.ndarray] = cupy_flash.attention(*arrays, return_lse=True, **options)
            return found

    return forward


# ---- which calls


def test_long_prompts_of_floats_are_multiplied_by_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves only where it is faster; where asked for, all that fill tiles and need no other bits."""
    fit: list[dict[str, Any]] = [
        {}, {"dtype": "float16"}, {"direction": "decode", "cache": Cache("float32")}, {"dropout": 0.5},
        {"reproducible": "run"},
    ]  # fmt: skip
    short: list[dict[str, Any]] = [{"seqlen_q": 12}, {"seqlen_k": 511}]
    never: list[dict[str, Any]] = [
        {"dtype": "float64"}, {"reproducible": "batch"}, {"precision": "ieee"}, {"direction": "jvp"},
        {"direction": "statistics"},
        {"direction": "decode", "cache": Cache("int8")}, {"seqlen_q": 2},
    ]  # fmt: skip
    assert all(choose.choose(LONG._replace(**x)).library.part == sources.AMX for x in fit + short)
    assert all(choose.choose(LONG._replace(**x)).library.part != sources.AMX for x in never)
    x = normal(1, 2, 12, 8)
    assert "products  of floats as three bfloat16 each, by AMX" in cupy_flash.explain(x, x, x)
    monkeypatch.delenv(isa.OVERRIDE)
    assert all(choose.choose(LONG._replace(**x)).library.part == sources.AMX for x in fit)
    assert all(choose.choose(LONG._replace(**x)).library.part != sources.AMX for x in short + never)
    grouped = LONG._replace(heads_q=8 * LONG.heads_k, seqlen_q=family.FEW_SPLIT // 8)
    assert choose.choose(grouped).library.part == sources.AMX
    assert "by AMX, as are long prompts of float32" in info_text()
    for way in (isa.FLOATS, isa.PAIRS):
        monkeypatch.setenv(isa.OVERRIDE, MINE.name + way)
        assert choose.choose(LONG).library.part != sources.AMX
        assert "float32" not in info_text().partition("compiled core")[2].partition("else tiled")[0]


# ---- results

SHAPES = [  # queries, keys, heads and key heads, features of k and v
    (12, 1, 2, 2, 64, 64), (50, 31, 4, 2, 17, 9), (33, 193, 2, 1, 40, 72), (129, 385, 3, 3, 128, 128),
    (64, 577, 2, 2, 1, 1), (800, 600, 1, 1, 32, 33), (40, 100, 2, 2, 256, 80), (100, 64, 2, 1, 31, 130),
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "top left": {"causal": True, "align": "top_left"},
    "window": {"window": (37, 5), "align": "bottom_right"},
    "softcap and sinks": {"softcap": 3.0, "sinks": 0.5},
    "bias": {"bias": "queries x keys"},
    "mask": {"mask": "queries x keys"},
    "ALiBi": {"alibi_slopes": 0.2, "align": "bottom_right"},
    "scale": {"scale": -0.7},
}


def drawn(shape: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    queries, keys, heads, heads_k, d, dv = shape
    sizes = ((heads, queries, d), (heads_k, keys, d), (heads_k, keys, dv))
    return [normal(2, *size, seed=n).astype(dtype) for n, size in enumerate(sizes)]


def filled(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The options of a name, with arrays of the shape."""
    queries, keys, heads, *_ = shape
    own = dict(OPTIONS[name])
    for key in ("sinks", "alibi_slopes"):
        if key in own:
            own[key] = np.full(heads, own[key], np.float32)
    if "bias" in own:
        own["bias"] = normal(1, heads, queries, keys)
    if "mask" in own:
        own["mask"] = normal(2, 1, queries, keys) < 0.3
    return own


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_within_the_error_budget(shape: tuple[int, ...], name: str) -> None:
    """Ragged tiles, more keys than a block and than a chunk, more rows than a job."""
    q, k, v = drawn(shape)
    own = filled(name, shape)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **own)
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, **own)


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_is_as_exact_as_multiply_adds(dtype: str, size: float, by_floats: Forward) -> None:
    """Three parts hold every bit, and tiles add in fewer steps: 0.6 of the error in root mean square."""
    q, k, v = drawn((300, 700, 4, 2, 64, 64), dtype)
    q = (q * size).astype(dtype)
    exact = cupy_flash.attention(*(x.astype(np.float64) for x in (q, k, v)), return_lse=True)
    ours = cupy_flash.attention(q, k, v, return_lse=True)
    theirs = by_floats(q, k, v)
    # why more for the LSE: up to 768 weights are added one by one instead of 576.
    for mine, other, true, most in zip(ours, theirs, exact, (1.05, 1.3), strict=True):
        error, theirs_error = (np.sqrt(np.mean((x - true) ** 2)) for x in (mine, other))
        assert error <= most * theirs_error


# ---- what three bfloat16 do not hold

UNUSUAL = [np.inf, -np.inf, np.nan, 1e34, -1e30, 1e-38, 1e-45, -1e-31]


@pytest.mark.parametrize("value", UNUSUAL)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_unusual_numbers_are_multiplied_as_floats(which: str, value: float, by_floats: Forward) -> None:
    """At the first and the last place, of the first and of a later block: as by multiply-adds."""
    for place in ((0, 0, 0, 0), (1, 1, 399, 39), (0, 1, 200, 16)):
        arrays = dict(zip("qkv", drawn((400, 400, 2, 2, 40, 40)), strict=True))
        arrays[which][place] = value
        ours = cupy_flash.attention(*arrays.values(), return_lse=True)
        for mine, other in zip(ours, by_floats(*arrays.values()), strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("value", UNUSUAL)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_other_rows_keep_their_bits(which: str, value: float, by_floats: Forward) -> None:
    """Those that do not see an unusual key, and those beside an unusual query; the others are of floats."""
    arrays = dict(zip("qkv", drawn((400, 400, 2, 2, 40, 40)), strict=True))
    wanted = cupy_flash.attention(*arrays.values(), causal=True, return_lse=True)
    arrays[which][0, 1, 205, 3] = value
    ours = cupy_flash.attention(*arrays.values(), causal=True, return_lse=True)
    theirs = by_floats(*arrays.values(), causal=True)
    rows = np.zeros((2, 2, 400), bool)
    rows[0, 1, 205 : 206 if which == "q" else 400] = True
    for mine, other, before in zip(ours, theirs, wanted, strict=True):
        np.testing.assert_array_equal(mine[~rows], before[~rows])
        np.testing.assert_allclose(mine[rows], other[rows], rtol=2e-5, atol=2e-6)


def test_rows_of_large_scores_are_those_of_floats(by_floats: Forward) -> None:
    """A backward pass finds their scores again, which may differ by a whole weight."""
    q, k, v = drawn((100, 300, 2, 2, 40, 40))
    q[:, :, 7] *= 1e4
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    theirs = by_floats(q, k, v)
    assert (np.abs(lse[:, :, 7]) > 1024).all()
    np.testing.assert_array_equal(o[:, :, 7], theirs[0][:, :, 7])
    np.testing.assert_array_equal(lse[:, :, 7], theirs[1][:, :, 7])
    np.testing.assert_array_equal(cupy_flash.attention(q, k, v), o)


def test_numbers_at_the_bounds_lose_nothing(by_floats: Forward) -> None:
    """From 2^-100 to 2^60 AMX multiplies: one key, so that O is v, to the last bit."""
    v = np.float32(2) ** np.linspace(-99, 59, 64, dtype=np.float32) * normal(1, 1, 1, 64)
    q, k = normal(1, 1, 16, 64), normal(1, 1, 1, 64)
    np.testing.assert_array_equal(cupy_flash.attention(q, k, v), np.broadcast_to(v, q.shape))
    # Scores of numbers of such sizes.
    up, down = np.float32(2.0**50), np.float32(2.0**-50)
    k, v = normal(1, 1, 70, 64), normal(1, 1, 70, 64, seed=1)
    ours = cupy_flash.attention(q * up, k * down, v, return_lse=True)
    for mine, same in zip(ours, cupy_flash.attention(q, k, v, return_lse=True), strict=True):
        np.testing.assert_array_equal(mine, same)
    for mine, other in zip(ours, by_floats(q, k, v), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_key_that_nobody_sees_does_not_matter(value: float) -> None:
    """Tiles begin at multiples of 32 keys: those in front of a window are read, and must not be added."""
    q, k, v = drawn((64, 300, 2, 2, 32, 32))
    own = {"window": (20, 0), "align": 230}
    expected = cupy_flash.attention(q, k, v, **own)
    k[:, :, :200] = v[:, :, :200] = k[:, :, 295:] = v[:, :, 295:] = value
    np.testing.assert_allclose(cupy_flash.attention(q, k, v, **own), expected, rtol=2e-5, atol=2e-6)


# ---- other calls


def test_packed_sequences_are_those_of_single_calls() -> None:
    """Of unequal lengths, one of them empty."""
    lengths = [300, 0, 40, 500]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = (normal(int(starts[-1]), heads, 48, seed=n) for n, heads in enumerate((4, 2, 2)))
    o = cupy_flash.attention_varlen(q, k, v, starts, starts, causal=True)
    for first, last in itertools.pairwise(starts):
        if first == last:
            continue
        one = [x[first:last].swapaxes(0, 1)[None] for x in (q, k, v)]
        testing.assert_within_budget({"o": o[first:last].swapaxes(0, 1)[None]}, *one, causal=True)


def test_bits_do_not_depend_on_threads_or_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn((900, 900, 2, 2, 64, 64))
    strided = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(family, "workers", lambda *_, count=threads: count)
        # why return_lse: a repeated call would keep its threads
        found += [
            cupy_flash.attention(*arrays, causal=True, return_lse=True)[0] for arrays in ((q, k, v), strided)
        ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_dropout_keeps_the_weights_of_multiply_adds(by_floats: Forward) -> None:
    """The backward pass, by multiply-adds, drops the same ones."""
    q, k, v = drawn((300, 300, 2, 2, 32, 32))
    own: dict[str, Any] = {"dropout": 0.4, "seed": 7}
    ours = cupy_flash.attention(q, k, v, return_lse=True, **own)
    for mine, other in zip(ours, by_floats(q, k, v, **own), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_prompts_over_pages_are_those_of_contiguous_keys() -> None:
    """In any order, with pages of 16 keys, among others that are NaN; the prompt is appended first."""
    q, k, v = drawn((40, 300, 4, 2, 48, 48))
    pages = np.random.default_rng(1).permutation(60)[: 2 * 19].reshape(2, 19).astype(np.int32)
    held = [np.full((60, 2, 16, 48), np.nan, np.float32) for _ in range(2)]
    for cache, x in zip(held, (k, v), strict=True):
        padded = np.pad(x, ((0, 0), (0, 0), (0, 4), (0, 0)), constant_values=np.nan)
        cache[pages] = padded.reshape(2, 2, 19, 16, 48).swapaxes(1, 2)
    lengths = np.array([260, 260], np.int32)
    new = {"k": k[:, :, 260:], "v": v[:, :, 260:]}
    o = cupy_flash.attention_with_kv_cache(
        q, *held, cache_seqlens=lengths, block_table=pages, causal=True, **new
    )
    testing.assert_within_budget({"o": o}, q, k, v, causal=True, align="bottom_right")
