"""Sizes of a call over a KV cache, checked: pages, groups of 4-bit codes, rotated features."""

from __future__ import annotations

from typing import NamedTuple

from ..checks import integer
from ..codes import CODE_SCALES, GROUPS, kind_of_codes
from ..describe import check_seqlen
from ..given import Packing
from ..operands import Views, heads_hint, lift, wrong
from ..problem import Codes
from ..public_names import public_name

__all__ = ["Sizes", "codes_of", "lifted_codes", "rotated_features", "sizes_of"]


class Sizes(NamedTuple):
    """The sizes of a call, after its shapes were checked."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int  # queries per sequence; if they are packed, of the longest
    appended: int  # new keys per sequence, or of all sequences together if they are packed
    head_dim: int
    head_dim_v: int
    page: int  # keys per page; 0 if each sequence has one contiguous slot
    capacity: int  # most keys of a sequence


def sizes_of(views: Views, raw: Views, layout: str, packing: Packing | None, most_keys: int | None) -> Sizes:
    """Check every shape and return the sizes; views are (batch or slots, heads, seq, head_dim)."""
    batch, heads_q, seqlen_q, head_dim = views["q"].shape
    if packing:
        batch, seqlen_q = packing.batch, packing.seqlen_q
    slots, heads_k, rows, head_dim_k = views["k_cache"].shape
    head_dim_v = views["v_cache"].shape[3]
    if kind_of_codes(raw):  # two codes per byte
        head_dim_k, head_dim_v = 2 * head_dim_k, 2 * head_dim_v
    if 0 in (head_dim, head_dim_v):
        raise wrong("head_dim is 0.", raw, "at least one feature per head")
    if head_dim_k != head_dim:
        headline = f"q has head_dim {head_dim}, k_cache has {head_dim_k}."
        raise wrong(headline, raw, "the same head_dim for q and k_cache")
    if views["v_cache"].shape[:3] != (slots, heads_k, rows):
        headline = f"k_cache has shape {raw['k_cache'].shape}, v_cache {raw['v_cache'].shape}."
        raise wrong(headline, raw, "the same shape but for head_dim")
    if heads_q % heads_k if heads_k else heads_q:
        headline = f"{heads_q} heads of q are not a multiple of {heads_k} of k_cache."
        raise wrong(headline, raw, heads_hint(views, layout, "k_cache", "v_cache"))
    page, capacity = 0, rows
    if "block_table" in raw:
        table = raw["block_table"]
        if len(table.shape) != 2 or table.shape[0] != batch:
            headline = f"block_table has shape {table.shape} for a batch of {batch}."
            raise wrong(headline, raw, "(batch, pages of the longest sequence)")
        if not rows:
            raise wrong("pages hold no keys.", raw, "a cache of (pages, heads, page, head_dim)")
        page, capacity = rows, rows * table.shape[1]
    elif "cache_batch_idx" in raw:
        if raw["cache_batch_idx"].shape != (batch,):
            headline = f"block_table has shape {raw['cache_batch_idx'].shape} for a batch of {batch}."
            raise wrong(headline, raw, "(batch,) slots, or (batch, pages of the longest sequence)")
    elif slots != batch:
        headline = f"q has a batch of {batch}, the cache {slots} slots."
        raise wrong(headline, raw, "block_table= of slots, (batch,), or of pages, (batch, pages)")
    if "cache_seqlens" in raw and raw["cache_seqlens"].shape != (batch,):
        headline = f"cache_seqlens has shape {raw['cache_seqlens'].shape} for a batch of {batch}."
        raise wrong(headline, raw, "(batch,), or one integer for all")
    if most_keys is not None:
        if (n := integer(most_keys)) is None or n < 0:
            raise wrong(f"max_seqlen_k is {most_keys!r}.", raw, "an integer, at least 0")
        capacity = min(capacity, n)
    check_seqlen(max(seqlen_q, capacity), raw)
    appended = 0
    if ("k" in views) != ("v" in views):
        given = "k" if "k" in raw else "v"
        raise wrong(f"{given} is given without {'v' if given == 'k' else 'k'}.", raw, "both or neither")
    if "cu_seqlens_k_new" in raw and "k" not in raw:
        raise wrong("cu_seqlens_k_new is given without k.", raw, "k and v, the new keys and values")
    if "k" in raw:
        appended = views["k"].shape[2]
        packed = "cu_seqlens_k_new" in raw
        for name, dim, other in (("k", head_dim, "k_cache"), ("v", head_dim_v, "k")):
            if views[name].shape != (1 if packed else batch, heads_k, appended, dim):
                headline = f"{name} has shape {raw[name].shape}, {other} {raw[other].shape}."
                axes = "(rows, heads_k, head_dim)" if packed else "(batch, heads_k, new, head_dim)"
                raise wrong(headline, raw, f"new keys and values: {axes}")
        if appended > capacity and not packed:
            raise wrong(f"{appended} new keys do not fit a cache for {capacity}.", raw, "a larger cache")
    return Sizes(batch, heads_q, heads_k, seqlen_q, appended, head_dim, head_dim_v, page, capacity)


def rotated_features(raw: Views, sizes: Sizes) -> int:
    """Check the rotation tables; return the number of rotated features."""
    given = [name for name in ("rotary_cos", "rotary_sin") if name in raw]
    if not given:
        if "rotary_seqlens" in raw:
            raise wrong(
                "rotary.seqlens is given without rotary.cos.", raw, "cupy_flash.Rotary(cos, sin, seqlens)"
            )
        return 0
    if len(given) == 1:
        there, missing = ("cos", "sin") if given == ["rotary_cos"] else ("sin", "cos")
        headline = f"rotary.{there} is given without rotary.{missing}."
        raise wrong(headline, raw, "both tables, or neither")
    cos, sin = raw["rotary_cos"], raw["rotary_sin"]
    if cos.shape != sin.shape or len(cos.shape) != 2:
        headline = f"rotary.cos has shape {cos.shape}, rotary.sin {sin.shape}."
        raise wrong(headline, raw, "(positions, rotated features / 2) for both")
    if cos.dtype != sin.dtype or cos.dtype not in (raw["q"].dtype, "float32"):
        headline = f"rotary.cos has dtype {cos.dtype}, rotary.sin {sin.dtype}."
        raise wrong(headline, raw, "float32 or the dtype of q, for both")
    turned = 2 * cos.shape[1]
    if not 0 < turned <= sizes.head_dim:
        headline = f"rotary.cos turns {turned} features of a head_dim of {sizes.head_dim}."
        raise wrong(headline, raw, "at most head_dim / 2 columns")
    if cos.shape[0] < sizes.capacity and "rotary_seqlens" not in raw:
        headline = f"rotary.cos has {cos.shape[0]} positions for a capacity of {sizes.capacity}."
        raise wrong(headline, raw, "one row for each key that the cache may hold")
    return turned


def lifted_codes(views: Views, raw: Views, layout: str) -> Views:
    """Scales and zeros of 4-bit codes as (slots, heads, keys, groups); block scales as uint8 bits."""
    kind = kind_of_codes(raw)
    parts = {name: lift(raw[name], layout, 4) for name in CODE_SCALES[kind]}
    for name, view in parts.items():
        cache = views[f"{name[0]}_cache"].shape
        groups, features = view.shape[3], 2 * cache[3]
        if view.shape[:3] != cache[:3] or not groups or features / groups not in GROUPS[kind]:
            codes = raw[f"{name[0]}_cache"].shape
            headline = f"{public_name(name)} has shape {raw[name].shape}, {name[0]}_cache.codes {codes}."
            sizes = " or ".join(map(str, GROUPS[kind]))
            raise wrong(headline, raw, f"its first axes, and a scale for {sizes} of {features} features")
        if kind == "int4" and view.shape != parts[f"{name[0]}_zero"].shape:
            zero = raw[f"{name[0]}_zero"].shape
            headline = f"{public_name(name)} has shape {raw[name].shape}, {name[0]}_cache.zero {zero}."
            raise wrong(headline, raw, "one scale and one zero for each group")
    return parts if kind == "int4" else {n: view._replace(dtype="uint8") for n, view in parts.items()}


def codes_of(views: Views, kind: str) -> Codes:
    """The `Codes` of a 4-bit cache, from views of the caches and of `lifted_codes`."""
    names = CODE_SCALES[kind]
    of_keys, of_values = ([views[name] for name in names if name[0] == x] for x in "kv")
    groups = tuple(
        2 * views[f"{x}_cache"].shape[3] // of[0].shape[3] for x, of in (("k", of_keys), ("v", of_values))
    )
    same_strides = all(
        view.strides[:3] == of[0].strides[:3] and view.in_rows() for of in (of_keys, of_values) for view in of
    )
    return Codes(kind, of_keys[0].dtype, (groups[0], groups[1]), same_strides)
