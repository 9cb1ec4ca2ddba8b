"""Products of a few rows with many keys, where a BLAS for square matrices spends its time packing.

OpenBLAS's kernels for AVX-512 multiply small matrices where they lie, at twice the speed for eight rows; so
there a long product is cut into small ones. Keys that come from memory are taken from eight places at a time,
which are read straight ahead. Elsewhere a few rows are multiplied one by one, by blocks of keys that stay in
L2 for them, and more in one call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import threads
from .scores import add_product
from .threads import scratch

Array = np.ndarray[Any, Any]

# Keys of a small product: with 16 rows and head dim 128 it stays below 10^6 multiplications. Tiles are
# multiples of it.
BLOCK_KEYS = 256
# Keys of a small product Q K^T whose keys come from memory. They lie far apart, and each product takes the
# next of each place: of neighbours the kernel reads a few features at a time, key after key, which no
# prefetcher follows. Two cores read 27 GB/s, not 14, with 4 rows of 128 features. Keys in L2 take 1.5 times
# as long.
STREAMS = 8
# Features of keys for which neighbours are read as fast.
FEW_FEATURES = 64
# Scores of a small product Q K^T: beyond them OpenBLAS packs.
SMALL_SCORES = 1024
# Most rows of queries for Q K^T in small products. With more, K Q^T is faster although its results have to be
# turned.
FEW_SMALL_ROWS = 8
# Keys of a small product P V of one row, and the features with which it gains: two cores read 25 GB/s of 128
# features, not 13.
KEYS_OF_ONE_ROW = 32
FEATURES_OF_ONE_ROW = (64, 128)
# Most rows that are faster one by one: with AVX2, 2 to 4 rows of queries 1.1 to 1.4 times as fast as in one
# call, 2 to 6 of weights 1.3 to 1.9 times.
FEW_ROWS_OF_QUERIES = 4
FEW_ROWS_OF_WEIGHTS = 6


def _blocks(x: Array, axis: int, keys: int = BLOCK_KEYS) -> Array:
    """View whole blocks of keys of x as an axis of their own before the keys."""
    whole = x.shape[axis] // keys
    index = [slice(None)] * x.ndim
    index[axis] = slice(whole * keys)
    return x[tuple(index)].reshape(*x.shape[:axis], whole, keys, *x.shape[axis + 1 :])


def multiply_by_keys(q: Array, k: Array, s: Array, *, cached: bool) -> None:
    """S = Q K^T, (heads, rows, head_dim) and (heads, keys, head_dim); whether K was just copied."""
    rows, keys = s.shape[1:]
    small = threads.small_products_are_fast()
    streams = small and not cached and k.shape[2] > FEW_FEATURES
    whole = keys - keys % BLOCK_KEYS
    if not streams and (rows == 1 or (not small and rows > FEW_ROWS_OF_QUERIES)):
        whole = 0
    elif streams:
        lines = k[:, :whole].reshape(len(k), STREAMS, -1, k.shape[2])
        turned = scratch("turned", (len(k), lines.shape[2], rows, STREAMS), q.dtype)
        np.matmul(q[:, None], lines.transpose(0, 2, 3, 1), out=turned)
        s_lines = s[:, :, :whole].reshape(len(k), rows, STREAMS, -1)
        np.copyto(s_lines, turned.transpose(0, 2, 3, 1))
    elif small and rows <= FEW_SMALL_ROWS:
        few = BLOCK_KEYS if rows * BLOCK_KEYS <= SMALL_SCORES else BLOCK_KEYS // 2
        k_turned = _blocks(k[:, :whole], 1, few).swapaxes(-1, -2)
        np.matmul(q[:, None], k_turned, out=_blocks(s[:, :, :whole], 2, few).swapaxes(1, 2))
    else:
        blocks, s_blocks = _blocks(k, 1), _blocks(s, 2).swapaxes(1, 2)
        if small:
            # why K Q^T: of the operands of a small product of many rows none may be transposed.
            columns = np.ascontiguousarray(q.swapaxes(-1, -2))[:, None]
            turned = scratch("turned", (*blocks.shape[:3], rows), q.dtype)
            np.matmul(blocks, columns, out=turned)
            np.copyto(s_blocks, turned.swapaxes(-1, -2))
        else:
            # why not into S at once: its rows lie a power of two apart, where stores delay the loads of keys.
            turned = scratch("turned", s_blocks.shape, q.dtype)
            np.matmul(blocks[:, :, None], q[:, None, :, :, None], out=turned[..., None])
            np.copyto(s_blocks, turned)
    if whole < keys:
        np.matmul(q, k[:, whole:].swapaxes(-1, -2), out=s[:, :, whole:])


def add_values(o: Array, weights: Array, v: Array, *, first: bool) -> None:
    """O += P V, (heads, rows, keys) and (heads, keys, head_dim_v); the first one is O."""
    rows, keys = weights.shape[1:]
    small = threads.small_products_are_fast()
    if rows == 1:
        few = KEYS_OF_ONE_ROW if small and v.shape[2] in FEATURES_OF_ONE_ROW else 0
    else:
        few = BLOCK_KEYS if small or rows <= FEW_ROWS_OF_WEIGHTS else 0
    whole = keys - keys % few if few else 0
    if whole:
        blocks, v_blocks = _blocks(weights, 2, few).swapaxes(1, 2), _blocks(v, 1, few)
        parts = scratch("parts", (*blocks.shape[:3], v.shape[2]), o.dtype)
        if small:
            np.matmul(blocks, v_blocks, out=parts)
        else:
            np.matmul(blocks[..., None, :], v_blocks[:, :, None], out=parts[..., None, :])
        if first:
            np.sum(parts, axis=1, out=o)
        else:
            o += parts.sum(axis=1)
    if whole < keys:
        add_product(o, weights[:, :, whole:], v[:, whole:], first=first and not whole)
