"""Packed queries over pages of keys, ragged in every way, against each sequence by itself in FP64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, RaggedMask, UnsupportedError, testing
from tests.cpu.test_varlen import offsets
from tests.public import cached

pytestmark = pytest.mark.usefixtures("cpu_family")

# A prompt, one that goes on, a step of decoding, a sequence without queries, one without keys.
QUERIES, KEYS = (40, 9, 1, 0, 3), (40, 130, 77, 12, 0)
HEADS, DIMS = (4, 2), (32, 24)


class Pool:
    """Keys and values of sequences, dealt out to pages of a pool that holds NaN elsewhere."""

    def __init__(self, lengths: tuple[int, ...], page: int, room: int = 144, dtype: Any = np.float64) -> None:
        rng = np.random.default_rng(page)
        batch, pages = len(lengths), -(-room // page)
        self.keys = [rng.standard_normal((n, HEADS[1], DIMS[0])).astype(dtype) for n in lengths]
        self.values = [rng.standard_normal((n, HEADS[1], DIMS[1])).astype(dtype) for n in lengths]
        self.k, self.v = (np.full((batch * pages + 2, page, HEADS[1], dim), np.nan, dtype) for dim in DIMS)
        self.table = (
            rng.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages).astype(np.int32)
        )
        for pool, rows in ((self.k, self.keys), (self.v, self.values)):
            for b, own in enumerate(rows):
                for j, row in enumerate(own):
                    pool[self.table[b, j // page], j % page] = row
        # why: values that are masked must be finite; of the room behind a sequence nothing is read
        self.used = np.array(lengths, np.int32)


def queries(lengths: tuple[int, ...] = QUERIES, spare: int = 2, dtype: Any = np.float64) -> np.ndarray:
    rows = np.random.default_rng(1).standard_normal((sum(lengths) + spare, HEADS[0], DIMS[0]))
    return rows.astype(dtype)


def one_by_one(
    q: np.ndarray, cut: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each sequence alone by the reference; options that are lists have one for each."""
    o, lse = np.zeros((*q.shape[:2], values[0].shape[-1])), np.zeros(q.shape[1::-1])
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(cut[b], cut[b + 1])
        own = {name: x[b] if isinstance(x, list) else x for name, x in options.items()}
        align = len(k) - (cut[b + 1] - cut[b])
        if cut[b] == cut[b + 1]:
            continue
        one = testing.reference_attention(
            *(x.swapaxes(0, 1)[None].astype(np.float64) for x in (q[rows], k, v)), align=int(align), **own
        )
        o[rows], lse[:, rows] = one.o[0].swapaxes(0, 1), one.lse[0]
    return o, lse


def masks(lengths: tuple[int, ...] = QUERIES, keys: tuple[int, ...] = KEYS) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.random((n, m)) < 0.7 for n, m in zip(lengths, keys, strict=True)]


def flat(each: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.ravel() for x in each])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3), "softcap": 3.0},
    "slopes": {"alibi_slopes": np.random.default_rng(2).random(4), "causal": True},
    "sinks": {"sinks": np.random.default_rng(3).standard_normal(4), "scale": 0.3},
}


