"""Products of a few rows with many keys, where a BLAS for square matrices spends its time packing.

OpenBLAS's kernels for AVX-512 multiply small matrices where they lie, at twice the speed for eight rows; so
there a long product is cut into small ones. Elsewhere a few rows are multiplied one by one, by blocks of keys
that stay in L2 for them, and more in one call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import threads
from .scores import add_product
from .threads import scratch

Array = np.ndarray[Any, Any]

# Keys of a small product: with 16 rows and head dim 128 it stays below 10^6 multiplications.
BLOCK_KEYS = 256
# Most rows that are faster one by one: with AVX2, 2 and 3 rows of queries 1.3 to 1.6 times as fast as in one
# call, of weights 1.5 to 1.9 times; 4 rows are not.
FEW_ROWS = 3


def _blocks(x: Array, axis: int) -> Array:
    """View whole blocks of keys of x as an axis of their own before the keys."""
    whole = x.shape[axis] // BLOCK_KEYS
    index = [slice(None)] * x.ndim
    index[axis] = slice(whole * BLOCK_KEYS)
    return x[tuple(index)].reshape(*x.shape[:axis], whole, BLOCK_KEYS, *x.shape[axis + 1 :])


def multiply_by_keys(q: Array, k: Array, s: Array) -> None:
    """S = Q K^T, (heads, rows, head_dim) and (heads, keys, head_dim)."""
    whole = 0
    if threads.small_products_are_fast():
        # why K Q^T: of the operands of a small product none may be transposed.
        blocks = _blocks(k, 1)
        whole = blocks.shape[1] * BLOCK_KEYS
        columns = np.ascontiguousarray(q.swapaxes(-1, -2))[:, None]
        turned = scratch("turned", (*blocks.shape[:3], q.shape[1]), q.dtype)
        np.matmul(blocks, columns, out=turned)
        np.copyto(_blocks(s, 2), turned.transpose(0, 3, 1, 2))
    elif 1 < q.shape[1] <= FEW_ROWS:
        blocks = _blocks(k, 1)
        whole = blocks.shape[1] * BLOCK_KEYS
        parts = scratch("turned", (*blocks.shape[:2], q.shape[1], BLOCK_KEYS), q.dtype)
        np.matmul(blocks[:, :, None], q[:, None, :, :, None], out=parts[..., None])
        np.copyto(_blocks(s, 2), parts.swapaxes(1, 2))
    if whole < k.shape[1]:
        np.matmul(q, k[:, whole:].swapaxes(-1, -2), out=s[:, :, whole:])


def add_values(o: Array, weights: Array, v: Array, *, first: bool) -> None:
    """O += P V, (heads, rows, keys) and (heads, keys, head_dim_v); the first one is O."""
    whole = 0
    small = threads.small_products_are_fast()
    if small or 1 < o.shape[1] <= FEW_ROWS:
        blocks = _blocks(weights, 2).swapaxes(1, 2)
        whole = blocks.shape[1] * BLOCK_KEYS
        parts = scratch("parts", (*blocks.shape[:3], v.shape[2]), o.dtype)
        if small:
            np.matmul(blocks, _blocks(v, 1), out=parts)
        else:
            np.matmul(blocks[..., None, :], _blocks(v, 1)[:, :, None], out=parts[..., None, :])
        if first:
            np.sum(parts, axis=1, out=o)
        else:
            o += parts.sum(axis=1)
    if whole < v.shape[1]:
        add_product(o, weights[:, :, whole:], v[:, whole:], first=first and not whole)
