"""Split the compound options of a call over a KV cache into arrays and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InvalidArgumentsError, UnsupportedError
from ...program.function import Bound, Program
from ..adopt import adopt
from ..blocks import BlockMask
from ..compound import LatentCache, QuantizedArray, QuantizedCache, Rotary, mask_parts, masks_of, tuning_of
from ..public_names import type_phrase

__all__ = ["cache_parts"]

_COMPOUND = frozenset(("mask", "rotary", "prefix", "tuning", "block_table"))


def cache_parts(k_cache: Any, v_cache: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The caches as arrays and the options of `attention_with_kv_cache`, with compound ones split.

    Scales, zeros, rotation tables, prefix and masks have their internal names, see `public_names`.
    """
    if type(k_cache) is LatentCache or type(v_cache) is LatentCache or v_cache is None:
        k_cache, v_cache = _of_latents(k_cache, v_cache, options)
    flat = {"k_cache": k_cache, "v_cache": v_cache, **options}
    for name in ("k_cache", "v_cache"):
        if type(flat[name]) in (QuantizedCache, QuantizedArray):
            flat |= _codes(name, flat[name])
    if _COMPOUND.isdisjoint(options):  # the common case when decoding
        return flat
    if "mask" in flat:
        flat |= _mask_of_cache(flat.pop("mask"))
    if flat.get("rotary") is not None:
        flat |= _rotation(flat["rotary"])
    if flat.get("prefix") is not None:
        flat["prefix_k"], flat["prefix_v"] = _prefix(flat["prefix"])
    if flat.get("tuning") is not None:
        tuning = tuning_of(flat["tuning"], ("splits", "workspace", "check"))
        flat |= {"splits": tuning.splits, "workspace": tuning.workspace, "check": tuning.check}
    for name in ("rotary", "prefix", "tuning"):
        if name in flat:
            del flat[name]
    table = flat.get("block_table")
    if table is not None and len(_shape(table, "block_table")) == 1:
        flat["cache_batch_idx"] = flat.pop("block_table")
    return flat


def _shape(x: Any, name: str) -> tuple[int, ...]:
    """The shape of an array, also if it only has DLPack or the CUDA array interface."""
    shape = getattr(x, "shape", None)
    return shape if isinstance(shape, tuple) else adopt(x, name).shape


def _mask_of_cache(mask: Any) -> dict[str, Any]:
    """The parts of a mask; refuse kinds that are not supported over a cache."""
    for given in masks_of(mask):
        if isinstance(given, (Program, Bound, BlockMask)):
            raise UnsupportedError(
                f"mask is {type_phrase(given)}, which is not supported over a KV cache.",
                hint="a boolean array, or cupy_flash.spans.tree for tree attention",
            )
    return mask_parts(mask)


def _rotation(rotary: Any) -> dict[str, Any]:
    """The parts of a `Rotary`."""
    if not isinstance(rotary, Rotary):
        raise InvalidArgumentsError(
            f"rotary is {type_phrase(rotary)}.", hint="rotary=cupy_flash.Rotary(cos, sin)"
        )
    names = (
        "rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved", "rotate_cache", "rotary_last",
    )  # fmt: skip
    return dict(zip(names, rotary, strict=True))


def _prefix(prefix: Any) -> tuple[Any, Any]:
    """The keys and values of a prefix."""
    if not isinstance(prefix, (tuple, list)) or len(prefix) != 2:
        raise InvalidArgumentsError(f"prefix is {type_phrase(prefix)}.", hint="prefix=(keys, values)")
    return prefix[0], prefix[1]


def _of_latents(k_cache: Any, v_cache: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The keys and values of a `LatentCache`: two views of the same memory."""
    if type(k_cache) is not LatentCache or v_cache is not None:
        given = ", ".join(
            f"{name} is {type_phrase(x)}" for name, x in (("k_cache", k_cache), ("v_cache", v_cache))
        )
        hint = "two arrays, or LatentCache(latents, head_dim_v) as k_cache and None as v_cache"
        raise InvalidArgumentsError(f"{given}.", hint=hint)
    x, columns = k_cache
    if type(x) is QuantizedCache and x.zero is None and x.block_scale is None:
        keys, values = _of_latents(LatentCache(x.codes, columns), None, options)
        return x._replace(codes=keys), x._replace(codes=values)
    if type(x) in (QuantizedCache, QuantizedArray):
        raise UnsupportedError(
            f"latents is {type_phrase(x)}{' of 4 bits' if type(x) is QuantizedCache else ''}.",
            hint="latents of the dtype of q, or QuantizedCache(codes, scale) of int8 or float8_e4m3fn",
        )
    if options.get("v") is not None:
        raise InvalidArgumentsError(
            "v is given with a LatentCache.", hint="v=None: the first columns of k are the value"
        )
    rotary = options.get("rotary")
    if isinstance(rotary, Rotary) and not rotary.on_read and not rotary.last:
        raise InvalidArgumentsError(
            "rotary turns the first features of q, and of new latents, which are values too.",
            hint="rotary._replace(last=True), which turns the last features",
        )
    shape = _shape(x, "latents")
    if not isinstance(columns, (int, np.integer)) or not 0 < columns < (shape[-1] if shape else 0):
        raise InvalidArgumentsError(
            f"head_dim_v is {columns!r}, of latents of shape {shape}.",
            hint="fewer columns than a latent has: 512 of 576",
        )
    if not hasattr(type(x), "__getitem__"):
        x = adopt(x, "latents")
        return x, x._replace(shape=(*shape[:-1], columns))
    return x, x[..., :columns]


def _codes(name: str, cache: Any) -> dict[str, Any]:
    """The arrays of a `QuantizedCache` by name: codes, scale, zero and block_scale."""
    if not isinstance(cache, QuantizedCache):
        hint = f"{name}=cupy_flash.QuantizedCache(codes, scale)"
        raise InvalidArgumentsError(f"{name} is a QuantizedArray.", hint=hint)
    x = name[0]
    names = (name, f"{x}_scale", f"{x}_zero", f"{x}_block_scale")
    return dict(zip(names, cache, strict=True))
