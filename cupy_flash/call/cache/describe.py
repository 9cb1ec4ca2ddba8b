"""describe for attention over a KV cache: check its arguments, and view pages and slots uniformly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InvalidArgumentsError
from ..adopt import adopt
from ..arrays import CPU, ArrayView, accumulator_of
from ..checks import flag, integer
from ..codes import CODE_SCALES, kind_of_codes
from ..describe import OFFSETS, head_operands, problem_of
from ..given import CacheCall, Options, Packing
from ..masks import resolve_band
from ..offsets import check_counts, counts, flat_mask, kept, longest_length, offsets
from ..operands import Views, lift, row_operand, score_operand, wrong
from ..problem import Cache, Problem
from ..spans import Intervals, span_operand
from ..values import check_options
from .kinds import check_kinds, check_scales, check_writable, is_first_columns, same_memory
from .pages import pages_of_one_key
from .sizes import Sizes, codes_of, lifted_codes, rotated_features, sizes_of

__all__ = ["PACKED", "adopt_cache", "describe_cache", "pack_queries"]

MOST_SPLITS = 256
# Arrays that only calls with packed queries or packed new keys have.
PACKED = frozenset(("cu_seqlens_q", "cu_seqlens_k_new", "seqused_q", "ragged_mask"))
_CACHED = ("q", "k_cache", "v_cache")
_REQUIRED = (*_CACHED, "cache_seqlens")


def pack_queries(raw: Views, layout: str, call: CacheCall, length: int | None) -> Packing | None:
    """Check the offsets of packed queries and new keys, and a ragged mask; None if queries are not packed.

    `length` is cache_seqlens, if it is one integer for all. For a ragged mask, mask_starts is added to `raw`.
    """
    if "cu_seqlens_k_new" in raw and "k" in raw:
        raw["cu_seqlens_k_new"] = new = kept(offsets(raw["cu_seqlens_k_new"], "cu_seqlens_k_new"))
        if new.device == CPU:
            longest_length(new, "cu_seqlens_k_new", raw["k"].shape[0], None)
    if "cu_seqlens_q" not in raw:
        packed_only = [n for n in ("seqused_q", "ragged_mask") if n in raw]
        if packed_only or call.longest is not None:
            name = packed_only[0] if packed_only else "max_seqlen_q"
            given = "mask is a RaggedMask" if name == "ragged_mask" else f"{name} is given"
            raise wrong(f"{given} without cu_seqlens_q.", raw, "cu_seqlens_q, for packed queries")
        return None
    raw["cu_seqlens_q"] = cut = kept(offsets(raw["cu_seqlens_q"], "cu_seqlens_q", call.longest))
    batch = cut.shape[0] - 1
    seqlen_q = longest_length(cut, "cu_seqlens_q", raw["q"].shape[0], call.longest)
    if "seqused_q" in raw:
        raw["seqused_q"] = kept(counts(raw["seqused_q"], "seqused_q", batch))
        check_counts(raw, "seqused_q", "cu_seqlens_q", "queries")
    if "ragged_mask" in raw:
        queries = raw["seqused_q"].integers() if "seqused_q" in raw else np.diff(cut.integers())
        flat_mask(raw, queries, _keys_in_use(raw, layout, batch, call.most_keys, length))
    return Packing(batch, seqlen_q, 0, False)


def _keys_in_use(raw: Views, layout: str, batch: int, most_keys: int | None, length: int | None) -> Any:
    """Keys of each sequence after the call, clamped to the capacity."""
    axis = 1 if layout == "bshd" else 2
    if len(raw["k_cache"].shape) != 4:
        return np.zeros(batch)  # `describe_cache` refuses this rank
    room = raw["k_cache"].shape[axis] * (raw["block_table"].shape[-1] if "block_table" in raw else 1)
    room = room if most_keys is None else min(room, most_keys)
    lengths = np.full(batch, length, np.int64) if length is not None else raw["cache_seqlens"].integers()
    added: Any = 0
    if "cu_seqlens_k_new" in raw:
        added = np.diff(raw["cu_seqlens_k_new"].integers())
    elif "k" in raw:
        added = raw["k"].shape[axis]
    return np.minimum(np.clip(lengths.astype(np.int64), 0, room) + added, room)


def adopt_cache(arrays: Mapping[str, Any]) -> tuple[Views, int | None]:
    """Adopt the arrays of a call that are not None, and separate cache_seqlens if it is an integer."""
    named = {name: x for name, x in arrays.items() if x is not None or name in _REQUIRED}
    lengths, length = named["cache_seqlens"], None
    if isinstance(lengths, (bool, float, list, tuple, str)) or lengths is None:
        raise InvalidArgumentsError(
            f"cache_seqlens is {lengths!r}.", hint="an int32 array (batch,), or one integer for all"
        )
    if isinstance(lengths, (int, np.integer)):
        length = int(named.pop("cache_seqlens"))
        check_one_length(length)
    return {name: adopt(x, name) for name, x in named.items()}, length


def describe_cache(
    raw: Views,
    options: Options,
    call: CacheCall,
    want_lse: bool = False,
    packing: Packing | None = None,
) -> tuple[Problem, Views]:
    """Check a call of `attention_with_kv_cache` and describe it.

    Parameters
    ----------
    raw : dict of str to ArrayView
        The views from `adopt_cache`. Values of lengths and tables are not read; `check_values` does that.
    options : Options
    call : CacheCall
    want_lse : bool
    packing : Packing, optional
        For packed queries, from `pack_queries`.

    Returns
    -------
    problem : Problem
    views : dict of str to ArrayView
        Caches as (slots, heads, keys, head_dim), the others of rank 4 as (batch, heads, seq, head_dim);
        block_table (batch, pages of a sequence), also made from cache_batch_idx; scales (1 or batch,
        heads_k), for 4-bit codes (slots, heads_k, keys, groups), like zeros and block scales.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
    """
    check_options(options)
    dtype = check_kinds(raw, options.layout)
    kind = kind_of_codes(raw)
    if call.single_keys:
        caches = ("k_cache", "v_cache", *CODE_SCALES.get(kind, ()))
        raw = {**raw, **{name: pages_of_one_key(name, raw, options.layout) for name in caches}}
    latent = is_first_columns(raw, "v_cache", "k_cache") and not kind
    views: Views = {
        n: lift(raw[n], options.layout if len(raw[n].shape) == 4 else "bshd", len(raw[n].shape))
        for n in ("q", "k", "v", "k_cache", "v_cache") if n in raw
    }  # fmt: skip
    if latent and "k" in raw:
        views["v"] = _values_of_new_latents(raw, views)
    sizes = sizes_of(views, raw, options.layout, packing, call.most_keys)
    if kind:
        views |= lifted_codes(views, raw, options.layout)
    else:
        views["k_cache"], views["v_cache"] = (views[n]._replace(dtype=dtype) for n in ("k_cache", "v_cache"))
    rotary, first_rotated, unrotated = _rotation(raw, sizes, call, latent and "k" in raw)
    views |= _rows_of_sequences(raw, sizes)
    full = (sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.capacity)
    mask = score_operand("mask", raw, views, full, ("bool",))
    spans = _spans(raw, views, (*full[:3], sizes.seqlen_q))
    views |= _table(raw)
    acc = accumulator_of(raw["q"].dtype)
    per_head = head_operands(raw, views, sizes.batch, sizes.heads_q, acc)
    for name in ("k_scale", "v_scale"):
        if name in raw and name not in views:
            shapes = ((sizes.heads_k,), (sizes.batch, sizes.heads_k))
            views[name] = row_operand(name, raw, shapes, acc).lifted(2)
    check_scales(raw, dtype)
    check_writable(raw)
    if call.splits is not None and not 1 <= (integer(call.splits) or 0) <= MOST_SPLITS:
        raise InvalidArgumentsError(
            f"tuning.splits is {call.splits!r}.",
            hint=f"an integer from 1 to {MOST_SPLITS}, or None for the planned number",
        )
    band = resolve_band(
        bool(options.causal), options.window, "bottom_right", "alibi_slopes" in raw,
        sizes.seqlen_q, sizes.capacity, packed_alike=True,
    )  # fmt: skip
    cache = Cache(
        dtype,
        sizes.page,
        sizes.appended,
        rotary,
        flag(call.interleaved, "rotary.interleaved"),
        call.splits,
        indexed="cache_batch_idx" in raw,
        packed="cu_seqlens_k_new" in views,
        leftpad="cache_leftpad" in raw,
        rotary_seqlens="rotary_seqlens" in raw,
        unrotated=unrotated,
        codes=codes_of(views, kind) if kind else None,
        latent=latent,
        first_rotated=first_rotated,
    )
    problem = problem_of(
        "decode",
        raw,
        views,
        _CACHED,
        options,
        packing,
        band,
        batch=sizes.batch,
        heads_k=sizes.heads_k,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.capacity,
        head_dim_v=sizes.head_dim_v,
        offset_from_end=True,
        per_head=per_head,
        mask=mask,
        spans=spans,
        want_lse=want_lse,
        aligned=all(views[n].aligned() for n in _CACHED) and not sizes.head_dim_v * raw["q"].item_bytes % 16,
        cache=cache,
    )
    return problem, views


def _values_of_new_latents(raw: Views, views: Views) -> ArrayView:
    """The first columns of k. why: a new latent is stored once, with one scale."""
    if "v" in raw and not is_first_columns(raw, "v", "k"):
        headline = "v_cache is the first columns of k_cache, but v is not the first columns of k."
        raise wrong(headline, raw, "v=None: the first columns of a new latent are its value")
    # why not in JAX: there one array may have two buffers, and a LatentCache has only one scale.
    if not same_memory(raw, "v_scale", "k_scale") and raw["q"].library != "jax":
        headline = "v_cache is the first columns of k_cache, but they have two arrays of scales."
        raise wrong(headline, raw, "one array as both scales: a new latent is stored once")
    k, columns = views["k"], views["v_cache"].shape[3]
    return k._replace(shape=(*k.shape[:3], columns))


def _rotation(raw: Views, sizes: Sizes, call: CacheCall, of_new_latents: bool) -> tuple[int, int, bool]:
    """How many features rotate, the first of them, and whether keys are stored unrotated."""
    rotary = rotated_features(raw, sizes)
    first = sizes.head_dim - rotary if flag(call.rotates_last, "rotary.last") else 0
    unrotated = flag(call.unrotated, "rotary.on_read")
    if of_new_latents and rotary and not unrotated and first < sizes.head_dim_v:
        which, values = f"{'last' if first else 'first'} {rotary}", sizes.head_dim_v
        headline = f"rotary turns the {which} features of new latents, whose first {values} are values too."
        most = sizes.head_dim - values
        raise wrong(headline, raw, f"cupy_flash.Rotary(cos, sin, last=True), which turns at most {most}")
    if unrotated and (not rotary or "rotary_seqlens" in raw):
        headline = f"rotary.on_read is True {'with rotary.seqlens' if rotary else 'without rotary.cos'}."
        raise wrong(
            headline, raw, "cupy_flash.Rotary(cos, sin, on_read=True): keys are rotated by their place"
        )
    return rotary, first if rotary else 0, unrotated


def _rows_of_sequences(raw: Views, sizes: Sizes) -> Views:
    """Tables of the rotation, and what says where the rows of each sequence are."""
    names = ("rotary_cos", "rotary_sin", "cache_seqlens", "ragged_mask", *OFFSETS)
    views = {n: raw[n] for n in names if n in raw}
    for n in ("cache_leftpad", "rotary_seqlens"):
        if n in raw:
            views[n] = counts(raw[n], n, sizes.batch)
    if "cu_seqlens_k_new" in raw:
        views["cu_seqlens_k_new"] = new = raw["cu_seqlens_k_new"]
        if new.shape != (sizes.batch + 1,):
            headline = f"cu_seqlens_k_new has shape {new.shape} for a batch of {sizes.batch}."
            raise wrong(headline, raw, "(batch + 1,)")
    return views


def _table(raw: Views) -> Views:
    """The block table, if there is one; of slots it has one column."""
    if "block_table" in raw:
        return {"block_table": raw["block_table"]}
    if "cache_batch_idx" in raw:
        slots = raw["cache_batch_idx"]
        return {"block_table": slots._replace(shape=(*slots.shape, 1), strides=(*slots.strides, 1))}
    return {}


def _spans(raw: Views, views: Views, full: tuple[int, int, int, int]) -> Intervals | None:
    """Check spans over a cache: intervals of queries for each of the last seqlen_q keys."""
    spans = span_operand(raw, views, full)
    # why not for one query: then both forms are equivalent.
    if spans is not None and spans.by_query and full[2] != 1:
        headline = f"mask.bounds has shape {raw['spans'].shape}: of keys for each query."
        raise wrong(headline, raw, f"(..., 1, {full[2]}, 2 or 4): the queries that see each of the last keys")
    return None if spans is None else spans._replace(by_query=False, limit=full[2])


def check_one_length(length: int) -> None:
    if not -(2**31) <= length < 2**31:
        raise InvalidArgumentsError(f"cache_seqlens is {length}, beyond 31 bits.", hint="keys in use")
