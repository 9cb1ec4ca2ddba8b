"""attention_statistics on NumPy arrays: FP64 parity over options and kinds of keys, and what is refused.

By the compiled core and by NumPy.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import (
    InvalidArgumentsError,
    QuantizedArray,
    QuantizedCache,
    Spans,
    UnsupportedError,
    testing,
)
from cupy_flash.dispatch import memo
from tests.block_cases import as_mask, random_blocks
from tests.cases import Case, feature_cases, length_cases
from tests.kv_cases import KvCase, cases
from tests.public import dequantized, int4_parts, over_cache
from tests.statistic_checks import assert_close

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("cpu_family")


def given(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    arrays = case.inputs()
    options = case.options(arrays)
    without = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    return arrays["q"], arrays["k"], arrays["v"], without


@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
@pytest.mark.parametrize(
    "case",
    [
        *feature_cases(
            lengths=((64, 64), (33, 65), (127, 7), (1, 70), (70, 1)), head_dims=((32, 32),), dropout=(0.0,)
        ),
        *length_cases(),
    ],
    ids=str,
)
def test_parity(case: Case, known: bool) -> None:
    q, k, v, options = given(case)
    lse = cupy_flash.attention(q, k, v, return_lse=True, **options)[1] if known else None
    hostile = [testing.hostile(x, style=case.style).view for x in (q, k)]
    made = cupy_flash.attention_statistics(*hostile, lse, top_k=5, **options)
    assert_close(made, q, k, 5, **options)


def test_the_textbook_is_the_definition() -> None:
    """Of three keys by hand, one of them masked, and of a sink whose share no result has."""
    q, k = np.ones((1, 1)), np.log([[1.0], [3.0], [5.0]])
    mask = np.array([[True, True, False]])
    sinks = np.log(np.array([4.0]))
    one = testing.reference_statistics(q, k, scale=1.0, mask=mask, sinks=sinks, top_k=3)
    np.testing.assert_allclose(one.key_sum, [1 / 8, 3 / 8, 0], atol=1e-15)
    np.testing.assert_allclose(one.key_max, [1 / 8, 3 / 8, 0], atol=1e-15)
    np.testing.assert_allclose(one.entropy, [np.log(8) / 8 + 3 / 8 * np.log(8 / 3)])
    np.testing.assert_allclose(one.top_weights, [[3 / 8, 1 / 8, 0]], atol=1e-15)
    assert one.top_keys.tolist() == [[1, 0, -1]]


def functions() -> dict[str, dict[str, Any]]:
    bounds = np.sort(RNG.integers(0, 66, (2, 1, 33, 1, 2)), axis=-1).astype(np.int32)
    blocks = random_blocks(RNG, (2, 4), (33, 65), (16, 16))
    return {
        "spans": {"mask": Spans(bounds)},
        "blocks": {"mask": blocks},
        "all masks": {"mask": (Spans(bounds), blocks, RNG.random((33, 65)) < 0.7)},
        "mask function": {"mask": cupy_flash.mask(lambda b, h, i, j: (i + j + b) % 3 != h % 2)},
        "score function": {
            "score": cupy_flash.score(lambda s, b, h, i, j, t: s * t[h] + (i - j + b) / 50)(np.ones(4) / 3)
        },
    }


@pytest.mark.parametrize("name", ["spans", "blocks", "all masks", "mask function", "score function"])
def test_masks_and_functions(name: str) -> None:
    options = functions()[name]
    q, k = RNG.standard_normal((2, 4, 33, 16)), RNG.standard_normal((2, 2, 65, 16))
    if name == "blocks":
        assert as_mask(options["mask"], 33, 65).any(), "some key is seen"
    assert_close(cupy_flash.attention_statistics(q, k, **options), q, k, 8, **options)


@pytest.mark.parametrize("what", ["mask", "bias", "causal"])
def test_hidden_keys_may_hold_anything(what: str) -> None:
    q, k = RNG.standard_normal((2, 2, 40, 16)), RNG.standard_normal((2, 2, 40, 16))
    seen = np.arange(40) < 30
    options: dict[str, Any] = {"mask": seen}
    if what == "bias":
        options = {"bias": np.where(seen, 0.0, -np.inf)}
    if what == "causal":
        options = {"causal": True, "align": -10}
    plain = cupy_flash.attention_statistics(q, k, **options)
    k[:, :, 30:] = np.nan
    for ours, wanted in zip(cupy_flash.attention_statistics(q, k, **options), plain, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    assert not plain.key_sum[:, :, 30:].any()


@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
def test_rows_without_keys(known: bool) -> None:
    q = k = RNG.standard_normal((1, 2, 6, 8)).astype(np.float32)
    mask = np.ones((6, 6), bool)
    mask[2] = False
    lse = cupy_flash.attention(q, k, k, mask=mask, return_lse=True)[1] if known else None
    made = cupy_flash.attention_statistics(q, k, lse, mask=mask, top_k=2)
    assert (made.entropy[:, :, 2] == 0).all()
    assert (made.top_weights[:, :, 2] == 0).all()
    assert (made.top_keys[:, :, 2] == -1).all()
    np.testing.assert_allclose(made.key_sum.sum(-1), 5, rtol=1e-6)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_count(lengths: tuple[int, int]) -> None:
    q, k = np.ones((2, 4, lengths[0], 8), np.float32), np.ones((2, 2, lengths[1], 8), np.float32)
    made = cupy_flash.attention_statistics(q, k, top_k=3)
    assert made.key_sum.shape == made.key_max.shape == (2, 4, lengths[1])
    assert made.top_weights.shape == made.top_keys.shape == (2, 4, lengths[0], 3)
    assert not any(x.any() for x in made[:4])
    assert (made.top_keys == -1).all()


def test_equal_weights_list_the_lower_keys_first() -> None:
    """Also where the equal ones lie in several tiles."""
    q, k = np.ones((1, 1, 3, 8), np.float32), np.ones((1, 1, 1500, 8), np.float32)
    k[0, 0, 1400] = 2
    made = cupy_flash.attention_statistics(q, k, want="top_k", top_k=4)
    assert made.top_keys.tolist() == [[[[1400, 0, 1, 2]] * 3]]


def test_only_what_is_wanted() -> None:
    q = k = np.ones((1, 1, 4, 8), np.float32)
    every = cupy_flash.attention_statistics(q, k)
    for want, fields in (
        ("key_sum", ("key_sum",)),
        (["entropy", "key_max"], ("key_max", "entropy")),
        ({"top_k"}, ("top_weights", "top_keys")),
    ):
        some = cupy_flash.attention_statistics(q, k, want=want)
        assert tuple(n for n in some._fields if getattr(some, n) is not None) == fields
        for name in fields:
            np.testing.assert_array_equal(getattr(some, name), getattr(every, name))


def test_a_scale_of_each_head_multiplies_q() -> None:
    q, k = RNG.standard_normal((2, 4, 9, 8)), RNG.standard_normal((2, 2, 9, 8))
    scale = np.array([0.1, 0.2, -0.3, 0.4])
    made = cupy_flash.attention_statistics(q, k, scale=scale)
    assert_close(made, q * scale[:, None, None], k, 8, scale=1.0)


def test_float8_with_scales() -> None:
    codes = [RNG.standard_normal((2, n, 40, 16)).astype(ml_dtypes.float8_e4m3fn) for n in (4, 2)]
    scales = [np.array(x, np.float32) for x in ([0.5, 2.0], [1.5, 0.25])]
    q, k = (QuantizedArray(x, s) for x, s in zip(codes, scales, strict=True))
    made = cupy_flash.attention_statistics(q, k, causal=True)
    assert_close(made, *codes, 8, causal=True, q_scale=scales[0], k_scale=scales[1])


# ---- some of the queries, some of the keys


def test_slices_of_queries_add_up() -> None:
    q, k = RNG.standard_normal((1, 4, 70, 16)), RNG.standard_normal((1, 2, 90, 16))
    whole = cupy_flash.attention_statistics(q, k, causal=True, align=20)
    parts = [
        cupy_flash.attention_statistics(q[:, :, i : i + 32], k, causal=True, align=20 + i)
        for i in range(0, 70, 32)
    ]
    np.testing.assert_allclose(sum(part.key_sum for part in parts), whole.key_sum, atol=1e-13)
    np.testing.assert_allclose(np.max([part.key_max for part in parts], 0), whole.key_max, atol=1e-13)


def test_an_lse_over_more_keys_gives_shares_of_the_whole() -> None:
    q, k = RNG.standard_normal((2, 2, 30, 16)), RNG.standard_normal((2, 2, 80, 16))
    lse = cupy_flash.attention(q, k, k, return_lse=True)[1]
    whole = cupy_flash.attention_statistics(q, k)
    parts = [cupy_flash.attention_statistics(q, k[:, :, part], lse) for part in (slice(50), slice(50, 80))]
    np.testing.assert_allclose(np.concatenate([x.key_sum for x in parts], -1), whole.key_sum, atol=1e-13)
    np.testing.assert_allclose(sum(x.entropy for x in parts), whole.entropy, atol=1e-12)


def test_far_scores_keep_their_weights() -> None:
    """An LSE in float32 beyond 1000 has no log of the sum left."""
    q = RNG.standard_normal((1, 1, 50, 16)).astype(np.float32)
    k = np.repeat(RNG.standard_normal((1, 1, 20, 16)).astype(np.float32), 4, axis=2)  # each weight four times
    lse = cupy_flash.attention(q, k, k, scale=3e4, return_lse=True)[1]
    assert np.abs(lse).min() > 1024
    made = cupy_flash.attention_statistics(q, k, lse, scale=3e4)
    np.testing.assert_allclose(made.entropy, np.log(4), rtol=1e-5)


@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_whose_terms_cancel(dtype: str, known: bool) -> None:
    """The first half of the terms adds up to thousands, which the second half takes away again."""
    signs = np.repeat([1.0, -1.0], 64)
    shapes = (1, 1, 70, 128), (1, 1, 150, 128)
    q, k = (30 + 1.5 * RNG.standard_normal(x) for x in shapes)
    q, k = q.astype(np.dtype(dtype)), (k * signs).astype(np.dtype(dtype))
    lse = cupy_flash.attention(q, k, k, return_lse=True)[1] if known else None
    assert_close(cupy_flash.attention_statistics(q, k, lse, top_k=5), q, k, 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_far_lse_over_more_keys_gives_shares_too(dtype: str) -> None:
    """Of keys that come twice each half has half of the weights."""
    q, k = (RNG.standard_normal((1, 2, 40, 16)).astype(np.dtype(dtype)) for _ in range(2))
    twice = np.concatenate([k, k], 2)
    lse = cupy_flash.attention(q, twice, twice, scale=3e3, return_lse=True)[1]
    assert np.abs(lse).min() > 1024
    half = cupy_flash.attention_statistics(q, k, lse, scale=3e3, want="key_sum").key_sum
    whole = cupy_flash.attention_statistics(q, twice, lse, scale=3e3, want="key_sum").key_sum
    np.testing.assert_allclose(half.sum(-1), 20, rtol=1e-2)
    np.testing.assert_allclose(whole.sum(-1), 40, rtol=1e-4)


# ---- packed sequences


def packed() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([[5, 9], [0, 4], [300, 600], [7, 3]])
    cut_q, cut_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths.T)
    q = RNG.standard_normal((cut_q[-1] + 2, 4, 16))
    k = RNG.standard_normal((cut_k[-1] + 3, 2, 16))
    return q, k, cut_q, cut_k


@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
def test_packed_is_dense_of_each_sequence(known: bool) -> None:
    q, k, cut_q, cut_k = packed()
    options: dict[str, Any] = {"causal": True, "align": "bottom_right", "window": (40, 0)}
    slopes = RNG.random((4, 4))
    used = np.array([8, 4, 550, 3], np.int32)
    lse = None
    packing = {"seqused_k": used, "alibi_slopes": slopes, **options}
    if known:
        lse = cupy_flash.attention_varlen(q, k, k, cut_q, cut_k, return_lse=True, **packing)[1]
    made = cupy_flash.attention_statistics(q, k, lse, cu_seqlens_q=cut_q, cu_seqlens_k=cut_k, **packing)
    covered = np.zeros(len(k), bool)
    for b in range(4):
        of_q, of_k = slice(*cut_q[b : b + 2]), slice(cut_k[b], cut_k[b] + used[b])
        covered[of_k] = True
        one = [x.swapaxes(0, 1)[None] for x in (q[of_q], k[of_k])]
        rows = None if lse is None else lse[None, :, of_q]
        dense = cupy_flash.attention_statistics(*one, rows, alibi_slopes=slopes[b : b + 1], **options)
        for name, part in zip(made._fields, (of_k, of_k, of_q, of_q, of_q), strict=True):
            np.testing.assert_array_equal(getattr(made, name)[:, part], getattr(dense, name)[0], err_msg=name)
    assert not made.key_sum[:, ~covered].any()
    assert not made.entropy[:, cut_q[-1] :].any()
    assert (made.top_keys[:, cut_q[-1] :] == -1).all()


def test_the_last_queries_of_packed_sequences() -> None:
    q, k, _, cut = packed()
    q = RNG.standard_normal((len(k), 4, 16))
    last, ends = 2, cut[1:]
    rows = (ends[:, None] - np.arange(last, 0, -1)).reshape(-1)
    of_last = cupy_flash.attention_statistics(
        q[rows], k, cu_seqlens_q=np.arange(5, dtype=np.int32) * last, cu_seqlens_k=cut, causal=True,
        align="bottom_right",
    )  # fmt: skip
    for b in range(4):
        own = slice(*cut[b : b + 2])
        one = [x[own].swapaxes(0, 1) for x in (q, k)]
        exact = testing.reference_statistics(one[0][:, -last:], one[1], causal=True, align="bottom_right")
        np.testing.assert_allclose(of_last.key_sum[:, own], exact.key_sum, atol=1e-12)


# ---- caches


def of_a_cache(flat: Mapping[str, Any], lse: Any = None, **options: Any) -> Any:
    """The call over a cache, of arguments of attention_with_kv_cache."""
    made = over_cache(**flat)
    values = made.pop("v_cache")
    assert values is not None
    return cupy_flash.attention_statistics(made.pop("q"), made.pop("k_cache"), lse, **made, **options)


def assert_close_over_cache(made: Any, flat: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    exact = testing.reference_with_kv_cache(**flat, **options)
    for b, one in enumerate(exact.sequences):
        length = one.k.shape[2]
        assert not made.key_sum[b, :, length:].any()
        assert not made.key_max[b, :, length:].any()
        own = cupy_flash.AttentionStatistics(
            made.key_sum[b : b + 1, :, :length], made.key_max[b : b + 1, :, :length],
            *(x[b : b + 1] for x in made[2:]),
        )  # fmt: skip
        assert_close(own, one.q, one.k * one.k_scale[:, None, None], 8, **one.options)


@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
@pytest.mark.parametrize(
    "case",
    [
        *(
            case
            for case in cases(dtype=("float32", "bfloat16", "float64"))
            if not case.new and not case.latent
        ),
        KvCase(dtype="float32", kind="paged", queries=9, lengths=(2, 160, 5), causal=True, sinks=True),
    ],
    ids=str,
)
def test_parity_over_a_cache(case: KvCase, known: bool) -> None:
    flat, options = case.inputs(), case.options()
    lse = None
    if known:
        lse = cupy_flash.attention_with_kv_cache(**over_cache(**flat, **options), return_lse=True)[1]
    made = of_a_cache({**flat, **options}, lse)
    assert_close_over_cache(made, flat, options)


def test_a_cache_of_4_bits() -> None:
    q = RNG.standard_normal((2, 4, 3, 64)).astype(np.float32)
    codes, scale, zero = int4_parts(RNG.standard_normal((2, 2, 48, 64)))
    lengths = np.array([11, 48], np.int32)
    made = cupy_flash.attention_statistics(q, QuantizedCache(codes, scale, zero), cache_seqlens=lengths)
    for b, length in enumerate(lengths):
        keys = dequantized(codes, scale, zero)[b, :, :length]
        plain = cupy_flash.attention_statistics(q[b], keys)
        for ours, of_floats in zip(made, plain, strict=True):
            own = ours[b, ..., :length] if ours.shape[-1] == 48 else ours[b]
            np.testing.assert_allclose(own, of_floats, rtol=1e-5)


def test_left_padding_and_a_mask_over_a_cache() -> None:
    q, k = RNG.standard_normal((2, 4, 3, 16)), RNG.standard_normal((2, 2, 40, 16))
    pads, lengths = np.array([4, 0], np.int32), np.array([30, 40], np.int32)
    mask = RNG.random((2, 1, 3, 40)) < 0.8
    made = cupy_flash.attention_statistics(
        q, k, cache_seqlens=lengths, cache_leftpad=pads, mask=mask, causal=True
    )
    for b in range(2):
        own = slice(lengths[b])
        seen = mask[b : b + 1, ..., own] & (np.arange(lengths[b]) >= pads[b])
        options = {"mask": seen, "causal": True, "align": "bottom_right"}
        one = testing.reference_statistics(q[b : b + 1], k[b : b + 1, :, own], **options)
        np.testing.assert_allclose(made.key_sum[b, :, own], one.key_sum[0], atol=1e-12)
        np.testing.assert_array_equal(made.top_keys[b], one.top_keys[0])


def test_latents_and_one_length() -> None:
    q, latents = RNG.standard_normal((2, 4, 1, 24)), RNG.standard_normal((2, 1, 40, 24))
    given = cupy_flash.LatentCache(latents, 16)
    made = cupy_flash.attention_statistics(q, given, cache_seqlens=33)
    plain = cupy_flash.attention_statistics(q, latents[:, :, :33])
    assert made.key_sum.shape == (2, 4, 40)
    np.testing.assert_array_equal(made.key_sum[..., :33], plain.key_sum)
    assert not made.key_sum[..., 33:].any()


def test_packed_queries_over_pages() -> None:
    pages = RNG.standard_normal((7, 2, 16, 8))
    table, lengths = np.array([[3, 1, 0], [5, 2, 6]], np.int32), np.array([33, 48], np.int32)
    cut = np.array([0, 2, 7], np.int32)
    q = RNG.standard_normal((7, 4, 8))
    _, lse = cupy_flash.attention_with_kv_cache(
        q, pages, pages, cache_seqlens=lengths, block_table=table, cu_seqlens_q=cut, causal=True,
        return_lse=True,
    )  # fmt: skip
    for known in (None, lse):
        made = cupy_flash.attention_statistics(
            q, pages, known, cache_seqlens=lengths, block_table=table, cu_seqlens_q=cut, causal=True
        )
        assert made.key_sum.shape == (2, 4, 48)
        assert made.entropy.shape == lse.shape
        for b in range(2):
            rows = slice(*cut[b : b + 2])
            keys = np.concatenate([pages[n] for n in table[b]], 1)[:, : lengths[b]]
            exact = testing.reference_statistics(
                q[rows].swapaxes(0, 1), keys, causal=True, align="bottom_right"
            )
            np.testing.assert_allclose(made.key_sum[b, :, : lengths[b]], exact.key_sum, atol=1e-12)
            np.testing.assert_allclose(made.entropy[:, rows], exact.entropy, atol=1e-12)
            np.testing.assert_array_equal(made.top_keys[:, rows], exact.top_keys)


# ---- beside the call


def test_memory_is_linear_in_the_length() -> None:
    q = k = RNG.standard_normal((1, 1, 4096, 16)).astype(np.float32)
    cupy_flash.attention_statistics(q[:, :, :600], k)
    tracemalloc.start()
    cupy_flash.attention_statistics(q, k, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 4096 * 4 / 4


def computed_by(**options: Any) -> tuple[str, ...]:
    memo.forget()
    cupy_flash.attention_statistics(Q, K, **options)
    return memo.kernels()


def test_what_computes(cpu_family: str) -> None:
    """The core, but of what is rotated; and `explain` says so."""
    ours = ("core statistics",) if cpu_family == "core" else ("NumPy",)
    assert computed_by() == computed_by(cache_seqlens=3) == ours
    angles = np.ones((8, 4), np.float32)
    assert computed_by(cache_seqlens=3, rotary=cupy_flash.Rotary(angles, angles)) == ("NumPy",)
    text = cupy_flash.explain(Q, K, K, direction="statistics")
    assert f"family    {cpu_family} on cpu" in text
    assert ("kernel    statistics for" in text) == (cpu_family == "core")
    text = cupy_flash.explain(Q, K, K, direction="statistics", arch="sm_80")
    assert all(f"kernel    simple_statistics_{step}_f32" in text for step in ("by_key", "by_query"))


def test_parts_of_many_rows() -> None:
    """Rows of a head are counted in parts, and those of a part in several groups of panels."""
    q, k = RNG.standard_normal((1, 2, 9100, 8)), RNG.standard_normal((1, 1, 170, 8))
    options: dict[str, Any] = {"causal": True, "align": -8900}
    assert_close(cupy_flash.attention_statistics(q, k, **options), q, k, 8, **options)


def test_a_key_of_nan_reaches_those_that_see_it() -> None:
    q, k = RNG.standard_normal((1, 2, 40, 16)), RNG.standard_normal((1, 2, 40, 16))
    k[:, 0, 30] = np.nan
    made = cupy_flash.attention_statistics(q, k, causal=True, want=("key_sum", "key_max", "entropy"))
    for of_keys in (made.key_sum, made.key_max):
        assert np.isnan(of_keys[:, 0, 30]).all()
    assert np.isnan(made.entropy[:, 0, 30:]).all()
    assert np.isfinite(made.entropy[:, 0, :30]).all()
    assert all(np.isfinite(x[:, 1]).all() for x in made if x is not None)


Q = np.ones((1, 4, 6, 8), np.float32)
K = np.ones((1, 2, 6, 8), np.float32)
CUT = np.array([0, 6], np.int32)
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "a name": (InvalidArgumentsError, "want has 'key_mean'(.|\n)*Try: want= some of", {"want": ["key_mean"]}),
    "no name": (InvalidArgumentsError, "want is empty", {"want": ()}),
    "no string": (InvalidArgumentsError, "want has 3", {"want": 3}),
    "an array of one name": (InvalidArgumentsError, "want has array", {"want": np.array("key_sum")}),
    "too many places": (InvalidArgumentsError, "top_k is 2048", {"top_k": 2048}),
    "no places": (InvalidArgumentsError, "top_k is 0", {"top_k": 0}),
    "a flag": (InvalidArgumentsError, "top_k is True", {"top_k": True}),
    "heads": (InvalidArgumentsError, "3 heads of q", {"q": Q[:, :3]}),
    "lse": (InvalidArgumentsError, "lse has shape", {"lse": np.ones((1, 4, 5), np.float32)}),
    "lse of float64": (InvalidArgumentsError, "lse has dtype float64", {"lse": np.ones((1, 4, 6))}),
    "dropout": (InvalidArgumentsError, "no option 'dropout'", {"dropout": 0.1}),
    "alignment": (InvalidArgumentsError, "align", {"q": Q[:, :, :3], "causal": True}),
    "a table alone": (InvalidArgumentsError, "without cache_seqlens", {"block_table": CUT[None]}),
    "used keys alone": (InvalidArgumentsError, "without cu_seqlens_q", {"seqused_k": CUT[1:]}),
    "a bias over a cache": (UnsupportedError, "bias is not", {"cache_seqlens": 3, "bias": Q[..., 0]}),
    "an alignment over a cache": (InvalidArgumentsError, "align is 0", {"cache_seqlens": 3, "align": 0}),
    "a length": (InvalidArgumentsError, "the capacity is 6 keys", {"cache_seqlens": 7}),
    "a length of float": (InvalidArgumentsError, "cache_seqlens is 7.0", {"cache_seqlens": 7.0}),
    "a page that does not exist": (
        InvalidArgumentsError,
        r"block_table\[0, 1\] is 1; the cache has 1 pages",
        {"cache_seqlens": 7, "block_table": np.array([[0, 1]], np.int32)},
    ),
    "lse of a cache": (
        InvalidArgumentsError, "lse has shape", {"cache_seqlens": 3, "lse": np.ones(4, np.float32)}
    ),
    "spans over a cache": (
        UnsupportedError,
        "spans are not supported",
        {"cache_seqlens": 6, "mask": Spans(np.full((1, 1, 1, 6, 2), 6, np.int32))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name: str) -> None:
    error, text, changes = WRONG[name]
    with pytest.raises(error, match=text) as raised:
        cupy_flash.attention_statistics(**{"q": Q, "k": K, **changes})
    told = str(raised.value)
    assert "\n  v " not in told, "the caller gave no v"
    assert "Try: " in told


def test_results_are_of_the_kind_of_the_inputs() -> None:
    q = Q.astype(ml_dtypes.bfloat16)
    made = cupy_flash.attention_statistics(q, K.astype(ml_dtypes.bfloat16))
    assert made.key_sum.dtype == np.float32
    made = cupy_flash.attention_statistics(Q[0, 0], K[0, 0])
    assert [x.shape for x in made] == [(6,), (6,), (6,), (6, 8), (6, 8)]
