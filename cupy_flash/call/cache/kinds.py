"""Checks of the arrays of a call over a KV cache: ranks, dtypes, libraries, and whether they are writable."""

from __future__ import annotations

from collections.abc import Mapping

from ..arrays import ArrayView, overlaps_itself
from ..codes import CODE_SCALES, kind_of_codes
from ..operands import AXES, FLOATS, Views, cast, check_place, wrong
from ..public_names import public_name

__all__ = [
    "check_codes",
    "check_kinds",
    "check_scales",
    "check_two_arrays",
    "check_writable",
    "is_first_columns",
    "same_memory",
    "written_caches",
]

# Dtypes of quantised caches -> format. why uint8: CuPy has no float8 dtype.
QUANTISED = {"int8": "int8", "float8_e4m3fn": "float8_e4m3fn", "uint8": "float8_e4m3fn"}

_INTEGERS = ("cache_seqlens", "block_table", "cache_batch_idx")


def check_kinds(raw: Views, layout: str) -> str:
    """Check ranks, dtypes, libraries and devices; return the dtype of the cache, or its 4-bit format."""
    q = raw["q"]
    packed = {"q": "cu_seqlens_q" in raw, "k": "cu_seqlens_k_new" in raw, "v": "cu_seqlens_k_new" in raw}
    if q.dtype not in FLOATS:
        raise wrong(
            f"q has dtype {q.dtype}; attention is over {', '.join(FLOATS)}.", raw, cast("q", q, "float32")
        )
    for name, view in raw.items():
        if name != "mask_starts":  # made here, in main memory, for a ragged mask there
            check_place(name, raw)
        rank = 3 if packed.get(name) else 4
        if name in ("q", "k", "v", "k_cache", "v_cache") and len(view.shape) != rank:
            axes = AXES[layout] if rank == 4 else "(rows, heads, head_dim), cut by offsets"
            if name == "q" and len(view.shape) == 3:
                axes += ", or cu_seqlens_q for packed queries"
            raise wrong(f"{name} has rank {len(view.shape)}, not {rank}.", raw, f"{name} as {axes}")
        if name in ("k", "v") and view.dtype != q.dtype:
            raise wrong(f"{name} has dtype {view.dtype}, q has {q.dtype}.", raw, cast(name, view, "q.dtype"))
        if name in _INTEGERS and view.dtype != "int32":
            raise wrong(
                f"{public_name(name)} has dtype {view.dtype}, not int32.", raw, cast(name, view, "int32")
            )
    if raw["k_cache"].dtype != raw["v_cache"].dtype:
        headline = f"k_cache has dtype {raw['k_cache'].dtype}, v_cache {raw['v_cache'].dtype}."
        raise wrong(headline, raw, "one dtype for both")
    stored = raw["k_cache"].dtype
    if kind := kind_of_codes(raw):
        check_codes(raw, kind)
        return kind
    dtype = stored if stored == q.dtype else QUANTISED.get(stored)
    if dtype is None:
        hint = f"a cache of {q.dtype}, int8 or float8_e4m3fn (uint8 stands for its bits)"
        raise wrong(f"k_cache has dtype {stored}.", raw, hint)
    return dtype


def is_first_columns(raw: Mapping[str, ArrayView], values: str, keys: str) -> bool:
    """Whether values are the first columns of keys in the same memory, as in a cache of latents."""
    if values not in raw or keys not in raw:
        return False
    v, k = raw[values], raw[keys]
    same = v.pointer == k.pointer and v.strides == k.strides and v.dtype == k.dtype
    return same and v.shape[:-1] == k.shape[:-1] and v.shape[-1] < k.shape[-1]


def same_memory(raw: Mapping[str, ArrayView], one: str, other: str) -> bool:
    """Whether two arrays are the same memory with the same shape and strides, or both are missing."""
    if one not in raw or other not in raw:
        return one not in raw and other not in raw
    a, b = raw[one], raw[other]
    return a.pointer == b.pointer and a.shape == b.shape and a.strides == b.strides


