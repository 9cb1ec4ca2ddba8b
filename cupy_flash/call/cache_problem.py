"""describe, for attention over a KV cache: its arguments checked, its pages and slots as one kind of view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArguments, Unsupported
from .adopt import adopt
from .arrays import CPU, ArrayView, device_name, overlaps_itself
from .checks import flag, integer
from .masks import resolve_band
from .offsets import check_counts, counts, flat_mask, longest_length, offsets
from .operands import AXES, FLOATS, cast, heads_hint, lift, row_operand, score_operand, table_of
from .options import Options, Packing
from .problem import MAX_SEQLEN, OFFSETS, Cache, Problem
from .spans import Spans, span_operand
from .values import check_options, finite_number

__all__ = ["PACKED", "adopt_cache", "check_values", "describe_cache", "pack_queries"]

MOST_SPLITS = 256
# Dtypes of a cache that are not q's. why uint8: CuPy has no dtype of its own for these bits.
QUANTISED = {"int8": "int8", "float8_e4m3fn": "float8_e4m3fn", "uint8": "float8_e4m3fn"}

# Of a cache of codes of 4 bits: what they stand for, by groups of so many features.
_CODES = ("k_scale", "k_zero", "v_scale", "v_zero")
_GROUPS = (32, 64, 128)

# Arrays that only packed queries and new keys have.
PACKED = frozenset(("cu_seqlens_q", "cu_seqlens_k_new", "seqused_q", "ragged_mask"))
_INTEGERS = ("cache_seqlens", "block_table", "cache_batch_idx")
_CACHED = ("q", "k_cache", "v_cache")
_REQUIRED = (*_CACHED, "cache_seqlens")

Views = dict[str, ArrayView]


class _Sizes(NamedTuple):
    """What the shapes say, once they agree."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    appended: int  # of each sequence, or of all if they are packed
    head_dim: int
    head_dim_v: int
    page: int  # keys of a page; 0 if a slot holds a whole sequence
    capacity: int  # keys of a sequence


def _wrong(headline: str, views: Mapping[str, ArrayView], hint: str | None = None) -> InvalidArguments:
    return InvalidArguments(headline, table_of(views), hint=hint)


def _check_kinds(raw: Views, layout: str) -> str:
    """Ranks, dtypes, libraries and devices; return the dtype of the cache."""
    q = raw["q"]
    packed = {"q": "cu_seqlens_q" in raw, "k": "cu_seqlens_k_new" in raw, "v": "cu_seqlens_k_new" in raw}
    if q.dtype not in FLOATS:
        raise _wrong(
            f"q has dtype {q.dtype}; attention is over {', '.join(FLOATS)}.", raw, cast("q", q, "float32")
        )
    for name, view in raw.items():
        if view.library != q.library and name != "mask_starts":
            headline = f"{name} is a {view.library} array, q a {q.library} array."
            raise _wrong(headline, raw, f"arrays of one library: from_dlpack({name})")
        if view.device != q.device:
            headline = f"{name} is on {device_name(view.device)}, q on {device_name(q.device)}."
            raise _wrong(headline, raw, "all arrays on one device")
        rank = 3 if packed.get(name) else 4
        if name in ("q", "k", "v", "k_cache", "v_cache") and len(view.shape) != rank:
            axes = AXES[layout] if rank == 4 else "(rows, heads, head_dim), cut by offsets"
            raise _wrong(f"{name} has rank {len(view.shape)}, not {rank}.", raw, f"{name} as {axes}")
        if name in ("k", "v") and view.dtype != q.dtype:
            raise _wrong(f"{name} has dtype {view.dtype}, q has {q.dtype}.", raw, cast(name, view, "q.dtype"))
        if name in _INTEGERS and view.dtype != "int32":
            raise _wrong(f"{name} has dtype {view.dtype}, not int32.", raw, cast(name, view, "int32"))
    if raw["k_cache"].dtype != raw["v_cache"].dtype:
        headline = f"k_cache has dtype {raw['k_cache'].dtype}, v_cache {raw['v_cache'].dtype}."
        raise _wrong(headline, raw, "one dtype for both")
    stored = raw["k_cache"].dtype
    if "k_zero" in raw or "v_zero" in raw:
        return _check_codes(raw)
    dtype = stored if stored == q.dtype else QUANTISED.get(stored)
    if dtype is None:
        hint = f"a cache of {q.dtype}, int8 or float8_e4m3fn (uint8 stands for its bits)"
        raise _wrong(f"k_cache has dtype {stored}.", raw, hint)
    return dtype


