"""Rows whose LSE is too large to hold the logarithm of their sum: weights computed again are right."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.cpu.core_calls import normal

pytestmark = pytest.mark.usefixtures("one_blas_thread")

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
BATCH, HEADS, HEADS_K, QUERIES, KEYS, D, DV = 1, 4, 2, 23, 150, 8, 5
LOWEST = -float(np.finfo(np.float32).max)  # what masks of (1 - m) * finfo.min add
FAR = 1024  # LSE up to here is as it was given: weights are off by half an ulp of it


class Made(NamedTuple):
    """Arrays of a call, and its options."""

    do: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]


def seen() -> np.ndarray:
    """Rows that see one key, two, all, none, and half of them."""
    mask = np.zeros((QUERIES, KEYS), bool)
    mask[0::5, 7] = mask[1::5, [[3], [148]]] = mask[2::5] = mask[4::5, ::2] = True
    return mask


def made(size: float, through: str, dtype: Any) -> Made:
    """Scores of +-size through the product or a bias, exactly, and of 0 in some rows.

    Through a bias they differ by 1 and 2 within a row, where a float32 holds that.
    """
    acc = np.float64 if dtype is np.float64 else np.float32
    do, q = normal(BATCH, HEADS, QUERIES, DV, seed=1), np.zeros((BATCH, HEADS, QUERIES, D), np.float32)
    k, v = normal(BATCH, HEADS_K, KEYS, D, seed=2), normal(BATCH, HEADS_K, KEYS, DV, seed=3)
    k[..., 0] = 1
    sign = np.resize([1, -1, 0, -1, 1, -1, 1], (QUERIES, 1))
    options: dict[str, Any] = {"mask": seen()}
    if through == "scores":
        q[..., :1] = sign
        options["scale"] = size
    else:
        bias = np.zeros((1, 1, QUERIES, KEYS)) + (-abs(sign) if size == LOWEST else sign) * abs(size)
        if abs(size) < 2**24:
            bias += np.random.default_rng(4).integers(0, 3, bias.shape)
        if through == "function":  # one that has no argument
            options["score"] = cupy_flash.score(lambda s, b, h, i, j: s - size)
        else:
            options["bias"] = bias.astype(acc)
    return Made(*(x.astype(dtype) for x in (do, q, k, v)), options)


def assert_near(
    found: dict[str, Any], exact: dict[str, Any], dtype: Any, size: float, order: int = 1
) -> None:
    """Of each result's largest element: roundings, and those of an LSE that is taken as it is."""
    name = np.dtype(dtype).name
    sums = UNIT["float64" if name == "float64" else "float32"]
    allowed = (8 if name in ("float16", "bfloat16") else 64) * UNIT[name]
    if abs(size) <= FAR:
        # why 8: of second order are products of weights, their sums and their tangents, which are off each.
        allowed += 8 ** (order - 1) * abs(size) * sums
    for result, wanted in exact.items():
        if wanted is None:
            continue
        empty = np.isneginf(wanted)
        largest = np.abs(wanted[~empty]).max(initial=0)
        if largest > float(ml_dtypes.finfo(found[result].dtype).max):
            continue
        x = found[result].astype(np.float64)
        assert (np.isneginf(x) == empty).all(), (result, size)
        error = np.abs(x[~empty] - wanted[~empty]).max(initial=0)
        # why 1: terms of that size cancel in dS, and in a sum over all rows.
        assert error <= allowed * max(largest, 1), (result, size)


def check_first(one: Made, size: float, dtype: Any, **more: Any) -> None:
    do, q, k, v, options = one
    options = {**options, **more}
    dlse = options.pop("dlse", None)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
    exact = testing.reference_attention(q, k, v, **options)._asdict()
    exact |= testing.reference_backward(do, q, k, v, dlse=dlse, **options)._asdict()
    names = set(exact) & {"o", "lse", *found._fields}
    assert_near({"o": o, "lse": lse, **found._asdict()}, {n: exact[n] for n in names}, dtype, size)


CASES = [(1e3, "scores"), (1e4, "scores"), (1e6, "scores"), (1e9, "scores"), (1e30, "scores"), (1e3, "bias"),
         (1e6, "bias"), (-1e9, "bias"), (1e30, "bias"), (LOWEST, "bias")]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_gradients_are_those_of_the_softmax(dtype: Any, every_library: str) -> None:
    for size, through in CASES:
        check_first(made(size, through, dtype), size, dtype)


