"""The rules at the edges: no keys, no queries, special values, and the options that mean the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.block_cases import as_mask as blocks_as_mask
from tests.block_cases import random_blocks
from tests.cases import DTYPES, Case, numpy_dtype
from tests.checks import Device, check_backward, check_forward
from tests.span_cases import as_mask as spans_as_mask

pytestmark = pytest.mark.usefixtures("device")


def arrays(case: Case) -> list[np.ndarray]:
    given = case.inputs()
    return [given[name] for name in ("do", "q", "k", "v")]


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether float32 results of ordinary size agree but for the order of their sums."""
    return bool(np.allclose(a, b, rtol=1e-5, atol=2e-6))


def backward_of(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options):
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    return o, lse, cupy_flash.attention_backward(do, q, k, v, o, lse, **options)


# ---- rows, sequences and batches without anything


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys(sinks: bool, dtype: str) -> None:
    """Output 0, lse -inf (the sink if there is one), and no gradient through them."""
    case = Case(dtype=dtype, lengths=(70, 66), causal=True, align="bottom_right", sinks=sinks)
    do, q, k, v = arrays(case)
    options = case.options(case.inputs())
    o, lse, gradients = backward_of(do, q, k, v, **options)
    assert not o[:, :, :4].any(), "queries 0 to 3 stand before key 0"
    expected = options["sinks"][None, :, None] if sinks else -np.inf
    assert (lse[:, :, :4] == expected).all()
    assert not gradients.dq[:, :, :4].any()
    assert np.isfinite(lse[:, :, 4:]).all()
    assert all(np.isfinite(x.astype(np.float32)).all() for x in gradients if x is not None)


