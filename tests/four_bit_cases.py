"""Calls over caches of 4-bit codes, for every device: int4 in groups, and NVFP4."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.testing.kv_cache import dequantized_int4, dequantized_nvfp4
from tests.public import int4_parts, nvfp4_parts

BATCH, ROOM, HEADS = 3, 48, (4, 2)
LENGTHS = np.array([0, 17, 44], np.int32)
E4M3: Any = ml_dtypes.float8_e4m3fn
# What a cache of codes is made of.
PARTS = {"int4": ("cache", "scale", "zero"), "nvfp4": ("cache", "block_scale")}


def call(
    kind: str,
    dims: tuple[int, int] = (64, 128),
    queries: int = 1,
    new: int = 0,
    dtype: Any = "float32",
    layout: str = "bhsd",
    page: int = 0,
    groups: tuple[int, int] = (32, 64),
    units: Any = None,
    scales: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """A call over such caches: `units` is the dtype of scales of codes, `scales` the shape of k_scale."""
    rng = np.random.default_rng(2)
    made: dict[str, Any] = {"cache_seqlens": LENGTHS, "layout": layout}
    normal = {"q": rng.standard_normal((BATCH, HEADS[0], queries, dims[0]))}
    slots, rows = (BATCH * ROOM // page + 2, page) if page else (BATCH, ROOM)
    for name, dim, group in zip("kv", dims, groups, strict=True):
        x = rng.standard_normal((slots, HEADS[1], rows, dim)).astype(np.float32) + np.float32(0.5)
        if kind == "int4":
            parts = int4_parts(x, group=group, dtype=units or "float16")
        else:
            codes, block_scale = nvfp4_parts(x)
            parts = codes, block_scale.view(units or "uint8")
        made |= {f"{name}_{part}": y for part, y in zip(PARTS[kind], parts, strict=True)}
        if new:
            normal[name] = rng.standard_normal((BATCH, HEADS[1], new, dim))
    made |= {name: x.astype(dtype) for name, x in normal.items()}
    if page:
        table = rng.permutation(slots)[: BATCH * ROOM // page]
        made["block_table"] = table.reshape(BATCH, -1).astype(np.int32)
    if layout == "bshd":
        made |= {n: x.swapaxes(1, 2) for n, x in made.items() if getattr(x, "ndim", 0) == 4}
    if scales is not None:
        acc = "float64" if np.dtype(dtype) == "float64" else "float32"
        made |= {f"{x}_scale": rng.uniform(0.5, 2, scales).astype(acc) for x in "kv"}
    return made


def wide(kind: str, given: dict[str, Any], dtype: Any = np.float64) -> dict[str, Any]:
    """The same call over the floats that its codes stand for, but for NVFP4's k_scale and v_scale."""
    parts = [f"{x}_{part}" for x in "kv" for part in PARTS[kind][1:]]
    rest = {n: x for n, x in given.items() if n not in parts}
    floats = dequantized_int4 if kind == "int4" else dequantized_nvfp4
    for x in "kv":
        rest[f"{x}_cache"] = floats(*(given[f"{x}_{part}"] for part in PARTS[kind])).astype(dtype)
    return rest
