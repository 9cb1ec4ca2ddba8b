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
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import threads
from .scores import add_product, by_key_head, operand
from .thin_products import BLOCK_KEYS, add_values, multiply_by_keys
from .threads import Work, scratch

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

# why: scores of a tile stay in L2 through the passes over them; keys and values are used once, so that tiles
# may be as long as that allows: below 1000 keys a product loses a third of its speed. As many heads together
# as fit: what NumPy does between the products of two threads it does one at a time.
SCORE_BYTES = 1 << 18
MOST_KEYS = 4096
# Keys or values that have to be copied first, from pages or to another dtype: with a page more what `scratch`
# keeps. Half as many take up to a third longer, as they mean twice as many calls.
COPIED_BYTES = 1 << 22
# A job is this share of one thread's part of what is left when it is cut: the first ones are long, as the
# NumPy calls of a job cost 50 us, the last ones short, so that a slow core does not leave the other waiting.
SHARE_OF_REST = 0.7
# Bytes of keys and values, 0.4 ms of a core, below which a part is not worth merging.
LEAST_PART_BYTES = 1 << 22

# One core reads 10 GB/s and does 100 GFLOP/s in float32.
FLOPS_OF_A_READ = 40

LOWEST = {np.dtype(kind): np.finfo(kind).min for kind in (np.float32, np.float64)}
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Sequence(NamedTuple):
    """One sequence of the batch and where its keys lie.

    Attributes
    ----------
    slots : array of int
        Slot or page of the cache for each `page` keys.
    hidden : array of bool, or None
        Keys whose entry leads outside the cache.
    start, length, page : int
        Keys before those of this call, and with them.
    """

    batch: int
    slots: Array
    hidden: Array | None
    start: int
    length: int
    page: int


class Part(NamedTuple):
    """Keys `first` to `stop` of a sequence for some of its key heads: one job."""

    sequence: Sequence
    heads: slice
    first: int
    stop: int


class Sums(NamedTuple):
    """Unnormalised attention over parts of the keys: (parts, key heads of each, rows, head_dim_v or none)."""

    o: Array
    row_max: Array
    row_sum: Array


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
    p, acc = problem, np.dtype(problem.accumulator)
    sequences = _sequences(p, arrays)
    if p.cache is not None and p.cache.appended:
        _append(p, arrays, sequences)  # [D1]
    if p.empty:
        return
    ranges = [_keys(p, sequence) for sequence in sequences]
    step, together = _tile(p, max(stop - first for first, stop in ranges), arrays["k_cache"])
    workers = threads.worker_count(flops(p, sum(stop - first for first, stop in ranges)))
    bytes_per_key = together * (p.head_dim + p.head_dim_v) * arrays["k_cache"].itemsize
    parts, units = _parts(p, sequences, ranges, together, bytes_per_key, workers)
    q = _queries(p, arrays, sequences)
    rows = (len(parts), together, q.shape[2] * q.shape[3])
    sums = Sums(np.zeros((*rows, p.head_dim_v), acc), np.full(rows, LOWEST[acc], acc), np.zeros(rows, acc))
    jobs = [
        partial(_attend, p, arrays, part, q[part.sequence.batch, part.heads], step, Sums(*of_part))
        for part, *of_part in zip(parts, *sums, strict=True)
    ]
    threads.carry_out(Work(jobs, partial(_unite, p, arrays, sums, units)), workers)


def flops(p: Problem, keys: int) -> float:
    """Operations over so many keys, or as many as one core does in the time it takes to read them."""
    per_feature = max(2.0 * p.heads_q * p.seqlen_q, FLOPS_OF_A_READ * p.heads_k)
    return keys * (p.head_dim + p.head_dim_v) * per_feature


