"""What the core computes in parts: rows of a key head, chunks and blocks of keys, lanes of a panel, pairs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.call.options import PER_HEAD
from cupy_flash.cpu import threads
from cupy_flash.cpu.core import family, params
from cupy_flash.parallel.partial import attention as unrounded
from tests.cpu.core_calls import normal

pytestmark = pytest.mark.usefixtures("core")

Arrays = list[np.ndarray]


def inputs(heads: int, queries: int, keys: int) -> Arrays:
    """do, q, k, v."""
    return [normal(1, heads, n, 8, seed=seed) for seed, n in enumerate((queries, queries, keys, keys))]


def assert_close(found: Any, wanted: Any, limit: float = 2e-5) -> None:
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit * max(1, np.abs(wanted).max()))


def test_gradients_of_rows_in_several_parts() -> None:
    """Jobs of their own where heads are few: 1100 queries in two parts, of which the first sees few keys."""
    do, q, k, v = inputs(1, 1100, 333)
    options = {"causal": True, "align": -600, "sinks": np.zeros(1, np.float32)}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    exact = testing.reference_backward(do, q, k, v, **options)
    for name in ("dq", "dk", "dv", "dsinks"):
        assert_close(getattr(found, name), getattr(exact, name))


def test_gradients_of_parts_one_after_the_other() -> None:
    """As reproducible= has them, of many heads, which otherwise are whole; neither part sees all blocks."""
    heads = max(8, threads.allowed())
    do, q, k, v = inputs(heads, 1100, 600)
    options = {"window": (60, 60), "align": -300, "sinks": np.linspace(-1, 1, heads, dtype=np.float32)}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    whole = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    parts = cupy_flash.attention_backward(do, q, k, v, o, lse, reproducible="batch", **options)
    for name in ("dq", "dk", "dv", "dsinks"):
        assert_close(getattr(parts, name), getattr(whole, name))


def test_second_order_of_rows_in_several_parts() -> None:
    """In two directions at a time, each with sums of its own."""
    do, q, k, v = inputs(1, 1100, 333)
    options = {"causal": True, "align": -600, "sinks": np.zeros(1, np.float32)}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    along = {"dq": normal(2, *q.shape, seed=7), "dk": normal(2, *k.shape, seed=8)}
    both = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **along, **options)
    for n in range(2):
        one = {name: x[n] for name, x in along.items()}
        alone = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, **one, **options)
        for name in ("dq", "dk", "dv", "dsinks"):
            assert_close(getattr(both, name)[n], getattr(alone, name))


def test_rows_that_see_nothing_of_several_chunks() -> None:
    _, q, k, v = inputs(2, 20, 1300)
    mask = np.ones((20, 1300), bool)
    mask[3] = mask[5, :1200] = mask[7, 100:] = False
    found = cupy_flash.attention(q, k, v, mask=mask, return_lse=True)
    for x, wanted in zip(found, testing.reference_attention(q, k, v, mask=mask), strict=False):
        assert_close(x[np.isfinite(x)], wanted[np.isfinite(wanted)])
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(wanted))


@pytest.mark.parametrize("row", [0, 15, 16, 31, 39])
def test_the_maximum_of_one_row_rises(row: int) -> None:
    """By more than 8 from one block to the next; those of all others stay."""
    _, q, k, v = inputs(1, 40, 300)
    q[0, 0, row] *= 20
    k[:, :, 150:] *= 2
    assert_close(cupy_flash.attention(q, k, v), testing.reference_attention(q, k, v).o, 1e-4)


@pytest.mark.parametrize("first", [20, 150, 290])
def test_the_first_keys_of_a_block_may_be_nobodys(first: int) -> None:
    do, q, k, v = inputs(2, 40, 400)
    bounds = np.stack([np.zeros(400), np.where(np.arange(400) < first, 0, 40)], -1).astype(np.int32)
    options = {"mask": cupy_flash.Spans(bounds[None, None])}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    exact = testing.reference_backward(do, q, k, v, mask=np.arange(400)[None] >= first)
    assert_close(o, testing.reference_attention(q, k, v, mask=np.arange(400)[None] >= first).o)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(found, name), getattr(exact, name))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["32", "16", "bf16"])
@pytest.mark.parametrize("queries", [1, 20])
def test_a_row_of_zeros_is_0_and_not_its_negative(queries: int, dtype: Any) -> None:
    """Whether rows beside it see more keys, of which each adds 0, or not; times a scale below 0 as well."""
    do, q, k, v = (x.astype(dtype) for x in inputs(2, queries, 20))
    v[...], do[...] = -0.0, -0.0
    options = {"window": (0, 0), "align": 0, "scale": -0.5}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    codes = np.zeros((1, 2, 20, 8), np.int8)
    cache = [cupy_flash.QuantizedCache(codes, np.full(2, by, np.float32)) for by in (1, -1)]
    cached = cupy_flash.attention_with_kv_cache(q, *cache, cache_seqlens=20)
    for x in (o, cached, *cupy_flash.attention_backward(do, q, k, v, o, lse, **options)[:3]):
        assert not np.signbit(x.astype(np.float32)).any()


@pytest.mark.parametrize("queries", [15, 16, 17, 31, 32, 33, 49])
def test_rows_that_fill_vectors_in_part(queries: int) -> None:
    _, q, k, v = inputs(1, queries, 40)
    assert_close(cupy_flash.attention(q, k, v), testing.reference_attention(q, k, v).o)


@pytest.mark.parametrize("low", [100, 200, 300])
def test_weights_by_an_lse_that_is_far_too_low_are_infinite(low: int) -> None:
    do, q, k, v = (np.abs(x) for x in inputs(1, 20, 20))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    with np.errstate(over="ignore"):
        assert np.isposinf(cupy_flash.attention_backward(do, q, k, v, o, lse - low).dv).all()


def test_a_row_has_the_bits_of_any_job() -> None:
    """Also where the first row of a job sees an odd key first, and keys are multiplied in pairs."""
    q, k, v = (normal(1, 2, 300, 32, seed=seed).astype(ml_dtypes.bfloat16) for seed in range(3))
    options: dict[str, Any] = {"window": (101, 20), "reproducible": "batch"}
    whole, _ = unrounded(q, k, v, align=0, **options)
    for first in (96, 128, 160):
        part, _ = unrounded(q[:, :, first : first + 60], k, v, align=first, **options)
        np.testing.assert_array_equal(part, whole[:, :, first : first + 60])


@pytest.mark.parametrize("edge", [1, 15, 16, 17, 31, 32, 33])
def test_intervals_end_at_any_lane(edge: int) -> None:
    """All keys of a block have the same one, which begins or ends at a query of a panel, or behind it."""
    _, q, k, v = inputs(1, 40, 300)
    i = np.arange(40)[:, None]
    for begin, end in ((0, edge), (edge, 40), (edge, edge + 1)):
        mask = np.broadcast_to((begin <= i) & (i < end), (40, 300))
        bounds = np.full((1, 1, 300, 2), (begin, end), np.int32)
        found = cupy_flash.attention(q, k, v, mask=cupy_flash.Spans(bounds))
        np.testing.assert_array_equal(found, cupy_flash.attention(q, k, v, mask=mask))


def example(name: str, queries: int, keys: int) -> dict[str, Any]:
    """What gives an option of two heads to a call."""

    def third(b: int, h: int, i: int, j: int) -> bool:
        return (i + j) % 3 > 0

    return {
        "mask": {"mask": np.arange(keys) % 3 > 0},
        "bias": {"bias": normal(1, 2, 1, keys)},
        "Spans": {"mask": cupy_flash.Spans(np.full((1, 1, keys, 2), (0, 2), np.int32))},
        "BlockMask": {"mask": cupy_flash.block_mask(third, 1, 1, queries, keys)},
        "score function": {"score": cupy_flash.score(lambda s, b, h, i, j: s * s)},
        "ALiBi": {"alibi_slopes": np.float32([0.5, 0.25]), "align": "bottom_right"},
        "softcap": {"softcap": 1.0},
        "dropout": {"dropout": 0.5, "seed": 3},
        "sinks": {"sinks": np.float32([1, 2])},
    }[name]


@pytest.mark.parametrize("queries", [3, 20])
@pytest.mark.parametrize("name", [*family.READ, *sorted({*PER_HEAD} & {*params.TENSORS} - {"alibi_slopes"})])
def test_every_option_of_the_core_reaches_few_rows(name: str, queries: int) -> None:
    """Other loops compute fewer than 12 rows of a key head, and silently ignore what they do not read."""
    _, q, k, v = inputs(2, queries, 40)
    options = example(name, queries, 40)
    found = cupy_flash.attention(q, k, v, **options)
    assert_close(found, testing.reference_attention(q, k, v, **options).o)
    assert np.abs(found - cupy_flash.attention(q, k, v)).max() > 1e-2


@pytest.mark.parametrize("page", [16, 17, 33])
@pytest.mark.parametrize("dim", [16, 47, 48, 64])
@pytest.mark.parametrize("queries", [1, 20])
def test_pairs_over_pages(queries: int, dim: int, page: int) -> None:
    """Of any head dim; pairs of keys cross pages, and what is behind those or the last key is NaN."""
    draw, dtype = np.random.default_rng(0), ml_dtypes.bfloat16
    q = draw.standard_normal((1, 2, queries, dim)).astype(dtype)
    caches = draw.standard_normal((2, 7, 1, page, dim)).astype(dtype)
    used = 3 * page + 5
    table = np.array([[2, 0, 4, 5]], np.int32)
    caches[:, 5, :, 5:] = caches[:, [1, 3, 6]] = np.nan
    o = cupy_flash.attention_with_kv_cache(q, *caches, cache_seqlens=used, block_table=table)
    k, v = (x[table[0]].reshape(1, 1, 4 * page, dim)[:, :, :used] for x in caches)
    wanted = testing.reference_attention(q, k, v).o
    np.testing.assert_allclose(o.astype(float), wanted, atol=2e-2)


def test_statistics_take_an_lse_of_products_of_pairs() -> None:
    """Where terms of a score cancel, they leave other last bits in pairs of bfloat16 than in float32."""
    draw = np.random.default_rng(0)
    q, k = (draw.standard_normal((1, 2, n, 64), np.float32) * by for n, by in ((64, 4000), (200, 1)))
    q[..., 0], q[..., 62], k[..., [0, 62]] = 2.0**20, -(2.0**20), 1
    q, k = q.astype(ml_dtypes.bfloat16), k.astype(ml_dtypes.bfloat16)
    lse = cupy_flash.attention(q, k, k, return_lse=True, reproducible="batch")[1]
    made = cupy_flash.attention_statistics(q, k, lse, want="key_sum")
    np.testing.assert_allclose(made.key_sum.sum(-1), [[64, 64]], rtol=1e-5)


@pytest.mark.parametrize("dim", [46, 48])
def test_pairs_in_rows_that_are_an_odd_stride_apart(dim: int) -> None:
    whole = normal(4, 1, 2, 40, dim + 1).astype(ml_dtypes.bfloat16)
    do, q, k, v = whole[..., :dim]
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    close = [np.ascontiguousarray(x) for x in (do, q, k, v)]
    np.testing.assert_array_equal(o, cupy_flash.attention(*close[1:]))
    found = cupy_flash.attention_backward(do, q, k, v, o, lse)
    for x, y in zip(found[:3], cupy_flash.attention_backward(*close, o, lse)[:3], strict=True):
        np.testing.assert_array_equal(x, y)
