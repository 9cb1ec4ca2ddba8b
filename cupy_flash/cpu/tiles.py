"""The tiles of the score matrix, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

# A tile of scores is (rows x keys); its rows are the queries of all heads that share a key head.
# why this size: half a megabyte stays in L2, and is large enough to hide the overhead of NumPy's calls.
ROWS = 256
KEYS = 512


class Box(NamedTuple):
    """One key head of one sequence, the unit of work: a slice of the batch and a slice of the heads."""

    # Of length 1: the sequence, and its key head.
    batch: slice
    head: slice


class Block(NamedTuple):
    """A block of the score matrix: a half-open range of queries and one of keys."""

    # First query, and the end of the queries.
    i0: int
    i1: int
    # First key, and the end of the keys.
    j0: int
    j1: int


def cut_out(x: Array, box: Box, *ranges: slice) -> Array:
    """Index (batch, key heads, group, ...) by a box and ranges; broadcast axes stay whole."""
    index = [
        slice(None) if extent == 1 else part
        for extent, part in zip(x.shape, (box.batch, box.head, slice(None), *ranges), strict=False)
    ]
    return x[tuple(index)]


def tile_of(problem: Problem) -> tuple[int, int]:
    """Extents of a block: queries and keys."""
    p = problem
    queries, keys = p.tile or (max(1, ROWS // (p.heads_q // p.heads_k)), KEYS)
    return min(queries, max(1, p.seqlen_q)), min(keys, max(1, p.seqlen_k))


def boxes(problem: Problem) -> Iterator[Box]:
    """Yield every key head of every sequence."""
    for batch in range(problem.batch):
        for head in range(problem.heads_k):
            yield Box(slice(batch, batch + 1), slice(head, head + 1))


def visited(problem: Problem) -> Iterator[tuple[int, int, list[Block]]]:
    """Yield each query block as (first, stop, key blocks), without key blocks outside the band."""
    p = problem
    queries, keys = tile_of(p)
    for i0 in range(0, p.seqlen_q, queries):
        i1 = min(i0 + queries, p.seqlen_q)
        first, stop = p.band.keys(i0, i1 - 1, p.seqlen_k)
        yield i0, i1, [Block(i0, i1, j0, min(j0 + keys, stop)) for j0 in range(first, stop, keys)]