@pytest.mark.parametrize(
    "name", ["sinks", "dropout", "softcap", "dlse", "alibi", "causal", "spans", "blocks", "function"]
)
def test_gradients_with_every_option(name: str, every_library: str) -> None:
    thirds = cupy_flash.block_mask(lambda b, h, i, j: (i + j) % 3 == 0, None, None, QUERIES, KEYS)
    for size in (1e6, -1e9):
        options: dict[str, Any] = {
            "sinks": {"sinks": np.array([size, -np.inf, -size, 0], np.float32)},
            "dropout": {"dropout": 0.25, "seed": 5},
            "softcap": {"softcap": 2 * abs(size)},
            "dlse": {"dlse": normal(BATCH, HEADS, QUERIES, seed=6)},
            "alibi": {"alibi_slopes": np.full(HEADS, 2.0**20, np.float32), "align": 300},
            "causal": {"causal": True, "window": (40, 0), "align": 100},
            "spans": {"mask": cupy_flash.Spans(np.resize(np.int32([0, 9, 12, 23]), (1, 1, 1, KEYS, 4)))},
            "blocks": {"mask": (seen(), thirds)},
            "function": {},
        }[name]  # fmt: skip
        through = "function" if name == "function" else "bias" if name != "softcap" else "scores"
        check_first(made(size, through, np.float32), size, np.float32, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_second_order_is_that_of_the_softmax(dtype: Any, every_library: str) -> None:
    for size, through in CASES:
        if through == "scores" and size > (1e3 if dtype is np.float16 else 1e9):
            continue  # o has tangents that overflow, and second derivatives by q are size^2 long
        for sinks in (
            None,
            np.array([size, -np.inf, -size, 0], np.float64 if dtype is np.float64 else np.float32),
        ):
            do, q, k, v, options = made(size, through, dtype)
            along = {
                "d" + n: normal(*x.shape, seed=7).astype(dtype) for n, x in (("q", q), ("k", k), ("v", v))
            }
            if sinks is not None:
                options["sinks"], along["dsinks"] = sinks, normal(HEADS, seed=10).astype(sinks.dtype)
            if through == "bias":
                along["dbias"] = normal(*options["bias"].shape, seed=11).astype(options["bias"].dtype)
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
            exact = testing.reference_jvp(q, k, v, **along, **options)._asdict()
            tangents = cupy_flash.derivatives.jvp(q, k, v, o, lse, **along, **options)
            both = cupy_flash.derivatives.value_and_jvp(q, k, v, **along, **options)
            for j in (tangents, both[1]):
                assert_near(dict(zip(("o", "lse"), j, strict=True)), exact, dtype, size)
            h = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **along, **options)
            exact = testing.reference_hvp(do, q, k, v, **along, **options)._asdict()
            assert_near(h._asdict(), exact, dtype, size, 2)


@pytest.mark.parametrize("size", [1e2, 8e4, 1e30])
def test_products_of_pairs_and_of_reals_agree(size: float, every_library: str) -> None:
    """Rows of bfloat16 that see one key: dv is do, whatever the score, with a bias and without."""
    q, k = ((normal(1, 2, 129, 64, seed=s) * size**0.5).astype(ml_dtypes.bfloat16) for s in (1, 2))
    v, do = (normal(1, 2, 129, 64, seed=s).astype(ml_dtypes.bfloat16) for s in (3, 4))
    for more in (
        {},
        {"bias": normal(129, 129).astype(ml_dtypes.bfloat16)},
        {"alibi_slopes": np.ones(2, np.float32)},
    ):
        options = {"window": (0, 0), **more}
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        along = {"dq": do, "dk": do, "dv": do}
        dq, dk, dv, *_ = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
        np.testing.assert_array_equal(dv, do)
        for x, other in ((dq, k), (dk, q)):  # of dS, which is 0 but for the rounding of products of 64
            limit = 2**-18 * np.abs(other.astype(np.float64)).max()
            assert np.abs(x.astype(np.float64)).max() <= limit
        moved, _ = cupy_flash.derivatives.jvp(q, k, v, o, lse, **along, **options)
        assert np.isfinite(moved.astype(np.float64)).all()


def of_equal_keys(size: float) -> list[np.ndarray]:
    """The do, q, k and v of rows that weigh all keys alike."""
    do, q, k, v = (normal(1, 2, 40, 64, seed=s) for s in range(4))
    q *= size
    k[:] = k[:, :, :1]
    return [do, q, k, v]


