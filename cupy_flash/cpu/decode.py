"""Attention over a KV cache in NumPy: few queries, many keys.

Dao et al. 2023, Flash-Decoding, without split-K.

[D1]  rotate and store the new keys and values, rotate the queries
[D2]  for each sequence, all heads at once
[D3]      for each tile of keys: S = score(Q K^T); raise row_max, rescale O; P = exp(S - row_max); O += P V
[D4]  write O and LSE of the sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..call.codes import packed, packed_e2m1, unpacked, unpacked_e2m1
from .forward import finish_rows
from .scores import by_key_head, operand
from .threads import one_blas_thread

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

# Keys of a tile. why: memory does not grow with the cache, and the overhead of NumPy's calls stays small.
KEYS = 1024

# Operations in the time of reading one float32: a core reads 10 GB/s and computes 100 GFLOP/s.
FLOPS_OF_A_READ = 40

# why not finfo: NumPy 1.26 warns of it in a thread that flushes subnormals, as those of XLA do.
LOWEST = {np.dtype(kind): np.nextafter(kind(-np.inf), kind(0)) for kind in (np.float32, np.float64)}
# Names for the scales of 4-bit integer codes, which are per group, not factors of scores and results.
CODES = {"k_scale": "k_codes_scale", "v_scale": "v_codes_scale"}
# Arrays that describe the cache and its codes, which a sequence without a cache does not have.
_IN_CACHE = frozenset((
    "k_cache", "v_cache", "block_table", "cache_seqlens", "cache_leftpad", "rotary_cos", "rotary_sin",
    "rotary_seqlens", "v_scale", "k_codes_scale", "v_codes_scale", "k_zero", "v_zero", "k_block_scale",
    "v_block_scale",
))  # fmt: skip
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Sequence(NamedTuple):
    """One sequence of the batch, and the location of its keys in the cache."""

    batch: int  # index in the batch
    slots: Array  # slot or page of the cache, one for each `page` keys
    hidden: Array | None  # True for keys with a table entry outside the cache; None if there are none
    # Number of keys without and with those that this call appends.
    start: int
    length: int
    page: int  # keys per page, or the capacity of a slot
    first: int  # left padding: index of the first key that is visible


def decode(problem: Problem, arrays: dict[str, Array]) -> None:
    """Append to the cache and attend over it.

    Parameters
    ----------
    problem : Problem
        A decode problem.
    arrays : dict of str to array
        q, k, v (batch, heads, seq, head_dim); k_cache, v_cache (slots, heads, keys, head_dim);
        cache_seqlens (batch,), block_table (batch, pages), rotary_cos, rotary_sin (positions, features / 2),
        k_scale, v_scale, alibi_slopes (1 or batch, heads), sinks (heads,), cache_leftpad, rotary_seqlens
        (batch,), mask (batch, heads, seqlen_q, keys), 1 where broadcast, if the problem has them; for 4-bit
        caches scales and zeros (slots, heads, keys, groups). Written: o, lse if given, and with k the
        caches and the scales and zeros of their 4-bit codes.
    """
    p = problem
    arrays = _named(p, arrays)
    sequences = _sequences(p, arrays)
    with one_blas_thread(), np.errstate(all="ignore"):  # as in the forward pass
        if p.cache is not None and p.cache.appended:
            _append(p, arrays, sequences)  # [D1]
        if p.empty:
            return
        q = _queries(p, arrays, sequences)
        for sequence in sequences:
            _attend(p, arrays, sequence, q[sequence.batch])  # [D2]


def gathered(problem: Problem, arrays: dict[str, Array]) -> Iterator[tuple[Problem, dict[str, Array]]]:
    """Yield each sequence as a problem without a cache, with keys gathered from the cache.

    Parameters
    ----------
    problem : Problem
        As in `decode`, without spans and new keys, and with every table entry inside the cache.
    arrays : dict of str to array
        As in `decode`, and others with the batch as first axis.

    Yields
    ------
    Problem
        The problem of one sequence.
    dict of str to array
        Its arrays: k (1, heads, keys in use, head_dim), a mask that hides padding, and views.
    """
    p, arrays = problem, _named(problem, arrays)
    sequences = _sequences(p, arrays)
    own = [sequence.length - p.seqlen_q for sequence in sequences]
    arrays["q"] = _rotated(p, arrays, arrays["q"], _rotary_starts(arrays, own)).astype(arrays["q"].dtype)
    for sequence, offset in zip(sequences, own, strict=True):
        b, length = sequence.batch, sequence.length
        views = {
            name: x if len(x) == 1 or name == "sinks" else x[b : b + 1]
            for name, x in arrays.items()
            if name not in _IN_CACHE
        }
        k = _rows(arrays, "k", sequence, 0, length, np.dtype(p.accumulator))[None]
        views["k"] = _rotated(p, arrays, k, [0]) if p.cache is not None and p.cache.unrotated else k
        mask = views["mask"][..., :length] if "mask" in views else None
        if sequence.first:
            inside = np.arange(length) >= sequence.first
            mask = inside[None, None, None] if mask is None else mask & inside
        if mask is not None:
            views["mask"] = mask
        one = p._replace(
            cache=None, batch=1, seqlen_k=length, offset=offset, offset_from_end=False,
            mask=None if mask is None else mask.shape,
        )  # fmt: skip
        yield one, views


def _named(p: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Rename the scales of 4-bit integer codes, so that they are not taken for factors of scores."""
    of_integers = p.cache is not None and p.cache.dtype == "int4"
    return {CODES.get(name, name) if of_integers else name: x for name, x in arrays.items()}