def check_codes(raw: Views, kind: str) -> None:
    """Check dtypes and ranks of a cache of 4-bit codes and its scales; `lifted_codes` checks shapes."""
    told = next(name for name in ("k_zero", "v_zero", *CODE_SCALES["nvfp4"]) if name in raw)
    if raw["k_cache"].dtype != "uint8":
        hint = f"codes of uint8, two to a byte, as cupy_flash.quantized.{kind} gives them"
        headline = f"{public_name(told)} is given, and k_cache has dtype {raw['k_cache'].dtype}."
        raise wrong(headline, raw, hint)
    if "k_zero" in raw and "k_block_scale" in raw:
        hint = "zero for codes of quantized.int4, block_scale for those of quantized.nvfp4"
        raise wrong("k_cache.zero and k_cache.block_scale are both given.", raw, hint)
    missing = [name for name in CODE_SCALES[kind] if name not in raw]
    if missing:
        headline = f"the cache holds codes of 4 bits and {public_name(missing[0])} is not given."
        raise wrong(headline, raw, f"k_cache and v_cache both of cupy_flash.quantized.{kind}")
    for name in CODE_SCALES[kind]:
        dtype = raw[name].dtype
        if kind == "nvfp4" and dtype not in ("float8_e4m3fn", "uint8"):
            headline = f"{public_name(name)} has dtype {dtype}, not that of the block scales of NVFP4."
            raise wrong(headline, raw, "float8_e4m3fn, or its bits as uint8")
        if kind == "int4" and (dtype not in ("float16", "float32") or dtype != raw["k_zero"].dtype):
            headline = f"{public_name(name)} has dtype {dtype}, k_cache.zero {raw['k_zero'].dtype}."
            raise wrong(headline, raw, "float16 or float32, one for scale and zero of both caches")
        if len(raw[name].shape) != 4:
            headline = f"{public_name(name)} has rank {len(raw[name].shape)}, not 4, the rank of 4-bit codes."
            raise wrong(headline, raw, f"{public_name(name)} as the codes, with groups instead of features")


def check_scales(raw: Views, dtype: str) -> None:
    """Refuse scales of a cache that is not quantised, and int8 without scales."""
    quantised = dtype != raw["q"].dtype
    for name in ("k_scale", "v_scale"):
        if name in raw and not quantised:
            headline = f"{public_name(name)} is given, but the cache holds {dtype} like q."
            raise wrong(
                headline, raw, f"{name[0]}_cache=the array itself; scales are for int8 and float8_e4m3fn"
            )
        if name not in raw and dtype == "int8":
            headline = f"the cache holds int8 and {public_name(name)} is not given."
            hint = (
                f"{name[0]}_cache=cupy_flash.QuantizedCache(codes, scale), with a float32 scale per KV head"
            )
            raise wrong(headline, raw, hint)


def check_two_arrays(raw: Views, rotated: bool) -> None:
    """If one array is both caches, refuse new keys that are not the new values too.

    why not in `describe_cache`: `explain` may pass one array for all arrays of a kind.
    """
    if "k" not in raw or not same_memory(raw, "k_cache", "v_cache"):
        return
    # why not in JAX: there one array may have two buffers.
    if raw["q"].library != "jax" and (rotated or not same_memory(raw, "k", "v")):
        headline = "k_cache and v_cache are one array, where new values would be stored over new keys."
        raise wrong(headline, raw, "two arrays; or one array as k and v, without rotary")


def written_caches(raw: Mapping[str, ArrayView]) -> tuple[str, ...]:
    """Names of the arrays that new keys and values are written to; empty without new ones."""
    if "k" not in raw or "k_cache" not in raw:
        return ()
    return "k_cache", "v_cache", *CODE_SCALES.get(kind_of_codes(raw), ())


def check_writable(raw: Views) -> None:
    """Refuse to append to caches that are read-only or whose elements overlap."""
    for name in written_caches(raw):
        if raw[name].library == "jax" and raw[name].readonly:
            raise wrong(
                "JAX arrays cannot be written, so nothing can be appended to a cache of them.", raw,
                "cupy_flash.jax.attention_with_kv_cache, which returns the caches",
            )  # fmt: skip
        if raw[name].readonly or overlaps_itself(raw[name]):
            state = (
                "read-only"
                if raw[name].readonly
                else f"an array whose elements overlap: strides {raw[name].strides}"
            )
            raise wrong(
                f"{public_name(name)} is {state}; new keys are written into it.",
                raw,
                f"a copy of {public_name(name)}",
            )