@pytest.mark.parametrize("page", [1, 5, 8, 16, 24, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_prefill_over_pages(page: int, name: str) -> None:
    """As vLLM calls flash_attn_varlen_func: prompts, their continuations and steps of decoding at once."""
    pool, q, cut = Pool(KEYS, page), queries(), offsets(QUERIES)
    wanted, wanted_lse = one_by_one(q, cut, pool.keys, pool.values, **OPTIONS[name])
    o, lse = cupy_flash.attention_varlen(
        q, pool.k, pool.v, cut, None, seqused_k=pool.used, block_table=pool.table, align="bottom_right",
        return_lse=True, **OPTIONS[name],
    )  # fmt: skip
    np.testing.assert_allclose(o, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-12)
    assert not o[cut[-1] :].any()


@pytest.mark.parametrize("page", [3, 16])
def test_few_queries_each(page: int) -> None:
    """Every sequence has few queries, though not as many: the core reads the keys once for all rows."""
    lengths = (1, 2, 0, 1, 2)
    pool, q, cut = Pool(KEYS, page), queries(lengths), offsets(lengths)
    wanted, wanted_lse = one_by_one(q, cut, pool.keys, pool.values, causal=True)
    o, lse = cupy_flash.attention_varlen(
        q, pool.k, pool.v, cut, offsets(KEYS), block_table=pool.table, causal=True, align="bottom_right",
        max_seqlen_q=2, max_seqlen_k=130, return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(o, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-12)


def test_pages_of_short_floats() -> None:
    for dtype in (np.float16, np.float32):
        pool, q, cut = Pool(KEYS, 5, dtype=dtype), queries(dtype=dtype), offsets(QUERIES)
        wanted, _ = one_by_one(q, cut, pool.keys, pool.values, causal=True)
        o = cupy_flash.attention_varlen(
            q, pool.k, pool.v, cut, offsets(KEYS), block_table=pool.table, causal=True, align="bottom_right"
        )
        assert o.dtype == dtype
        np.testing.assert_allclose(o, wanted, atol=2e-3 if dtype == np.float16 else 2e-6)


@pytest.mark.parametrize("page", [5, 16])
def test_masks_in_a_row(page: int) -> None:
    """As flashinfer's custom_mask: (queries, keys) of each sequence, one after the other."""
    pool, q, cut, own = Pool(KEYS, page), queries(), offsets(QUERIES), masks()
    wanted, wanted_lse = one_by_one(q, cut, pool.keys, pool.values, mask=own)
    o, lse = cupy_flash.attention_varlen(
        q, pool.k, pool.v, cut, None, seqused_k=pool.used, block_table=pool.table,
        mask=RaggedMask(flat(own)),
        return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(o, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-12)


def test_masks_in_a_row_without_pages() -> None:
    """BatchPrefillWithRaggedKVCache; and its gradients, which are those of a padded mask."""
    pool, q, cuts, own = Pool(KEYS, 16), queries(), (offsets(QUERIES), offsets(KEYS)), masks()
    k, v = np.concatenate(pool.keys), np.concatenate(pool.values)
    padded = np.zeros((len(own), 1, max(QUERIES), max(KEYS)), bool)
    for x, mask in zip(padded, own, strict=True):
        x[0, : mask.shape[0], : mask.shape[1]] = mask
    results = []
    for option in ({"mask": RaggedMask(flat(own))}, {"mask": padded}):
        o, lse = cupy_flash.attention_varlen(q, k, v, *cuts, return_lse=True, **option)
        grads = cupy_flash.attention_varlen_backward(q[..., :24].copy(), q, k, v, o, lse, *cuts, **option)
        results.append((o, lse, *grads[:3]))
    for row, wide in zip(*results, strict=True):
        np.testing.assert_allclose(row, wide, atol=1e-12)
    np.testing.assert_allclose(
        results[0][0], one_by_one(q, cuts[0], pool.keys, pool.values, mask=own)[0], atol=1e-12
    )


def test_queries_not_in_use() -> None:
    """As flash-attn 3's seqused_q: rows after those in use give 0, and have no gradient."""
    pool, q, cuts = Pool(KEYS, 16), queries(), (offsets(QUERIES), offsets(KEYS))
    k, v = np.concatenate(pool.keys), np.concatenate(pool.values)
    used = np.array([13, 9, 0, 0, 2], np.int32)
    kept = np.concatenate([np.arange(a, a + n) for a, n in zip(cuts[0][:-1], used, strict=True)])
    lost = np.setdiff1d(np.arange(len(q)), kept)
    options: Any = {"causal": True, "align": "bottom_right"}
    wanted = cupy_flash.attention_varlen(q[kept], k, v, offsets(used), cuts[1], return_lse=True, **options)
    q[lost] = np.nan
    o, lse = cupy_flash.attention_varlen(q, k, v, *cuts, seqused_q=used, return_lse=True, **options)
    np.testing.assert_array_equal(o[kept], wanted[0])
    np.testing.assert_array_equal(lse[:, kept], wanted[1])
    assert not o[lost].any()
    paged = cupy_flash.attention_varlen(
        q, pool.k, pool.v, *cuts, seqused_q=used, block_table=pool.table, **options
    )
    np.testing.assert_allclose(paged[kept], wanted[0], atol=1e-12)
    assert not paged[lost].any()
    back = cupy_flash.attention_varlen_backward(o, q, k, v, o, lse, *cuts, seqused_q=used, **options)
    short = cupy_flash.attention_varlen_backward(
        o[kept], q[kept], k, v, *wanted, offsets(used), cuts[1], **options
    )
    np.testing.assert_array_equal(back.dq[kept], short.dq)
    assert not back.dq[lost].any()
    np.testing.assert_allclose(back.dk, short.dk, atol=1e-12)
    np.testing.assert_allclose(back.dv, short.dv, atol=1e-12)


@pytest.mark.parametrize("page", [5, 16])
@pytest.mark.parametrize(("rotary", "last"), [(0, False), (16, False), (16, True)])
def test_ragged_new_keys(page: int, rotary: int, last: bool) -> None:
    """As flash-attn 3's cu_seqlens_k_new: each sequence brings its own number of keys, and of queries."""
    pool, q, cut = Pool(KEYS, page), queries(), offsets(QUERIES)
    added = (40, 9, 1, 2, 0)
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((sum(added) + 1, HEADS[1], dim)) for dim in DIMS)
    before = pool.used - np.array(added, np.int32)
    tables: dict[str, Any] = {}
    if rotary:
        angles = rng.random((160, rotary // 2)) * 6
        tables = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "rotary_last": last}
    o, lse = cached(
        q, pool.k, pool.v, cache_seqlens=before, block_table=pool.table, k=k, v=v, cu_seqlens_q=cut,
        cu_seqlens_k_new=offsets(added), causal=True, layout="bshd", return_lse=True, **tables,
    )  # fmt: skip
    turned = q.copy()
    for b, start in enumerate(offsets(added)[:-1]):
        rows = slice(start, start + added[b])
        new = k[rows]
        if rotary:
            new = _turned(new, np.arange(before[b], KEYS[b]), tables)
            mine = slice(cut[b], cut[b + 1])
            turned[mine] = _turned(q[mine], np.arange(KEYS[b] - QUERIES[b], KEYS[b]), tables)
        pool.keys[b][before[b] :], pool.values[b][before[b] :] = new, v[rows]
    stored = np.concatenate([pool.k[pool.table[1]].reshape(-1, *pool.k.shape[2:])[: KEYS[1]]])
    np.testing.assert_allclose(stored, pool.keys[1], atol=1e-12)
    wanted, wanted_lse = one_by_one(turned, cut, pool.keys, pool.values, causal=True)
    np.testing.assert_allclose(o, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-12)


def _turned(x: np.ndarray, positions: np.ndarray, tables: dict[str, Any]) -> np.ndarray:
    rotated: np.ndarray = testing.kv_cache.rotate(
        x.swapaxes(0, 1), positions, tables["rotary_cos"], tables["rotary_sin"], False, tables["rotary_last"]
    ).swapaxes(0, 1)
    return rotated


@pytest.mark.parametrize(
    ("interleaved", "last"), [(False, False), (True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("lengths", [QUERIES, (1, 2, 0, 1, 2)])
@pytest.mark.parametrize("page", [5, 16])
def test_keys_that_are_rotated_when_they_are_read(
    page: int, lengths: tuple[int, ...], interleaved: bool, last: bool
) -> None:
    """As flashinfer's ROPE_LLAMA: what is stored stays as it came, new keys too."""
    angles = np.random.default_rng(6).random((150, 8)) * 6
    tables: dict[str, Any] = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    plain, turned = Pool(KEYS, page), Pool(KEYS, page)
    added = (5, 0, 1, 2, 0)
    new_k, new_v = (np.random.default_rng(7).standard_normal((sum(added), HEADS[1], dim)) for dim in DIMS)
    before = plain.used - np.array(added, np.int32)
    for b, rows in enumerate(turned.keys):
        rows = testing.kv_cache.rotate(
            rows.swapaxes(0, 1), np.arange(len(rows)), tables["rotary_cos"], tables["rotary_sin"],
            interleaved, last,
        )  # fmt: skip
        for j, row in enumerate(rows.swapaxes(0, 1)):
            turned.k[turned.table[b, j // page], j % page] = row
    q = queries(lengths)
    given: dict[str, Any] = {
        "cache_seqlens": before, "block_table": plain.table, "k": new_k, "v": new_v, "causal": True,
        "cu_seqlens_q": offsets(lengths), "cu_seqlens_k_new": offsets(added), "layout": "bshd",
        "rotary_interleaved": interleaved, "rotary_last": last, "return_lse": True, **tables,
    }  # fmt: skip
    wanted = cached(q, turned.k, turned.v, **given)
    kept = plain.k.copy()
    o, lse = cached(q, plain.k, plain.v, rotate_cache=True, **given)
    np.testing.assert_allclose(o, wanted[0], atol=1e-12)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-12)
    for b, (start, n) in enumerate(zip(offsets(added), added, strict=False)):
        for j in range(n):
            place = plain.table[b, (before[b] + j) // page], (before[b] + j) % page
            np.testing.assert_array_equal(plain.k[place], new_k[start + j])
            kept[place] = new_k[start + j]
    np.testing.assert_array_equal(plain.k, kept)


@pytest.mark.parametrize("queries_each", [1, 17])
def test_padding_on_the_left(queries_each: int) -> None:
    """As flash-attn 2's cache_leftpad: keys before it are in the cache and in positions, but unseen."""
    pads, lengths = (3, 0, 60, 37), (40, 130, 77, 37)
    pool = Pool(lengths, 16)
    q = queries((queries_each,) * 4, 0)
    cut = offsets((queries_each,) * 4)
    visible = [
        np.broadcast_to(np.arange(n) >= pad, (queries_each, n)) for pad, n in zip(pads, lengths, strict=True)
    ]
    options: dict[str, Any] = {"causal": True, "window": (50, 0), "alibi_slopes": np.arange(4) * 0.01}
    wanted, wanted_lse = one_by_one(q, cut, pool.keys, pool.values, mask=visible, **options)
    shared = {"cache_seqlens": pool.used, "cache_leftpad": np.array(pads, np.int32), "layout": "bshd"}
    o, lse = cached(
        q.reshape(4, queries_each, *q.shape[1:]), pool.k, pool.v, block_table=pool.table, return_lse=True,
        **shared, **options,
    )  # fmt: skip
    np.testing.assert_allclose(o.reshape(wanted.shape), wanted, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(list(lse), 1), wanted_lse, atol=1e-12)


def test_a_mask_over_a_cache() -> None:
    """A tree of draft tokens: each sees the prompt and its own ancestors."""
    lengths, parents = (40, 13), (-1, 0, 0, 1, 1, 2)
    pool = Pool(lengths, 8)
    tree = np.eye(6, dtype=bool)
    for i, parent in enumerate(parents[1:], 1):
        tree[i] |= tree[parent]
    mask = np.zeros((2, 1, 6, 48), bool)
    for b, n in enumerate(lengths):
        mask[b, 0, :, : n - 6], mask[b, 0, :, n - 6 : n] = True, tree
    q = queries((6, 6), 0)
    own = [mask[b, 0, :, :n] for b, n in enumerate(lengths)]
    wanted, _ = one_by_one(q, offsets((6, 6)), pool.keys, pool.values, mask=own)
    o = cached(
        q.reshape(2, 6, *q.shape[1:]), pool.k, pool.v, cache_seqlens=pool.used, layout="bshd",
        block_table=pool.table, mask=mask, max_seqlen_k=48,
    )  # fmt: skip
    np.testing.assert_allclose(o.reshape(wanted.shape), wanted, atol=1e-12)


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1, 0])  # 0: the first that is no page
@pytest.mark.parametrize("page", [5, 16])
def test_keys_of_entries_outside_the_pool_are_hidden(value: int, page: int) -> None:
    pool = Pool((40, 130, 77), page, room=135)
    pool.k, pool.v = np.nan_to_num(pool.k), np.nan_to_num(pool.v)
    pool.table[1, 2] = len(pool.k) if value == 0 else value
    lost = np.arange(130) // page != 2
    own = [np.ones((1, 40), bool), lost[None], np.ones((1, 77), bool)]
    for lengths_q in ((9, 1, 2), (1, 1, 1)):
        q, cut = queries(lengths_q), offsets(lengths_q)
        own = [np.broadcast_to(x[:1], (n, x.shape[1])) for n, x in zip(lengths_q, own, strict=True)]
        wanted, _ = one_by_one(q, cut, pool.keys, pool.values, mask=own)
        o = cached(
            q, pool.k, pool.v, cache_seqlens=pool.used, cu_seqlens_q=cut, block_table=pool.table,
            layout="bshd", check=False,
        )  # fmt: skip
        np.testing.assert_allclose(o, wanted, atol=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an entry outside": ({"block_table": np.full((5, 9), 99, np.int32)}, r"block_table\[0, 0\] is 99"),
    "longer than the table": ({"seqused_k": np.full(5, 145, np.int32)}, "capacity is 144"),
    "longer than claimed": ({"max_seqlen_k": 100}, r"cache_seqlens\[1\] is 130; the capacity is 100 keys"),
    "offsets that fall": ({"cu_seqlens_q": np.array([0, 9, 3, 4, 5, 6], np.int32)}, "never fall"),
    "offsets of another batch": ({"cu_seqlens_q": offsets((1, 2))}, "for a batch of 2"),
    "no lengths": ({"seqused_k": None}, "neither seqused_k nor cu_seqlens_k"),
    "a bias": ({"bias": np.zeros((1, 1))}, "bias is not supported over pages"),
    "dropout": ({"dropout": 0.5, "seed": 1}, "is not supported over pages"),
    "causal from the front": ({"causal": True, "align": "top_left"}, "align is 'top_left'"),
    "more queries than there are": ({"seqused_q": np.full(5, 41, np.int32)}, r"seqused_q\[0\] is 41"),
    "a mask of another length": ({"mask": RaggedMask(np.ones(5, bool))}, r"not contiguous \(2847,\) bool"),
    "a mask of bytes": ({"mask": RaggedMask(np.ones(2847, np.uint8))}, r"not contiguous \(2847,\) bool"),
    "pages of no keys": ({"k": np.zeros((3, 0, 2, 32)), "v": np.zeros((3, 0, 2, 24))}, "pages hold no keys"),
    "keys of rank 3": ({"k": np.zeros((3, 2, 32))}, "k_cache has rank 3, not 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    pool = Pool(KEYS, 16)
    given = {"q": queries(), "k": pool.k, "v": pool.v, "cu_seqlens_q": offsets(QUERIES), "cu_seqlens_k": None}
    given |= {"seqused_k": pool.used, "block_table": pool.table, **changed}
    with pytest.raises((InvalidArgumentsError, UnsupportedError), match=message) as caught:
        cupy_flash.attention_varlen(**given)
    assert "Try: " in str(caught.value)


TABLES = dict.fromkeys(("rotary_cos", "rotary_sin"), np.ones((144, 4)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"cache_leftpad": np.array([41, 0, 0, 0, 0], np.int32)},
            r"cache_leftpad\[0\] is 41; the sequence has 40",
        ),
        ({"cache_leftpad": np.array([0, 0, 0, 0, -1], np.int32)}, r"cache_leftpad\[4\] is -1"),
        ({"cache_leftpad": np.array([1], np.int32)}, "cache_leftpad is"),
        ({"rotary_seqlens": np.zeros(5, np.int32)}, "rotary.seqlens is given without rotary.cos"),
        ({"rotate_cache": True}, "rotary.on_read is True without rotary.cos"),
        (
            {**TABLES, "rotate_cache": True, "rotary_seqlens": np.zeros(5, np.int32)},
            "rotary.on_read is True with rotary.seqlens",
        ),
        ({"max_seqlen_k": -1}, "max_seqlen_k is -1"),
        ({"cu_seqlens_q": None, "max_seqlen_q": 3}, "max_seqlen_q is given without cu_seqlens_q"),
        ({"cu_seqlens_q": None}, "q has rank 3, not 4"),
        ({"cu_seqlens_k_new": offsets(QUERIES)}, "cu_seqlens_k_new is given without k"),
        ({"max_seqlen_q": 2}, "the longest length of cu_seqlens_q is 40, not 2"),
    ],
)
def test_a_cache_refuses(changed: dict[str, Any], message: str) -> None:
    pool = Pool(KEYS, 16)
    given: dict[str, Any] = {"cache_seqlens": pool.used, "cu_seqlens_q": offsets(QUERIES), "layout": "bshd"}
    given |= {"block_table": pool.table, **changed}
    with pytest.raises(InvalidArgumentsError, match=message):
        cached(queries(), pool.k, pool.v, **given)


@pytest.mark.parametrize(("queries", "new"), [(3, 0), (3, 5), (5, 3)])
def test_positions_of_rotation_end_with_the_tables(queries: int, new: int) -> None:
    """Tables may be shorter than the cache, but not than the rows of queries and of new keys."""
    rng, last = np.random.default_rng(0), 16 - max(queries, new)
    q, k, v = (rng.standard_normal((1, 2, n, 8)) for n in (queries, new, new))
    how = {"cache_seqlens": 20} | ({"k": k, "v": v} if new else {})
    tables = dict.fromkeys(("rotary_cos", "rotary_sin"), np.ones((16, 4)))
    for first in (0, last, last + 1, -1):
        cache = rng.standard_normal((1, 2, 40, 8))
        given = {**how, **tables, "rotary_seqlens": np.array([first], np.int32)}
        if 0 <= first <= last:
            assert np.isfinite(cached(q, cache, cache.copy(), **given)).all()
        else:
            with pytest.raises(InvalidArgumentsError, match=rf"rotary.seqlens\[0\] is {first}; the tables"):
                cached(q, cache, cache.copy(), **given)