def flops(p: Problem, keys: int) -> float:
    """Operations for a number of keys, or those that take as long as reading the keys, if that is more."""
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
    pads = arrays.get("cache_leftpad")
    made = []
    for b, given in enumerate(arrays["cache_seqlens"].tolist()):
        start = min(max(given, 0), p.seqlen_k)
        length = min(start + appended, p.seqlen_k)
        hidden = np.repeat(outside[b], page)[:length] if hides else None
        first = 0 if pads is None else min(max(int(pads[b]), 0), length)
        made.append(Sequence(b, table[b], hidden, start, length, max(1, page), first))
    return made


def _keys(p: Problem, sequence: Sequence) -> tuple[int, int]:
    """Half-open range of keys that at least one query of a sequence sees."""
    band = p.band._replace(offset=sequence.length - p.seqlen_q)
    first, stop = band.keys(0, p.seqlen_q - 1, sequence.length)
    return max(first, sequence.first), stop


# ---- new keys, and rotation


def _rotated(p: Problem, arrays: dict[str, Array], x: Array, first: list[int]) -> Array:
    """Rotate rows (batch, heads, rows, head_dim); those of sequence b are at positions first[b] onwards."""
    if p.cache is None or not p.cache.rotary:
        return x
    acc = np.dtype(p.accumulator)
    cos, sin = arrays["rotary_cos"], arrays["rotary_sin"]
    positions = np.clip(np.array(first)[:, None] + np.arange(x.shape[-2]), 0, len(cos) - 1)
    cos, sin = (part[positions][:, None].astype(acc) for part in (cos, sin))
    begin, turned = p.cache.first_rotated, p.cache.rotary
    stop, middle = begin + turned, begin + turned // 2
    if p.cache.interleaved:
        left, right = slice(begin, stop, 2), slice(begin + 1, stop, 2)
    else:
        left, right = slice(begin, middle), slice(middle, stop)
    wide = x.astype(acc)
    result: Array = wide.copy()
    result[..., left] = wide[..., left] * cos - wide[..., right] * sin
    result[..., right] = wide[..., right] * cos + wide[..., left] * sin
    return result


def _rotary_starts(arrays: dict[str, Array], own: list[int]) -> list[int]:
    """Position of the first row of each sequence: from rotary_seqlens, else from `own`."""
    given = arrays.get("rotary_seqlens")
    return own if given is None else [int(n) for n in given]


