"""Attention over a KV cache in NumPy: keys cut into parts for the threads, parts united by their LSE.

Dao et al. 2023, Flash-Decoding. Queries are few and keys many, so time is the time to read the cache: every
key and value is read once, by one thread, for all queries of all heads that share it.

[D1]  rotate and store the new keys and values, rotate the queries
[D2]  for each sequence and part of its keys, at once for all heads
[D3]      for each tile of keys: S = score(Q K^T); row_max rises; P = exp(S - row_max); O += P V
[D4]  O and LSE of a sequence from those of its parts
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import threads
from .scores import add_product, by_key_head, operand
from .thin_products import add_values, multiply_by_keys
from .threads import scratch

if TYPE_CHECKING:
    from ..problem import Problem

Array = np.ndarray[Any, Any]

# why: scores of a tile stay in L2 through the passes over them; keys and values are used once, so that tiles
# may be as long as that allows: below 1000 keys a product loses a third of its speed. As many heads together
# as fit: what NumPy does between the products of two threads it does one at a time.
SCORE_BYTES = 1 << 18
MOST_KEYS = 4096
# Keys that have to be copied first, from pages or to another dtype: below what `scratch` keeps.
COPIED_BYTES = 1 << 21
# Jobs per thread: enough that a slow core does not leave the other one waiting.
PARTS_PER_WORKER = 4
# Bytes of keys and values below which a part is not worth merging.
LEAST_PART_BYTES = 1 << 20

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Sums(NamedTuple):
    """Unnormalised attention over parts of the keys: (parts, key heads, rows, head_dim_v or nothing)."""

    o: Array
    row_max: Array
    row_sum: Array


def _sums(p: Problem, parts: int) -> Sums:
    """Sums over no keys."""
    rows = (parts, p.heads_k, p.heads_q // p.heads_k * p.seqlen_q)
    acc = np.dtype(p.accumulator)
    return Sums(np.zeros((*rows, p.head_dim_v), acc), np.full(rows, -np.inf, acc), np.zeros(rows, acc))


def _of_part(sums: Sums, part: int) -> Sums:
    return Sums(*(x[part] for x in sums))


class Sequence(NamedTuple):
    """One sequence of the batch and where its keys lie.

    Attributes
    ----------
    slots : array of int
        Slot or page of the cache for each `page` keys.
    hidden : array of bool, or None
        Keys whose entry leads outside the cache.
    length, page : int
    """

    batch: int
    slots: Array
    hidden: Array | None
    length: int
    page: int


def decode(problem: Problem, arrays: dict[str, Array]) -> None:
    """Append to the cache and attend over it.

    Parameters
    ----------
    problem : Problem
        A decode problem.
    arrays : dict of str to array
        q, k, v (batch, heads, seq, head_dim); k_cache, v_cache (slots, heads, keys, head_dim);
        cache_seqlens (batch,), block_table (batch, pages), rotary_cos, rotary_sin (positions, features / 2),
        k_scale, v_scale, alibi_slopes (1 or batch, heads), sinks (heads,) as the problem has them. Written:
        o, lse if there, and the caches if k is.
    """
    p = problem
    sequences = [_sequence(p, arrays, b) for b in range(p.batch)]
    if p.cache is not None and p.cache.appended:
        for sequence in sequences:
            _append(p, arrays, sequence)  # [D1]
    if p.empty:
        return
    bytes_per_key = p.heads_k * (p.head_dim + p.head_dim_v) * arrays["k_cache"].itemsize
    ranges = [_keys(p, sequence) for sequence in sequences]
    total = sum(stop - first for first, stop in ranges) * bytes_per_key
    flops = 2.0 * p.heads_q * p.seqlen_q * (p.head_dim + p.head_dim_v) * total / max(1, bytes_per_key)
    workers = threads.worker_count(flops)
    jobs, results = [], []
    for sequence, (first, stop) in zip(sequences, ranges, strict=True):
        q = _queries(p, arrays, sequence)
        step, together = _tile(p, stop - first, arrays["k_cache"], sequence.page)
        parts = _parts(first, stop, bytes_per_key, total, workers, -(-p.heads_k // together))
        sums = _sums(p, len(parts))
        jobs += [
            partial(_attend, p, arrays, sequence, q, slice(h, h + together), part, step, _of_part(sums, n))
            for h in range(0, p.heads_k, together)
            for n, part in enumerate(parts)
        ]
        results.append(sums)
    threads.run(jobs, workers)
    for sequence, sums in zip(sequences, results, strict=True):
        _unite(p, arrays, sequence, sums)


def _sequence(p: Problem, arrays: dict[str, Array], b: int) -> Sequence:
    cache = arrays["k_cache"]
    page = max(1, cache.shape[2])
    table = arrays["block_table"][b] if "block_table" in arrays else np.array([b])
    appended = p.cache.appended if p.cache is not None else 0
    start = min(max(int(arrays["cache_seqlens"][b]), 0), p.seqlen_k)
    length = min(start + appended, p.seqlen_k)
    outside = (table < 0) | (table >= cache.shape[0])
    hidden = np.repeat(outside, page)[:length] if outside.any() else None
    return Sequence(b, np.where(outside, 0, table), hidden, length, page)


def _keys(p: Problem, sequence: Sequence) -> tuple[int, int]:
    """Half-open range of the keys that any query of a sequence sees."""
    band = p.band._replace(offset=sequence.length - p.seqlen_q)
    return band.keys(0, p.seqlen_q - 1, sequence.length)


def _parts(
    first: int, stop: int, bytes_per_key: int, total: int, workers: int, boxes: int
) -> list[tuple[int, int]]:
    """Cut a range of keys into parts of about equal size, in proportion to the work of all sequences.

    Heads that are computed apart, so many `boxes`, are jobs of their own already.
    """
    if first == stop:
        return []
    share = total / (PARTS_PER_WORKER * workers) if workers > 1 else total
    step = max(1, int(boxes * max(share, LEAST_PART_BYTES) / max(1, bytes_per_key)))
    count = -(-(stop - first) // step)
    step = -(-(stop - first) // count)
    return [(j, min(j + step, stop)) for j in range(first, stop, step)]


def _tile(p: Problem, keys: int, cache: Array, page: int) -> tuple[int, int]:
    """Keys of a tile, and key heads that are computed together."""
    acc = np.dtype(p.accumulator)
    rows = p.heads_q // p.heads_k * p.seqlen_q
    step = max(256, min(MOST_KEYS, SCORE_BYTES // (rows * acc.itemsize)))
    together = SCORE_BYTES // (max(1, min(step, keys)) * rows * acc.itemsize)
    if page < keys or cache.dtype != acc:
        row = max(p.head_dim, p.head_dim_v) * acc.itemsize
        step = max(256, min(step, COPIED_BYTES // row))
        together = min(together, COPIED_BYTES // (max(1, min(step, keys)) * row))
    return step, max(1, together)


# ---- new keys, and rotation


def _rotated(p: Problem, arrays: dict[str, Array], x: Array, first: int) -> Array:
    """Rotate rows (..., rows, head_dim) that stand at positions first, first + 1, ..."""
    if p.cache is None or not p.cache.rotary:
        return x
    acc = np.dtype(p.accumulator)
    cos, sin = arrays["rotary_cos"], arrays["rotary_sin"]
    positions = np.clip(np.arange(first, first + x.shape[-2]), 0, len(cos) - 1)
    cos, sin = cos[positions].astype(acc), sin[positions].astype(acc)
    turned = p.cache.rotary
    if p.cache.interleaved:
        left, right = slice(0, turned, 2), slice(1, turned, 2)
    else:
        left, right = slice(0, turned // 2), slice(turned // 2, turned)
    wide = x.astype(acc)
    result: Array = wide.copy()
    result[..., left] = wide[..., left] * cos - wide[..., right] * sin
    result[..., right] = wide[..., right] * cos + wide[..., left] * sin
    return result


def _of_batch(x: Array, b: int) -> Array:
    own: Array = x[b if x.shape[0] > 1 else 0]
    return own


def _append(p: Problem, arrays: dict[str, Array], sequence: Sequence) -> None:
    """Store new keys and values after those of a sequence; what has no place is left out."""
    b = sequence.batch
    start = min(max(int(arrays["cache_seqlens"][b]), 0), p.seqlen_k)
    k = _rotated(p, arrays, arrays["k"][b], start)
    for name, new in (("k", k), ("v", arrays["v"][b])):
        cache = arrays[f"{name}_cache"]
        if f"{name}_scale" in arrays:
            new = new.astype(p.accumulator) / _of_batch(arrays[f"{name}_scale"], b)[:, None, None]
        largest = LARGEST.get(cache.dtype.name)
        if largest is not None:
            new = np.clip(new, -largest, largest)
        if cache.dtype == np.int8:
            new = np.rint(new)
        for j in range(start, sequence.length):
            if sequence.hidden is None or not sequence.hidden[j]:
                slot, row = sequence.slots[j // sequence.page], j % sequence.page
                cache[slot, :, row] = new[:, j - start].astype(cache.dtype)


def _queries(p: Problem, arrays: dict[str, Array], sequence: Sequence) -> Array:
    """Queries (key heads, group, seqlen_q, head_dim), rotated, times all factors before softcap."""
    q = arrays["q"][sequence.batch]
    turned = _rotated(p, arrays, q, sequence.length - p.seqlen_q)
    if turned is not q:
        turned = turned.astype(q.dtype)
    factor = p.scale if p.softcap is None else p.scale / p.softcap
    scaled = turned.astype(p.accumulator) * np.dtype(p.accumulator).type(factor)
    grouped = by_key_head(scaled[None], p.heads_k)[0]
    if "k_scale" in arrays:
        grouped = grouped * _of_batch(arrays["k_scale"], sequence.batch)[:, None, None, None]
    return np.ascontiguousarray(grouped)


# ---- attention over a part of the keys


def _read(cache: Array, sequence: Sequence, j0: int, j1: int, acc: np.dtype[Any], name: str) -> Array:
    """Keys or values j0 to j1 of a sequence as (key heads, keys, head_dim): a view where that is possible."""
    page = sequence.page
    first, last = j0 // page, (j1 - 1) // page
    if first == last:
        piece = cache[sequence.slots[first], :, j0 - first * page : j1 - first * page]
        rows: Array = operand(piece[None], acc, name)[0]
        return rows
    # why: a product per page of 16 keys would be all overhead; a copy into L2 costs less.
    heads, dim = cache.shape[1], cache.shape[3]
    pages = scratch(name, (heads, last + 1 - first, page, dim), acc)
    pages[...] = cache[sequence.slots[first : last + 1]].swapaxes(0, 1)
    keys: Array = pages.reshape(heads, -1, dim)[:, j0 - first * page : j1 - first * page]
    return keys


def _attend(
    p: Problem,
    arrays: dict[str, Array],
    sequence: Sequence,
    q: Array,
    heads: slice,
    part: tuple[int, int],
    step: int,
    sums: Sums,
) -> None:
    """Attend over the keys of one part for some key heads, tile by tile."""
    acc = q.dtype
    grouped = q[heads]
    count, group, seqlen_q, head_dim = grouped.shape
    q = grouped.reshape(count, group * seqlen_q, head_dim)
    o, row_max, row_sum = (x[heads] for x in sums)
    k_cache, v_cache = arrays["k_cache"][:, heads], arrays["v_cache"][:, heads]
    ones = np.ones((step, 1), acc)
    first = True
    for j0 in range(*part, step):  # [D3]
        j1 = min(j0 + step, part[1])
        k = _read(k_cache, sequence, j0, j1, acc, "k")
        s = scratch("s", (count, group * seqlen_q, j1 - j0), acc)
        multiply_by_keys(q, k, s)
        _score(p, arrays, sequence, heads, s.reshape(count, group, seqlen_q, j1 - j0), j0)
        highest = np.maximum(row_max, s.max(axis=-1))
        reference = np.where(np.isneginf(highest), 0, highest)
        s -= reference[..., None]
        np.exp(s, out=s)
        if not first and (highest > row_max).any():
            rescale = np.exp(row_max - reference)
            row_sum *= rescale
            o *= rescale[..., None]
        row_max[...] = highest
        v = _read(v_cache, sequence, j0, j1, acc, "v")
        add_product(row_sum[..., None], s, ones[: j1 - j0], first=first)
        add_values(o, s, v, first=first)
        first = False


def _score(p: Problem, arrays: dict[str, Array], sequence: Sequence, heads: slice, s: Array, j0: int) -> None:
    """Turn products (key heads, group, seqlen_q, keys) into scores: softcap, ALiBi, -inf where hidden."""
    j1 = j0 + s.shape[-1]
    if p.softcap is not None:
        np.tanh(s, out=s)
        s *= s.dtype.type(p.softcap)
    offset = sequence.length - p.seqlen_q
    i, j = np.arange(p.seqlen_q)[:, None], np.arange(j0, j1)
    if p.alibi:
        slopes = _of_batch(arrays["alibi_slopes"], sequence.batch).reshape(p.heads_k, -1, 1, 1)
        s -= slopes[heads] * np.abs(i + offset - j).astype(s.dtype)
    left, right = p.left, p.right
    outside = None
    if right is not None and j1 - 1 > offset + right:
        outside = j > i + offset + right
    if left is not None and j0 < offset + p.seqlen_q - 1 - left:
        before = j < i + offset - left
        outside = before if outside is None else outside | before
    if sequence.hidden is not None:
        hidden = sequence.hidden[j0:j1]
        outside = hidden if outside is None else outside | hidden
    if outside is not None:
        np.copyto(s, -np.inf, where=outside)


def _unite(p: Problem, arrays: dict[str, Array], sequence: Sequence, sums: Sums) -> None:
    """[D4] Write O and LSE of a sequence."""
    b, rows = sequence.batch, (p.heads_q, p.seqlen_q)
    acc = np.dtype(p.accumulator)
    sink = arrays["sinks"][:, None].astype(acc) if p.sinks else np.full((p.heads_q, 1), -np.inf, acc)
    row_max, row_sum = sums.row_max.reshape(-1, *rows), sums.row_sum.reshape(-1, *rows)
    with np.errstate(all="ignore"):
        top = np.maximum(sink, row_max.max(axis=0, initial=-np.inf))
        reference = np.where(np.isneginf(top), 0, top)
        weights = np.exp(row_max - reference)
        total = np.exp(sink - reference) + (weights * row_sum).sum(axis=0)
        o = np.einsum("nhi,nhid->hid", weights, sums.o.reshape(-1, *rows, p.head_dim_v))
        if "v_scale" in arrays:
            o.reshape(p.heads_k, -1)[...] *= _of_batch(arrays["v_scale"], b)[:, None]
        o *= np.where(total == 0, 0, 1 / total)[..., None]
        arrays["o"][b] = o.astype(arrays["o"].dtype)
        if "lse" in arrays:
            arrays["lse"][b] = np.where(total == 0, -np.inf, reference + np.log(total))
