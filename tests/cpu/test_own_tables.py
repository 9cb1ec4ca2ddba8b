"""Arrays that say where to read are copied before their checks: no thread can change them in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import kv_cache, statistics
from cupy_flash.derivatives import second_order
from cupy_flash.dispatch import memo

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 2, 40, 8), np.float32)
CACHE, NEW = RNG.standard_normal((6, 2, 8, 8), np.float32), RNG.standard_normal((2, 2, 3, 8), np.float32)
TABLES = (np.cos(np.arange(96.0).reshape(24, 4)), np.sin(np.arange(96.0).reshape(24, 4)))
COS, SIN = (x.astype(np.float32) for x in TABLES)
FAR = 2**30
BITS = np.full((1, 16, 2), 170, np.uint8)


def blocks() -> tuple[list[Any], dict[str, Any]]:
    # why a view: its strides, one of them 0, are those of the copy too
    table = np.tile(np.array([1, 0, 2, 2, 1, 0, 0, 2, 1], np.int32), 2)[::2].reshape(1, 1, 3, 3)
    return [table], {"mask": cupy_flash.BlockMask(np.broadcast_to(table, (2, 1, 3, 3)), BITS)}


def spans() -> tuple[list[Any], dict[str, Any]]:
    bounds = np.stack([np.arange(40) // 2, np.full(40, 40)], -1).astype(np.int32)[None]
    return [bounds], {"mask": cupy_flash.Spans(bounds)}


def pages() -> tuple[list[Any], dict[str, Any]]:
    table = np.array([[0, 4, 2], [5, 1, 3]], np.int32)
    lengths, pad, turned = (np.array(x, np.int32) for x in ([6, 11], [1, 5], [4, 0]))
    rotary = cupy_flash.Rotary(COS, SIN, seqlens=turned)
    options = {"block_table": table, "cache_seqlens": lengths, "cache_leftpad": pad, "rotary": rotary}
    return [table, lengths, pad, turned], options


def slots() -> tuple[list[Any], dict[str, Any]]:
    index, lengths = np.array([4, 1], np.int32), np.array([3, 5], np.int32)
    return [index, lengths], {"block_table": index, "cache_seqlens": lengths}


def attended(options: dict[str, Any]) -> Any:
    return cupy_flash.attention(Q, Q, Q, **options)


def over_cache(options: dict[str, Any]) -> Any:
    caches = CACHE.copy(), CACHE.copy()
    return cupy_flash.attention_with_kv_cache(NEW, *caches, k=NEW, v=NEW, **options)


def summed(options: dict[str, Any]) -> Any:
    return cupy_flash.attention_statistics(Q, Q, **options).key_sum


def moved(options: dict[str, Any]) -> Any:
    o, lse = cupy_flash.attention(Q, Q, Q, return_lse=True, **options)
    return cupy_flash.derivatives.jvp(Q, Q, Q, o, lse, dq=Q, dk=Q, dv=Q, **options)[0]


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any, str]] = {
    "blocks": (attended, blocks, memo, "check_blocks"),
    "spans": (attended, spans, memo, "check_spans"),
    "pages": (over_cache, pages, kv_cache, "check_values"),
    "slots": (over_cache, slots, kv_cache, "check_values"),
    "statistics of blocks": (summed, blocks, statistics, "check_blocks"),
    "tangents of blocks": (moved, blocks, second_order, "check_blocks"),
}


@pytest.mark.parametrize("path", [None, "numpy"], ids=["core", "numpy"])
@pytest.mark.parametrize("name", CALLS)
def test_tables_are_read_once(name: str, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, make, module, check = CALLS[name]
    if path is not None:
        monkeypatch.setenv("CUPY_FLASH_CPU", path)
    exact = call(make()[1])
    arrays, options = make()
    of_arrays = getattr(module, check)

    def and_then_written(*args: Any) -> None:
        of_arrays(*args)
        for x in arrays:
            x[...] = FAR

    monkeypatch.setattr(module, check, and_then_written)
    np.testing.assert_array_equal(call(options), exact)
