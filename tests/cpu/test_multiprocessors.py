"""Plans for GPUs of fewer or more multiprocessors than a typical one: all work once, little of a GPU idle."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pytest

from cupy_flash.call.problem import Cache, Problem
from cupy_flash.call.spans import Intervals
from cupy_flash.plan import catalog
from cupy_flash.plan.choose import choose
from cupy_flash.plan.families import decode, hopper, pack_gqa
from cupy_flash.plan.launch import Plan, blocks_of

# An H20, a GeForce RTX 4080 and an L40S have these; the last ones divide nothing.
COUNTS = (78, 76, 142, 1, 131)
FORWARD = Problem("forward", "float16", None, 2, 12, 4, 3000, 3000, 128, 128, 128**-0.5)
CACHED = Problem("decode", "float16", None, 1, 64, 8, 1, 32768, 128, 128, 128**-0.5, offset_from_end=True,
                 cache=Cache("float16"))  # fmt: skip


# ---------------------------------------------------------------------- blocks that stay

# Tiles fewer than multiprocessors, a few more, and many; dealt out, and given out one by one.
SHAPES = ({"batch": 1, "heads_q": 3, "heads_k": 3, "seqlen_q": 700}, {"batch": 3, "seqlen_q": 1100}, {})
BANDS = ({}, {"right": 0}, {"left": 500, "right": 100})


def stays(problem: Problem, multiprocessors: int) -> tuple[Plan, int, int]:
    """A plan for sm_90, the blocks that stay, and their tiles."""
    plan = choose(problem, "sm_90a", multiprocessors)
    assert plan.family == hopper.NAME
    launch = plan.launches[-1]
    heads = problem.heads_k if launch.head_bits else problem.heads_q
    tiles = problem.batch * heads * blocks_of(problem.seqlen_q << launch.head_bits, launch.variant.tile[0])
    return plan, launch.grid[0], tiles


def taken(blocks: int, tiles: int, seconds: np.ndarray, *, counted: bool) -> tuple[list[int], list[float]]:
    """Tiles in the order in which blocks take them, as TileScheduler has it, and when each block ends."""
    if not counted:
        own = [range(block, tiles, blocks) for block in range(blocks)]
        return [tile for each in own for tile in each], [seconds[list(each)].sum() for each in own]
    ends = [(seconds[tile], tile) for tile in range(min(blocks, tiles))]
    heapq.heapify(ends)
    order = sorted(block for _, block in ends)
    for given in range(max(tiles - blocks, 0)):
        tile = blocks + given  # of the counter, which is 0 at launch
        end, block = ends[0]
        heapq.heapreplace(ends, (end + seconds[tile], block))
        order.append(tile)
    return order, [end for end, _ in ends]


@pytest.mark.parametrize("multiprocessors", COUNTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_that_stay_take_every_tile_once(
    shape: dict[str, int], band: dict[str, int], dtype: str, multiprocessors: int
) -> None:
    """No block ends earlier than the others by more than one tile takes: the longest."""
    problem = FORWARD._replace(dtype=dtype, **shape, **band)
    plan, blocks, tiles = stays(problem, multiprocessors)
    counted = any(part.name == "next_tile" for part in plan.workspace)
    assert counted == (tiles > multiprocessors and bool(band)) == bool(plan.zeroed)
    assert blocks == min(tiles, multiprocessors), "a block for each multiprocessor, no two of one"
    # Tiles of the same work in any order; of others, the longest first: from the last queries on.
    variant, bits = plan.launches[-1].variant, plan.launches[-1].head_bits
    of_head = tiles // (problem.batch * (problem.heads_k if bits else problem.heads_q))
    work = np.array([work_of(problem, bits, variant.tile, t) for t in reversed(range(of_head))])
    seconds = np.repeat(work, tiles // of_head)
    order, ends = taken(blocks, tiles, seconds, counted=counted)
    assert sorted(order) == list(range(tiles))
    assert max(ends) - min(ends) <= seconds.max()


def work_of(p: Problem, bits: int, tile: tuple[int, int], number: int) -> int:
    """Blocks of keys of a tile, and one for its start and end."""
    m, n = tile
    last = min(((number + 1) * m - 1) >> bits, p.seqlen_q - 1)
    return 1 + pack_gqa._blocks(p, number * m >> bits, last, p.seqlen_q, p.seqlen_k, n)


@pytest.mark.parametrize("multiprocessors", COUNTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_that_stay_over_spans(shape: dict[str, int], multiprocessors: int) -> None:
    """Tiles of one head, given out one by one where there are more of them than blocks."""
    problem = FORWARD._replace(spans=Intervals(False, 1, 4096), **shape)
    plan = choose(problem, "sm_90a", multiprocessors)
    assert plan.family == hopper.NAME
    launch = plan.launches[-1]
    tiles = problem.batch * problem.heads_q * blocks_of(problem.seqlen_q, launch.variant.tile[0])
    counted = any(part.name == "next_tile" for part in plan.workspace)
    assert counted == (tiles > multiprocessors) == bool(plan.zeroed)
    assert launch.grid[0] == min(tiles, multiprocessors)
    order, _ = taken(launch.grid[0], tiles, np.random.default_rng(0).random(tiles), counted=counted)
    assert sorted(order) == list(range(tiles))


@pytest.mark.parametrize(
    ("seqlen", "heads", "wave"),
    [(1024, 4, 33), (16384, 4, 66), (32768, 4, 132), (65536, 4, 132), (1024, 24, 5), (1024, 25, 0)],
)
def test_a_wave_is_what_runs_at_once_of_a_head(seqlen: int, heads: int, wave: int) -> None:
    """Deterministic gradients: 16 MiB of Q and dO are those of 32768 queries, of one head or of several."""
    problem = FORWARD._replace(
        direction="backward", deterministic=True, batch=1, heads_q=heads, heads_k=heads, seqlen_q=seqlen
    )
    assert {launch.wave for launch in choose(problem, "sm_90a").launches} == {wave}


@pytest.mark.parametrize("multiprocessors", COUNTS)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("bits", [0, 2])
def test_the_cost_is_when_the_last_block_ends(bits: int, band: dict[str, int], multiprocessors: int) -> None:
    """By which rows of tiles are numbered: off by less than one tile, of any number of multiprocessors."""
    problem, tile = FORWARD._replace(seqlen_q=1100, **band), (128, 128)
    rows = pack_gqa.numbered(problem, bits, tile, multiprocessors)
    groups = problem.batch * (problem.heads_k if bits else problem.heads_q)
    work = [work_of(problem, bits, tile, t) for t in reversed(range(rows.tiles // groups))]
    seconds = np.repeat(np.array(work), groups)
    _, ends = taken(min(rows.tiles, multiprocessors), rows.tiles, seconds, counted=bool(band))
    assert 0 <= max(ends) - rows.cost < seconds.max()


# ---------------------------------------------------------------------- splits of keys


def caches(arch: str) -> Iterator[Problem]:
    """Few and many sequences, short and long ones, of one query and of several, of wide heads and latents."""
    for batch, keys, queries in ((1, 32768, 1), (1, 4096, 1), (3, 10000, 2), (13, 2000, 1), (200, 8192, 1)):
        yield CACHED._replace(batch=batch, seqlen_k=keys, seqlen_q=queries)
    for batch, keys, queries in ((1, 50000, 1), (5, 20000, 2), (1, 500000, 1)):
        yield CACHED._replace(batch=batch, seqlen_k=keys, seqlen_q=queries, heads_q=35, heads_k=5)
    if arch != "sm_75":
        latents = CACHED._replace(
            heads_k=1, head_dim=576, head_dim_v=512, cache=Cache("float16", latent=True)
        )
        for batch, keys, heads in ((1, 32768, 16), (5, 20000, 128), (70, 3000, 16)):
            yield latents._replace(batch=batch, seqlen_k=keys, heads_q=heads)
            yield CACHED._replace(batch=batch, seqlen_k=keys, heads_q=heads, head_dim=512, head_dim_v=512)


@pytest.mark.parametrize("multiprocessors", COUNTS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a"])
def test_splits_leave_less_than_a_wave_idle(arch: str, multiprocessors: int) -> None:
    """Every step of every tile of queries is one part's; no other number of parts costs less."""
    row = catalog.architecture(arch)._replace(multiprocessors=multiprocessors)
    for problem in caches(arch):
        assert not decode.refusals(problem, row)
        plan = decode.plan(problem, row)
        variant, splits = decode.cheapest(problem, row)
        launch = next(x for x in plan.launches if x.variant == variant)
        rows = problem.heads_q // problem.heads_k * problem.seqlen_q
        tiles = problem.batch * problem.heads_k * blocks_of(rows, variant.tile[0])
        assert launch.grid[0] == tiles * splits.parts
        assert splits.steps == blocks_of(problem.seqlen_k, decode.keys_of_step(variant))
        partial = {part.name: part.shape for part in plan.workspace}
        assert (splits.parts == 1) == ("partial_lse" not in partial)
        assert splits.parts == 1 or partial["partial_lse"][0] == splits.parts
        assert splits.at_once % multiprocessors == 0
        waves = blocks_of(launch.grid[0], splits.at_once)
        of_part = blocks_of(splits.steps, splits.parts)
        merging = decode.LAUNCH_COST + decode._SPLIT_COST * splits.parts if splits.parts > 1 else 0
        assert splits.cost == pytest.approx(waves * (of_part + decode.BLOCK_COST) + merging)
        assert splits.cost == min(
            decode.split_cost(n, tiles, splits.steps, splits.at_once)
            for n in range(1, max(1, most_parts(variant, splits.steps)) + 1)
        )
        least = tiles * splits.steps / splits.at_once
        assert waves * of_part < least + of_part + waves, "the last wave alone is not full, and rounding"


def most_parts(variant: catalog.Variant, steps: int) -> int:
    """Parts of two full rings each, of which [D2] of flash_decode makes none smaller; 256 at most."""
    return min(256, steps // (2 * int(dict(variant.macros)["CF_STAGES"])))


# ---------------------------------------------------------------------- waves of turns


@pytest.mark.parametrize("multiprocessors", COUNTS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (12, 4), (20, 5), (24, 24)], ids=str)
def test_a_wave_of_turns_fits_the_gpu(heads: tuple[int, int], multiprocessors: int) -> None:
    """All blocks of a wave run at once, and one more of each head would not."""
    queries, keys = heads
    problem = FORWARD._replace(
        direction="backward", batch=1, heads_q=queries, heads_k=keys, seqlen_q=9000, seqlen_k=9000,
        deterministic=True,
    )  # fmt: skip
    plan = choose(problem, "sm_90a", multiprocessors)
    wave = plan.launches[1].wave
    side_by_side = min(keys, (16 << 20) // 2 // 256 // 9000)
    assert wave >= 1
    assert wave * side_by_side <= max(multiprocessors, side_by_side)
    assert (wave + 1) * side_by_side > multiprocessors
