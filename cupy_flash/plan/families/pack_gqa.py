"""Choose whether a tile has queries of one head, or of all heads of a group (packed GQA).

Kernels whose tensor maps have an axis for the heads of a group (flash_forward_sm90) support both. Packed, a
tile covers fewer queries: short sequences fill it, fewer keys are in blocks that the band only crosses, and K
and V are read once for all heads of the group. The rows per query are a power of two, so groups of 3, 5, 6,
7, ... heads leave some rows empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...call.problem import Problem
from ..launch import blocks_of

__all__ = ["Rows", "bits_of", "cost", "numbered", "rows_of_tiles"]

# Cost of a tile in addition to its key blocks, in key blocks: its first S and last O += P V, which overlap
# with nothing. Counts gave 0.5 to 1.8; not fitted to measurements yet.
_TILE_COST = 1.0
# why: this unmeasured model decides only for a twentieth less time, or for a tenth fewer tiles, which read K
# and V, in no more time.
_LESS_TIME, _FEWER_TILES = 0.95, 0.9
# Most tiles that `cost` evaluates; more are sampled by the golden ratio, which is even but not periodic.
_SAMPLES, _GOLDEN = 128, 0.6180339887498949


class Rows(NamedTuple):
    """A numbering of the rows of tiles, and its cost."""

    # Row r is query r >> head_bits and head r % 2**head_bits of a group; 0: a tile has rows of one head.
    head_bits: int
    tiles: int  # tiles of the whole problem; for packed sequences an upper bound
    cost: float  # time in key blocks, as returned by `cost`


def bits_of(group: int) -> int:
    """Bits of a row number that select the head of a group."""
    return max(group - 1, 0).bit_length()


def _lengths(p: Problem) -> tuple[int, int]:
    """Queries and keys of a sequence; if packed, the mean and the longest, as only the GPU knows lengths."""
    return (max(1, blocks_of(p.rows_q, p.batch)) if p.packed and p.batch else p.seqlen_q), p.seqlen_k


def _blocks(p: Problem, first: int, last: int, queries: int, keys: int, n: int) -> int:
    """Number of blocks of n keys that a query in [first, last] attends to."""
    offset = p.offset + (keys - queries if p.offset_from_end else 0)
    begin = 0 if p.left is None else min(max(first + offset - p.left, 0), keys)
    end = keys if p.right is None else min(max(last + offset + p.right + 1, 0), keys)
    return blocks_of(end - begin // n * n, n) if end > begin else 0


def cost(p: Problem, head_bits: int, tile: tuple[int, int], multiprocessors: int) -> float:
    """The time of a problem with tiles of these rows and keys, in key blocks on one multiprocessor."""
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
    if not costs:
        return 0.0
    if p.left is None and p.right is None:
        return blocks_of(groups * tiles, multiprocessors) * costs[0]
    # why: tiles of unequal work are scheduled dynamically, longest first, and end at nearly the same time.
    return max(groups * tiles * sum(costs) / len(costs) / multiprocessors, max(costs))


def numbered(p: Problem, head_bits: int, tile: tuple[int, int], multiprocessors: int) -> Rows:
    """Rows with a given head_bits; parameters as in `cost`."""
    groups = p.batch * (p.heads_k if head_bits else p.heads_q)
    tiles = groups * blocks_of(p.seqlen_q << head_bits, tile[0])
    return Rows(head_bits, tiles, cost(p, head_bits, tile, multiprocessors))


def rows_of_tiles(p: Problem, tile: tuple[int, int], multiprocessors: int) -> tuple[Rows, str]:
    """Choose the numbering of rows, with a remark for `explain`, "" without GQA; a tile is rows and keys."""
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