def test_one_row_is_enough(every_library: str) -> None:
    """The last one, of the last head."""
    do, q, k, v = of_equal_keys(1)
    q[:, -1, -1] *= 1e7
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    dv = cupy_flash.attention_backward(do, q, k, v, o, lse).dv
    np.testing.assert_allclose(dv, testing.reference_backward(do, q, k, v).dv, atol=1e-4)


def test_an_lse_that_was_rounded_otherwise_is_that_of_these_keys(every_library: str) -> None:
    do, q, k, v = of_equal_keys(1e7)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    made = [cupy_flash.attention_backward(do, q, k, v, o, x).dv for x in (lse, np.nextafter(lse, np.inf))]
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("packed", [False, True])
def test_other_rows_keep_their_bits(packed: bool, every_library: str) -> None:
    """Beside one row of large scores, those of others and their share of dk and dv are as without it."""
    do, q, k, v = (normal(1, 2, 70, 16, seed=s) for s in range(4))
    do[:, :, [5, 40]] = 0
    large = q.copy()
    large[:, :, 5] *= 1e6
    large[:, :, 40] *= 1e15

    def gradients(q: np.ndarray) -> list[np.ndarray]:
        if packed:
            rows = [x[0].swapaxes(0, 1) for x in (do, q, k, v)]
            cut = np.array([0, 33, 70], np.int32)
            o, lse = cupy_flash.attention_varlen(*rows[1:], cut, cut, return_lse=True)
            found = cupy_flash.attention_varlen_backward(*rows, o, lse, cut, cut)[:3]
            return [x.swapaxes(0, 1)[None] for x in found]
        o, lse = cupy_flash.attention(q, k, v, return_lse=True)
        return list(cupy_flash.attention_backward(do, q, k, v, o, lse)[:3])

    alone, beside = gradients(q), gradients(large)
    others = np.delete(np.arange(70), [5, 40])
    np.testing.assert_array_equal(beside[0][:, :, others], alone[0][:, :, others])
    for a, b in zip(alone[1:], beside[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_bits_of_a_row_are_its_own(core: Any) -> None:
    """Under reproducible=, of rows whose sums are formed again."""
    do, q, k, v = (normal(3, 2, 300, 16, seed=s) for s in range(4))
    q[1, :, ::3] *= 1e5
    options = {"reproducible": "batch", "causal": True}

    def gradients(at: slice) -> Any:
        one = [x[at] for x in (do, q, k, v)]
        o, lse = cupy_flash.attention(*one[1:], return_lse=True, **options)
        return cupy_flash.attention_backward(*one, o, lse, **options)[:3]

    for alone, all_of_them in zip(gradients(slice(1, 2)), gradients(slice(None)), strict=True):
        np.testing.assert_array_equal(alone[0], all_of_them[1])


@pytest.mark.parametrize("size", [1.0, 3e3, 3e5])
def test_shares_of_parts_add_up(size: float, every_library: str) -> None:
    """With the LSE of all keys each part of them gives its share, as in a ring."""
    do, q, k, v = (normal(1, 1, 50, 32, seed=s) for s in range(4))
    q *= size
    cut = [slice(0, 20), slice(20, 50)]
    parts = [cupy_flash.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in cut]
    o, lse = cupy_flash.merge(*parts[0], *parts[1])
    shares = [cupy_flash.attention_backward(do, q, k[:, :, at], v[:, :, at], o, lse) for at in cut]
    exact = testing.reference_backward(do, q, k, v)
    allowed = 8 * UNIT["float32"] * np.abs(lse).max()
    dv = np.concatenate([x.dv for x in shares], 2)
    assert np.abs(dv - exact.dv).max() <= allowed * np.abs(exact.dv).max()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_part_without_keys_has_no_share(dtype: Any, every_library: str) -> None:
    """Of rows with a large LSE, which other parts gave them."""
    do, q, k, v = (normal(1, 2, 20, 16, seed=s).astype(dtype) for s in range(4))
    bias, mask = np.zeros((20, 20), dtype), np.ones((20, 20), bool)
    mask[:5] = False
    o, lse = cupy_flash.attention(q, k, v, bias=bias, mask=mask, return_lse=True)
    lse[:, :, :5] = 3000
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, bias=bias, mask=mask)
    moved = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=do, bias=bias, mask=mask)
    for x in (*found[:4], *moved):
        assert x is None or np.isfinite(x.astype(np.float32)).all()
    assert not found.dq[:, :, :5].any()
    assert not found.dbias[:5].any()
