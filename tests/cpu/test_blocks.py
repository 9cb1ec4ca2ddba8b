"""Makers of a BlockMask, against dense masks, and what is skipped."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, block_mask, block_mask_of_lists
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.cpu import tiles
from cupy_flash.cpu.blocks import TileBlocks
from tests.block_cases import as_mask
from tests.conftest import skip_without_core

SIZES = [(16, 16), (16, 64), (128, 32), (256, 256)]

# ---- makers

FUNCTIONS = {
    "causal": lambda b, h, i, j: j <= i,
    "window of the head": lambda b, h, i, j: abs(i - j) < 20 * (h + 1),
    "documents": lambda b, h, i, j: (i + b) // 50 == (j + b) // 50,
    "scattered": lambda b, h, i, j: (7 * i + 3 * j + h) % 11 == 0,
    "nothing": lambda b, h, i, j: j < 0,
    "all": lambda b, h, i, j: j >= 0,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_block_mask_is_what_the_function_says(name: str, size: tuple[int, int]) -> None:
    made = block_mask(FUNCTIONS[name], 2, 3, 130, 300, block=size)
    b, h, i, j = np.ogrid[:2, :3, :130, :300]
    expected = np.broadcast_to(FUNCTIONS[name](b, h, i, j), (2, 3, 130, 300))
    assert made.table.dtype == np.int32
    assert np.array_equal(as_mask(made, 130, 300), expected)
    traced = block_mask(cupy_flash.mask(FUNCTIONS[name]), 2, 3, 130, 300, block=size)
    assert all(map(np.array_equal, made, traced))
    if name == "all":
        assert (made.table == 1).all(), "what is past the end does not make a block partial"


def test_blocks_that_are_alike_share_their_bits() -> None:
    made = block_mask(lambda b, h, i, j: j <= i, None, None, 1024, 1024, block=64)
    assert made.table.shape == (1, 1, 16, 16)
    assert made.bits.shape == (1, 64, 8)


def test_arguments_of_the_function() -> None:
    limit = np.int32([3, 40])
    below = cupy_flash.mask(lambda b, h, i, j, most: j < most[h])
    made = block_mask(below(limit), None, 2, 20, 50, block=16)
    assert np.array_equal(as_mask(made, 20, 50)[0, :, 0], np.arange(50) < limit[:, None])


def test_no_array_of_all_pairs_is_made() -> None:
    n = 8192
    tracemalloc.start()
    made = block_mask(lambda b, h, i, j: (j <= i) & (i - j < 500), None, None, n, n)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n / 2
    assert sum(x.nbytes for x in made) < n * n / 1000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lead", [(1, 1), (2, 3)])
def test_lists_of_other_libraries(size: tuple[int, int], lead: tuple[int, int]) -> None:
    draw = np.random.default_rng(0)
    counts = (-(-130 // size[0]), -(-300 // size[1]))
    kinds = draw.integers(0, 3, (*lead, *counts))
    lists: list[np.ndarray] = []
    for kind in (1, 2):
        count = (kinds == kind).sum(axis=-1).astype(np.int32)
        index = np.full(kinds.shape, 99999, np.int32)  # what is behind the count may be anything
        for at in np.ndindex(*count.shape):
            index[at][: count[at]] = draw.permutation(np.flatnonzero(kinds[at] == kind))
        lists += [count, index]

    def some(b, h, i, j):
        return (i + j + h) % 3 == 0

    sizes = {"q_len": 130, "kv_len": 300, "block": size}
    b, h, i, j = np.ogrid[: lead[0], : lead[1], :130, :300]
    of_pair = kinds[:, :, i[0, 0] // size[0], j[0, 0] // size[1]]
    in_part = block_mask_of_lists(*lists, function=some, **sizes)
    assert np.array_equal(as_mask(in_part, 130, 300), (of_pair == 2) | ((of_pair == 1) & some(b, h, i, j)))
    whole = block_mask_of_lists(*lists, **sizes)
    assert np.array_equal(as_mask(whole, 130, 300), of_pair > 0)
    without = block_mask_of_lists(*lists[:2], **sizes)
    assert np.array_equal(as_mask(without, 130, 300), of_pair == 1)


def _lists(count=((1, 0),), index=((1, 0), (0, 0)), **more):
    return lambda: block_mask_of_lists(
        np.array(count), np.array([index]), q_len=32, kv_len=32, block=16, **more
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: block_mask(3, None, None, 5, 5), r"block_mask\(\) is given an int"),
        (lambda: block_mask(lambda i, j: j, None, None, 5, 5), r"with b, h, i, j: too many positional"),
        (lambda: block_mask(lambda b, h, i, j: j, None, None, 5, 5), r"gives int64 of shape \(1, 5\)"),
        (lambda: block_mask(lambda b, h, i, j: np.ones(3, bool), 1, 1, 5, 5), r"gives bool of shape \(3,\)"),
        (lambda: block_mask(cupy_flash.score(lambda s, b, h, i, j: s), 1, 1, 5, 5), r"returns scores"),
        (lambda: block_mask(FUNCTIONS["all"], None, None, 5, 5, block=48), r"block is 48"),
        (lambda: block_mask(FUNCTIONS["all"], None, None, 5, 5, block=(16, 8)), r"block is \(16, 8\)"),
        (lambda: block_mask(FUNCTIONS["all"], -1, None, 5, 5), r"batch is -1"),
        (lambda: block_mask(FUNCTIONS["all"], 1, True, 5, 5), r"heads is True"),
        (lambda: block_mask(FUNCTIONS["all"], 1, None, 5, 1.5), r"kv_len is 1.5"),
        (_lists(count=((1.0, 0.0),)), r"mask_block_cnt is of dtype float64"),
        (_lists(count=((3, 0),)), r"mask_block_cnt holds 3"),
        (_lists(count=((-1, 0),)), r"mask_block_cnt holds -1"),
        (_lists(count=((1, 0, 0),)), r"mask_block_cnt has shape \(1, 1, 3\)"),
        (_lists(index=((2, 0), (0, 0))), r"mask_block_idx holds 2"),
        (_lists(count=((2, 0),), index=((1, 1), (0, 0))), r"block 1 of keys is listed twice for block 0"),
        (_lists(full_block_cnt=[[1, 0]], full_block_idx=[[[1], [0]]]), r"block 1 of keys is listed twice"),
        (_lists(full_block_cnt=np.array([[1, 0]])), r"full_block_idx is of dtype object"),
    ],
)  # fmt: skip
def test_makers_refuse(make, says: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=rf"{says}[^\n]*\n(?s:.*)Try: ."):
        make()


# ---- what is skipped


def test_the_core_skips_eights_of_a_block_that_is_seen_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that no query of a panel sees are not read, though others of their block are."""
    monkeypatch.setenv("CUPY_FLASH_CPU", "")
    skip_without_core()
    draw = np.random.default_rng(1)
    q, do = draw.standard_normal((2, 1, 2, 64, 16), np.float32)
    k, v = draw.standard_normal((2, 1, 2, 256, 16), np.float32)
    k[:, :, :40] = v[:, :, :40] = k[:, :, 200:] = v[:, :, 200:] = np.inf
    made = block_mask(lambda b, h, i, j: (j >= 40 + i % 8) & (j < 200), None, None, 64, 256)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, mask=made)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, mask=made)
    assert all(np.isfinite(x).all() for x in (o, lse, *gradients[:3]))


def test_tiles_of_blocks_that_are_not_seen_are_skipped() -> None:
    q = np.ones((1, 1, 256, 8), np.float32)
    table, bits = block_mask(lambda b, h, i, j: j < (i // 64 + 1) * 64, None, None, 256, 256, block=64)
    asked, views, _ = describe(
        "forward", {"q": q, "k": q, "v": q, "blocks": table, "block_bits": bits}, Options(tile=(64, 64))
    )
    assert asked.blocks is not None
    of_tiles = TileBlocks(asked.blocks, views["blocks"].numpy()[:, :, None], bits)
    kinds = [
        of_tiles.visible(box, block)
        for box in tiles.boxes(asked)
        for _, _, blocks in tiles.visited(asked)
        for block in blocks
    ]
    assert len(kinds) == 16
    assert sum(nothing for _, nothing in kinds) == 6
    assert sum(tile is None and not nothing for tile, nothing in kinds) == 10, "whole tiles need no test"
