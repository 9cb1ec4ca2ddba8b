"""What tables of cases hold flat, an array by each name, as the options of public calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy_flash
from cupy_flash import (
    LatentCache,
    QuantizedArray,
    QuantizedCache,
    RaggedMask,
    Rotary,
    ScoreFunction,
    Spans,
    Tuning,
)
from cupy_flash import quantized as quantized_caches

__all__ = [
    "cached",
    "dequantized",
    "explained",
    "int4_parts",
    "nvfp4_parts",
    "over_cache",
    "quantized",
    "with_function",
    "with_mask",
]  # fmt: skip


def with_mask(options: Mapping[str, Any], mask: Any) -> dict[str, Any]:
    """Options with one mask more."""
    other = options.get("mask")
    return {**options, "mask": mask if other is None else (other, mask)}


def with_function(options: Mapping[str, Any], function: ScoreFunction, arguments: Any = ()) -> dict[str, Any]:
    """Options with a score or mask function and its arguments."""
    bound = function(*arguments)
    return with_mask(options, bound) if function.masks else {**options, "score": bound}


def quantized(q: Any, k: Any, v: Any, scales: Mapping[str, Any]) -> list[Any]:
    """The three, those with a NAME_scale as a `QuantizedArray`."""
    given = zip("qkv", (q, k, v), strict=True)
    return [QuantizedArray(x, scales[f"{n}_scale"]) if f"{n}_scale" in scales else x for n, x in given]


_ROTARY = {
    "rotary_cos": "cos", "rotary_sin": "sin", "rotary_seqlens": "seqlens",
    "rotary_interleaved": "interleaved", "rotate_cache": "on_read", "rotary_last": "last",
}  # fmt: skip
_CODES = ("scale", "zero", "block_scale")


def over_cache(**flat: Any) -> dict[str, Any]:
    """The arguments of attention_with_kv_cache: scales, tables, a prefix and tuning in their values."""
    made = dict(flat)
    for x in "kv":
        units = {part: made.pop(f"{x}_{part}", None) for part in _CODES}
        cache = made.get(f"{x}_cache")
        if cache is None or all(unit is None for unit in units.values()):
            continue
        if isinstance(cache, LatentCache):
            made[f"{x}_cache"] = cache._replace(latents=QuantizedCache(cache.latents, **units))
        else:
            made[f"{x}_cache"] = QuantizedCache(cache, **units)
    rotary = {_ROTARY[name]: made.pop(name) for name in [name for name in made if name in _ROTARY]}
    if any(x is not None and x is not False for x in rotary.values()):
        made["rotary"] = Rotary(**{"cos": None, "sin": None, **rotary})
    prefix = made.pop("prefix_k", None), made.pop("prefix_v", None)
    if prefix[0] is not None or prefix[1] is not None:
        made["prefix"] = prefix
    tuning = {name: made.pop(name) for name in ("splits", "workspace", "check") if name in made}
    if tuning:
        made["tuning"] = Tuning(**tuning)
    if made.get("cache_batch_idx") is not None:
        made["block_table"] = made["cache_batch_idx"]
    made.pop("cache_batch_idx", None)
    for name, kind in (("spans", Spans), ("ragged_mask", RaggedMask)):
        given = made.pop(name, None)
        if given is not None:
            made = with_mask(made, given if isinstance(given, Spans) else kind(given))
    return made


def cached(*q_and_caches: Any, attend: Any = cupy_flash.attention_with_kv_cache, **flat: Any) -> Any:
    """attention_with_kv_cache, or that of an adapter, of flat arguments."""
    return attend(**over_cache(**dict(zip(("q", "k_cache", "v_cache"), q_and_caches, strict=False)), **flat))


def explained(flat: Mapping[str, Any], **options: Any) -> str:
    """`cupy_flash.explain` of attention_with_kv_cache, of flat arguments and options of `attention`."""
    asked = over_cache(**flat)
    q, k, v = (asked.pop(name) for name in ("q", "k_cache", "v_cache"))
    return cupy_flash.explain(q, k, v, kv_cache=asked, **options)


def int4_parts(x: Any, group: int = 64, dtype: str = "float16") -> tuple[Any, Any, Any]:
    """Codes, scale and zero of `quantized.int4`."""
    made = quantized_caches.int4(x, group=group, dtype=dtype)
    return made.codes, made.scale, made.zero


def nvfp4_parts(x: Any) -> tuple[Any, Any]:
    """Codes and block scales of `quantized.nvfp4`."""
    made = quantized_caches.nvfp4(x)
    return made.codes, made.block_scale


def dequantized(codes: Any, scale: Any, zero: Any = None, dtype: str = "float32") -> Any:
    """The floats that codes stand for: of int4 with a zero, else of NVFP4."""
    nvfp4, int4 = QuantizedCache(codes, block_scale=scale), QuantizedCache(codes, scale, zero)
    return quantized_caches.dequantize(nvfp4 if zero is None else int4, dtype=dtype)
