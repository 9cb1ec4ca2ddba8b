"""Which tiles of the score matrix are computed, in what order, and by whom."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..call.problem import Problem

# A tile of scores is (rows x keys). Rows are the queries of every head that shares a key head, so
# that grouped heads make tall products instead of many small ones.
#
# why: 512 keys amortise the pass over O; 256 rows bring a product within 5% of the largest ones, but of
# two threads each slows the other at every NumPy call, so that 512 rows, all of the 1 MB of L2 that a core
# has, take a tenth less time.
KEYS = 512
ROWS = 512
# why: a tile on the edge of a band is computed whole and half thrown away: an eighth of the rows, or half of
# the keys of a window, at most. Below 64 rows products lose more than that; 256 are 3 to 13% faster than 128.
ROWS_OF_A_BAND = (64, 256)
# why: a NumPy call costs about 1 us, so small heads are computed together until their tiles fill
# this, although it is as much as L2.
TILE_ELEMENTS = 1 << 18
# Below this a thread passes the interpreter on to another one more often than it computes.
LEAST_ELEMENTS = 1 << 16
# Jobs per thread: enough that one slow core does not leave the other one waiting, unless they would be
# shorter than this many operations, 0.3 ms of a core, beside which the NumPy calls of a job count.
JOBS_PER_WORKER = 4
JOB_FLOPS = 3e7


class Box(NamedTuple):
    """Heads that are computed together: a range of the batch and a range of the key heads."""

    batch: slice
    head: slice


class Block(NamedTuple):
    """A block of the score matrix: a half-open range of queries and one of keys."""

    i0: int
    i1: int
    j0: int
    j1: int


class Schedule(NamedTuple):
    """How a problem is cut.

    Attributes
    ----------
    queries, keys : int
        Size of a block.
    boxes : tuple of Box
    parts : tuple of (int, int)
        Half-open ranges of queries; a job is one box and one part.
    workers : int
        Threads.
    """

    queries: int
    keys: int
    boxes: tuple[Box, ...]
    parts: tuple[tuple[int, int], ...]
    workers: int


def flops(problem: Problem) -> float:
    """Operations of the products, at most: every tile counted."""
    p = problem
    products = 5 if p.direction == "backward" else 2
    pairs = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
    return products * pairs * (p.head_dim + p.head_dim_v)


@functools.lru_cache(maxsize=64)
def schedule(problem: Problem, workers: int, alone: bool = True) -> Schedule:
    """Cut a problem into jobs for so many threads, which have others to do as well unless it is alone.

    The cut depends on the problem and the number of threads only: equal calls give equal bits.
    """
    p = problem
    group = p.heads_q // p.heads_k
    queries, keys = p.tile or (max(1, _rows(p) // group), KEYS)
    queries, keys = min(queries, max(1, p.seqlen_q)), min(keys, max(1, p.seqlen_k))

    least = workers if alone else 1
    jobs = max(least, min(JOBS_PER_WORKER * workers if workers > 1 else 1, int(flops(p) / JOB_FLOPS)))
    heads, elements = p.batch * p.heads_k, queries * group * keys
    together = max(heads // jobs, min(LEAST_ELEMENTS // elements, heads // least))
    together = max(1, min(together, TILE_ELEMENTS // elements))
    heads_together = min(together, p.heads_k)
    batch_together = min(max(1, together // p.heads_k), p.batch)
    boxes = tuple(
        Box(batch, head)
        for batch in _slices(p.batch, batch_together)
        for head in _slices(p.heads_k, heads_together)
    )
    parts = _parts(p, queries, len(boxes), workers, jobs)
    return Schedule(queries, keys, boxes, parts, workers)


def _slices(extent: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, extent)) for i in range(0, extent, step)]


def _rows(p: Problem) -> int:
    if p.band.open:
        return ROWS
    least, most = ROWS_OF_A_BAND
    rows = p.seqlen_q // 8
    if p.left is not None and p.right is not None:
        rows = min(rows, (p.left + p.right + 1) // 2)
    return min(max(rows, least), most)


def boxes_share_dbias(problem: Problem) -> bool:
    """Whether an element of dbias is a sum over several heads or batches."""
    p = problem
    return p.want_dbias and p.bias is not None and p.bias[:2] != (p.batch, p.heads_q)


def _parts(p: Problem, queries: int, boxes: int, workers: int, jobs: int) -> tuple[tuple[int, int], ...]:
    """Cut the queries until there are enough jobs; later parts are no longer than earlier ones."""
    wanted = -(-jobs // boxes)
    if p.direction == "backward":
        # Each part of a backward pass sums into a dK and dV of its own.
        if boxes_share_dbias(p):
            wanted = jobs
        elif boxes % workers == 0:
            wanted = 1
    blocks = -(-p.seqlen_q // queries)
    step = -(-blocks // min(wanted, blocks)) * queries
    return tuple((i, min(i + step, p.seqlen_q)) for i in range(0, p.seqlen_q, step))


def visited(problem: Problem, cut: Schedule, part: tuple[int, int]) -> Iterator[tuple[int, int, list[Block]]]:
    """Yield each query block of a part with the key blocks it visits, none outside the band."""
    for i0 in range(*part, cut.queries):
        i1 = min(i0 + cut.queries, part[1])
        first, stop = problem.band.keys(i0, i1 - 1, problem.seqlen_k)
        starts = range(first, stop, cut.keys)
        yield i0, i1, [Block(i0, i1, j0, min(j0 + cut.keys, stop)) for j0 in starts]
