"""The specification of attention over a KV cache: gather, append, rotate, then plain attention, in FP64.

Its rules, in addition to those of `reference`: the location of keys (`gather`), the keys that a query
selects (`selected`), what appending stores (`append`), the positions of queries (the last one at the position
of the last key), and rotation (`rotate`). Table entries outside the cache hide their keys; lengths beyond the
capacity are clamped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import reference
from .budget import UNIT_ROUNDOFF, Verdict, error_budget

__all__ = ["CacheReference", "error_budget_with_kv_cache", "reference_with_kv_cache"]

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Sequence(NamedTuple):
    """Arguments of `reference_attention` for queries of a sequence; arrays are (1, heads, seq, head_dim)."""

    batch: int
    queries: slice  # all queries, or a single one with selected keys
    q: np.ndarray  # rotated, and rounded to its dtype
    q_error: np.ndarray  # like q: uncertainty of its rounding after a rotation in float32
    k: np.ndarray  # as stored, before multiplication by k_scale
    v: np.ndarray  # as stored, before multiplication by v_scale
    k_scale: np.ndarray  # (heads_k,)
    v_scale: np.ndarray
    options: dict[str, Any]


class CacheReference(NamedTuple):
    """Output, log-sum-exp, the caches after the call, and the attention problem of each sequence.

    Attributes
    ----------
    o, lse : ndarray
        Output and log-sum-exp, in FP64.
    k_cache, v_cache : ndarray
        The caches after the call.
    sequences : list of Sequence
        The arguments of `reference_attention` for each sequence.
    """

    o: np.ndarray
    lse: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    sequences: list[Sequence]


def reference_with_kv_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    block_table: Any = None,
    cache_batch_idx: Any = None,
    indices: Any = None,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_last: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    k_zero: Any = None,
    v_zero: Any = None,
    k_block_scale: Any = None,
    v_block_scale: Any = None,
    layout: str = "bhsd",
    **options: Any,
) -> CacheReference:
    """Compute `cupy_flash.attention_with_kv_cache` in FP64, without changing its caches.

    Parameters
    ----------
    q, k_cache, v_cache, cache_seqlens, block_table, indices, k, v, layout
        As in `cupy_flash.attention_with_kv_cache`.
    cache_batch_idx
        A block_table of shape (batch,).
    rotary_cos, rotary_sin, rotary_interleaved, rotary_last
        cos, sin, interleaved and last of `cupy_flash.Rotary`.
    k_scale, v_scale, k_zero, v_zero, k_block_scale, v_block_scale
        scale, zero and block_scale of `cupy_flash.QuantizedCache`.
    **options
        causal, window, scale, softcap, alibi_slopes, sinks, as in `cupy_flash.attention_with_kv_cache`.

    Returns
    -------
    CacheReference
        o and lse in float64; the caches in their dtype, but 4-bit codes dequantised to floats.
    """
    if options.keys() & {"align", "mask"}:
        raise ValueError("the specification of a cache sets align and mask itself, and takes neither")

    def four(x: Any) -> np.ndarray:
        lifted: np.ndarray = np.asarray(x).swapaxes(1, 2) if layout == "bshd" else np.asarray(x)
        return lifted

    queries = four(q)
    batch, heads_q, seqlen_q, _ = queries.shape
    caches = [four(x).copy() for x in (k_cache, v_cache)]
    codes = [] if k_zero is None else [(four(k_scale), four(k_zero)), (four(v_scale), four(v_zero))]
    if k_block_scale is not None:
        blocks = [four(x) for x in (k_block_scale, v_block_scale)]
        caches = [dequantized_nvfp4(cache, block) for cache, block in zip(caches, blocks, strict=True)]
    if codes:
        caches = [dequantized_int4(cache, *of) for cache, of in zip(caches, codes, strict=True)]
        k_scale = v_scale = None
    slots, heads_k, page, _ = caches[0].shape
    table = np.arange(batch)[:, None] if cache_batch_idx is None else np.asarray(cache_batch_idx)[:, None]
    if block_table is not None:
        table = np.asarray(block_table).reshape(batch, -1)
    room = table.shape[1] * page
    before = np.clip(np.broadcast_to(cache_seqlens, batch), 0, room)
    new = [] if k is None else [four(k), four(v)]
    scales = [
        np.broadcast_to(1.0 if scale is None else np.asarray(scale, np.float64), (batch, heads_k))
        for scale in (k_scale, v_scale)
    ]
    turn = None
    if rotary_cos is not None:
        turn = (
            np.asarray(rotary_cos, np.float64), np.asarray(rotary_sin, np.float64), rotary_interleaved,
            rotary_last,
        )  # fmt: skip

    sequences = []
    o, lse = np.zeros((batch, heads_q, seqlen_q, caches[1].shape[3])), np.zeros((batch, heads_q, seqlen_q))
    for b in range(batch):
        start = int(before[b])
        length = start
        if new:
            length = min(start + new[0].shape[2], room)
            rows = [x[b].astype(np.float64) for x in new]
            if turn:
                rows[0] = rotate(rows[0], np.arange(start, start + rows[0].shape[1]), *turn)
            if k_block_scale is not None:
                rows = [
                    through_e2m1(row / scale[b][:, None, None])
                    for row, scale in zip(rows, scales, strict=True)
                ]
            if codes:
                rows = [through_codes(row, *of) for row, of in zip(rows, codes, strict=True)]
            for cache, row, scale in zip(caches, rows, scales, strict=True):
                append(cache, table[b], row, start, scale[b])
        own_q = queries[b].astype(np.float64)
        q_error = np.zeros(own_q.shape)
        if turn:
            places = np.arange(length - seqlen_q, length)
            own_q, q_error = rotated_queries(queries[b], places, *turn)
        own = [gather(cache, table[b], length) for cache in caches]
        seen = np.repeat((table[b] >= 0) & (table[b] < slots), page)[:length]
        own = [np.where(seen[:, None], x, 0.0) for x in own]
        chosen = {**options, "align": length - seqlen_q, "mask": seen[None, None, None]}
        slopes = chosen.get("alibi_slopes")
        if slopes is not None and np.ndim(slopes) == 2:
            chosen["alibi_slopes"] = np.asarray(slopes)[b]
        keys, values = (x[None] for x in own)
        k_unit, v_unit = (scale[b] for scale in scales)
        of_all = slice(0, seqlen_q)
        whole = Sequence(b, of_all, own_q[None], q_error[None], keys, values, k_unit, v_unit, chosen)
        if indices is None:
            sequences.append(whole)
            continue
        alone = {name: x for name, x in chosen.items() if name not in ("causal", "window", "align", "mask")}
        for i, of_query in enumerate(np.asarray(indices)[b]):
            keep = selected(of_query, seen, length - seqlen_q + i, **options)
            at = slice(i, i + 1)
            one = whole._replace(queries=at, q=whole.q[:, :, at], q_error=whole.q_error[:, :, at])
            sequences.append(one._replace(k=keys[:, :, keep], v=values[:, :, keep], options=alone))
    for one in sequences:
        if seqlen_q and heads_q:
            keys, values = one.k * one.k_scale[:, None, None], one.v * one.v_scale[:, None, None]
            found = reference.reference_attention(one.q, keys, values, **one.options)
            o[one.batch, :, one.queries], lse[one.batch, :, one.queries] = found.o[0], found.lse[0]
    return CacheReference(four(o), lse, four(caches[0]), four(caches[1]), sequences)


def error_budget_with_kv_cache(
    o: np.ndarray,
    lse: np.ndarray,
    q: np.ndarray,
    k_cache: Any,
    v_cache: Any,
    *,
    precision: str | None = None,
    layout: str = "bhsd",
    **options: Any,
) -> list[Verdict]:
    """Compare results of `cupy_flash.attention_with_kv_cache` with FP64, for each key head of a sequence.

    Parameters
    ----------
    o, lse : np.ndarray
        Results of the call.
    q, k_cache, v_cache, layout, **options
        As in `reference_with_kv_cache`, after the call: the caches and cache_seqlens include new keys, and k
        and v are not given. v_scale of a quantised cache must be a power of two, so that dividing the result
        by it is exact; dequantised 4-bit codes must be exact in the dtype of q.
    precision : str, optional
        As in `error_budget`.

    Returns
    -------
    list of Verdict
        Of o and lse, for each sequence and each key head.
    """
    exact = reference_with_kv_cache(q, k_cache, v_cache, layout=layout, **options)
    o = o.swapaxes(1, 2) if layout == "bshd" else o
    verdicts = []
    for sequence in exact.sequences:
        at = slice(sequence.batch, sequence.batch + 1)
        heads = sequence.k.shape[1]
        group = sequence.q.shape[1] // heads
        scale = sequence.options.get("scale")
        scale = sequence.q.shape[3] ** -0.5 if scale is None else scale
        for head in range(heads):
            of_q = slice(head * group, (head + 1) * group)
            own = {**sequence.options, "scale": scale * float(sequence.k_scale[head])}
            for name in ("alibi_slopes", "sinks"):
                if own.get(name) is not None:
                    own[name] = np.asarray(own[name])[of_q]
            unscaled = (o[at, of_q, sequence.queries].astype(np.float64) / sequence.v_scale[head]).astype(
                o.dtype
            )
            verdicts += error_budget(
                {"o": unscaled, "lse": lse[at, of_q, sequence.queries]},
                sequence.q[:, of_q].astype(q.dtype),
                sequence.k[:, head : head + 1].astype(q.dtype),
                sequence.v[:, head : head + 1].astype(q.dtype),
                precision=precision,
                q_error=sequence.q_error[:, of_q],
                **own,
            )
    return verdicts


def selected(
    indices: np.ndarray, seen: np.ndarray, stand: int, causal: bool = False, window: Any = None, **_: Any
) -> list[int]:
    """The visible keys among the indices of a query at position `stand`, with repetitions."""
    left, right = window or (None, None)
    right = 0 if causal else right
    return [
        j
        for j in indices.tolist()
        if 0 <= j < len(seen)
        and seen[j]
        and (left is None or j >= stand - left)
        and (right is None or j <= stand + right)
    ]


def gather(cache: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """Return the keys of a sequence (heads, length, head_dim) in float64; invalid entries read page 0."""
    page = cache.shape[2]
    inside = np.where((table >= 0) & (table < cache.shape[0]), table, 0)
    rows = [cache[inside[j // page], :, j % page].astype(np.float64) for j in range(length)]
    return np.stack(rows, axis=1) if rows else np.zeros((cache.shape[1], 0, cache.shape[3]))


def append(cache: np.ndarray, table: np.ndarray, rows: np.ndarray, start: int, scale: np.ndarray) -> None:
    """Store rows (heads, new, head_dim) at position start and after, divided by scale and rounded."""
    page = cache.shape[2]
    largest = LARGEST.get(cache.dtype.name)
    for t in range(rows.shape[1]):
        entry, row = divmod(start + t, page)
        if entry >= len(table) or not 0 <= table[entry] < cache.shape[0]:
            continue
        stored = rows[:, t]
        if largest is not None:
            stored = np.clip(stored / scale[:, None], -largest, largest)
        if cache.dtype == np.int8:
            stored = np.where(np.isnan(stored), 0, np.rint(stored))
        cache[table[entry], :, row] = stored.astype(cache.dtype)


def dequantized_int4(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Dequantise codes: feature i is in half i % 2 of byte i // 2; its value is scale * code + zero."""
    made = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]))
    group = made.shape[-1] // scale.shape[-1]
    for i in range(made.shape[-1]):
        code = codes[..., i // 2] >> 4 * (i % 2) & 15
        made[..., i] = scale[..., i // group].astype(float) * code + zero[..., i // group].astype(float)
    return made


def through_codes(rows: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Quantise rows to 4-bit codes and back: 16 levels from the lowest to the highest of a group.

    NaN becomes the lowest; magnitudes are clamped to the range of zero's dtype, and to 2**126.
    """
    most = min(float(np.finfo(zero.dtype).max), 2.0**126)
    groups = rows.reshape(*rows.shape[:-1], scale.shape[-1], rows.shape[-1] // scale.shape[-1])
    groups = np.clip(groups, -most, most)
    absent = np.isnan(groups)
    groups = np.where(absent & absent.all(-1, keepdims=True), 0, groups)
    lowest, highest = np.nanmin(groups, -1, keepdims=True), np.nanmax(groups, -1, keepdims=True)
    groups = np.where(np.isnan(groups), lowest, groups)
    low = lowest.astype(zero.dtype).astype(float)
    step = ((highest - lowest) / 15).astype(scale.dtype).astype(float)
    codes = np.clip(np.rint((groups - low) / np.where(step > 0, step, np.inf)), 0, 15)
    back: np.ndarray = (codes * step + low).reshape(rows.shape)
    return back


def number(bits: int, exponents: int, mantissas: int) -> float:
    """Value of a float with a sign, exponent bits and mantissa bits, without infinities and NaN."""
    exponent, mantissa = divmod(bits % 2 ** (exponents + mantissas), 2**mantissas)
    bias, unit = 2 ** (exponents - 1) - 1, 2.0**-mantissas
    size: float = (mantissa * unit + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    return -size if bits >> exponents + mantissas else size


E2M1 = np.array([number(bits, 2, 1) for bits in range(16)])
E4M3 = np.array([number(bits, 4, 3) for bits in range(256)])


def dequantized_nvfp4(codes: np.ndarray, block_scale: np.ndarray) -> np.ndarray:
    """Dequantise NVFP4: feature i is in half i % 2 of byte i // 2, times the block scale i // 16."""
    made = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]))
    scale = E4M3[block_scale.view(np.uint8)]
    for i in range(made.shape[-1]):
        made[..., i] = E2M1[codes[..., i // 2] >> 4 * (i % 2) & 15] * scale[..., i // 16]
    return made


def through_e2m1(rows: np.ndarray) -> np.ndarray:
    """Quantise rows to NVFP4 and back: a block scale is the e4m3 nearest to max / 6, and NaN becomes 0."""
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 16, 16)
    groups = np.clip(np.where(np.isnan(groups), 0, groups), -6 * 448, 6 * 448)
    step = nearest(np.abs(groups).max(-1, keepdims=True) / 6, E4M3[:127])
    sizes = nearest(np.abs(groups) / np.where(step > 0, step, np.inf), E2M1[:8])
    back: np.ndarray = (np.sign(groups) * sizes * step).reshape(rows.shape)
    return back


def nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Round x to the nearest of ascending numbers; ties to the even index."""
    far = np.abs(x[..., None] - numbers)
    found: np.ndarray = numbers[
        np.argmax((far == far.min(-1, keepdims=True)) * (2 - np.arange(len(numbers)) % 2), -1)
    ]
    return found


def pairs_of(
    dim: int, half: int, interleaved: bool, last: bool
) -> tuple[slice[int, int, int | None], slice[int, int, int | None]]:
    """Slices of the first and the second features of the pairs that rotation rotates."""
    begin = dim - 2 * half if last else 0
    middle, stop = begin + half, begin + 2 * half
    if interleaved:
        return slice(begin, stop, 2), slice(begin + 1, stop, 2)
    return slice(begin, middle), slice(middle, stop)


def rotate(
    x: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool,
    last: bool = False,
) -> np.ndarray:  # fmt: skip
    """Rotate pairs of features of x (heads, rows, head_dim) by the angles of their positions.

    Positions outside the tables are clamped.
    """
    positions = np.clip(positions, 0, len(cos) - 1)
    cos, sin = cos[positions], sin[positions]
    first, second = pairs_of(x.shape[-1], cos.shape[1], interleaved, last)
    turned: np.ndarray = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def rotated_queries(
    q: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool,
    last: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Rotate queries (heads, rows, head_dim), round to their dtype; also return their uncertainty.

    For 16-bit dtypes: two products and their sum in float32 have up to three rounding errors, which close to
    a tie may round to either neighbour, and both are right.
    """
    exact = rotate(q.astype(np.float64), positions, cos, sin, interleaved, last)
    rounded = exact.astype(q.dtype).astype(np.float64)
    if q.dtype.itemsize != 2:
        return rounded, np.zeros(exact.shape)
    sizes = (np.abs(q.astype(np.float64)), positions, np.abs(cos))
    size = np.maximum(*(rotate(*sizes, way * np.abs(sin), interleaved, last) for way in (-1, 1)))
    slack = np.zeros(exact.shape)  # of features that are not rotated
    for part in pairs_of(q.shape[-1], cos.shape[1], interleaved, last):
        slack[..., part] = 2 * UNIT_ROUNDOFF["float32"] * size[..., part]
    either = [np.abs((exact + way * slack).astype(q.dtype).astype(np.float64) - rounded) for way in (-1, 1)]
    return rounded, np.maximum(*either)