@pytest.mark.parametrize("everything_by", ["mask", "bias"])
def test_everything_masked(everything_by: str) -> None:
    do, q, k, v = arrays(Case())
    options = (
        {"mask": np.zeros((64, 64), bool)}
        if everything_by == "mask"
        else {"bias": np.full((64, 64), -np.inf, np.float32)}
    )
    o, lse, gradients = backward_of(do, q, k, v, **options)
    assert not o.any()
    assert np.isneginf(lse).all()
    assert not any(x.any() for x in gradients if x is not None)


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -np.inf], np.float32)], ids=["plain", "sinks"])
def test_no_keys_at_all(sinks: np.ndarray | None) -> None:
    do, q, _, _ = arrays(Case())
    k, v = np.ones((2, 2, 0, 32), np.float32), np.ones((2, 2, 0, 32), np.float32)
    bias = np.ones((2, 1, 64, 0), np.float32)
    o, lse, gradients = backward_of(do, q, k, v, sinks=sinks, bias=bias)
    assert o.shape == (2, 2, 64, 32)
    assert not o.any()
    expected = np.full((2, 2, 64), -np.inf) if sinks is None else np.tile(sinks[:, None], (2, 1, 64))
    assert np.array_equal(lse, expected)
    assert not gradients.dq.any()
    assert gradients.dk.shape == gradients.dv.shape == (2, 2, 0, 32)
    assert gradients.dbias.shape == (2, 1, 64, 0)
    if sinks is not None:
        assert not gradients.dsinks.any()


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((2, 3, 0, 8), (2, 3, 5, 8)),
        ((0, 3, 4, 8), (0, 3, 5, 8)),
        ((0, 3, 0, 8), (0, 3, 0, 8)),
        ((2, 0, 4, 8), (2, 0, 5, 8)),
        ((0, 8), (5, 8)),
    ],
    ids=str,
)
def test_nothing_to_compute(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """An empty result, and gradients of zero where there is something to have one."""
    q, k = np.ones(q_shape, np.float32), np.ones(k_shape, np.float32)
    heads = q_shape[1] if len(q_shape) == 4 else 1
    sinks, bias = np.ones(heads, np.float32), np.ones((1, 1), np.float32)
    o, lse, gradients = backward_of(q, q, k, k, sinks=sinks, bias=bias)
    assert o.shape == q_shape
    assert lse.shape == q_shape[:-1]
    *of_arrays, dscore, dscale = gradients
    assert [x.shape for x in of_arrays] == [q_shape, k_shape, k_shape, (1, 1), (heads,)]
    assert not any(x.any() for x in of_arrays)
    assert dscore is dscale is None


def test_nothing_to_compute_writes_into_out() -> None:
    q, k = np.ones((1, 2, 3, 8), np.float32), np.ones((1, 2, 0, 8), np.float32)
    out = testing.dead(q.shape, q.dtype)
    cupy_flash.attention(q, k, k, out=out.view)
    out.check_written()
    assert not out.view.any()


# ---- special values


def test_nan_in_masked_keys_does_not_show() -> None:
    _, q, k, v = arrays(Case(lengths=(64, 70)))
    mask = np.ones((64, 70), bool)
    mask[:, 33] = mask[:, 64:] = False
    clean = cupy_flash.attention(q, k, v, mask=mask, return_lse=True)
    for value in (np.nan, np.inf, -np.inf):
        dirty = k.copy()
        dirty[:, :, ~mask[0]] = value
        for options in ({}, {"softcap": 2.0}, {"bias": np.zeros((64, 70), np.float32)}):
            o, lse = cupy_flash.attention(q, dirty, v, mask=mask, return_lse=True, **options)
            assert np.isfinite(o).all()
            assert np.isfinite(lse).all()
            if not options:
                assert close(o, clean[0])
                assert close(lse, clean[1])


def test_nan_beyond_the_band_does_not_show() -> None:
    _, q, k, v = arrays(Case(lengths=(64, 64)))
    clean = cupy_flash.attention(q, k, v, causal=True)
    k[:, :, 40:] = np.nan
    o = cupy_flash.attention(q, k, v, causal=True)
    assert close(o[:, :, :40], clean[:, :, :40])
    assert np.isnan(o[:, :, 40:]).all(), "and where it counts it does show"


def test_nan_in_a_query_stays_in_its_row() -> None:
    _, q, k, v = arrays(Case())
    clean = cupy_flash.attention(q, k, v)
    q[0, 1, 5, 3] = np.nan
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    assert np.isnan(o[0, 1, 5]).all()
    assert np.isnan(lse[0, 1, 5])
    o[0, 1, 5] = clean[0, 1, 5]
    assert close(o, clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_near_overflow(dtype: str) -> None:
    """The largest score takes everything; its exponential alone would overflow any dtype."""
    big = {"float16": 200.0, "bfloat16": 1e9, "float32": 1e15, "float64": 1e150}[dtype]
    q = (np.eye(8)[None, None] * big).astype(numpy_dtype(dtype))
    v = (np.arange(64.0).reshape(1, 1, 8, 8) / 8).astype(numpy_dtype(dtype))
    for scale in (1.0, -1.0):
        o, lse, gradients = backward_of(v, q, q, v, scale=scale)
        exact = testing.reference_attention(q, q, v, scale=scale)
        ulp = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-22, "float64": 2**-51}[dtype]
        assert np.allclose(o.astype(np.float64), exact.o, rtol=ulp, atol=0)
        assert np.allclose(lse, exact.lse, rtol=1e-6)
        assert all(np.isfinite(x.astype(np.float64)).all() for x in gradients if x is not None)
    o = cupy_flash.attention(q, q, v, scale=1.0)
    assert np.array_equal(o, v)


def test_scores_far_below_zero() -> None:
    """A row whose scores are all near the lowest number still sums to one."""
    q = np.full((1, 1, 4, 8), -1e18, np.float32)
    k = np.full((1, 1, 70, 8), 1e18, np.float32)
    v = np.ones((1, 1, 70, 8), np.float32)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    assert np.allclose(o, 1.0)
    assert np.allclose(lse, -1e36 * 8**0.5)


def test_growing_scores_rescale_what_came_before(device: Device) -> None:
    """Each block of keys has a larger maximum than all before it, and then smaller ones."""
    tiles = ((2, 1), (16, 16), (64, 300)) if device.name == "cpu" else (None,)
    for sign in (1.0, -1.0):
        q = np.full((1, 1, 4, 8), 1.0, np.float32)
        k = (sign * np.linspace(0, 40, 300)[None, None, :, None] * np.ones(8)).astype(np.float32)
        v = np.random.default_rng(0).standard_normal((1, 1, 300, 8)).astype(np.float32)
        for tile in tiles:
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, tuning=cupy_flash.Tuning(tile=tile))
            testing.assert_within_budget({"o": o, "lse": lse}, q, k, v)