def _check_codes(raw: Views) -> str:
    """Kinds of a cache of 4-bit codes, and of what they stand for; their shapes are looked at later."""
    if raw["k_cache"].dtype != "uint8":
        hint = "uint8, two codes to a byte, as cupy_flash.int4.quantize gives them"
        raise _wrong(f"k_zero is given, and k_cache has dtype {raw['k_cache'].dtype}.", raw, hint)
    missing = [name for name in _CODES if name not in raw]
    if missing:
        headline = f"the cache holds codes of 4 bits and {missing[0]} is not given."
        raise _wrong(headline, raw, ", ".join(_CODES))
    for name in _CODES:
        if raw[name].dtype not in ("float16", "float32") or raw[name].dtype != raw["k_zero"].dtype:
            headline = f"{name} has dtype {raw[name].dtype}, k_zero {raw['k_zero'].dtype}."
            raise _wrong(headline, raw, "float16 or float32, one for all four")
        if len(raw[name].shape) != 4:
            headline = f"{name} has rank {len(raw[name].shape)}, not 4, beside codes of 4 bits."
            raise _wrong(headline, raw, f"{name} as the cache, with groups instead of features")
    return "int4"


def _codes(views: Views, raw: Views, layout: str) -> Views:
    """Scales and zeros of 4-bit codes as (slots, heads, keys, groups)."""
    lifted_codes = {name: lift(raw[name], layout, 4) for name in _CODES}
    for name, view in lifted_codes.items():
        cache = views[f"{name[0]}_cache"].shape
        groups, features = view.shape[3], 2 * cache[3]
        if view.shape[:3] != cache[:3] or not groups or features / groups not in _GROUPS:
            headline = f"{name} has shape {raw[name].shape}, {name[0]}_cache {raw[f'{name[0]}_cache'].shape}."
            raise _wrong(
                headline, raw, f"its first axes, and a scale for 32, 64 or 128 of {features} features"
            )
        if view.shape != lifted_codes[f"{name[0]}_zero"].shape:
            headline = f"{name} has shape {raw[name].shape}, {name[0]}_zero {raw[f'{name[0]}_zero'].shape}."
            raise _wrong(headline, raw, "one scale and one zero for each group")
    return lifted_codes


