"""describe, for attention over a KV cache: its arguments checked, its pages and slots as one kind of view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArguments, Unsupported
from .adopt import adopt
from .arrays import ArrayView, device_name, overlaps_itself
from .checks import flag, integer
from .masks import resolve_band
from .operands import AXES, FLOATS, cast, heads_hint, lift, row_operand, table_of
from .options import Options, check_options, finite_number
from .problem import MAX_SEQLEN, Cache, Problem

__all__ = ["adopt_cache", "check_values", "describe_cache"]

SMALLEST_PAGE = 16
MOST_SPLITS = 256
# Dtypes of a cache that are not q's. why uint8: CuPy has no dtype of its own for these bits.
QUANTISED = {"int8": "int8", "float8_e4m3fn": "float8_e4m3fn", "uint8": "float8_e4m3fn"}

_CACHED = ("q", "k_cache", "v_cache")
_REQUIRED = (*_CACHED, "cache_seqlens")

Views = dict[str, ArrayView]


class _Sizes(NamedTuple):
    """What the shapes say, once they agree."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    appended: int
    head_dim: int
    head_dim_v: int
    page: int  # keys of a page; 0 if a slot holds a whole sequence
    capacity: int  # keys of a sequence


def _wrong(headline: str, views: Mapping[str, ArrayView], hint: str | None = None) -> InvalidArguments:
    return InvalidArguments(headline, table_of(views), hint=hint)


def _check_kinds(raw: Views, layout: str) -> str:
    """Ranks, dtypes, libraries and devices; return the dtype of the cache."""
    q = raw["q"]
    if q.dtype not in FLOATS:
        raise _wrong(
            f"q has dtype {q.dtype}; attention is over {', '.join(FLOATS)}.", raw, cast("q", q, "float32")
        )
    for name, view in raw.items():
        if view.library != q.library:
            headline = f"{name} is a {view.library} array, q a {q.library} array."
            raise _wrong(headline, raw, f"arrays of one library: from_dlpack({name})")
        if view.device != q.device:
            headline = f"{name} is on {device_name(view.device)}, q on {device_name(q.device)}."
            raise _wrong(headline, raw, "all arrays on one device")
        if name in ("q", "k", "v", "k_cache", "v_cache") and len(view.shape) != 4:
            raise _wrong(f"{name} has rank {len(view.shape)}, not 4.", raw, f"{name} as {AXES[layout]}")
        if name in ("k", "v") and view.dtype != q.dtype:
            raise _wrong(f"{name} has dtype {view.dtype}, q has {q.dtype}.", raw, cast(name, view, "q.dtype"))
        if name in ("cache_seqlens", "block_table", "cache_batch_idx") and view.dtype != "int32":
            raise _wrong(f"{name} has dtype {view.dtype}, not int32.", raw, cast(name, view, "int32"))
    if raw["k_cache"].dtype != raw["v_cache"].dtype:
        headline = f"k_cache has dtype {raw['k_cache'].dtype}, v_cache {raw['v_cache'].dtype}."
        raise _wrong(headline, raw, "one dtype for both")
    stored = raw["k_cache"].dtype
    dtype = stored if stored == q.dtype else QUANTISED.get(stored)
    if dtype is None:
        hint = f"a cache of {q.dtype}, int8 or float8_e4m3fn (uint8 stands for its bits)"
        raise _wrong(f"k_cache has dtype {stored}.", raw, hint)
    return dtype