def _append(p: Problem, arrays: dict[str, Array], sequences: list[Sequence]) -> None:
    """Store new keys and values after those of each sequence; rows beyond the capacity are dropped."""
    k = arrays["k"]
    if p.cache is None or not p.cache.unrotated:
        k = _rotated(p, arrays, k, _rotary_starts(arrays, [sequence.start for sequence in sequences]))
    for name, new in (("k", k), ("v", arrays["v"])):
        cache = arrays[f"{name}_cache"]
        if f"{name}_scale" in arrays:
            new = new.astype(p.accumulator) / arrays[f"{name}_scale"][..., None, None]
        largest = LARGEST.get(cache.dtype.name)
        if largest is not None:
            new = np.clip(new, -largest, largest)
        if cache.dtype == np.int8:
            new = np.rint(np.where(np.isnan(new), 0, new))
        stored = [(cache, new)]
        if p.cache is not None and p.cache.codes:
            parts = [cache, *_scale_arrays(arrays, name)]
            group, units = new.shape[-1] // parts[1].shape[-1], parts[1].dtype.name
            kind = p.cache.codes.kind
            made = (
                packed(np, new, group, units, p.accumulator)
                if kind == "int4"
                else packed_e2m1(np, new, p.accumulator)
            )
            stored = list(zip(parts, made, strict=True))
        for b, slots, hidden, start, length, page, _ in sequences:
            for j in range(start, length):
                if hidden is None or not hidden[j]:
                    for into, rows in stored:
                        into[slots[j // page], :, j % page] = rows[b, :, j - start].astype(into.dtype)


def _queries(p: Problem, arrays: dict[str, Array], sequences: list[Sequence]) -> Array:
    """Queries (batch, key heads, group, seqlen_q, head_dim), rotated and scaled by all factors of S."""
    q = arrays["q"]
    own = [sequence.length - p.seqlen_q for sequence in sequences]
    turned = _rotated(p, arrays, q, _rotary_starts(arrays, own))
    acc = np.dtype(p.accumulator)
    factor = acc.type(p.scale if p.softcap is None else p.scale / p.softcap)
    scaled = np.empty((p.batch, p.heads_k, p.heads_q // p.heads_k, p.seqlen_q, p.head_dim), acc)
    scaled[...] = by_key_head(turned.astype(q.dtype, copy=False), p.heads_k)
    scaled *= factor * arrays["k_scale"][..., None, None, None] if "k_scale" in arrays else factor
    return scaled


# ---- attention


def _read(cache: Array, sequence: Sequence, j0: int, j1: int, acc: np.dtype[Any]) -> Array:
    """Keys or values j0 to j1 of a sequence as (key heads, keys, head_dim): a view if possible."""
    page = sequence.page
    first, last = j0 // page, (j1 - 1) // page
    j0, j1 = j0 - first * page, j1 - first * page
    if first == last:
        return operand(cache[sequence.slots[first], :, j0:j1], acc)
    # why gather: a product per page of 16 keys would be mostly overhead
    pages = cache[sequence.slots[first : last + 1]].swapaxes(0, 1)
    rows: Array = pages.reshape(len(pages), -1, cache.shape[3])[:, j0:j1].astype(acc, copy=False)
    return rows


def _scale_arrays(arrays: dict[str, Array], name: str) -> list[Array]:
    """Scales and zeros of the 4-bit codes of keys (name "k") or values; empty if there are no codes."""
    kinds = (CODES[f"{name}_scale"], f"{name}_zero", f"{name}_block_scale")
    return [arrays[kind] for kind in kinds if kind in arrays]


def _rows(arrays: dict[str, Array], name: str, sequence: Sequence, j0: int, j1: int, acc: Any) -> Array:
    """Keys (name "k") or values j0 to j1 of a sequence as (key heads, keys, head_dim)."""
    cache, units = arrays[f"{name}_cache"], _scale_arrays(arrays, name)
    if not units:
        return _read(cache, sequence, j0, j1, acc)
    codes, scale, *zero = (_read(x, sequence, j0, j1, x.dtype) for x in (cache, *units))
    dtype = np.dtype(acc).name
    rows: Array = (
        unpacked(np, codes, scale, zero[0], dtype) if zero else unpacked_e2m1(np, codes, scale, dtype)
    )
    return rows


def _attend(p: Problem, arrays: dict[str, Array], sequence: Sequence, q: Array) -> None:
    """Compute attention of the queries (key heads, group, seqlen_q, head_dim) of a sequence by tiles."""
    acc, grouped = q.dtype, q.shape[:3]
    q = q.reshape(grouped[0], -1, q.shape[3])
    o = np.zeros((*q.shape[:2], p.head_dim_v), acc)
    # why LOWEST: the weights of a row without a visible key so far are exp(-inf - LOWEST) = 0.
    row_max, row_sum = np.full(q.shape[:2], LOWEST[acc], acc), np.zeros(q.shape[:2], acc)
    first, stop = _keys(p, sequence)
    for j0 in range(first, stop, KEYS):  # [D3]
        j1 = min(j0 + KEYS, stop)
        k, v = (_rows(arrays, name, sequence, j0, j1, acc) for name in "kv")
        if sequence.hidden is not None:  # why: another sequence's NaN, times a weight of 0, would be NaN
            v = np.where(sequence.hidden[j0:j1, None], 0, v)
        if p.cache is not None and p.cache.unrotated:
            k = _rotated(p, arrays, k[None], [j0])[0]
        s = q @ k.swapaxes(-1, -2)
        _score(p, arrays, sequence, s.reshape(*grouped, j1 - j0), j0)
        new_max = np.maximum(row_max, s.max(axis=-1))
        s -= new_max[..., None]
        np.exp(s, out=s)
        rescale = np.exp(row_max - new_max)
        row_sum = rescale * row_sum + s.sum(axis=-1)
        o *= rescale[..., None]
        o += s @ v
        row_max = new_max
    rows = (p.heads_q, p.seqlen_q)
    _finish(p, arrays, sequence.batch, o.reshape(*rows, -1), row_max.reshape(rows), row_sum.reshape(rows))


def _score(p: Problem, arrays: dict[str, Array], sequence: Sequence, s: Array, j0: int) -> None:
    """Turn products (key heads, group, seqlen_q, keys) into scores: softcap, ALiBi, -inf where hidden."""
    j1 = j0 + s.shape[-1]
    if p.softcap is not None:
        np.tanh(s, out=s)
        s *= s.dtype.type(p.softcap)
    offset, rows = sequence.length - p.seqlen_q, np.arange(p.seqlen_q)[:, None]
    if p.alibi:
        slopes = arrays["alibi_slopes"][sequence.batch if len(arrays["alibi_slopes"]) > 1 else 0]
        distance = np.abs(rows + offset - np.arange(j0, j1)).astype(s.dtype)
        s -= slopes.reshape(p.heads_k, -1, 1, 1) * distance
    left, right = p.left, p.right
    if right is not None and j1 - 1 > offset + right:
        np.copyto(s, -np.inf, where=np.arange(j0, j1) > rows + offset + right)
    if left is not None and j0 < offset + p.seqlen_q - 1 - left:
        np.copyto(s, -np.inf, where=np.arange(j0, j1) < rows + offset - left)
    if sequence.hidden is not None:
        np.copyto(s, -np.inf, where=sequence.hidden[j0:j1])
    if "spans" in arrays:
        _hide_drafts(arrays["spans"], sequence.batch, s, offset - j0)
    if "mask" in arrays:
        mask = _pairs(arrays["mask"], sequence.batch, j0, j1)
        np.copyto(s, -np.inf, where=~by_key_head(mask[None], p.heads_k)[0])


def _hide_drafts(spans: Array, b: int, s: Array, first: int) -> None:
    """Hide keys of scores (key heads, group, seqlen_q, keys) by spans, which start at key `first`."""
    spans = by_key_head(spans[b if len(spans) > 1 else 0][None], s.shape[0])[0]
    keys = range(max(first, 0), min(first + s.shape[2], s.shape[3]))
    rows = np.arange(s.shape[2])[:, None]
    for j in keys:
        bounds = spans[:, :, j - first, None]  # (key heads or 1, group or 1, 1, 2 or 4)
        seen = (bounds[..., ::2] <= rows) & (rows < bounds[..., 1::2])
        np.copyto(s[..., j], -np.inf, where=~seen.any(-1))


def _pairs(mask: Array, b: int, j0: int, j1: int) -> Array:
    """The part (heads, queries, keys) of a mask for keys j0 to j1 of sequence b; broadcast axes stay."""
    mask = mask[b if len(mask) > 1 else 0]
    return mask if mask.shape[2] == 1 else mask[:, :, j0:j1]


def _finish(p: Problem, arrays: dict[str, Array], b: int, o: Array, top: Array, total: Array) -> None:
    """[D4] Write O (heads, seqlen_q, head_dim_v) and LSE (heads, seqlen_q) of sequence b."""
    factor, lse = finish_rows(top, total, arrays["sinks"][:, None].astype(o.dtype) if p.sinks else None)
    if "v_scale" in arrays:
        scale = arrays["v_scale"][b if len(arrays["v_scale"]) > 1 else 0]
        factor = factor * np.repeat(scale, p.heads_q // p.heads_k)[:, None]
    np.multiply(o, factor[..., None], out=arrays["o"][b], casting="same_kind")
    if "lse" in arrays:
        arrays["lse"][b] = lse