def test_minus_infinity_in_the_bias_masks() -> None:
    do, q, k, v = arrays(Case())
    keep = np.random.default_rng(0).random((2, 1, 64, 64)) < 0.5
    keep[0, 0, 7] = False
    bias = np.where(keep, 0.0, -np.inf).astype(np.float32)
    o, lse, gradients = backward_of(do, q, k, v, bias=bias)
    other, other_lse, others = backward_of(do, q, k, v, mask=keep)
    assert close(o, other)
    assert close(lse, other_lse)
    assert close(gradients.dq, others.dq)
    assert close(gradients.dk, others.dk)
    assert not gradients.dbias[~keep].any()


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_any_dtype(dtype: str, bias_dtype: str, device: Device) -> None:
    case = Case(dtype=dtype, bias="1hqk", bias_dtype=bias_dtype)
    check_forward(case, device)
    assert check_backward(case, device).dbias.dtype == numpy_dtype(bias_dtype)


# ---- options that say the same


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "in tuples of tuples"])
def test_all_masks_of_a_tuple_hold(nested: bool, dtype: str) -> None:
    """Arrays, spans, blocks and functions, beside one array of what they all keep, and in the reference."""
    do, q, k, v = arrays(Case(dtype=dtype))
    draw = np.random.default_rng(5)
    array, other = draw.random((64, 64)) < 0.8, draw.random((2, 1, 1, 64)) < 0.9
    bounds = np.stack([draw.integers(0, 20, (64, 1)), draw.integers(40, 65, (64, 1))], -1).astype(np.int32)
    blocks = random_blocks(draw, (2, 2), (64, 64), (16, 16))
    function = cupy_flash.mask(lambda b, h, i, j, ids: ids[b, i] <= ids[b, j])
    ids = draw.integers(0, 3, (2, 64)).astype(np.int32)
    masks = [array, cupy_flash.Spans(bounds), other, function(ids), blocks]
    kept = array & other & spans_as_mask(bounds, 64, 64) & blocks_as_mask(blocks, 64, 64)
    kept &= (ids[:, :, None] <= ids[:, None, :])[:, None]
    assert 0.02 < kept.mean() < 0.3
    every = (tuple(masks[:2]), (masks[2], tuple(masks[3:]))) if nested else tuple(masks)
    o, lse, gradients = backward_of(do, q, k, v, mask=every)
    found = {"o": o, "lse": lse} | {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
    testing.assert_within_budget(found, q, k, v, do=do, mask=kept)
    said, wanted = (testing.reference_attention(q, k, v, mask=mask) for mask in (every, kept))
    np.testing.assert_array_equal(said.lse, wanted.lse)


def test_window_and_causal_and_align() -> None:
    _, q, k, v = arrays(Case(lengths=(40, 100)))

    def same(a: dict, b: dict) -> None:
        assert close(cupy_flash.attention(q, k, v, **a), cupy_flash.attention(q, k, v, **b))

    same({"causal": True, "align": "bottom_right"}, {"causal": True, "align": 60})
    same({"causal": True, "align": "top_left"}, {"causal": True, "align": 0})
    same({"causal": True, "align": 3}, {"window": (None, 0), "align": 3})
    same({"causal": True, "window": (5, 9), "align": 3}, {"window": (5, 0), "align": 3})
    same({}, {"align": "bottom_right"})
    same({}, {"window": (None, None), "align": "top_left"})
    same({}, {"window": (1000, 1000), "align": "top_left"})
    i, j = np.arange(40)[:, None], np.arange(100)
    band = (j >= i + 7 - 5) & (j <= i + 7 + 2)
    same({"window": (5, 2), "align": 7}, {"mask": band})


@pytest.mark.parametrize("align", [-1000, 1000, -(2**31) - 20, 2**31 - 20, -(2**33), 2**33])
def test_bands_far_from_the_keys(align: int) -> None:
    do, q, k, v = arrays(Case())
    o, lse, _ = backward_of(do, q, k, v, causal=True, align=align)
    if align > 0:
        assert np.array_equal(o, cupy_flash.attention(q, k, v))
    else:
        assert not o.any()
        assert np.isneginf(lse).all()
    o, lse, gradients = backward_of(do, q, k, v, window=(3, 3), align=align)
    assert not o.any()
    assert not gradients.dv.any()


def test_huge_window_does_not_overflow() -> None:
    _, q, k, v = arrays(Case())
    o = cupy_flash.attention(q, k, v, window=(2**62, 2**62), align=2**20)
    assert np.array_equal(o, cupy_flash.attention(q, k, v))


def test_a_sink_is_one_more_key_with_value_zero() -> None:
    do, q, k, v = arrays(Case(batch=1, heads=(1, 1)))
    sink = np.array([1.25], np.float32)
    o, lse, gradients = backward_of(do, q, k, v, sinks=sink)
    longer_k = np.concatenate([k, np.zeros((1, 1, 1, 32), np.float32)], axis=2)
    longer_v = np.concatenate([v, np.zeros((1, 1, 1, 32), np.float32)], axis=2)
    bias = np.zeros(65, np.float32)
    bias[64] = 1.25
    other, other_lse, others = backward_of(do, q, longer_k, longer_v, bias=bias)
    assert np.allclose(o, other, atol=1e-6)
    assert np.allclose(lse, other_lse, atol=1e-6)
    assert np.allclose(gradients.dq, others.dq, atol=1e-5)
    assert np.allclose(gradients.dsinks, others.dbias[64:], atol=1e-4)
    nothing = np.array([-np.inf], np.float32)
    assert np.allclose(cupy_flash.attention(q, k, v, sinks=nothing), cupy_flash.attention(q, k, v), atol=1e-7)


def test_alibi_is_a_bias_of_distance() -> None:
    _, q, k, v = arrays(Case(lengths=(30, 50)))
    slopes = np.array([0.5, 0.25], np.float32)
    distance = np.abs(np.arange(30)[:, None] + 20 - np.arange(50))
    bias = (-slopes[:, None, None] * distance).astype(np.float32)
    o = cupy_flash.attention(q, k, v, alibi_slopes=slopes, align="bottom_right")
    assert np.allclose(o, cupy_flash.attention(q, k, v, bias=bias), atol=1e-6)
    per_batch = np.stack([slopes, 2 * slopes])
    o = cupy_flash.attention(q, k, v, alibi_slopes=per_batch, align="bottom_right")
    twice = cupy_flash.attention(q, k, v, bias=np.stack([bias, 2 * bias]))
    assert np.allclose(o, twice, atol=1e-6)


def test_grouped_heads_are_repeated_heads() -> None:
    do, q, k, v = arrays(Case(heads=(6, 2)))
    o, _, gradients = backward_of(do, q, k, v)
    repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
    other, _, others = backward_of(do, q, *repeated)
    assert close(o, other)
    assert np.allclose(gradients.dk, others.dk.reshape(2, 2, 3, 64, 32).sum(2), atol=1e-5)
    broadcast = [np.broadcast_to(x[:, :, None], (2, 2, 3, 64, 32)).reshape(2, 6, 64, 32) for x in (k, v)]
    assert np.array_equal(cupy_flash.attention(q, *broadcast), other)


def test_inputs_of_stride_zero() -> None:
    _, q, k, v = arrays(Case())
    one = np.broadcast_to(k[:1, :1], k.shape)
    assert np.array_equal(cupy_flash.attention(q, one, v), cupy_flash.attention(q, one.copy(), v))
    row = np.broadcast_to(q[:, :, :1], q.shape)
    assert np.array_equal(cupy_flash.attention(row, k, v), cupy_flash.attention(row.copy(), k, v))


def test_shared_inputs_and_read_only_inputs() -> None:
    _, q, _, _ = arrays(Case())
    copies = [q.copy() for _ in range(3)]
    q.flags.writeable = False
    o, _, gradients = backward_of(q, q, q, q)
    expected = cupy_flash.attention(*copies)
    assert np.array_equal(o, expected)
    assert gradients.dq.flags.writeable


def test_scale_zero_and_negative() -> None:
    _, q, k, v = arrays(Case())
    o, lse = cupy_flash.attention(q, k, v, scale=0.0, return_lse=True)
    assert np.allclose(o, v.mean(axis=2, keepdims=True), atol=1e-6)
    assert np.allclose(lse, np.log(64))
    assert np.allclose(
        cupy_flash.attention(q, k, v, scale=-0.5), cupy_flash.attention(-q, k, v, scale=0.5), atol=1e-6
    )


def test_dropout_leaves_lse_alone() -> None:
    _, q, k, v = arrays(Case())
    _, lse = cupy_flash.attention(q, k, v, return_lse=True)
    for dropout in (0.1, 0.999999, np.nextafter(1.0, 0.0)):
        o, dropped = cupy_flash.attention(q, k, v, dropout=dropout, seed=0, return_lse=True)
        assert np.array_equal(lse, dropped)
        assert np.isfinite(o).all()


def test_results_have_the_type_of_their_inputs() -> None:
    for dtype in DTYPES:
        do, q, k, v = arrays(Case(dtype=dtype))
        o, lse, gradients = backward_of(do, q, k, v)
        assert type(o) is np.ndarray
        assert o.dtype == gradients.dq.dtype == gradients.dk.dtype == gradients.dv.dtype == q.dtype
        assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert o.flags.c_contiguous
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16


def test_merge_with_nothing() -> None:
    _, q, k, v = arrays(Case())
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    nothing = cupy_flash.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    for merged in (cupy_flash.merge(o, lse, *nothing), cupy_flash.merge(*nothing, o, lse)):
        assert np.array_equal(merged[0], o)
        assert np.array_equal(merged[1], lse)
    o, lse = cupy_flash.merge(*nothing, *nothing)
    assert not o.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_of_any_rank_and_layout(dtype: str, shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    o_a, o_b = (draw.standard_normal(shape).astype(dtype) for _ in "ab")
    lse_a, lse_b = (
        draw.standard_normal(shape[:-1]).astype(np.promote_types(dtype, np.float32)) for _ in "ab"
    )
    weight = 1 / (1 + np.exp((lse_b - lse_a).astype(np.float64)))[..., None]
    wanted = weight * o_a.astype(np.float64) + (1 - weight) * o_b.astype(np.float64)
    o, lse = cupy_flash.merge(o_a, lse_a, o_b, lse_b)
    assert (o.dtype, lse.dtype) == (o_a.dtype, lse_a.dtype)
    np.testing.assert_allclose(o.astype(np.float64), wanted, atol=2e-2 if o.itemsize == 2 else 1e-6)
    if len(shape) > 2:
        o_a, o_b = o_a.swapaxes(-3, -2), o_b.swapaxes(-3, -2)
    turned, same = cupy_flash.merge(o_a, lse_a, o_b, lse_b, layout="bshd")
    np.testing.assert_array_equal(same, lse)
    np.testing.assert_array_equal(turned.swapaxes(-3, -2) if len(shape) > 2 else turned, o)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_reads_nothing_of_a_part_without_weight(dtype: str, layout: str) -> None:
    """Some libraries never write the result of an empty part."""
    _, q, k, v = arrays(Case(dtype=dtype))
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, layout=layout)
    outweighed = np.finfo(lse.dtype).min  # finite, but exp of the difference is 0
    for garbage in (np.nan, np.inf, -np.inf, ml_dtypes.finfo(o.dtype).max):
        for low in (-np.inf, outweighed):
            unwritten = np.full_like(o, garbage), np.full_like(lse, low)
            for parts in ((o, lse, *unwritten), (*unwritten, o, lse)):
                merged = cupy_flash.merge(*parts, layout=layout)
                assert np.array_equal(merged[0], o)
                assert np.array_equal(merged[1], lse)
        empty = np.full_like(o, garbage), np.full_like(lse, -np.inf)
        both = cupy_flash.merge(*empty, *empty, layout=layout)
        assert not both[0].any()
        assert np.isneginf(both[1]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_over_the_whole_range_of_lse(dtype: str) -> None:
    """From the lowest finite number to the largest, without a warning; beside the formula in long doubles."""
    top, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    some = np.array([-np.inf, -top, -0.75 * top, -1e30, -750, -5, -tiny, 0, 5, 5.5, 1e30, 0.75 * top, top])
    a, b = (x.ravel().astype(dtype) for x in np.meshgrid(some, some))
    o, lse = cupy_flash.merge(np.ones((a.size, 1), dtype), a, np.full((a.size, 1), 3, dtype), b)
    wide, high = np.stack([a, b]).astype(np.longdouble), np.maximum(a, b).astype(np.longdouble)
    weights = np.exp(wide - np.where(np.isneginf(high), 0, high))
    total = weights.sum(0)
    empty = total == 0
    logarithm = np.log(np.where(empty, 1, total))
    eps = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(lse, np.where(empty, -np.inf, high + logarithm), rtol=eps, atol=eps)
    wanted = (weights[0] + 3 * weights[1]) / np.where(empty, 1, total)
    np.testing.assert_allclose(o[:, 0], wanted, rtol=eps, atol=eps)