def _sizes(views: Views, raw: Views, layout: str) -> _Sizes:
    """Check every shape; views are (batch or slots, heads, seq, head_dim)."""
    batch, heads_q, seqlen_q, head_dim = views["q"].shape
    slots, heads_k, rows, head_dim_k = views["k_cache"].shape
    head_dim_v = views["v_cache"].shape[3]
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
        if rows < SMALLEST_PAGE or rows & rows - 1:
            headline = f"pages hold {rows} keys, not a power of two of at least {SMALLEST_PAGE}."
            raise _wrong(headline, raw, "a cache of (pages, heads, page, head_dim) in the layout asked for")
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
    if max(seqlen_q, capacity) > MAX_SEQLEN:
        raise Unsupported(f"a sequence of {max(seqlen_q, capacity)} is beyond 31 bits.", table_of(raw))
    appended = 0
    if ("k" in raw) != ("v" in raw):
        given = "k" if "k" in raw else "v"
        raise _wrong(f"{given} is given without {'v' if given == 'k' else 'k'}.", raw, "both or neither")
    if "k" in raw:
        appended = views["k"].shape[2]
        for name, dim in (("k", head_dim), ("v", head_dim_v)):
            if views[name].shape != (batch, heads_k, appended, dim):
                headline = f"{name} has shape {raw[name].shape}, k {raw['k'].shape}."
                raise _wrong(headline, raw, "new keys and values: (batch, heads_k, new, head_dim)")
        if appended > capacity:
            raise _wrong(f"{appended} new keys do not fit a cache for {capacity}.", raw, "a larger cache")
    return _Sizes(batch, heads_q, heads_k, seqlen_q, appended, head_dim, head_dim_v, page, capacity)


def _rotary(raw: Views, sizes: _Sizes) -> int:
    """Check the tables of rotation; return how many features turn."""
    given = [name for name in ("rotary_cos", "rotary_sin") if name in raw]
    if not given:
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
    if cos.shape[0] < sizes.capacity:
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
    for b, length in enumerate(lengths):
        if length < 0 or length + cache.appended > capacity:
            new = f" and {cache.appended} new keys are to follow" if cache.appended else ""
            where = f"cache_seqlens[{b}]" if "cache_seqlens" in raw else "cache_seqlens"
            headline = f"{where} is {length}{new}; a sequence has room for {capacity}."
            raise _wrong(headline, raw, "lengths before the call, at least 0, and a cache with room")
    name = "block_table" if "block_table" in raw else "cache_batch_idx"
    if name not in raw:
        return
    slots, page = raw["k_cache"].shape[0], cache.page or max(1, capacity)
    table = raw[name].integers().reshape(problem.batch, -1)
    written: dict[int, int] = {}
    for b, length in enumerate(lengths):
        used = -(-(length + cache.appended) // page)
        for n, entry in enumerate(table[b, :used].tolist()):
            where = f"{name}[{b}, {n}]" if cache.page else f"{name}[{b}]"
            if not 0 <= entry < slots:
                what = "pages" if cache.page else "slots"
                raise _wrong(f"{where} is {entry}; the cache has {slots} {what}.", raw,
                             f"entries from 0 to {slots - 1} for all keys in use")  # fmt: skip
            if cache.appended and n >= length // page:
                if entry in written:
                    headline = f"{where} is {entry}, where sequence {written[entry]} appends keys too."
                    raise _wrong(headline, raw, "a page of its own for each sequence that grows")
                written[entry] = b


def _check_writable(raw: Views) -> None:
    """Appending needs caches that can be written."""
    if "k" not in raw:
        return
    for name in ("k_cache", "v_cache"):
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
        rotary_cos, rotary_sin, k_scale, v_scale, alibi_slopes, sinks, out, each of which may be None.

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

    Returns
    -------
    problem : Problem
    views : dict of str to ArrayView
        Caches as (slots, heads, keys, head_dim), the others of rank 4 as (batch, heads, seq, head_dim);
        block_table (batch, pages of a sequence), also if the caller gave cache_batch_idx;
        scales (1 or batch, heads_k).

    Raises
    ------
    InvalidArguments, Unsupported
    """
    check_options(options)
    dtype = _check_kinds(raw, options.layout)
    views: Views = {
        n: lift(raw[n], options.layout, 4) for n in ("q", "k", "v", "k_cache", "v_cache") if n in raw
    }
    sizes = _sizes(views, raw, options.layout)
    views["k_cache"], views["v_cache"] = (views[n]._replace(dtype=dtype) for n in ("k_cache", "v_cache"))
    rotary = _rotary(raw, sizes)
    views |= {n: raw[n] for n in ("rotary_cos", "rotary_sin", "cache_seqlens") if n in raw}
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
        if name in raw:
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
        want_lse=want_lse,
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
        ),
        reproducible=options.reproducible,
    )
    return problem, views


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