def _sizes(views: Views, raw: Views, layout: str, packing: Packing | None, most_keys: int | None) -> _Sizes:
    """Check every shape; views are (batch or slots, heads, seq, head_dim)."""
    batch, heads_q, seqlen_q, head_dim = views["q"].shape
    if packing:
        batch, seqlen_q = packing.batch, packing.seqlen_q
    slots, heads_k, rows, head_dim_k = views["k_cache"].shape
    head_dim_v = views["v_cache"].shape[3]
    if "k_zero" in raw:  # two to a byte
        head_dim_k, head_dim_v = 2 * head_dim_k, 2 * head_dim_v
    if 0 in (head_dim, head_dim_v):
        raise _wrong("head_dim is 0.", raw, "at least one feature per head")
    if head_dim_k != head_dim:
        headline = f"q has head_dim {head_dim}, k_cache has {head_dim_k}."
        raise _wrong(headline, raw, "the same head_dim for q and k_cache")
    if views["v_cache"].shape[:3] != (slots, heads_k, rows):
        headline = f"k_cache has shape {raw['k_cache'].shape}, v_cache {raw['v_cache'].shape}."
        raise _wrong(headline, raw, "the same shape but for head_dim")
    if heads_q % heads_k if heads_k else heads_q:
        headline = f"{heads_q} heads of q are not a multiple of {heads_k} of k_cache."
        raise _wrong(headline, raw, heads_hint(views, layout, "k_cache", "v_cache"))
    page, capacity = 0, rows
    if "block_table" in raw:
        table = raw["block_table"]
        if "cache_batch_idx" in raw:
            raise _wrong(
                "cache_batch_idx and block_table are both given.", raw,
                "block_table alone: its rows already say where each sequence is",
            )  # fmt: skip
        if len(table.shape) != 2 or table.shape[0] != batch:
            headline = f"block_table has shape {table.shape} for a batch of {batch}."
            raise _wrong(headline, raw, "(batch, pages of the longest sequence)")
        if not rows:
            raise _wrong("pages hold no keys.", raw, "a cache of (pages, heads, page, head_dim)")
        page, capacity = rows, rows * table.shape[1]
    elif "cache_batch_idx" in raw:
        if raw["cache_batch_idx"].shape != (batch,):
            headline = f"cache_batch_idx has shape {raw['cache_batch_idx'].shape} for a batch of {batch}."
            raise _wrong(headline, raw, "(batch,)")
    elif slots != batch:
        headline = f"q has a batch of {batch}, the cache {slots} slots."
        raise _wrong(headline, raw, "cache_batch_idx= for which slots, or block_table= for pages")
    if "cache_seqlens" in raw and raw["cache_seqlens"].shape != (batch,):
        headline = f"cache_seqlens has shape {raw['cache_seqlens'].shape} for a batch of {batch}."
        raise _wrong(headline, raw, "(batch,), or one integer for all")
    if most_keys is not None:
        if (n := integer(most_keys)) is None or n < 0:
            raise _wrong(f"max_seqlen_k is {most_keys!r}.", raw, "an integer, at least 0")
        capacity = min(capacity, n)
    if max(seqlen_q, capacity) > MAX_SEQLEN:
        raise Unsupported(f"a sequence of {max(seqlen_q, capacity)} is beyond 31 bits.", table_of(raw))
    appended = 0
    if ("k" in raw) != ("v" in raw):
        given = "k" if "k" in raw else "v"
        raise _wrong(f"{given} is given without {'v' if given == 'k' else 'k'}.", raw, "both or neither")
    if "k" in raw:
        appended = views["k"].shape[2]
        packed = "cu_seqlens_k_new" in raw
        for name, dim in (("k", head_dim), ("v", head_dim_v)):
            if views[name].shape != (1 if packed else batch, heads_k, appended, dim):
                headline = f"{name} has shape {raw[name].shape}, k {raw['k'].shape}."
                axes = "(rows, heads_k, head_dim)" if packed else "(batch, heads_k, new, head_dim)"
                raise _wrong(headline, raw, f"new keys and values: {axes}")
        if appended > capacity and not packed:
            raise _wrong(f"{appended} new keys do not fit a cache for {capacity}.", raw, "a larger cache")
    return _Sizes(batch, heads_q, heads_k, seqlen_q, appended, head_dim, head_dim_v, page, capacity)


def _rotary(raw: Views, sizes: _Sizes) -> int:
    """Check the tables of rotation; return how many features turn."""
    given = [name for name in ("rotary_cos", "rotary_sin") if name in raw]
    if not given:
        if "rotary_seqlens" in raw:
            raise _wrong("rotary_seqlens is given without rotary_cos.", raw, "rotary_cos and rotary_sin")
        return 0
    if len(given) == 1:
        missing = "rotary_sin" if given == ["rotary_cos"] else "rotary_cos"
        raise _wrong(f"{given[0]} is given without {missing}.", raw, "both or neither")
    cos, sin = raw["rotary_cos"], raw["rotary_sin"]
    if cos.shape != sin.shape or len(cos.shape) != 2:
        headline = f"rotary_cos has shape {cos.shape}, rotary_sin {sin.shape}."
        raise _wrong(headline, raw, "(positions, rotated features / 2) for both")
    if cos.dtype != sin.dtype or cos.dtype not in (raw["q"].dtype, "float32"):
        headline = f"rotary_cos has dtype {cos.dtype}, rotary_sin {sin.dtype}."
        raise _wrong(headline, raw, "float32 or the dtype of q, for both")
    turned = 2 * cos.shape[1]
    if not 0 < turned <= sizes.head_dim:
        headline = f"rotary_cos turns {turned} features of a head_dim of {sizes.head_dim}."
        raise _wrong(headline, raw, "at most head_dim / 2 columns")
    if cos.shape[0] < sizes.capacity and "rotary_seqlens" not in raw:
        headline = f"rotary_cos has {cos.shape[0]} positions, a sequence room for {sizes.capacity}."
        raise _wrong(headline, raw, "one row for each key that the cache may hold")
    return turned


