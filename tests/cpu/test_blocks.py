"""A BlockMask on NumPy arrays: its makers, against FP64 and dense masks, what is skipped and refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import cupy_flash
from cupy_flash import BlockMask, InvalidArgumentsError, block_mask, block_mask_of_lists, testing
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.cpu import tiles
from cupy_flash.cpu.blocks import TileBlocks
from tests.block_cases import BlockCase, as_mask, crossed, random_blocks
from tests.cases import Case
from tests.checks import Device
from tests.conftest import skip_without_core
from tests.cpu.test_spans import WITH as WITH_SPANS
from tests.cpu.test_spans import computed
from tests.public import with_mask

SIZES = [(16, 16), (16, 64), (128, 32), (256, 256)]
PLAIN = [
    BlockCase(Case(lengths=(70, 301), head_dims=(16, 8), heads=(4, 2)), size, lead)
    for size in SIZES
    for lead in ("", "h", "b1", "bh")
]
WITH = crossed(
    [
        {"lengths": (200, 200), "causal": True, "heads": (4, 2)},
        {"lengths": (300, 150), "window": (20, 40), "align": "bottom_right"},
        {"lengths": (65, 330), "mask": "b1q1", "bias": "1hqk", "heads": (2, 1)},
        {"lengths": (33, 170), "softcap": 2.0, "alibi": "bh", "align": 7, "dlse": True},
        {"lengths": (100, 290), "sinks": True, "dropout": 0.2, "dlse": True},
        {"lengths": (70, 150), "bias": "1h11", "heads": (6, 2), "dropout": 0.1},
        {"lengths": (40, 300), "bias": "k", "layout": "bshd", "dtype": "float16"},
        {"lengths": (64, 144), "dtype": "float64", "bias": "qk", "sinks": True},
        {"lengths": (3, 700), "heads": (2, 2), "window": (30, None), "align": "bottom_right"},
        {"lengths": (1, 1), "dtype": "bfloat16"},
        {"lengths": (5, 1), "causal": True, "align": 0},
        {"lengths": (1, 400), "heads": (4, 4)},
    ]
)  # fmt: skip


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
        (lambda: block_mask(3, None, None, 5, 5), r"block_mask\(\) is given a int"),
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


# ---- what is computed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN + WITH, ids=str)
def test_both_passes_are_what_the_specification_says(case: BlockCase, device: Device) -> None:
    arrays = case.inputs()
    how = case.options(arrays)
    q, k, v = (arrays[name] for name in "qkv")
    actual = computed(arrays, how)
    testing.assert_within_budget(actual, q, k, v, do=arrays["do"], dlse=arrays.get("dlse"), **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN + WITH, ids=str)
def test_bits_are_those_of_the_mask(case: BlockCase, device: Device) -> None:
    arrays = case.inputs()
    by_blocks, by_mask = computed(arrays, case.options(arrays)), computed(arrays, case.with_mask(arrays))
    for name, x in by_mask.items():
        assert np.array_equal(by_blocks[name], x), name


def test_blocks_meet_spans(device: Device) -> None:
    for case in WITH_SPANS[:4]:
        arrays = case.inputs()
        blocks = random_blocks(np.random.default_rng(1), (1, 1), case.case.lengths, (32, 64))
        both = computed(arrays, with_mask(case.options(arrays), blocks))
        how = with_mask(case.options(arrays), as_mask(blocks, *case.case.lengths))
        for name, x in computed(arrays, how).items():
            assert np.array_equal(both[name], x), name


@pytest.mark.parametrize("case", WITH[:8], ids=str)
def test_second_order(case: BlockCase) -> None:
    arrays = case.inputs()
    how = case.options(arrays)
    if arrays["q"].dtype != np.float64:
        arrays = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in arrays.items()}
        how |= {name: arrays[name] for name in ("bias", "alibi_slopes", "sinks") if name in arrays}
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    draw = np.random.default_rng(3)
    along = {
        "d" + name: draw.standard_normal(arrays[name].shape)
        for name in ("q", "k", "v", "bias", "sinks")
        if name in arrays
    }
    exact = testing.reference_attention(q, k, v, **how)
    j = cupy_flash.derivatives.jvp(q, k, v, *exact, **along, **how)
    h = cupy_flash.derivatives.hvp(do, q, k, v, *exact, **along, **how)
    expected = [*testing.reference_jvp(q, k, v, **along, **how)]
    expected += [x for x in testing.reference_hvp(do, q, k, v, **along, **how) if x is not None]
    for ours, theirs in zip([*j, *(x for x in h if x is not None)], expected, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-9, atol=1e-9 * np.abs(theirs).max(initial=1))


@pytest.mark.parametrize("lead", ["11", "b1", "1h", "bh"])
def test_packed(lead: str, device: Device) -> None:
    """Blocks count from the start of each sequence; those past its end are not looked at."""
    lengths_q, lengths_k, used = [40, 0, 150], [60, 9, 155], [60, 5, 150]
    draw = np.random.default_rng(0)
    q, do = draw.standard_normal((2, sum(lengths_q) + 3, 4, 8), np.float32)
    k, v = draw.standard_normal((2, sum(lengths_k), 2, 8), np.float32)
    cuts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    axes = tuple({"1": 1, "b": 3, "h": 4}[axis] for axis in lead)
    blocks = random_blocks(draw, axes, (150, 155), (32, 16))
    how = {"seqused_k": np.array(used, np.int32), "causal": True, "align": "bottom_right", "mask": blocks}
    o, lse = cupy_flash.attention_varlen(q, k, v, *cuts, return_lse=True, **how)
    grads = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, *cuts, **how)
    mask = as_mask(blocks, 150, 155)
    for b, n in enumerate(used):
        of_q, of_k = slice(cuts[0][b], cuts[0][b + 1]), slice(cuts[1][b], cuts[1][b] + n)
        kept = mask[b if "b" in lead else 0, :, : lengths_q[b], :n]
        one = [x[None] for x in (q[of_q], k[of_k], v[of_k])]
        options = {"mask": kept, "causal": True, "align": "bottom_right", "layout": "bshd"}
        exact = testing.reference_attention(*one, **options)
        slopes = testing.reference_backward(do[of_q][None], *one, **options)
        assert np.allclose(o[of_q], exact.o[0], atol=1e-5)
        assert np.allclose(grads.dq[of_q], slopes.dq[0], atol=1e-4)
        assert np.allclose(grads.dk[of_k], slopes.dk[0], atol=1e-4)
        assert np.allclose(grads.dv[of_k], slopes.dv[0], atol=1e-4)


def test_naive_attention_takes_them() -> None:
    for case in PLAIN[:: len(PLAIN) // 4]:
        arrays = case.inputs()
        qkv, blocks = [arrays[name] for name in "qkv"], case.mask_of(arrays)
        for made in (blocks, BlockMask(np.minimum(blocks.table, 1), blocks.bits[:0])):
            ours = cupy_flash.naive_attention(*qkv, mask=made, causal=True, align=3)
            exact = testing.reference_attention(*qkv, mask=as_mask(made, 70, 301), causal=True, align=3)
            assert np.allclose(ours.o, exact.o, atol=1e-5)
            by_reference = testing.reference_attention(*qkv, mask=made, causal=True, align=3)
            assert all(map(np.array_equal, by_reference, exact))


def test_keys_of_blocks_that_are_not_seen_may_be_infinite(device: Device) -> None:
    """What is skipped is not read: infinite values times weights of 0 would be NaN."""
    draw = np.random.default_rng(1)
    q, do = draw.standard_normal((2, 1, 2, 64, 16), np.float32)
    k, v = draw.standard_normal((2, 1, 2, 1300, 16), np.float32)
    k[:, :, 512:1024] = v[:, :, 512:1024] = np.inf
    made = block_mask(lambda b, h, i, j: (j < 512) | (j >= 1152), None, None, 64, 1300)
    assert made.bits.shape[0] == 0
    results = computed({"q": q, "k": k, "v": v, "do": do}, {"mask": made})
    assert all(np.isfinite(x).all() for x in results.values())


def test_the_core_skips_eights_of_a_block_that_is_seen_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that no query of a panel sees are not read, though others of their block are."""
    monkeypatch.setenv("CUPY_FLASH_CPU", "")
    skip_without_core()
    draw = np.random.default_rng(1)
    q, do = draw.standard_normal((2, 1, 2, 64, 16), np.float32)
    k, v = draw.standard_normal((2, 1, 2, 256, 16), np.float32)
    k[:, :, :40] = v[:, :, :40] = k[:, :, 200:] = v[:, :, 200:] = np.inf
    made = block_mask(lambda b, h, i, j: (j >= 40 + i % 8) & (j < 200), None, None, 64, 256)
    results = computed({"q": q, "k": k, "v": v, "do": do}, {"mask": made})
    assert all(np.isfinite(x).all() for x in results.values())


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


