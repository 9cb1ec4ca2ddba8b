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


def arguments_of_explain(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `explain` for a command line.

    Raises
    ------
    InvalidArgumentsError
        A size below 0, or options of what is not asked for, such as of a cache without one.
    """
    for name in _SIZES:
        size = getattr(args, name)
        least = int(name == "page")
        if size is not None and size < least:
            option = name.replace("_", "-")
            raise InvalidArgumentsError(f"--{option} is {size}.", hint=f"--{option} {least}, or more")
    refuse_without(args, "score", "score_arg")
    refuse_without(args, "bias", "bias_dtype")
    queries = args.seqlen
    heads_k = args.heads if args.heads_k is None else args.heads_k
    keys = queries if args.seqlen_k is None else args.seqlen_k
    head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    full = (args.batch, args.heads, queries, keys if args.cache is None else _room(args))
    of_heads = _array((args.heads,), "float64" if args.dtype == "float64" else "float32")

    def score(kind: str, dtype: str) -> ArrayView:
        return _array(tuple(n if axis in BROADCASTS[kind] else 1 for axis, n in enumerate(full)), dtype)

    # An interval of queries for each key, or of keys for each query.
    spans = {"key": (1, keys, 2), "query": (queries, 1, 2)}
    options = ("causal", "window", "align", "scale", "softcap", "dropout", "layout", "precision",
               "reproducible")  # fmt: skip
    call: dict[str, Any] = {name: getattr(args, name) for name in options}
    if args.tile is not None:
        call["tuning"] = Tuning(tile=args.tile)
    masks = (
        score(args.mask, "bool") if args.mask else None,
        Spans(_array(spans[args.spans], "int32")) if args.spans else None,
        _blocks(args.blocks, queries, keys) if args.blocks is not None else None,
    )
    call |= {
        "q": _tensor(args.layout, args.batch, args.heads, queries, args.head_dim, args.dtype),
        "direction": "backward" if args.backward else "forward",
        "seed": 0 if args.dropout else None,  # any seed: plans do not depend on it
        "mask": tuple(x for x in masks if x is not None) or None,
        "bias": score(args.bias, args.bias_dtype or args.dtype) if args.bias else None,
        **{name: of_heads for name in PER_HEAD if getattr(args, name)},
    }
    if args.cache is not None:
        return call | _over_a_cache(args, heads_k, head_dim_v)
    refuse_without(args, "cache", "page", "cache_dtype", "append", "rotary", "splits")
    for name, features in (("k", args.head_dim), ("v", head_dim_v)):
        call[name] = _tensor(args.layout, args.batch, heads_k, keys, features, args.dtype)
    if args.dtype == FLOAT8:
        call |= {name: QuantizedArray(call[name], _array((heads_k,), "float32")) for name in "qkv"}
    return call


def refuse_without(args: argparse.Namespace, needed: str, *names: str) -> None:
    """Refuse options that would be ignored, because the one that they belong to is not given."""
    values = {name: getattr(args, name) for name in names}
    given = [name for name, x in values.items() if not (x is None or x is False or x == [])]
    if given and getattr(args, needed) is None:
        option = given[0].replace("_", "-")
        raise InvalidArgumentsError(
            f"--{option} is an option of --{needed}, which is not given.", hint=f"--{needed} too"
        )


def _blocks(size: int, queries: int, keys: int) -> BlockMask:
    """A table shared by all batches and heads, and the bits of one block."""
    counts = (-(-queries // max(1, size)), -(-keys // max(1, size)))
    return BlockMask(_array(counts, "int32"), _array((1, size, size // 8), "uint8"))


def _room(args: argparse.Namespace) -> int:
    """The capacity of a sequence in the cache, rounded up to whole pages."""
    page = args.page or 1
    return -(-int(args.cache) // page) * page


def _over_a_cache(args: argparse.Namespace, heads_k: int, head_dim_v: int) -> dict[str, Any]:
    """The arguments for a KV cache with a capacity of ``args.cache`` keys per sequence."""
    if args.seqlen_k is not None:
        raise InvalidArgumentsError("--seqlen-k and --cache are both given.", hint="--cache KEYS alone")
    features = {"k": args.head_dim, "v": head_dim_v}
    dtype = args.cache_dtype or args.dtype
    own: dict[str, Any] = {"cache_seqlens": np.zeros(args.batch, np.int32)}
    if args.splits is not None:
        own["tuning"] = Tuning(splits=args.splits)
    slots, rows, room = args.batch, args.cache, _room(args)
    if args.page:
        pages = room // args.page
        own["block_table"] = _array((args.batch, pages), "int32")
        slots, rows = args.batch * pages, args.page
    if args.rotary and args.rotary % 2:
        raise InvalidArgumentsError(f"--rotary is {args.rotary}.", hint="an even count: pairs are rotated")
    if args.rotary:
        table = _array((room, args.rotary // 2), "float32")
        own["rotary"] = Rotary(table, table)
    caches: dict[str, Any] = {}
    for name, dim in features.items():
        codes = _tensor(args.layout, slots, heads_k, rows, dim, dtype)
        scaled = dtype != args.dtype
        caches[name] = QuantizedCache(codes, _array((heads_k,), "float32")) if scaled else codes
        if args.append:
            own[name] = _tensor(args.layout, args.batch, heads_k, args.append, dim, args.dtype)
    return {**caches, "kv_cache": own}
