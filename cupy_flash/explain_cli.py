"""Arrays without memory for `explain` on the command line, made from sizes alone."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from .call.arrays import CPU, ArrayView, contiguous
from .call.blocks import BlockMask
from .call.compound import QuantizedArray, QuantizedCache, Rotary, Spans, Tuning
from .call.operands import FLOAT8
from .call.options import PER_HEAD
from .errors import InvalidArgumentsError

__all__ = ["BROADCASTS", "arguments_of_explain", "refuse_without"]

# Axes of (batch, heads, queries, keys) that a mask or bias has; it is broadcast along the others.
BROADCASTS = {"keys": (0, 3), "pairs": (2, 3), "heads": (1, 2, 3), "full": (0, 1, 2, 3)}


_SIZES = ("batch", "heads", "heads_k", "seqlen", "seqlen_k", "head_dim", "head_dim_v",
          "cache", "page", "append", "rotary", "blocks")  # fmt: skip


def _array(shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A contiguous array at an aligned address, without memory."""
    return ArrayView(1 << 20, shape, contiguous(shape), dtype, CPU, "numpy", False, None)


def _tensor(layout: str, batch: int, heads: int, rows: int, features: int, dtype: str) -> ArrayView:
    """An array with the axes of q, in a layout."""
    middle = (heads, rows) if layout == "bhsd" else (rows, heads)
    return _array((batch, *middle, features), dtype)


def arguments_of_explain(asked: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `explain` for a command line.

    Raises
    ------
    InvalidArgumentsError
        A size below 0, or options of what is not asked for, such as of a cache without one.
    """
    for name in _SIZES:
        size = getattr(asked, name)
        least = int(name == "page")
        if size is not None and size < least:
            option = name.replace("_", "-")
            raise InvalidArgumentsError(f"--{option} is {size}.", hint=f"--{option} {least}, or more")
    refuse_without(asked, "score", "score_arg")
    refuse_without(asked, "bias", "bias_dtype")
    queries = asked.seqlen
    heads_k = asked.heads if asked.heads_k is None else asked.heads_k
    keys = queries if asked.seqlen_k is None else asked.seqlen_k
    head_dim_v = asked.head_dim if asked.head_dim_v is None else asked.head_dim_v
    full = (asked.batch, asked.heads, queries, keys if asked.cache is None else _room(asked))
    of_heads = _array((asked.heads,), "float64" if asked.dtype == "float64" else "float32")

    def score(kind: str, dtype: str) -> ArrayView:
        return _array(tuple(n if axis in BROADCASTS[kind] else 1 for axis, n in enumerate(full)), dtype)

    # An interval of queries for each key, or of keys for each query.
    spans = {"key": (1, keys, 2), "query": (queries, 1, 2)}
    options = ("causal", "window", "align", "scale", "softcap", "dropout", "layout", "precision",
               "reproducible")  # fmt: skip
    call: dict[str, Any] = {name: getattr(asked, name) for name in options}
    if asked.tile is not None:
        call["tuning"] = Tuning(tile=asked.tile)
    masks = (
        score(asked.mask, "bool") if asked.mask else None,
        Spans(_array(spans[asked.spans], "int32")) if asked.spans else None,
        _blocks(asked.blocks, queries, keys) if asked.blocks is not None else None,
    )
    call |= {
        "q": _tensor(asked.layout, asked.batch, asked.heads, queries, asked.head_dim, asked.dtype),
        "direction": "backward" if asked.backward else "forward",
        "seed": 0 if asked.dropout else None,  # any seed: plans do not depend on it
        "mask": tuple(x for x in masks if x is not None) or None,
        "bias": score(asked.bias, asked.bias_dtype or asked.dtype) if asked.bias else None,
        **{name: of_heads for name in PER_HEAD if getattr(asked, name)},
    }
    if asked.cache is not None:
        return call | _over_a_cache(asked, heads_k, head_dim_v)
    refuse_without(asked, "cache", "page", "cache_dtype", "append", "rotary", "splits")
    for name, features in (("k", asked.head_dim), ("v", head_dim_v)):
        call[name] = _tensor(asked.layout, asked.batch, heads_k, keys, features, asked.dtype)
    if asked.dtype == FLOAT8:
        call |= {name: QuantizedArray(call[name], _array((heads_k,), "float32")) for name in "qkv"}
    return call


def refuse_without(asked: argparse.Namespace, needed: str, *names: str) -> None:
    """Refuse options that would be ignored, because the one that they belong to is not given."""
    values = {name: getattr(asked, name) for name in names}
    given = [name for name, x in values.items() if not (x is None or x is False or x == [])]
    if given and getattr(asked, needed) is None:
        option = given[0].replace("_", "-")
        raise InvalidArgumentsError(
            f"--{option} is an option of --{needed}, which is not given.", hint=f"--{needed} too"
        )


def _blocks(size: int, queries: int, keys: int) -> BlockMask:
    """A table shared by all batches and heads, and the bits of one block."""
    counts = (-(-queries // max(1, size)), -(-keys // max(1, size)))
    return BlockMask(_array(counts, "int32"), _array((1, size, size // 8), "uint8"))


def _room(asked: argparse.Namespace) -> int:
    """The capacity of a sequence in the cache, rounded up to whole pages."""
    page = asked.page or 1
    return -(-int(asked.cache) // page) * page


def _over_a_cache(asked: argparse.Namespace, heads_k: int, head_dim_v: int) -> dict[str, Any]:
    """The arguments for a KV cache with a capacity of ``asked.cache`` keys per sequence."""
    if asked.seqlen_k is not None:
        raise InvalidArgumentsError("--seqlen-k and --cache are both given.", hint="--cache KEYS alone")
    features = {"k": asked.head_dim, "v": head_dim_v}
    dtype = asked.cache_dtype or asked.dtype
    own: dict[str, Any] = {"cache_seqlens": np.zeros(asked.batch, np.int32)}
    if asked.splits is not None:
        own["tuning"] = Tuning(splits=asked.splits)
    slots, rows, room = asked.batch, asked.cache, _room(asked)
    if asked.page:
        pages = room // asked.page
        own["block_table"] = _array((asked.batch, pages), "int32")
        slots, rows = asked.batch * pages, asked.page
    if asked.rotary and asked.rotary % 2:
        raise InvalidArgumentsError(f"--rotary is {asked.rotary}.", hint="an even count: pairs are rotated")
    if asked.rotary:
        table = _array((room, asked.rotary // 2), "float32")
        own["rotary"] = Rotary(table, table)
    caches: dict[str, Any] = {}
    for name, dim in features.items():
        codes = _tensor(asked.layout, slots, heads_k, rows, dim, dtype)
        scaled = dtype != asked.dtype
        caches[name] = QuantizedCache(codes, _array((heads_k,), "float32")) if scaled else codes
        if asked.append:
            own[name] = _tensor(asked.layout, asked.batch, heads_k, asked.append, dim, asked.dtype)
    return {**caches, "kv_cache": own}
