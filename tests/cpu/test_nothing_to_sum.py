"""Where there is no key or no query, sums over them are 0: every element of a result is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import quantized
from cupy_flash.call import outputs
from cupy_flash.dispatch import memo
from tests.cpu.core_calls import normal

pytestmark = pytest.mark.usefixtures("every_library", "unset")

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True, "align": "bottom_right"}, "softcap": {"softcap": 2.0},
    "window": {"window": (3, 4), "align": 0}, "dropout": {"dropout": 0.5, "seed": 1},
    "mask": {"mask": np.ones((1, 1), bool)}, "sinks": {"sinks": [0.5, -np.inf]},
    "ALiBi": {"alibi_slopes": [1.0, 2.0], "align": 0},
}  # fmt: skip


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New arrays hold what is no result of these tests, as memory may that is used again."""
    make = outputs.empty

    def used(*given: Any) -> Any:
        view = make(*given)
        view.owner[...] = 77
        return view

    monkeypatch.setattr(outputs, "empty", used)
    memo.forget()
    yield
    memo.forget()


def given(options: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Options, rows of numbers in the dtype of the accumulator."""
    wide = np.float64 if dtype == np.float64 else np.float32
    return {n: np.array(x, wide) if isinstance(x, list) else x for n, x in options.items()}


@pytest.mark.parametrize("lengths", [(95, 0), (0, 9), (0, 0), (1, 0)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_over_no_keys_or_no_queries(name: str, lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    for dtype in DTYPES:
        own = given(OPTIONS[name], dtype)
        do, q = (normal(3, 2, queries, n, seed=n).astype(dtype) for n in (16, 24))
        k, v = (normal(3, 1, keys, n, seed=n).astype(dtype) for n in (24, 16))
        for shape in ((1, queries, 1), (2, 1, 1), (3, 2, queries, keys), (1, keys), (1, 1)):
            bias = np.ones(shape, dtype)
            o, lse = cupy_flash.attention(q, k, v, bias=bias, return_lse=True, **own)
            assert not o.any()
            sinks = own.get("sinks", np.full(2, -np.inf))
            assert (lse == sinks[:, None]).all()
            dlse = np.ones_like(lse)
            made = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, bias=bias, **own)
            assert [x.shape for x in made[:4]] == [q.shape, k.shape, v.shape, shape]
            assert not any(x.any() for x in made[:4])
            if "sinks" in own:  # LSE is the sink, of so many rows
                assert made.dsinks.tolist() == [3 * queries, 0]
            along = {"dq": np.stack([q, q]), "dk": np.stack([k, k]), "dbias": np.stack([bias, bias]), **own}
            for x in cupy_flash.derivatives.jvp(q, k, v, o, lse, bias=bias, **along):
                assert not x.any()
            for x in cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dlse=dlse, bias=bias, **along):
                assert x is None or not x.any()


@pytest.mark.parametrize("lengths", [(95, 0), (0, 9)], ids=str)
def test_gradients_of_tables_over_nothing(lengths: tuple[int, int]) -> None:
    score = cupy_flash.score(lambda s, b, h, i, j, table: s + table[h], learned="table")
    q, k = normal(1, 2, lengths[0], 8), normal(1, 2, lengths[1], 8)
    own = {"score": score(np.ones(2, np.float32))}
    o, lse = cupy_flash.attention(q, k, k, return_lse=True, **own)
    made = cupy_flash.attention_backward(q, q, k, k, o, lse, **own)
    assert [x.tolist() for x in made.dscore] == [[0, 0]]


def test_packed_sequences_without_keys_or_queries() -> None:
    """Some of them, and all."""
    for of_q, of_k in (([0, 5, 5, 9], [0, 0, 7, 7]), ([0, 5, 9, 9], [0, 0, 0, 0])):
        rows, keys = np.array(of_q, np.int32), np.array(of_k, np.int32)
        q, k = normal(9, 2, 8), normal(of_k[-1], 1, 8)
        own = {"bias": np.ones((2, 1, 1), np.float32), "sinks": np.zeros(2, np.float32)}
        o, lse = cupy_flash.attention_varlen(q, k, k, rows, keys, return_lse=True, **own)
        made = cupy_flash.attention_varlen_backward(q, q, k, k, o, lse, rows, keys, **own)
        assert not o.any()
        assert not lse.any()
        assert not any(x.any() for x in made if x is not None)


STORED: dict[str, Any] = {
    "floats": lambda x: x, "int8": quantized.int8, "int4": lambda x: quantized.int4(x, group=32),
    "nvfp4": quantized.nvfp4,
}  # fmt: skip


@pytest.mark.parametrize("stored", STORED)
def test_caches_without_keys(stored: str) -> None:
    """A sequence of no key, beside one that has some."""
    cache, lengths = STORED[stored](normal(2, 2, 16, 32)), np.array([0, 5], np.int32)
    for queries in (1, 20):
        q = normal(2, 4, queries, 32)
        o, lse = cupy_flash.attention_with_kv_cache(q, cache, cache, cache_seqlens=lengths, return_lse=True)
        assert not o[0].any()
        assert (lse[0] == -np.inf).all()
        assert np.isfinite(lse[1]).all()
        made = cupy_flash.attention_statistics(q, cache, cache_seqlens=lengths)
        assert not made.key_sum[0].any()
        np.testing.assert_allclose(made.key_sum[1].sum(-1), queries, rtol=1e-5)


@pytest.mark.parametrize("stored", ["int4", "nvfp4"])
def test_codes_of_no_keys(stored: str) -> None:
    made = STORED[stored](normal(2, 0, 64))
    assert (made.codes.shape, quantized.dequantize(made).shape) == ((2, 0, 32), (2, 0, 64))
