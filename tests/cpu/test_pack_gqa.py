"""How rows of tiles are numbered: what the model counts, and what it chooses."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.call.problem import Problem
from cupy_flash.plan.choose import choose
from cupy_flash.plan.families import pack_gqa

BASE = Problem("forward", "float16", None, 1, 64, 8, 4096, 4096, 128, 128, 128**-0.5)
TILE = (128, 128)


def chosen(multiprocessors: int = 132, tile: tuple[int, int] = TILE, **changes: object) -> pack_gqa.Rows:
    return pack_gqa.rows_of_tiles(BASE._replace(**changes), tile, multiprocessors)[0]


@pytest.mark.parametrize("head_bits", [0, 1, 3])
@pytest.mark.parametrize(
    "band",
    [{}, {"right": 0}, {"left": 40, "right": 0}, {"left": 9, "right": 30, "offset": -70},
     {"left": 100, "offset": 200}, {"right": 5, "offset": -300}, {"right": 1},
     {"left": 100, "offset": 500}],
    ids=str,
)  # fmt: skip
def test_blocks_are_those_that_hold_a_key(band: dict[str, int], head_bits: int) -> None:
    """On one multiprocessor the cost is that of every tile, counted from the mask itself."""
    p = BASE._replace(seqlen_q=300, seqlen_k=500, heads_q=8, heads_k=1, **band)
    m, n = TILE
    at = np.arange(300)[:, None] + p.offset
    keys = np.arange(500)
    keep = np.ones((300, 500), bool)
    if p.left is not None:
        keep &= keys >= at - p.left
    if p.right is not None:
        keep &= keys <= at + p.right
    total = 0
    for first in range(0, 300 << head_bits, m):
        queries = keep[first >> head_bits : (first + m - 1 >> head_bits) + 1].any(axis=0)
        seen = np.flatnonzero(queries)
        # A block of threads goes through all keys between the first and the last one.
        total += 1 + (seen[-1] // n - seen[0] // n + 1 if seen.size else 0)
    groups = 1 if head_bits else 8
    assert pack_gqa.cost(p, head_bits, TILE, 1) == pytest.approx(groups * total)


def test_many_tiles_are_sampled() -> None:
    p = BASE._replace(seqlen_q=100_000, seqlen_k=100_000, right=0)
    whole = 64 * sum(1 + -(-min((t + 1) * 128, 100_000) // 128) for t in range(782)) / 132
    assert pack_gqa.cost(p, 0, TILE, 132) == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("heads", [(8, 1), (7, 7), (6, 2), (40, 8), (64, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("seqlen", [1, 17, 100, 1000, 4096])
@pytest.mark.parametrize("right", [None, 0])
def test_it_is_never_worse(heads: tuple[int, int], seqlen: int, right: int | None) -> None:
    sizes = {"heads_q": heads[0], "heads_k": heads[1], "seqlen_q": seqlen, "seqlen_k": seqlen, "right": right}
    by_head = pack_gqa.numbered(BASE._replace(**sizes), 0, TILE, 132)
    assert chosen(**sizes).cost <= by_head.cost


def test_what_is_chosen() -> None:
    assert chosen(seqlen_q=1).head_bits == 3, "a query of 8 heads is 8 rows of one tile"
    assert chosen(seqlen_q=1).tiles == 8
    assert chosen(seqlen_q=16, batch=40).head_bits == 3
    assert chosen().head_bits == 0, "without a mask, long sequences are the same work either way"
    assert chosen(left=200, right=0).head_bits == 3, "a window crosses fewer blocks of keys"
    assert chosen(left=127, right=0).head_bits == 0, "this one as many: its edges are those of the blocks"
    assert chosen(heads_k=64).head_bits == 0
    assert chosen(heads_q=3, heads_k=1, batch=200).head_bits == 0, "a quarter of the rows would be empty"
    assert chosen(heads_q=3, heads_k=1, seqlen_q=5).head_bits == 2
    window = {"left": 200, "right": 0, "seqlen_k": 2**27}
    assert chosen(seqlen_q=2**27 - 1, **window).head_bits == 3
    assert chosen(seqlen_q=2**27, **window).head_bits == 0, "rows are counted in 31 bits"


def test_packed_sequences_are_judged_by_their_mean() -> None:
    """2000 rows of 100 sequences, of which one may have 4096."""
    p = {"packed": True, "batch": 100, "rows_q": 2000, "offset_from_end": True, "right": 0}
    assert chosen(**p).head_bits == 3
    assert chosen(**p).tiles == 100 * 8 * 256, "as many as there could be"
    assert chosen(**{**p, "rows_q": 400_000, "right": None}).head_bits == 0


def test_the_plan_says_so() -> None:
    plan = choose(BASE._replace(seqlen_q=4), "sm_90a")
    assert plan.notes == (
        "rows      8 heads share a tile; packed GQA: 8 tiles, cost 33.0; one head: 64 tiles, cost 33.0",
    )
    assert plan.launches[0].head_bits == 3
    assert plan.launches[0].grid == (8, 1, 1)
    assert choose(BASE._replace(heads_k=64), "sm_90a").notes == ()