def _sequences(p: Problem, arrays: dict[str, Array]) -> list[Sequence]:
    slots, _, page, _ = arrays["k_cache"].shape
    table = arrays.get("block_table")
    table = np.arange(p.batch)[:, None] if table is None else table
    outside = (table < 0) | (table >= slots)
    hides = bool(outside.any())
    if hides:
        table = np.where(outside, 0, table)
    appended = p.cache.appended if p.cache is not None else 0
    made = []
    for b, given in enumerate(arrays["cache_seqlens"].tolist()):
        start = min(max(given, 0), p.seqlen_k)
        length = min(start + appended, p.seqlen_k)
        hidden = np.repeat(outside[b], page)[:length] if hides else None
        made.append(Sequence(b, table[b], hidden, start, length, max(1, page)))
    return made


def _keys(p: Problem, sequence: Sequence) -> tuple[int, int]:
    """Half-open range of the keys that any query of a sequence sees."""
    band = p.band._replace(offset=sequence.length - p.seqlen_q)
    return band.keys(0, p.seqlen_q - 1, sequence.length)


def _parts(
    p: Problem,
    sequences: list[Sequence],
    ranges: list[tuple[int, int]],
    together: int,
    bytes_per_key: int,
    workers: int,
) -> tuple[list[Part], list[int]]:
    """Cut the keys of every sequence, for so many heads at a time, into parts.

    Returns the parts, and where those of the next sequence or of its next heads begin: each has one at least.
    """
    parts: list[Part] = []
    units = []
    boxes = p.heads_k // together
    left = boxes * sum(stop - first for first, stop in ranges)
    for sequence, (first, stop) in zip(sequences, ranges, strict=True):
        for h in range(0, p.heads_k, together):
            units.append(len(parts))
            heads, j = slice(h, h + together), first
            while True:
                share = int(left * SHARE_OF_REST / workers) if workers > 1 else left
                share = max(share, LEAST_PART_BYTES // max(1, bytes_per_key))
                share += -share % BLOCK_KEYS
                # What would remain is no part of its own.
                end = j + share if j + share + share // 2 < stop else stop
                parts.append(Part(sequence, heads, j, end))
                left -= end - j
                j = end
                if j == stop:
                    break
    return parts, units


def _tile(p: Problem, keys: int, cache: Array) -> tuple[int, int]:
    """Keys of a tile, and key heads that are computed together: a divisor of all."""
    acc = np.dtype(p.accumulator)
    rows = p.heads_q // p.heads_k * p.seqlen_q
    step = max(BLOCK_KEYS, min(MOST_KEYS, SCORE_BYTES // (rows * acc.itemsize)))
    most = SCORE_BYTES // (max(1, min(step, keys)) * rows * acc.itemsize)
    if cache.shape[2] < keys or cache.dtype != acc:
        row = max(p.head_dim, p.head_dim_v) * acc.itemsize
        step = max(BLOCK_KEYS, min(step, COPIED_BYTES // row))
        most = min(most, COPIED_BYTES // (max(1, min(step, keys)) * row))
    step -= step % BLOCK_KEYS
    return step, max(n for n in range(1, p.heads_k + 1) if p.heads_k % n == 0 and n <= max(1, most))


# ---- new keys, and rotation


def _rotated(p: Problem, arrays: dict[str, Array], x: Array, first: list[int]) -> Array:
    """Rotate rows (batch, heads, rows, head_dim) that stand at positions first, first + 1, ... each."""
    if p.cache is None or not p.cache.rotary:
        return x
    acc = np.dtype(p.accumulator)
    cos, sin = arrays["rotary_cos"], arrays["rotary_sin"]
    positions = np.clip(np.array(first)[:, None] + np.arange(x.shape[-2]), 0, len(cos) - 1)
    cos, sin = (part[positions][:, None].astype(acc) for part in (cos, sin))
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


def _append(p: Problem, arrays: dict[str, Array], sequences: list[Sequence]) -> None:
    """Store new keys and values after those of each sequence; what has no place is left out."""
    k = _rotated(p, arrays, arrays["k"], [sequence.start for sequence in sequences])
    for name, new in (("k", k), ("v", arrays["v"])):
        cache = arrays[f"{name}_cache"]
        if f"{name}_scale" in arrays:
            new = new.astype(p.accumulator) / arrays[f"{name}_scale"][..., None, None]
        largest = LARGEST.get(cache.dtype.name)
        if largest is not None:
            new = np.clip(new, -largest, largest)
        if cache.dtype == np.int8:
            new = np.rint(new)
        new = new.astype(cache.dtype)
        for b, slots, hidden, start, length, page in sequences:
            for j in range(start, length):
                if hidden is None or not hidden[j]:
                    cache[slots[j // page], :, j % page] = new[b, :, j - start]


def _queries(p: Problem, arrays: dict[str, Array], sequences: list[Sequence]) -> Array:
    """Queries (batch, key heads, group, seqlen_q, head_dim), rotated, times all factors before softcap."""
    q = arrays["q"]
    turned = _rotated(p, arrays, q, [sequence.length - p.seqlen_q for sequence in sequences])
    acc = np.dtype(p.accumulator)
    factor = acc.type(p.scale if p.softcap is None else p.scale / p.softcap)
    scaled = np.empty((p.batch, p.heads_k, p.heads_q // p.heads_k, p.seqlen_q, p.head_dim), acc)
    scaled[...] = by_key_head(turned.astype(q.dtype, copy=False), p.heads_k)
    scaled *= factor * arrays["k_scale"][..., None, None, None] if "k_scale" in arrays else factor
    return scaled


# ---- attention over a part of the keys


def _read(cache: Array, heads: slice, sequence: Sequence, j0: int, j1: int, acc: np.dtype[Any]) -> Array:
    """Keys or values j0 to j1 of a sequence as (key heads, keys, head_dim): a view where that is possible.

    Where it is not, the next call writes over them.
    """
    page = sequence.page
    first, last = j0 // page, (j1 - 1) // page
    if first == last:
        piece = cache[sequence.slots[first], heads, j0 - first * page : j1 - first * page]
        rows: Array = operand(piece[None], acc, "copied")[0]
        return rows
    # why: a product per page of 16 keys would be all overhead; a copy into L2 costs less.
    slots = sequence.slots[first : last + 1].astype(np.intp)
    heads_k, dim = cache.shape[1], cache.shape[3]
    pages = scratch("copied", (heads.stop - heads.start, len(slots), page, dim), acc)
    if cache.dtype == acc and cache.flags.c_contiguous:
        lines = slots * heads_k + np.arange(heads.start, heads.stop)[:, None]
        # why clip: with any other mode the result is copied once more.
        np.take(cache.reshape(-1, page * dim), lines, 0, pages.reshape(*pages.shape[:2], -1), "clip")
    else:
        pages[...] = cache[slots, heads].swapaxes(0, 1)
    keys: Array = pages.reshape(len(pages), -1, dim)[:, j0 - first * page : j1 - first * page]
    return keys


def _attend(p: Problem, arrays: dict[str, Array], part: Part, q: Array, step: int, sums: Sums) -> None:
    """[D2] Attend over the keys of one part, tile by tile."""
    sequence, heads = part.sequence, part.heads
    acc = q.dtype
    grouped = q.shape[:3]
    q = q.reshape(grouped[0], -1, q.shape[3])
    o, row_max, row_sum = sums
    k_cache, v_cache = arrays["k_cache"], arrays["v_cache"]
    ones = np.ones((min(step, part.stop - part.first), 1), acc)
    for j0 in range(part.first, part.stop, step):  # [D3]
        first = j0 == part.first
        j1 = min(j0 + step, part.stop)
        k = _read(k_cache, heads, sequence, j0, j1, acc)
        s = scratch("s", (*q.shape[:2], j1 - j0), acc)
        multiply_by_keys(q, k, s, cached=not np.may_share_memory(k, k_cache))
        _score(p, arrays, sequence, heads, s.reshape(*grouped, j1 - j0), j0)
        # why LOWEST in row_max: a row that has seen no key keeps its weights at exp(-inf - LOWEST) = 0.
        highest = np.maximum(row_max, s.max(axis=-1))
        s -= highest[..., None]
        np.exp(s, out=s)
        if not first and (highest > row_max).any():
            rescale = np.exp(row_max - highest)
            row_sum *= rescale
            o *= rescale[..., None]
        row_max[...] = highest
        add_product(row_sum[..., None], s, ones[: j1 - j0], first=first)
        add_values(o, s, _read(v_cache, heads, sequence, j0, j1, acc), first=first)


def _score(p: Problem, arrays: dict[str, Array], sequence: Sequence, heads: slice, s: Array, j0: int) -> None:
    """Turn products (key heads, group, seqlen_q, keys) into scores: softcap, ALiBi, -inf where hidden."""
    j1 = j0 + s.shape[-1]
    if p.softcap is not None:
        np.tanh(s, out=s)
        s *= s.dtype.type(p.softcap)
    offset, rows = sequence.length - p.seqlen_q, np.arange(p.seqlen_q)[:, None]
    if p.alibi:
        slopes = arrays["alibi_slopes"][sequence.batch if len(arrays["alibi_slopes"]) > 1 else 0]
        distance = np.abs(rows + offset - np.arange(j0, j1)).astype(s.dtype)
        s -= slopes.reshape(p.heads_k, -1, 1, 1)[heads] * distance
    left, right = p.left, p.right
    if right is not None and j1 - 1 > offset + right:
        np.copyto(s, -np.inf, where=np.arange(j0, j1) > rows + offset + right)
    if left is not None and j0 < offset + p.seqlen_q - 1 - left:
        np.copyto(s, -np.inf, where=np.arange(j0, j1) < rows + offset - left)
    if sequence.hidden is not None:
        np.copyto(s, -np.inf, where=sequence.hidden[j0:j1])


def _unite(p: Problem, arrays: dict[str, Array], sums: Sums, units: list[int]) -> None:
    """[D4] Write O and LSE of the sequences; the parts of each, or of some of its heads, begin at `units`."""
    rows = (p.batch, p.heads_q, p.seqlen_q)
    top, total, o = sums.row_max, sums.row_sum, sums.o
    if len(units) < len(o):
        bounds = [*units, len(o)]
        top = np.maximum.reduceat(sums.row_max, units)
        weights = np.exp(sums.row_max - np.repeat(top, np.diff(bounds), axis=0))
        total = np.add.reduceat(weights * sums.row_sum, units)
        o = np.empty((len(units), *o.shape[1:]), o.dtype)
        for unit, (one, end) in zip(o, pairwise(bounds), strict=True):
            # (heads, rows, 1, parts) @ (heads, rows, parts, head_dim_v)
            of_rows = weights[one:end].transpose(1, 2, 0)[:, :, None]
            np.matmul(of_rows, sums.o[one:end].transpose(1, 2, 0, 3), out=unit[:, :, None])
    top, total, o = top.reshape(rows), total.reshape(rows), o.reshape(*rows, p.head_dim_v)
    unit = np.ones((), o.dtype)
    if p.sinks:
        sink = arrays["sinks"][:, None].astype(o.dtype)
        reference = np.maximum(sink, top)
        unit = np.exp(top - reference)
        top, total = reference, total * unit + np.exp(sink - reference)
    if "v_scale" in arrays:
        unit = unit * np.repeat(arrays["v_scale"], p.heads_q // p.heads_k, axis=1)[..., None]
    unseen = total == 0
    factor = np.where(unseen, 0, unit / total)
    np.multiply(o, factor[..., None], out=arrays["o"], casting="same_kind")
    if "lse" in arrays:
        arrays["lse"][...] = np.where(unseen, -np.inf, top + np.log(total))