# ---- what is refused


def test_explain_names_the_size() -> None:
    q = np.ones((1, 2, 8, 4), np.float32)
    made = block_mask(FUNCTIONS["causal"], None, None, 8, 8, block=(16, 32))
    assert "BlockMask(16 x 32, 1 in part)" in cupy_flash.explain(q, q, q, mask=made)


BITS = np.zeros((2, 16, 2), np.uint8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((np.zeros((1, 1, 1, 1)), BITS), "mask.table has dtype float64, not int32"),
        ((np.zeros((1, 1, 1, 1), np.int64), BITS), "mask.table has dtype int64, not int32"),
        ((np.zeros((1, 1, 1, 1), np.int32), BITS.astype(bool)), "mask.bits has dtype bool, not uint8"),
        ((np.zeros((1, 1, 1, 2), np.int32), BITS), r"has shape \(1, 1, 1, 2\) for 6 queries and 9 keys"),
        ((np.zeros((3, 1, 1, 1), np.int32), BITS), r"mask.table has shape \(3, 1, 1, 1\)"),
        ((np.zeros((1,), np.int32), BITS), r"mask.table has shape \(1,\)"),
        ((np.zeros((1, 1), np.int32), BITS[:, :9]), r"mask.bits has shape \(2, 9, 2\)"),
        ((np.zeros((1, 1), np.int32), BITS[0]), r"mask.bits has shape \(16, 2\)"),
        ((np.zeros((1, 1), np.int32), BITS.repeat(2, 2)[..., :3]), r"mask.bits has shape \(2, 16, 3\)"),
        ((np.zeros((1, 1), np.int32), BITS.repeat(2, 0)[::2]), r"mask.bits is not contiguous"),
        ((np.zeros((1, 1, 1, 1, 1), np.int32), BITS), r"mask.table has shape \(1, 1, 1, 1, 1\)"),
        ((np.zeros((1, 1), np.int32), BITS[:, ::-1]), r"mask.bits is not contiguous"),
        ((np.full((1, 1), 4, np.int32), BITS), "mask.table holds 4, and there are bits of 2"),
        ((np.full((1, 1), -1, np.int32), BITS), "mask.table holds -1, and there are bits of 2"),
    ],
)  # fmt: skip
def test_wrong_blocks_are_refused(given, says: str, device: Device) -> None:
    q, k = np.ones((2, 4, 6, 8), np.float32), np.ones((2, 2, 9, 8), np.float32)
    o, lse = cupy_flash.attention(q, k, k, return_lse=True)
    for call in (
        lambda: cupy_flash.attention(q, k, k, mask=BlockMask(*given)),
        lambda: cupy_flash.attention_backward(o, q, k, k, o, lse, mask=BlockMask(*given)),
        lambda: cupy_flash.derivatives.jvp(q, k, k, o, lse, dq=q, mask=BlockMask(*given)),
        lambda: cupy_flash.naive_attention(q, k, k, mask=BlockMask(*given)),
    ):
        with pytest.raises(InvalidArgumentsError, match=rf"{says}[^\n]*\n(?s:.*)Try: ."):
            call()


def test_values_are_looked_at_in_every_call(device: Device) -> None:
    """Not only in the first of those that are alike."""
    q, made = np.ones((1, 1, 6, 8), np.float32), BlockMask(np.ones((1, 1), np.int32), BITS)
    cupy_flash.attention(q, q, q, mask=made)
    made.table[0, 0] = 9
    with pytest.raises(InvalidArgumentsError, match=r"mask\.table holds 9"):
        cupy_flash.attention(q, q, q, mask=made)