def check_values(problem: Problem, raw: Mapping[str, ArrayView], length: int | None = None) -> None:
    """Refuse lengths beyond the cache, entries that lead outside it, and keys written to one place twice.

    Parameters
    ----------
    problem : Problem
        Of the arrays `raw`, as `describe_cache` found it.
    raw : mapping of str to ArrayView
    length : int, optional
        Of every sequence, if no array says it.
    """
    cache, capacity = problem.cache, problem.seqlen_k
    assert cache is not None
    lengths = raw["cache_seqlens"].integers().tolist() if length is None else [length] * problem.batch
    added = _new_keys(problem, raw)
    for b, (length, more) in enumerate(zip(lengths, added, strict=True)):
        if length < 0 or length + more > capacity:
            new = f" and {more} new keys are to follow" if more else ""
            where = f"cache_seqlens[{b}]" if "cache_seqlens" in raw else "cache_seqlens"
            headline = f"{where} is {length}{new}; a sequence has room for {capacity}."
            raise _wrong(headline, raw, "lengths before the call, at least 0, and a cache with room")
    _check_beginnings(problem, raw, [length + more for length, more in zip(lengths, added, strict=True)])
    name = "block_table" if "block_table" in raw else "cache_batch_idx"
    if name not in raw:
        return
    slots, page = raw["k_cache"].shape[0], cache.page or max(1, capacity)
    table = raw[name].integers().reshape(problem.batch, -1)
    written: dict[int, int] = {}
    for b, length in enumerate(lengths):
        used = -(-(length + added[b]) // page)
        for n, entry in enumerate(table[b, :used].tolist()):
            where = f"{name}[{b}, {n}]" if cache.page else f"{name}[{b}]"
            if not 0 <= entry < slots:
                what = "pages" if cache.page else "slots"
                raise _wrong(f"{where} is {entry}; the cache has {slots} {what}.", raw,
                             f"entries from 0 to {slots - 1} for all keys in use")  # fmt: skip
            if added[b] and n >= length // page:
                if entry in written:
                    headline = f"{where} is {entry}, where sequence {written[entry]} appends keys too."
                    raise _wrong(headline, raw, "a page of its own for each sequence that grows")
                written[entry] = b


def _new_keys(problem: Problem, raw: Mapping[str, ArrayView]) -> list[int]:
    """New keys of each sequence."""
    assert problem.cache is not None
    if problem.cache.packed:
        added: list[int] = np.diff(raw["cu_seqlens_k_new"].integers()).tolist()
        return added
    return [problem.cache.appended] * problem.batch


def _check_beginnings(problem: Problem, raw: Mapping[str, ArrayView], lengths: list[int]) -> None:
    """Refuse padding behind the last key, and rotations by positions that the tables do not have."""
    pads = raw["cache_leftpad"].integers().tolist() if "cache_leftpad" in raw else []
    for b, pad in enumerate(pads):
        if not 0 <= pad <= lengths[b]:
            headline = f"cache_leftpad[{b}] is {pad}; the sequence has {lengths[b]} keys."
            raise _wrong(headline, raw, "keys to leave out, from 0 to the length of the sequence")
    if "rotary_seqlens" not in raw:
        return
    queries = [problem.seqlen_q] * problem.batch
    if problem.packed:
        queries = np.diff(raw["cu_seqlens_q"].integers()).tolist()
    positions, added = raw["rotary_cos"].shape[0], _new_keys(problem, raw)
    for b, first in enumerate(raw["rotary_seqlens"].integers().tolist()):
        rows = max(queries[b], added[b])
        if not 0 <= first <= positions - rows:
            headline = f"rotary_seqlens[{b}] is {first}; the tables have {positions} rows for {rows} more."
            raise _wrong(headline, raw, "longer tables, or positions from 0 on")


def pack_queries(
    raw: Views, layout: str, longest: int | None, most_keys: int | None, length: int | None
) -> Packing | None:
    """Check offsets of queries and of new keys, and of masks in a row; None if queries are not packed.

    Parameters
    ----------
    raw : dict of str to ArrayView
        Those of the call; mask_starts is added for a ragged_mask.
    layout : {"bhsd", "bshd"}
    longest : int or None
        The longest sequence of queries, as the caller claims it.
    most_keys : int or None
        Room of a sequence, as the caller claims it.
    length : int or None
        Of every sequence, if no array says it.
    """
    if "cu_seqlens_k_new" in raw and "k" in raw:
        raw["cu_seqlens_k_new"] = new = offsets(raw["cu_seqlens_k_new"], "cu_seqlens_k_new")
        if new.device == CPU:
            longest_length(new, "cu_seqlens_k_new", raw["k"].shape[0], None)
    if "cu_seqlens_q" not in raw:
        packed_only = [n for n in ("seqused_q", "ragged_mask") if n in raw]
        if packed_only or longest is not None:
            name = packed_only[0] if packed_only else "max_seqlen_q"
            raise _wrong(f"{name} is given without cu_seqlens_q.", raw, "cu_seqlens_q, for packed queries")
        return None
    cut = offsets(raw["cu_seqlens_q"], "cu_seqlens_q", longest)
    batch = cut.shape[0] - 1
    seqlen_q = longest_length(cut, "cu_seqlens_q", raw["q"].shape[0], longest)
    if "seqused_q" in raw:
        counts(raw["seqused_q"], "seqused_q", batch)
        check_counts(raw, "seqused_q", "cu_seqlens_q", "queries")
    if "ragged_mask" in raw:
        queries = raw["seqused_q"].integers() if "seqused_q" in raw else np.diff(cut.integers())
        flat_mask(raw, queries, _keys_in_use(raw, layout, batch, most_keys, length))
    return Packing(batch, seqlen_q, 0, False)


def _keys_in_use(raw: Views, layout: str, batch: int, most_keys: int | None, length: int | None) -> Any:
    """Keys of each sequence after the call, as far as there is room for them."""
    axis = 1 if layout == "bshd" else 2
    if len(raw["k_cache"].shape) != 4:
        return np.zeros(batch)  # is refused for it, when the problem is described
    room = raw["k_cache"].shape[axis] * (raw["block_table"].shape[-1] if "block_table" in raw else 1)
    room = room if most_keys is None else min(room, most_keys)
    lengths = np.full(batch, length, np.int64) if length is not None else raw["cache_seqlens"].integers()
    added: Any = 0
    if "cu_seqlens_k_new" in raw:
        added = np.diff(raw["cu_seqlens_k_new"].integers())
    elif "k" in raw:
        added = raw["k"].shape[axis]
    return np.minimum(np.clip(lengths.astype(np.int64), 0, room) + added, room)


def _check_writable(raw: Views) -> None:
    """Appending needs caches that can be written."""
    if "k" not in raw:
        return
    for name in ("k_cache", "v_cache", *(_CODES if "k_zero" in raw else ())):
        if raw[name].library == "jax" and raw[name].readonly:
            raise _wrong(
                "JAX arrays cannot be written, so nothing can be appended to a cache of them.", raw,
                "cupy_flash.jax.attention_with_kv_cache, which returns the caches",
            )  # fmt: skip
        if raw[name].readonly or overlaps_itself(raw[name]):
            state = "read-only" if raw[name].readonly else f"its own overlap: strides {raw[name].strides}"
            raise _wrong(f"{name} is {state}; new keys are written into it.", raw, f"a copy of {name}")


def adopt_cache(arrays: Mapping[str, Any]) -> tuple[Views, int | None]:
    """Adopt what a call gives.

    Parameters
    ----------
    arrays : mapping of str to array
        q, k_cache, v_cache, cache_seqlens (an array or an integer), and block_table, cache_batch_idx, k, v,
        rotary_cos, rotary_sin, k_scale, v_scale, k_zero, v_zero, alibi_slopes, sinks, out, each of which may
        be None.

    Returns
    -------
    views : dict of str to ArrayView
        Without cache_seqlens if that is an integer.
    length : int or None
        That integer.
    """
    named = {name: x for name, x in arrays.items() if x is not None or name in _REQUIRED}
    lengths, length = named["cache_seqlens"], None
    if isinstance(lengths, (bool, float, list, tuple, str)) or lengths is None:
        raise InvalidArguments(
            f"cache_seqlens is {lengths!r}.", hint="an int32 array (batch,), or one integer for all"
        )
    if isinstance(lengths, (int, np.integer)):
        length = int(named.pop("cache_seqlens"))
        _check_one_length(length)
    return {name: adopt(x, name) for name, x in named.items()}, length


def describe_cache(
    raw: Views,
    options: Options,
    interleaved: bool = False,
    splits: int | None = None,
    want_lse: bool = False,
    packing: Packing | None = None,
    most_keys: int | None = None,
    unrotated: bool = False,
) -> tuple[Problem, Views]:
    """Check a call of `attention_with_kv_cache` and describe it.

    Parameters
    ----------
    raw : dict of str to ArrayView
        The views that `adopt_cache` makes. Lengths and tables are not read; `check_values` does.
    options : Options
    interleaved : bool
        Which features a rotation pairs.
    splits : int, optional
    want_lse : bool
    packing : Packing, optional
        Of packed queries, as `pack_queries` found it.
    most_keys : int, optional
        Room of a sequence, if that is to be less than the cache has.
    unrotated : bool
        Keys of the cache are rotated when they are read.

    Returns
    -------
    problem : Problem
    views : dict of str to ArrayView
        Caches as (slots, heads, keys, head_dim), the others of rank 4 as (batch, heads, seq, head_dim);
        block_table (batch, pages of a sequence), also if the caller gave cache_batch_idx;
        scales (1 or batch, heads_k), of 4-bit codes (slots, heads_k, keys, groups) as their zeros.

    Raises
    ------
    InvalidArguments, Unsupported
    """
    check_options(options)
    dtype = _check_kinds(raw, options.layout)
    views: Views = {
        n: lift(raw[n], options.layout if len(raw[n].shape) == 4 else "bshd", len(raw[n].shape))
        for n in ("q", "k", "v", "k_cache", "v_cache") if n in raw
    }  # fmt: skip
    sizes = _sizes(views, raw, options.layout, packing, most_keys)
    if dtype == "int4":
        views |= _codes(views, raw, options.layout)
    else:
        views["k_cache"], views["v_cache"] = (views[n]._replace(dtype=dtype) for n in ("k_cache", "v_cache"))
    rotary = _rotary(raw, sizes)
    unrotated = flag(unrotated, "rotate_cache")
    if unrotated and (not rotary or "rotary_seqlens" in raw):
        headline = (
            f"rotate_cache is {unrotated!r} {'with rotary_seqlens' if rotary else 'without rotary_cos'}."
        )
        raise _wrong(headline, raw, "rotary_cos and rotary_sin alone: keys are rotated by their place")
    views |= {n: raw[n] for n in ("rotary_cos", "rotary_sin", "cache_seqlens", "ragged_mask") if n in raw}
    views |= {n: raw[n] for n in OFFSETS if n in raw}
    for n in ("cache_leftpad", "rotary_seqlens"):
        if n in raw:
            views[n] = counts(raw[n], n, sizes.batch)
    if "cu_seqlens_k_new" in raw and "k" in raw:
        views["cu_seqlens_k_new"] = raw["cu_seqlens_k_new"]
        if raw["cu_seqlens_k_new"].shape != (sizes.batch + 1,):
            headline = (
                f"cu_seqlens_k_new has shape {raw['cu_seqlens_k_new'].shape} for a batch of {sizes.batch}."
            )
            raise _wrong(headline, raw, "(batch + 1,)")
    full = (sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.capacity)
    mask = score_operand("mask", raw, views, full, ("bool",))
    spans = _spans(raw, views, (*full[:3], sizes.seqlen_q))
    if "block_table" in raw:
        views["block_table"] = raw["block_table"]
    elif "cache_batch_idx" in raw:
        view = raw["cache_batch_idx"]
        views["block_table"] = view._replace(shape=(*view.shape, 1), strides=(*view.strides, 1))
    acc = "float64" if raw["q"].dtype == "float64" else "float32"
    for name, heads in (
        ("alibi_slopes", sizes.heads_q),
        ("k_scale", sizes.heads_k),
        ("v_scale", sizes.heads_k),
    ):
        if name in raw and name not in views:
            views[name] = row_operand(name, raw, ((heads,), (sizes.batch, heads)), acc).lifted(2)
    if "sinks" in raw:
        views["sinks"] = row_operand("sinks", raw, ((sizes.heads_q,),), acc)
    _check_scales(raw, dtype)
    _check_writable(raw)
    if splits is not None and not 1 <= (integer(splits) or 0) <= MOST_SPLITS:
        raise InvalidArguments(
            f"splits is {splits!r}.", hint=f"an integer from 1 to {MOST_SPLITS}, or None for the planned ones"
        )
    band = resolve_band(
        bool(options.causal), options.window, "bottom_right", "alibi_slopes" in raw,
        sizes.seqlen_q, sizes.capacity, packed_alike=True,
    )  # fmt: skip
    if options.precision is not None and raw["q"].dtype != "float32":
        raise _wrong(f"precision={options.precision!r} is for float32 inputs.", raw, "precision=None")
    default_scale = sizes.head_dim**-0.5
    item = raw["q"].item_bytes
    problem = Problem(
        direction="decode",
        dtype=raw["q"].dtype,
        precision=options.precision,
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        heads_k=sizes.heads_k,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.capacity,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        scale=default_scale if options.scale is None else finite_number(options.scale, "scale"),
        softcap=None if options.softcap is None else float(options.softcap),
        left=band.left,
        right=band.right,
        offset_from_end=True,
        alibi="alibi_slopes" in raw,
        sinks="sinks" in raw,
        mask=mask,
        spans=spans,
        want_lse=want_lse,
        packed=packing is not None,
        rows_q=views["q"].shape[2] if packing else 0,
        in_rows=all(views[n].in_rows() for n in _CACHED),
        aligned=all(views[n].aligned() for n in _CACHED) and not sizes.head_dim_v * item % 16,
        boxes=all(views[n].boxable() for n in _CACHED),
        cache=Cache(
            dtype,
            sizes.page,
            sizes.appended,
            rotary,
            flag(interleaved, "rotary_interleaved"),
            splits,
            "cache_batch_idx" in raw,
            "cu_seqlens_k_new" in views,
            "cache_leftpad" in raw,
            "rotary_seqlens" in raw,
            unrotated,
        ),
        reproducible=options.reproducible,
        used_q="seqused_q" in raw,
        ragged_mask="ragged_mask" in raw,
    )
    return problem, views


def _spans(raw: Views, views: Views, full: tuple[int, int, int, int]) -> Spans | None:
    """Spans of the last keys, as many as there are queries."""
    spans = span_operand(raw, views, full)
    # why not one query: then both forms say the same.
    if spans is not None and spans.by_query and full[2] != 1:
        headline = f"spans has shape {raw['spans'].shape}: of keys for each query."
        raise _wrong(
            headline, raw, f"(..., 1, {full[2]}, 2 or 4): the queries that see each of the last keys"
        )
    return None if spans is None else spans._replace(by_query=False, limit=full[2])


def _check_one_length(length: int) -> None:
    if not -(2**31) <= length < 2**31:
        raise InvalidArguments(f"cache_seqlens is {length}, beyond 31 bits.", hint="keys in use")


def _check_scales(raw: Views, dtype: str) -> None:
    """Scales belong to stored integers and 8-bit floats, and integers need them."""
    quantised = dtype != raw["q"].dtype
    for name in ("k_scale", "v_scale"):
        if name in raw and not quantised:
            headline = f"{name} is given, but the cache holds {dtype} like q."
            raise _wrong(headline, raw, f"{name}=None; scales are for int8 and float8_e4m3fn")
        if name not in raw and dtype == "int8":
            headline = f"the cache holds int8 and {name} is not given."
            raise _wrong(headline, raw, f"{name}= (heads_k,) float32: a stored key times it is the key")
