"""What k holds of keys that a row does not see shows nowhere: NaN, infinities, in results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.cpu.core_calls import normal

QUERIES, KEYS = 40, 301
# What all queries see; odd, so that a pair of keys may be seen by half, and more than a block of 144.
FIRST, LAST = 37, 207
HIDDEN = [*range(FIRST), *range(LAST, KEYS)]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
# By key.
ANYTHING = np.resize([np.nan, np.inf, -np.inf], (720, 1))

ROW, KEY = np.arange(QUERIES), np.arange(KEYS)
SEEN = (KEY >= FIRST) & (KEY < LAST)


@cupy_flash.mask
def between(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j >= 37) & (j < 207)


@cupy_flash.score
def halved_between(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.where((j >= 37) & (j < 207), 0.5 * s, -np.inf)


def spans(interval: tuple[int, int], where: np.ndarray, axis: int) -> cupy_flash.Spans:
    bounds = np.where(where[:, None], interval, 0).astype(np.int32)
    return cupy_flash.Spans(np.expand_dims(bounds, axis))


WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mask": lambda _: {"mask": SEEN[None]},
    "mask of other rows too": lambda _: {"mask": SEEN[None] & ((ROW[:, None] + KEY) % 3 > 0)},
    "bias": lambda dtype: {"bias": np.where(SEEN, normal(QUERIES, KEYS), -np.inf).astype(dtype)},
    "bias of a key": lambda _: {"bias": np.where(SEEN, 0, -np.inf).astype(np.float32)[None]},
    "window": lambda _: {"window": (100, 30), "align": 137},
    "causal and mask": lambda _: {"causal": True, "align": LAST - QUERIES, "mask": (KEY >= FIRST)[None]},
    "ALiBi": lambda dtype: {
        "mask": SEEN[None], "align": 0,
        "alibi_slopes": np.ones(2, np.float64 if dtype == np.float64 else np.float32),
    },
    "spans by key": lambda _: {"mask": spans((0, QUERIES), SEEN, 0)},
    "spans by query": lambda _: {"mask": spans((FIRST, LAST), ROW >= 0, 1)},
    "blocks": lambda _: {
        "mask": cupy_flash.block_mask(
            lambda b, h, i, j: (j >= FIRST) & (j < LAST), None, None, QUERIES, KEYS, block=16
        )
    },
    "mask function": lambda _: {"mask": between},
    "score function": lambda _: {"score": halved_between},
}  # fmt: skip


def inputs(dtype: Any) -> dict[str, np.ndarray]:
    """Of two heads that share a key head."""
    shapes = {"do": (2, QUERIES, 16), "q": (2, QUERIES, 24), "k": (1, KEYS, 24), "v": (1, KEYS, 16)}
    return {name: normal(1, *shape, seed=n).astype(dtype) for n, (name, shape) in enumerate(shapes.items())}


def everything(x: dict[str, np.ndarray], second: bool = True, **options: Any) -> dict[str, Any]:
    """Results, gradients, and both of second order, whose direction is finite."""
    do, q, k, v = (x[name] for name in ("do", "q", "k", "v"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    made = {"o": o, "lse": lse}
    made |= cupy_flash.attention_backward(do, q, k, v, o, lse, **options)._asdict()
    if second:
        own = inputs(k.dtype)
        along = {"dq": own["q"], "dk": own["k"], "dv": own["v"], **options}
        made |= zip(("jvp o", "jvp lse"), cupy_flash.derivatives.jvp(q, k, v, o, lse, **along), strict=True)
        hvp = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **along)._asdict()
        made |= {f"hvp {name}": value for name, value in hvp.items()}
    return {name: value for name, value in made.items() if isinstance(value, np.ndarray)}


@pytest.mark.usefixtures("every_library")
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("way", WAYS)
def test_keys_that_nobody_sees_hold_anything(way: str, softcap: float | None) -> None:
    for dtype in DTYPES:
        x, options = inputs(dtype), WAYS[way](dtype) | {"softcap": softcap}
        second = softcap is None or way != "score function"
        wanted = everything(x, second, **options)
        assert all(np.isfinite(value.astype(float)).all() for value in wanted.values())
        x["k"][:, :, HIDDEN] = ANYTHING[HIDDEN]
        for name, found in everything(x, second, **options).items():
            np.testing.assert_array_equal(found, wanted[name], f"{name}, {np.dtype(dtype)}")


@pytest.mark.usefixtures("every_library")
@pytest.mark.parametrize("way", ["causal", "mask", "bias"])
def test_rows_that_do_not_see_a_key_are_as_without_it(way: str) -> None:
    """And in rows that see it NaN shows."""
    sees = KEY[None] <= ROW[:, None] + 137
    options = {
        "causal": {"causal": True, "align": 137},
        "mask": {"mask": sees},
        "bias": {"bias": np.where(sees, 0, -np.inf).astype(np.float32)},
    }[way]
    for dtype in DTYPES:
        x = inputs(dtype)
        wanted = everything(x, **options)
        x["k"][:, :, 151, 3] = np.nan  # which row 14 sees first
        found = everything(x, **options)
        for name in ("o", "lse", "dq", "jvp o", "jvp lse", "hvp dq"):
            np.testing.assert_array_equal(found[name][:, :, :14], wanted[name][:, :, :14], name)
            assert np.isnan(found[name][:, :, 14:].astype(float)).all(), name


@pytest.mark.usefixtures("every_library")
def test_packed_sequences_hold_anything_behind_what_is_used() -> None:
    cut, used = np.array([0, 101, 101, 301], np.int32), np.array([37, 0, 145], np.int32)
    rows = np.array([0, 13, 20, 40], np.int32)
    for dtype in DTYPES:
        x = {name: value[0].swapaxes(0, 1) for name, value in inputs(dtype).items()}

        def computed(x: dict[str, np.ndarray] = x) -> list[np.ndarray]:
            do, q, k, v = (x[name] for name in ("do", "q", "k", "v"))
            o, lse = cupy_flash.attention_varlen(q, k, v, rows, cut, return_lse=True, seqused_k=used)
            made = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, rows, cut, seqused_k=used)
            return [o, lse, made.dq, made.dk, made.dv]

        wanted = computed()
        for unused in (slice(37, 101), slice(101 + 145, None)):
            x["k"][unused] = ANYTHING[: len(x["k"][unused]), None]
        for found, right in zip(computed(), wanted, strict=True):
            np.testing.assert_array_equal(found, right)


# Odd places of the first key that is seen, pages of odd sizes, one and many queries, causal and windows.
CACHES: list[dict[str, Any]] = [
    {}, {"window": (100, 0)}, {"window": (101, None)}, {"cache_leftpad": np.array([37, 2], np.int32)},
    {"cache_leftpad": np.array([145, 1], np.int32), "window": (51, 0)},
]  # fmt: skip


@pytest.mark.usefixtures("every_library")
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("options", CACHES, ids=str)
def test_caches_hold_anything_where_nobody_looks(options: dict[str, Any], queries: int) -> None:
    """And what is seen is within the budget: pairs of keys, too, begin at any place."""
    lengths, room = np.array([211, 44], np.int32), 720
    left = options.get("window", (None, None))[0]
    pads = options.get("cache_leftpad", np.zeros(2, np.int32))
    for dtype in DTYPES:
        q = normal(2, 4, queries, 32).astype(dtype)
        k, v = (normal(2, 2, room, 32, seed=s).astype(dtype) for s in (1, 2))
        unused = np.ones((2, 1, room, 1), bool)
        for b, (pad, length) in enumerate(zip(pads.tolist(), lengths.tolist(), strict=True)):
            first = max(pad, 0 if left is None else length - queries - left)
            unused[b, 0, first:length] = False
        given = {"cache_seqlens": lengths, "causal": True, "return_lse": True, **options}
        dirty = np.where(unused, ANYTHING.astype(dtype), k)
        made = []
        for page in (0, 5, 18, 16):
            of_page = []
            for cache in (k, dirty):
                parts = [cache, v]
                if page:
                    table = np.random.default_rng(0).permutation(2 * room // page).reshape(2, -1)
                    given["block_table"] = table.astype(np.int32)
                    for n, part in enumerate(parts):
                        pages = part.reshape(2, 2, -1, page, 32).swapaxes(1, 2).reshape(-1, 2, page, 32)
                        parts[n] = np.empty_like(pages)
                        parts[n][table.ravel()] = pages
                of_page.append(cupy_flash.attention_with_kv_cache(q, *parts, **given))
            for wanted, found in zip(*of_page, strict=True):
                np.testing.assert_array_equal(found, wanted, f"{np.dtype(dtype)}, page {page}")
            made.append(of_page[0])
        for b, (pad, length) in enumerate(zip(pads.tolist(), lengths.tolist(), strict=True)):
            own = [x[b : b + 1, :, :length] for x in (k, v)]
            seen = (np.arange(length) >= pad)[None]
            testing.assert_within_budget(
                [{"o": o[b : b + 1], "lse": lse[b : b + 1]} for o, lse in made], q[b : b + 1], *own,
                causal=True, align="bottom_right", window=options.get("window"), mask=seen,
            )  # fmt: skip


@pytest.mark.parametrize("way", ["mask", "bias", "window", "score function"])
def test_the_specification_says_so(way: str) -> None:
    """The reference, its yardstick, and the textbook method."""
    x, options = inputs(np.float32), WAYS[way](np.float32) | {"softcap": 2.0}
    do, q, k, v = (x[name] for name in ("do", "q", "k", "v"))
    dirty = k.copy()
    dirty[:, :, HIDDEN] = np.nan
    of_keys: list[Callable[[np.ndarray], Any]] = [
        lambda k: testing.reference_attention(q, k, v, **options),
        lambda k: testing.reference_backward(do, q, k, v, **options),
        lambda k: testing.naive_same_precision(q, k, v, do=do, **options),
        lambda k: cupy_flash.naive_attention(q, k, v, **options),
    ]
    if way != "score function":
        of_keys += [
            lambda k: testing.reference_jvp(q, k, v, dq=q, **options),
            lambda k: testing.reference_hvp(do, q, k, v, dq=q, **options),
        ]
    for compute in of_keys:
        for found, wanted in zip(compute(dirty), compute(k), strict=True):
            if isinstance(wanted, np.ndarray):
                assert np.isfinite(wanted).all()
                np.testing.assert_array_equal(found, wanted)
    if way != "score function":
        made = everything({**x, "k": dirty}, second=False, **options)
        testing.assert_within_budget(made, q, dirty, v, do=do, **options)


FEW = {
    "both": {},
    "softcap": {"softcap": 5.0},
    "window": {"window": (60, 9), "align": 190},
    "causal": {"causal": True, "align": "bottom_right"},
    "ALiBi": {"alibi_slopes": np.linspace(0.1, 0.4, 4)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", FEW)
@pytest.mark.usefixtures("core")
def test_few_rows_with_a_mask_and_a_bias_have_the_bits_of_many(way: str, dtype: Any) -> None:
    """Few are computed as in decode, with lanes along keys, many with lanes along queries."""
    rng = np.random.default_rng(0)
    q = normal(2, 4, QUERIES, 24).astype(dtype)
    k, v = (normal(2, 2, KEYS, width).astype(dtype) for width in (24, 41))
    k[:, :, HIDDEN] = np.resize(ANYTHING, (len(HIDDEN), 1)).astype(dtype)
    mask = (rng.random((2, 1, QUERIES, KEYS)) < 0.7) & SEEN
    mask[:, :, 3] = False  # a row that sees nothing
    bias = np.asfortranarray(rng.standard_normal((4, QUERIES, KEYS)), np.float32)
    bias[:, :, 60:70] = -np.inf
    wide = np.float64 if dtype == np.float64 else np.float32
    options = {name: x.astype(wide) if name == "alibi_slopes" else x for name, x in FEW[way].items()}
    align = options.pop("align", 0)
    start = KEYS - QUERIES if align == "bottom_right" else align

    def rows(first: int, count: int, **added: Any) -> Any:
        part = {name: x[..., first : first + count, :] for name, x in added.items()}
        return cupy_flash.attention(
            q[:, :, first : first + count], k, v, align=start + first, reproducible="batch", **part, **options
        )

    of_all = np.broadcast_to(mask[0, 0, 0], (QUERIES, KEYS))
    for added in ({"mask": mask}, {"mask": mask, "bias": bias}, {"mask": of_all, "bias": bias}):
        whole = rows(0, QUERIES, **added)
        assert np.isfinite(whole.astype(np.float64)).all()
        for first, count in ((0, 1), (3, 1), (2, 5), (29, 5)):
            np.testing.assert_array_equal(
                rows(first, count, **added).view(np.uint8),
                whole[:, :, first : first + count].copy().view(np.uint8),
            )
