"""Whether a tile of queries should be of one head, or of all heads of q that share a head of k and v.

A kernel whose tensor maps have an axis for the heads of a group (flash_forward_sm90) can number the rows of
its tiles either way. Grouped, a tile covers fewer queries: short sequences fill it, fewer keys lie in blocks
that a band only crosses, and K and V are read once for all of the heads. The rows of a query are a power of
two, so that groups of 3, 5, 6, 7, ... heads leave some empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...call.problem import Problem
from ..launch import blocks_of

__all__ = ["Rows", "bits_of", "cost", "numbered", "rows_of_tiles"]

# What a tile costs beside its blocks of keys, in blocks: its first S and its last O += P V, which nothing
# covers. Counts of it were between 0.5 and 1.8; not fitted to a measurement yet.
_TILE_COST = 1.0
# why: a model that nobody has measured decides only where it sees a twentieth of the time, or as much time
# with a tenth fewer tiles to read K and V for.
_LESS_TIME, _FEWER_TILES = 0.95, 0.9
# Tiles that are looked at where there are more, spread by the golden ratio: evenly, and in step with no edge.
_SAMPLES, _GOLDEN = 128, 0.6180339887498949


class Rows(NamedTuple):
    """How rows of tiles are numbered, and what it costs.

    Attributes
    ----------
    head_bits : int
        Row r is query r >> head_bits and head r % 2**head_bits of a group; 0: tiles of one head.
    tiles : int
        Of the whole problem; where sequences are packed, the most that there can be.
    cost : float
        Time in blocks of keys, as of `cost`.
    """

    head_bits: int
    tiles: int
    cost: float


def bits_of(group: int) -> int:
    """How many bits of a row's number say which head of a group it is of."""
    return max(group - 1, 0).bit_length()


def _lengths(p: Problem) -> tuple[int, int]:
    """Queries and keys of a sequence; of packed ones, whose lengths only the GPU knows, mean and longest."""
    return (max(1, blocks_of(p.rows_q, p.batch)) if p.packed and p.batch else p.seqlen_q), p.seqlen_k


def _blocks(p: Problem, first: int, last: int, queries: int, keys: int, n: int) -> int:
    """Blocks of n keys that hold one for a query of first .. last."""
    offset = p.offset + (keys - queries if p.offset_from_end else 0)
    begin = 0 if p.left is None else min(max(first + offset - p.left, 0), keys)
    end = keys if p.right is None else min(max(last + offset + p.right + 1, 0), keys)
    return blocks_of(end - begin // n * n, n) if end > begin else 0


def cost(p: Problem, head_bits: int, tile: tuple[int, int], multiprocessors: int) -> float:
    """Time of a problem in blocks of keys on one multiprocessor.

    Parameters
    ----------
    p : Problem
    head_bits : int
    tile : (int, int)
        Rows and keys of a tile.
    multiprocessors : int
    """
    m, n = tile
    queries, keys = _lengths(p)
    tiles = blocks_of(queries << head_bits, m)
    looked_at: Iterable[int] = range(tiles)
    if tiles > _SAMPLES:
        looked_at = (int(tiles * (i * _GOLDEN % 1)) for i in range(_SAMPLES))
    costs = [
        _TILE_COST
        + _blocks(p, t * m >> head_bits, min(((t + 1) * m - 1) >> head_bits, queries - 1), queries, keys, n)
        for t in looked_at
    ]
    groups = p.batch * (p.heads_k if head_bits else p.heads_q)
    if not costs or not groups:
        return 0.0
    if p.left is None and p.right is None:
        return blocks_of(groups * tiles, multiprocessors) * costs[0]
    # why: tiles of unlike work are given out one by one, the longest first, and end at nearly the same time.
    return max(groups * tiles * sum(costs) / len(costs) / multiprocessors, max(costs))


def numbered(p: Problem, head_bits: int, tile: tuple[int, int], multiprocessors: int) -> Rows:
    """Rows numbered in one of the two ways; parameters as of `cost`."""
    groups = p.batch * (p.heads_k if head_bits else p.heads_q)
    tiles = groups * blocks_of(p.seqlen_q << head_bits, tile[0])
    return Rows(head_bits, tiles, cost(p, head_bits, tile, multiprocessors))


def rows_of_tiles(p: Problem, tile: tuple[int, int], multiprocessors: int) -> tuple[Rows, str]:
    """Choose how rows are numbered.

    Parameters
    ----------
    p : Problem
    tile : (int, int)
        Rows and keys of a tile.
    multiprocessors : int

    Returns
    -------
    rows : Rows
    line : str
        About the choice, for people; "" if a head of k serves one head of q.
    """
    group = p.heads_q // p.heads_k if p.heads_k else 1
    bits = bits_of(group)
    alone = numbered(p, 0, tile, multiprocessors)
    if bits == 0 or p.seqlen_q << bits >= 2**30:
        return alone, ""
    together = numbered(p, bits, tile, multiprocessors)
    faster = together.cost <= _LESS_TIME * alone.cost
    leaner = together.cost <= alone.cost and together.tiles <= _FEWER_TILES * alone.tiles
    chosen = together if faster or leaner else alone
    line = (
        f"rows      {f'{group} heads share a tile' if chosen.head_bits else 'one head has a tile'}; "
        f"packed GQA: {together.tiles} tiles, cost {together.cost:.1f}; "
        f"one head: {alone.tiles} tiles, cost {alone.cost:.1f}"
    )
    return chosen, line
