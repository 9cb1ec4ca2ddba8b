"""Scores and sinks of +-inf and NaN: every path gives what the softmax of docs/semantics.md gives."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.cpu.core_calls import normal

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
SINKS = [np.inf, np.nan, -np.inf]
RTOL = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


def inputs(dtype: Any, queries: int, keys: int, dim: int = 8) -> list[np.ndarray]:
    """do, q, k, v of two heads; two query heads share a key head."""
    shapes = ((2, queries), (2, queries), (1, keys), (1, keys))
    return [normal(1, *shape, dim, seed=n).astype(dtype) for n, shape in enumerate(shapes)]


def assert_like(found: Any, wanted: np.ndarray, dtype: Any, name: str) -> None:
    """The same infinities and NaN, and otherwise the same numbers, but for rounding."""
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
    tolerance = RTOL[np.dtype(dtype).name] * largest
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0, atol=tolerance, err_msg=name)


def check_sinks(dtype: Any, queries: int, keys: int, dim: int = 8, *, by_band: bool = False) -> None:
    """A sink of each head, and rows without keys, whose LSE is the sink, whatever it is; others are NaN."""
    _, q, k, v = inputs(dtype, queries, keys, dim)
    options: dict[str, Any] = {"window": (3, 0), "align": -2}
    if not by_band:
        mask = np.ones((queries, keys), bool)
        mask[[1, -1]] = False
        options = {"mask": mask}
    for sink in SINKS:
        options["sinks"] = np.array([0.5, sink], np.float64 if dtype is np.float64 else np.float32)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        exact = testing.reference_attention(q, k, v, **options)
        assert_like(o, exact.o, dtype, f"o with a sink of {sink}")
        assert_like(lse, exact.lse, dtype, f"lse with a sink of {sink}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("queries", [5, 40])
def test_sinks(queries: int, dtype: Any, every_library: str) -> None:
    for by_band in (False, True):
        check_sinks(dtype, queries, 170, by_band=by_band)


def check_sinks_over_a_cache(dtype: Any, queries: int, keys: int = 40, dim: int = 8) -> None:
    """Of sequences without keys, and with some."""
    q = normal(2, 2, queries, dim).astype(dtype)
    cache = normal(2, 1, keys, dim, seed=1).astype(dtype)
    for sink in SINKS:
        sinks = np.array([0.5, sink], np.float64 if dtype is np.float64 else np.float32)
        for lengths in ([0, 5], [keys, 0]):
            asked = {"cache_seqlens": np.array(lengths, np.int32), "sinks": sinks}
            exact = testing.reference_with_kv_cache(q, cache, cache, **asked)
            o, lse = cupy_flash.attention_with_kv_cache(q, cache, cache, return_lse=True, **asked)
            assert_like(o, exact.o, dtype, f"o with a sink of {sink}")
            assert_like(lse, exact.lse, dtype, f"lse with a sink of {sink}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("queries", [1, 20])
def test_sinks_over_a_cache(queries: int, dtype: Any, every_library: str) -> None:
    check_sinks_over_a_cache(dtype, queries)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("queries", [1, 20])
def test_rows_of_nan_with_sinks(queries: int, dtype: Any, every_library: str) -> None:
    """A row has no maximum then, whatever its sink."""
    _, q, k, v = inputs(dtype, queries, 33)
    q[0, :, 0, 3] = np.nan
    for sink in (*SINKS, 1.0):
        options = {"sinks": np.array([-np.inf, sink], np.float64 if dtype is np.float64 else np.float32)}
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        exact = testing.reference_attention(q, k, v, **options)
        assert np.isnan(exact.lse[0, :, 0]).all()
        assert_like(o, exact.o, dtype, f"o with a sink of {sink}")
        assert_like(lse, exact.lse, dtype, f"lse with a sink of {sink}")


def test_gradients_of_rows_that_see_nothing_but_an_infinite_sink(every_library: str) -> None:
    do, q, k, v = inputs(np.float32, 20, 33)
    mask = np.ones((20, 33), bool)
    mask[[1, 19]] = False
    options = {"mask": mask, "sinks": np.array([0.5, np.inf], np.float32)}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    exact = testing.reference_backward(do, q, k, v, **options)
    assert_like(found.dq, exact.dq, np.float32, "dq")
    assert_like(found.dsinks, exact.dsinks, np.float32, "dsinks")
    assert not found.dq[0, 1, [1, 19]].any()
    assert np.isnan(found.dk).all(), "of keys that other rows of the head see"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("how", ["softcap", "score of -inf", "causal", "bias"])
def test_infinite_keys_have_finite_gradients(how: str, dtype: Any, every_library: str) -> None:
    """Where they make a score of -inf, or softcap makes one that is finite; of panels in part and in full."""
    for queries, keys in ((5, 7), (16, 30), (40, 170)):
        do, q, k, v = inputs(dtype, queries, keys)
        k[0, 0, 3, 1] = np.inf
        q[..., 1] = -1 - np.abs(q[..., 1])
        options: dict[str, Any] = {"softcap": 3.0} if how == "softcap" else {}
        if how == "causal":
            options = {"causal": True, "align": 5}
        if how == "bias":
            options = {"bias": normal(queries, keys).astype(dtype)}
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        exact = testing.reference_attention(q, k, v, **options)
        assert_like(o, exact.o, dtype, "o")
        assert_like(lse, exact.lse, dtype, "lse")
        found = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
        exact = testing.reference_backward(do, q, k, v, **options)
        for name in ("dq", "dk", "dv"):
            assert np.isfinite(getattr(exact, name)).all()
            assert_like(getattr(found, name), getattr(exact, name), dtype, name)
        along = {
            "d" + name: normal(*x.shape, seed=9).astype(dtype)
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
        if how == "bias":
            along["dbias"] = normal(queries, keys, seed=9).astype(dtype)
        found = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **along, **options)
        exact = testing.reference_hvp(do, q, k, v, **along, **options)
        for name in [name for name in along if getattr(exact, name) is not None]:
            assert np.isfinite(getattr(exact, name)).all()
            assert_like(getattr(found, name), getattr(exact, name), dtype, f"second order, {name}")


def test_rows_of_nan_beside_a_sink_without_weight(every_library: str) -> None:
    """Its gradient is a sum over rows, of first and of second order."""
    do, q, k, v = inputs(np.float32, 20, 30)
    q[0, 0, 3, 2] = np.nan
    options = {"sinks": np.full(2, -np.inf, np.float32)}
    along = {"dq": np.ones_like(q), "dsinks": np.ones(2, np.float32)}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, **options).dsinks
    np.testing.assert_array_equal(found, [np.nan, 0])
    found = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **along, **options).dsinks
    np.testing.assert_array_equal(found, [np.nan, 0])


@pytest.mark.parametrize("what", ["q", "k", "bias", "sinks"])
def test_statistics_of_rows_of_nan(what: str, every_library: str) -> None:
    """NaN for the sums, with and without LSE; a weight of NaN is in no list of the largest."""
    for value in (np.nan, np.inf):
        _, q, k, v = inputs(np.float32, 20, 33)
        options: dict[str, Any] = {}
        if what == "q":
            q[0, 1, 2] = np.nan
        elif what == "k":
            k[0, 0, 3] = np.nan
        elif what == "bias":
            options["bias"] = normal(20, 33)
            options["bias"][2, 3] = value
        else:
            options["sinks"] = np.array([0.5, value], np.float32)
        exact = testing.reference_statistics(q, k, top_k=3, **options)
        _, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        for given in (None, lse):
            found = cupy_flash.attention_statistics(q, k, given, top_k=3, **options)
            for name, wanted in exact._asdict().items():
                assert_like(getattr(found, name), wanted, np.float32, name)


def check_lse_without_weights(lse_of_row: float) -> None:
    """A row whose LSE is infinite has no weights, though it sees keys."""
    do, q, k, v = inputs(np.float32, 5, 7)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    lse[0, 1, 2] = lse_of_row
    found = cupy_flash.attention_backward(do, q, k, v, o, lse)
    mask = np.ones((1, 2, 5, 7), bool)
    mask[0, 1, 2] = False
    exact = testing.reference_backward(do, q, k, v, mask=mask)
    for name in ("dq", "dk", "dv"):
        assert_like(getattr(found, name), getattr(exact, name), np.float32, name)


@pytest.mark.parametrize("lse", [-np.inf, np.inf])
def test_infinite_lse_has_no_weights(lse: float, every_library: str) -> None:
    check_lse_without_weights(lse)


def test_the_reference_takes_window_bounds_of_any_size() -> None:
    _, q, k, v = inputs(np.float64, 5, 7)
    for far in (2**62, 2**63, 10**30):
        for bounds, wanted in (((far, far), {}), ((far, 0), {"causal": True}), ((None, far), {})):
            exact = testing.reference_attention(q, k, v, align=1, **wanted)
            found = testing.reference_attention(q, k, v, align=1, window=bounds)
            np.testing.assert_array_equal(found.o, exact.o)
            o = cupy_flash.attention(q, k, v, align=1, window=bounds)
            np.testing.assert_allclose(o, exact.o, rtol=1e-12)


@pytest.mark.parametrize("path", [None, "numpy"], ids=["core", "numpy"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-42, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("make", [cupy_flash.quantized.int8, cupy_flash.quantized.float8])
@pytest.mark.parametrize("queries", [1, 5])
def test_scales_of_a_cache(
    make: Any, scale: float, queries: int, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of k is a factor of the scores, that of v of the result, and each of its own head."""
    if path is not None:
        monkeypatch.setenv("CUPY_FLASH_CPU", path)
    q, k, v = (normal(1, 2, n, 16, seed=n + i).astype(np.float32) for i, n in enumerate((queries, 40, 40)))
    caches = [make(x)._replace(scale=np.float32([0.02, 0.03])) for x in (k, v)]
    odd = np.float32([scale, 0.03])

    def attend(q: Any, k: Any, v: Any) -> Any:
        return cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=40, return_lse=True)

    o, lse = attend(q, *caches)
    found, same = attend(q, caches[0], caches[1]._replace(scale=odd))
    np.testing.assert_array_equal(same, lse)
    with np.errstate(all="ignore"):
        wanted = o * (odd / np.float32([0.02, 0.03]))[:, None, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-40)
    found, lse_found = attend(q, caches[0]._replace(scale=odd), caches[1])
    np.testing.assert_array_equal(found[:, 1], o[:, 1])
    np.testing.assert_array_equal(lse_found[:, 1], lse[:, 1])
    if np.isfinite(scale):
        wanted, of_scores = attend(q * np.float32([scale / 0.02, 1])[:, None, None], *caches)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse_found, of_scores, rtol=1e-5)
    else:
        assert np.isnan(found[:, 0]).all()
        assert np.isnan(lse_found[:, 0]).all()


@pytest.mark.parametrize("path", [None, "numpy"], ids=["core", "numpy"])
def test_new_keys_over_a_scale_of_0(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if path is not None:
        monkeypatch.setenv("CUPY_FLASH_CPU", path)
    new = np.float32([0, 1, -1, 0] * 4).reshape(1, 1, 1, 16)
    for dtype, stored in (
        (np.int8, [0, 127, -127, 0]),
        (ml_dtypes.float8_e4m3fn, [np.nan, 448, -448, np.nan]),
    ):
        codes = np.zeros((1, 1, 4, 16), dtype)
        cache = cupy_flash.QuantizedCache(codes, np.zeros(1, np.float32))
        cupy_flash.attention_with_kv_cache(
            new, cache, cache._replace(codes=codes.copy()), cache_seqlens=1, k=new, v=new
        )
        np.testing.assert_array_equal(codes[0, 0, 1].astype(np.float32), np.float32(stored * 4))
