"""Spans and a BlockMask on Hopper's own kernels, simulated: against FP64, bands, and what it may skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import Spans, spans, testing
from cupy_flash.device import abi, simulator
from cupy_flash.dispatch import memo
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan import families
from cupy_flash.plan.families import flash, hopper
from tests import block_cases, span_cases
from tests.block_cases import BlockCase
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.simulator import sanitized
from tests.simulator.units import SIMULATED, aligned, pack, unit
from tests.span_cases import SpanCase

pytestmark = SIMULATED

POLICIES = ("late", "early", "random")
OPEN = 1 << 62
OPTIONS: list[dict[str, Any]] = [
    {"lengths": (140, 300), "heads": (4, 2)},
    {"lengths": (65, 200), "causal": True, "align": "bottom_right", "head_dims": (128, 72)},
    {"lengths": (200, 330), "window": (20, 40), "align": 3, "dtype": "bfloat16"},
    {"lengths": (400, 270), "sinks": True, "head_dims": (40, 24), "heads": (3, 1)},
    {"lengths": (130, 280), "head_dims": (192, 128), "batch": 1, "heads": (2, 1)},
    {"lengths": (150, 190), "head_dims": (256, 200), "batch": 1, "heads": (1, 1), "causal": True, "align": 9},
    {"lengths": (1, 133), "heads": (4, 4), "layout": "bshd"},
    {"lengths": (133, 1), "dtype": "bfloat16", "head_dims": (96, 96)},
]
PLAIN = [Case(**{"dtype": "float16", "style": "aligned", "head_dims": (64, 64), **each}) for each in OPTIONS]
KINDS = [(by, n, lead) for lead in ("", "bh", "h", "b1") for n in (1, 2) for by in (False, True)]
SIZES = [(size, lead) for lead in ("", "bh", "h") for size in ((16, 16), (128, 128), (64, 16), (16, 256))]
CASES: list[SpanCase | BlockCase] = [
    *(SpanCase(PLAIN[0], *kind) for kind in KINDS[:8]),
    *(SpanCase(case, *KINDS[(5 * n + m) % len(KINDS)]) for n, case in enumerate(PLAIN[1:]) for m in (1, 2)),
    *(BlockCase(PLAIN[0], *size) for size in SIZES[:8]),
    *(BlockCase(case, *SIZES[(5 * n + m) % len(SIZES)]) for n, case in enumerate(PLAIN[1:]) for m in (0, 1)),
]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A simulated Hopper, small so that blocks take several tiles; its plans fail instead of falling back."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90a")
    monkeypatch.setattr(simulator, "multiprocessors", lambda _device=0: 3)
    monkeypatch.setattr(families, "FAMILIES", (hopper,))
    memo.forget()
    yield Device("sm_90a", np)
    memo.forget()


@pytest.mark.sampled(16)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_it_is_what_the_specification_says(number: int, device: Device) -> None:
    with simulator.schedule(POLICIES[number % 3], seed=number):
        check_forward(CASES[number], device)  # type: ignore[arg-type]


def causal_spans(queries: int, keys: int, offset: int, *, by_query: bool) -> np.ndarray:
    """What a causal mask is in either form."""
    if by_query:
        stop = np.clip(np.arange(queries) + offset + 1, 0, keys)
        return np.stack([0 * stop, stop], -1).astype(np.int32)[:, None]
    start = np.clip(np.arange(keys) - offset, 0, queries)
    return np.stack([start, 0 * start + queries], -1).astype(np.int32)[None]


def causal_blocks(queries: int, keys: int, size: int = 128) -> cupy_flash.BlockMask:
    """The same by blocks."""
    return cupy_flash.block_mask(lambda b, h, i, j: j <= i, None, None, queries, keys, block=size)


# Shared with the sanitizers, which run it in a process of their own.
def check_band(head_dim: int, lengths: tuple[int, int], policy: str = "late") -> None:
    """Causality as spans or as blocks has the bits of `causal=True`: the same tiles in the same order."""
    rng = np.random.default_rng(3)
    shapes = [(1, 2, lengths[n > 0], head_dim) for n in range(3)]
    q, k, v = (
        testing.hostile(rng.standard_normal(s).astype(np.float16), style="aligned").view for s in shapes
    )
    forms: list[dict[str, Any]] = [
        {"mask": Spans(causal_spans(*lengths, 0, by_query=by_query))} for by_query in (False, True)
    ]
    with simulator.schedule(policy, seed=7):
        o, lse = cupy_flash.attention(q, k, v, causal=True, align=0, return_lse=True)
        everything = np.array([0, lengths[1]], np.int32) + np.zeros((1, lengths[0], 1, 1), np.int32)
        by_band = {"mask": Spans(everything), "causal": True, "align": 0}
        for form in (*forms, {"mask": causal_blocks(*lengths)}, by_band):
            same, same_lse = cupy_flash.attention(q, k, v, return_lse=True, **form)
            assert np.array_equal(o.view(np.uint16), same.view(np.uint16)), list(form)
            assert np.array_equal(lse, same_lse), list(form)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_band_has_the_same_bits_in_any_form(policy: str) -> None:
    check_band(64, (450, 450), policy)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_band_has_the_same_bits_above_64(policy: str, head_dim: int) -> None:
    check_band(head_dim, (300, 400), policy)


def flops(*arrays: np.ndarray, **options: Any) -> int:
    """Of the products of a forward pass."""
    with simulator.costs() as counted:
        cupy_flash.attention(*arrays, **options)
    return sum(cost["mma_flops"] for _, cost in counted)


def test_what_is_not_reached_is_neither_copied_nor_multiplied() -> None:
    """Documents of two tiles each, in every form: only their own tiles are looked at."""
    q, k, v = (aligned((1, 2, 1024, 128), np.float16, 0.5) for _ in range(3))
    own = np.arange(1024) // 256 * 256
    bounds = np.stack([own, own + 256], -1).astype(np.int32)
    table = np.kron(np.eye(4, dtype=np.int32), np.ones((2, 2), np.int32))
    no_bits = np.zeros((0, 128, 16), np.uint8)
    of_tile = 4 * 128 * 128 * 128
    for causal, tiles in ((False, 16), (True, 12)):
        for form in (
            {"mask": Spans(bounds[None])},
            {"mask": Spans(bounds[:, None])},
            {"mask": cupy_flash.BlockMask(table, no_bits)},
        ):
            with simulator.costs() as counted:
                cupy_flash.attention(q, k, v, causal=causal, **form)
            (_, of_reach), (_, cost) = counted
            assert cost["mma_flops"] == 2 * tiles * of_tile, (causal, list(form))
            assert cost["bulk_load_bytes"] == 2 * 2 * 128 * 128 * (8 + 2 * tiles), (causal, list(form))
            assert of_reach["mma_flops"] == 0


@pytest.mark.slow
def test_sparse_tiles_of_many_words() -> None:
    """Blocks of keys of more than one word of 32, most of which nobody sees; a tile of queries sees none."""
    keys = 128 * 70
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float16) for n in (400, keys, keys))
    start = np.where(np.arange(400) < 192, 8700, 0)
    bounds = np.stack([start, start + 100, 0 * start + 4090, 0 * start + 4200], -1).astype(np.int32)
    bounds[192:384] = 0
    views = [testing.hostile(x, style="aligned").view for x in (q, k, v)]
    o, lse = cupy_flash.attention(*views, mask=Spans(bounds[:, None]), return_lse=True)
    assert not o[0, 0, 192:384].any()
    assert np.isneginf(lse[0, 0, 192:384]).all()
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, mask=Spans(bounds[:, None]))


@pytest.mark.parametrize("classes", hopper._SPANS)
def test_documents_visit_few_blocks_that_packed_ones_do_not(classes: tuple[int, int]) -> None:
    """32 causal documents in 32768 tokens: a packed call visits 0.9 of what flash_reach leaves, or more."""
    rng = np.random.default_rng(32)
    ends = np.sort(rng.choice(np.arange(1, 32768), 31, replace=False))
    lengths = np.diff([0, *ends, 32768])
    m, n, _ = hopper._SPANS[classes][:3]
    tiles, words = -(-32768 // m), -(-32768 // n // 32)
    call, reach = np.zeros((), abi.FORWARD), np.zeros((tiles, words, 2), np.uint32)
    call["reach"] = (reach.ctypes.data, 0, 0, 2 * words, 1)
    for name, x in (("batch", 1), ("heads_q", 1), ("heads_k", 1), ("seqlen_q", 32768), ("seqlen_k", 32768)):
        call["shape"][name] = x
    bounds = spans.documents(list(lengths)).bounds
    call["score"]["spans"] = (bounds.ctypes.data, 0, 0, 2, 1)
    call["score"]["span_intervals"], call["score"]["left"] = 1, OPEN
    kernel = simulator.load(hopper._reach((m, n)))
    kernel.launch((-(-tiles // 32) * words, 1, 1), (256, 1, 1), 1024, call.tobytes(), 0)
    seen = int(np.unpackbits(np.ascontiguousarray(reach[..., 0]).view(np.uint8)).sum())
    packed = sum(-(-min(length, last + m) // n) for length in lengths for last in range(0, int(length), m))
    assert 0.9 * seen <= packed <= seen


def test_keys_of_tiles_that_are_skipped_may_hold_anything() -> None:
    """NaN in keys and values that no tile reaches does no harm. 384: whole tiles of queries and of keys."""
    rng = np.random.default_rng(6)
    q, k, v = rng.standard_normal((3, 1, 1, 3 * 384, 64)).astype(np.float16)
    bounds = spans.documents([384] * 3).bounds
    clean = cupy_flash.attention(q, k, v, mask=Spans(bounds))
    k[:, :, 384:768], v[:, :, 384:768] = np.nan, np.nan
    o = cupy_flash.attention(q, k, v, mask=Spans(bounds))
    seen = np.r_[0:384, 768:1152]
    assert np.array_equal(o[:, :, seen], clean[:, :, seen])


@pytest.mark.parametrize("policy", POLICIES)
def test_packed(policy: str) -> None:
    """Bounds count from the start of each sequence, which has its own tiles; every head has its own."""
    lengths = (np.array([5, 200, 0, 130]), np.array([9, 300, 12, 257]))
    cu = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((int(ends[-1]), heads, 64)).astype(np.float16)
        for ends, heads in ((cu[0], 4), (cu[1], 2), (cu[1], 2))
    )
    bounds = span_cases.random_spans(rng, (4, 4), 300, 200, 2)
    with simulator.schedule(policy, seed=2):
        o, lse = cupy_flash.attention_varlen(
            q, k, v, *cu, mask=Spans(bounds[:, :, None]), causal=True, align="bottom_right", return_lse=True
        )
    for n in (0, 1, 3):
        rows, keys = slice(*cu[0][n : n + 2]), slice(*cu[1][n : n + 2])
        own = np.minimum(bounds[n][None, :, None, : lengths[1][n]], lengths[0][n])
        part = {"o": o[rows].swapaxes(0, 1)[None], "lse": lse[:, rows][None]}
        each = (x[at].swapaxes(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys)))
        testing.assert_within_budget(part, *each, mask=Spans(own), causal=True, align="bottom_right")


# ---------------------------------------------------------------------- words of partial tiles

BANDS = [(OPEN, OPEN, 0), (OPEN, 0, 7), (60, 100, 40), (OPEN, OPEN, -90), (OPEN, -5, 3), (31, 0, -OPEN // 2)]
# Sizes of blocks, and who has intervals beside them.
BLOCKED = [
    ((16, 16), ""), ((128, 128), ""), ((32, 16), "key"), ((16, 64), "query"), ((256, 32), ""),
    ((64, 256), "key"),
]  # fmt: skip


def words_of(queries: int, lengths: tuple[int, int], heads: int, keeping: dict[str, Any]) -> np.ndarray:
    """What the helpers of a gradient keep, as if every tile were partial: (heads, rows, keys) of bool."""
    score = np.zeros((), abi.SCORE)
    score["left"], score["right"], score["offset"] = keeping["band"]
    if "spans" in keeping:
        bounds = keeping["spans"]
        score["spans"] = (bounds.ctypes.data, 0, *(step // 4 for step in bounds.strides))
        score["span_intervals"], score["spans_by_query"] = bounds.shape[-1] // 2, keeping["by_query"]
    if "blocks" in keeping:
        table, bits = keeping["blocks"]
        score["blocks"] = (table.ctypes.data, 0, *(step // 4 for step in table.strides))
        score["block_bits"], score["block_count"] = bits.ctypes.data, len(bits)
        logs = (size.bit_length() - 1 for size in (bits.shape[1], 8 * bits.shape[2]))
        score["block_log_queries"], score["block_log_keys"] = logs
    shape = np.array([1, heads, heads, *lengths, 64, 64, 0], np.int32).tobytes() + bytes(24)
    tiles, columns = -(-lengths[0] // queries), -(-lengths[1] // 128)
    out = np.zeros((heads, tiles, columns, queries // 32, 128), np.uint32)
    params = pack(shape=shape, score=score.tobytes(), out=out, tiles=tiles, blocks_of_keys=columns)
    kernel = simulator.load(unit("kept_pairs", f"QUERIES={queries}"))
    kernel.launch((heads * tiles * columns, 1, 1), (64, 1, 1), 8192, params.tobytes(), 0)
    kept = out[..., None] >> np.arange(32, dtype=np.uint32) & 1  # head, tile, column, word, key, query
    return kept.transpose(0, 1, 3, 5, 2, 4).reshape(heads, tiles * queries, columns * 128).astype(bool)


def check_words(queries: int, lengths: tuple[int, int], heads: int, **keeping: Any) -> list[str]:
    """Every bit is that of a dense mask, keys past the last have none. What each part of 32 x 32 pairs is."""
    keeping = {"band": BANDS[0], **keeping}
    found = words_of(queries, lengths, heads, keeping)
    rows, keys = lengths
    left, right, offset = keeping["band"]
    distance = np.arange(keys) - np.arange(rows)[:, None] - offset
    exact = np.broadcast_to((distance >= -left) & (distance <= right), (heads, rows, keys))
    if "spans" in keeping:
        bounds = keeping["spans"]
        exact = exact & span_cases.as_mask(
            bounds[:, :, None] if keeping["by_query"] else bounds[:, None], rows, keys
        )
    if "blocks" in keeping:
        exact = exact & block_cases.as_mask(keeping["blocks"], rows, keys)
    wrong = np.argwhere(found[:, :rows, :keys] != exact)
    assert not len(wrong), f"{len(wrong)} bits, the first of (head, query, key) {wrong[0]}: {keeping}"
    assert not found[:, :, keys:].any()
    parts = found.reshape(heads, -1, 32, found.shape[2] // 32, 32).swapaxes(2, 3).reshape(-1, 32, 32)
    of_rows = np.where(parts.all(2), 32, np.where(parts.any(2), 1, 0))
    return [
        "whole"
        if (part == 32).all()
        else "hidden"
        if not part.any()
        else "mixed"
        if (part == 1).any()
        else "rows"
        for part in of_rows
    ]


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("lengths", [(384, 512), (300, 410), (1, 33)])
@pytest.mark.parametrize("intervals", [1, 2])
@pytest.mark.parametrize("by_query", [False, True])
def test_words_of_spans(queries: int, lengths: tuple[int, int], intervals: int, by_query: bool) -> None:
    """Of intervals in either form, alone and within bands; heads have their own."""
    rows, along = lengths if by_query else lengths[::-1]
    bounds = span_cases.random_spans(np.random.default_rng(intervals), (2,), rows, along, intervals)
    sorts: list[str] = []
    for band in BANDS:
        sorts += check_words(queries, lengths, 2, spans=bounds, by_query=by_query, band=band)
    if min(lengths) > 32:
        assert {*sorts} >= {"whole", "hidden", "mixed"}


@pytest.mark.parametrize("queries", [64, 128])
def test_words_of_bands(queries: int) -> None:
    for band in BANDS:
        check_words(queries, (300, 410), 1, band=band)


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("by_query", [False, True])
def test_words_of_causality(queries: int, by_query: bool) -> None:
    """Of 16 parts of 128 x 128 pairs under the edge 6 are whole and 6 hidden, 4 mixed."""
    bounds = causal_spans(128, 128, 0, by_query=by_query).reshape(1, 128, 2)
    sorts = check_words(queries, (128, 128), 1, spans=bounds, by_query=by_query)
    assert {sort: sorts.count(sort) for sort in sorts} == {"whole": 6, "hidden": 6, "mixed": 4}


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("last", [256, 77])
def test_words_of_queries_that_have_all_or_nothing(queries: int, last: int) -> None:
    """A vote decides parts of such; it must not where a single query has some."""
    seen = np.random.default_rng(4).integers(0, 2, 256)
    seen[[0, 31, 40]] = 1, 0, 1
    bounds = np.stack([0 * seen, 256 * seen], -1).astype(np.int32)
    bounds[40, 1] = last
    sorts = check_words(queries, (256, 256), 1, spans=bounds[None], by_query=True)
    assert sorts.count("rows") == 64 - sorts.count("mixed")
    assert sorts.count("mixed") == (last == 77)


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("number", range(len(BLOCKED)), ids=lambda n: str(BLOCKED[n]))
def test_words_of_blocks(queries: int, number: int) -> None:
    """Of blocks of every kind of size, with intervals and bands beside them."""
    sizes, side = BLOCKED[number]
    lengths, rng = (300, 410), np.random.default_rng(number)
    keeping: dict[str, Any] = {"blocks": block_cases.random_blocks(rng, (2,), lengths, sizes)}
    if side:
        bounds = span_cases.random_spans(rng, (2,), *(lengths if side == "query" else lengths[::-1]), 2)
        keeping |= {"spans": bounds, "by_query": side == "query"}
    sorts: list[str] = []
    for band in BANDS[:3]:
        sorts += check_words(queries, lengths, 2, band=band, **keeping)
    assert {*sorts} >= {"hidden", "mixed"}
    assert "whole" in sorts or side or sizes == (16, 16)


# ---------------------------------------------------------------------- gradients

GRADIENTS = [number for number, case in enumerate(CASES) if max(case.case.head_dims) <= 128]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("number", GRADIENTS, ids=[str(CASES[number]) for number in GRADIENTS])
def test_gradients_are_what_the_specification_says(number: int, device: Device) -> None:
    with simulator.schedule(POLICIES[number % 3], seed=number):
        check_backward(CASES[number], device)  # type: ignore[arg-type]


def gradients(*arrays: np.ndarray, do: np.ndarray, **options: Any) -> testing.Gradients:
    """Of arrays that start anywhere."""
    do, q, k, v = (testing.hostile(x, style="aligned").view for x in (do, *arrays))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    return cupy_flash.attention_backward(do, q, k, v, o, lse, **options)


# Shared with the sanitizers, which run it in a process of their own.
def check_band_of_gradients(head_dim: int, lengths: tuple[int, int], policy: str) -> None:
    """Causality as spans or as blocks has the gradients of `causal=True`: the same tiles in the same order.

    Not so dQ, a sum in any order. At head dim 128 tiles are others than those of a band.
    """
    rng = np.random.default_rng(4)
    q, k, v, do = (
        rng.standard_normal((1, 2, lengths[n in (1, 2)], head_dim)).astype(np.float16) for n in range(4)
    )
    with simulator.schedule(policy, seed=8):
        exact = gradients(q, k, v, do=do, causal=True, align=0)
        everything = np.array([0, lengths[1]], np.int32) + np.zeros((1, lengths[0], 1, 1), np.int32)
        for form in (
            {"mask": Spans(causal_spans(*lengths, 0, by_query=False))},
            {"mask": Spans(causal_spans(*lengths, 0, by_query=True))},
            {"mask": causal_blocks(*lengths)},
            {"mask": Spans(everything), "causal": True, "align": 0},
        ):
            same = gradients(q, k, v, do=do, **form)
            testing.assert_within_budget(same, q, k, v, do=do, causal=True, align=0)
            if head_dim == 64:
                assert np.array_equal(exact.dk.view(np.uint16), same.dk.view(np.uint16)), list(form)
                assert np.array_equal(exact.dv.view(np.uint16), same.dv.view(np.uint16)), list(form)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_band_has_the_same_gradients_in_any_form(policy: str, head_dim: int) -> None:
    check_band_of_gradients(head_dim, (300, 400), policy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("head_dim", "tile"), [(64, 128), (128, 64)])
def test_gradients_of_what_is_not_reached_cost_nothing(head_dim: int, tile: int) -> None:
    """Documents of two blocks of keys each, in every form: only their own tiles are copied and multiplied."""
    q, k, v, o, do = (aligned((1, 2, 1024, head_dim), np.float16, 0.5) for _ in range(5))
    lse = aligned((1, 2, 1024), np.float32, 5.0)
    own = np.arange(1024) // 256 * 256
    bounds = np.stack([own, own + 256], -1).astype(np.int32)
    table = np.kron(np.eye(4, dtype=np.int32), np.ones((2, 2), np.int32))
    no_bits = np.zeros((0, 128, 16), np.uint8)

    def cost_of(**options: Any) -> dict[str, int]:
        with simulator.costs() as counted:
            cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
        return next(cost for name, cost in counted if name.startswith("flash_backward_sm90"))

    whole = cost_of(mask=Spans(np.array([0, 1024], np.int32) + np.zeros((1, 1024, 1), np.int32)))
    tiles = 2 * 1024 * 1024 // (128 * tile)
    keys, each = 2 * 2 * 2 * 1024 * head_dim, 2 * 2 * tile * head_dim
    assert whole["bulk_load_bytes"] == keys + tiles * each
    # Under a causal mask blocks of keys do without tiles of the queries before them.
    below = {128: 12, 64: 24}[tile] * 2
    for causal, seen in ((False, tiles // 4), (True, below)):
        for form in (
            {"mask": Spans(bounds[None])},
            {"mask": Spans(bounds[:, None])},
            {"mask": cupy_flash.BlockMask(table, no_bits)},
        ):
            cost = cost_of(causal=causal, **form)
            assert cost["mma_flops"] * tiles == whole["mma_flops"] * seen, (causal, list(form))
            assert cost["bulk_load_bytes"] == keys + seen * each, (causal, list(form))
            assert cost["bulk_reduce_bytes"] == 4 * seen * tile * head_dim, (causal, list(form))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_sparse_tiles_of_many_words(head_dim: int) -> None:
    """Tiles of queries of more than one word of 32, few of which a block of keys sees, one of them none."""
    queries = 64 * 70
    rng = np.random.default_rng(9)
    q, do = (rng.standard_normal((1, 2, queries, head_dim)).astype(np.float16) for _ in range(2))
    k, v = (rng.standard_normal((1, 1, 400, head_dim)).astype(np.float16) for _ in range(2))
    start = np.where(np.arange(400) < 128, 4300, 0)
    bounds = np.stack([start, start + 100, 0 * start + 2040, 0 * start + 2100], -1).astype(np.int32)
    bounds[128:256] = 0
    found = gradients(q, k, v, do=do, mask=Spans(bounds[None]))
    for x in (found.dk, found.dv):
        assert not x[0, 0, 128:256].any()
        assert x[0, 0, :128].any()
    assert not found.dq[0, :, 110:2030].any()
    testing.assert_within_budget(found, q, k, v, do=do, mask=Spans(bounds[None]))


def test_gradients_without_keys_are_zero() -> None:
    """Queries and keys that nobody is left to see, within tiles that are seen, and whole blocks of them."""
    rng = np.random.default_rng(11)
    q, k, v, do = rng.standard_normal((4, 1, 2, 300, 64)).astype(np.float16)
    bounds = np.zeros((1, 2, 300, 1, 2), np.int32)
    bounds[0, 0, 40:90, 0] = 10, 20
    found = gradients(q, k, v, do=do, mask=Spans(bounds))
    for x in found[:3]:
        assert np.isfinite(x).all()
        assert not x[0, 1].any()
    assert not found.dq[0, 0, :40].any()
    assert not found.dq[0, 0, 90:].any()
    assert not found.dk[0, 0, 20:].any()
    assert not found.dv[0, 0, :10].any()
    testing.assert_within_budget(found, q, k, v, do=do, mask=Spans(bounds))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_packed_gradients(policy: str, by_query: bool) -> None:
    """Bounds count from the start of each sequence, which has its own tiles; every head has its own."""
    lengths = (np.array([5, 200, 0, 130]), np.array([9, 300, 12, 257]))
    cu = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    rng = np.random.default_rng(1)
    q, k, v, do = (
        rng.standard_normal((int(cu[side][-1]), heads, 64)).astype(np.float16)
        for side, heads in ((0, 4), (1, 2), (1, 2), (0, 4))
    )
    bounds = span_cases.random_spans(rng, (4, 4), *((200, 300) if by_query else (300, 200)), 2)
    spanned = bounds[:, :, :, None] if by_query else bounds[:, :, None]
    options: dict[str, Any] = {"causal": True, "align": "bottom_right"}
    given = (("q", q), ("k", k), ("v", v), ("do", do))
    with simulator.schedule(policy, seed=2):
        o, lse = cupy_flash.attention_varlen(q, k, v, *cu, mask=Spans(spanned), return_lse=True, **options)
        found = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, *cu, mask=Spans(spanned), **options)
    for n in (0, 1, 3):
        rows, keys = (slice(*ends[n : n + 2]) for ends in cu)
        own_lengths = lengths[0][n], lengths[1][n]
        own = np.minimum(bounds[n][:, : own_lengths[not by_query]], own_lengths[by_query])
        own = own[None, :, :, None] if by_query else own[None, :, None]
        side = {"q": rows, "do": rows, "k": keys, "v": keys}
        part = {name: x[side[name]].swapaxes(0, 1)[None] for name, x in given}
        got = {f"d{x}": getattr(found, f"d{x}")[side[x]].swapaxes(0, 1)[None] for x in "qkv"}
        testing.assert_within_budget(
            got, part["q"], part["k"], part["v"], do=part["do"], mask=Spans(own), **options
        )
    assert not found.dk[cu[1][2] : cu[1][3]].any()


@pytest.mark.parametrize("by_query", [False, True])
def test_bounds_may_be_any_numbers(by_query: bool) -> None:
    """On a GPU nobody checks them: those outside of the lengths mean what is within."""
    rng = np.random.default_rng(12)
    q, k, v, do = rng.standard_normal((4, 1, 1, 200, 64)).astype(np.float16)
    views = [testing.hostile(x, style="aligned").view for x in (do, q, k, v)]
    far = np.iinfo(np.int32)
    bounds = np.full((200, 2), (far.min, far.max), np.int32)
    bounds[50:100] = far.min, 77
    bounds[100:] = 72, far.max  # of the 16 rows from 64 on the upper half
    form = bounds[:, None] if by_query else bounds[None]
    cut = np.clip(form, 0, 200)
    o, lse = cupy_flash.attention(*views[1:], mask=Spans(cut), return_lse=True)
    exact = cupy_flash.attention_backward(*views, o, lse, mask=Spans(cut))
    with mock.patch.object(memo, "check_spans"):
        same_o, same_lse = cupy_flash.attention(*views[1:], mask=Spans(form), return_lse=True)
        found = cupy_flash.attention_backward(*views, o, lse, mask=Spans(form))
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v, mask=Spans(cut))
    assert np.array_equal(o, same_o)
    assert np.array_equal(lse, same_lse)
    assert np.array_equal(exact.dk, found.dk)
    assert np.array_equal(exact.dv, found.dv)


def test_what_gradients_leave_to_the_flash_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims without a kernel of this kind, and an order of sums: refused by name, answered by others."""
    bounds = spans.documents([30, 34]).bounds
    for head_dim, options, reason in (
        (200, {}, "its inner loop has no Spans"),
        (64, {"reproducible": "run"}, "sums dQ with Spans or a BlockMask in any order"),
        (64, {"softcap": 3.0}, "its inner loop has no Spans"),
    ):
        q = aligned((1, 1, 64, head_dim), np.float16, 1.0)
        lse = np.zeros((1, 1, 64), np.float32)
        monkeypatch.setattr(families, "FAMILIES", (hopper,))
        memo.forget()
        with pytest.raises(UnsupportedError, match=reason):
            cupy_flash.attention_backward(q, q, q, q, q, lse, mask=Spans(bounds), **options)
        monkeypatch.setattr(families, "FAMILIES", (hopper, flash))
        memo.forget()
        text = cupy_flash.explain(q, q, q, mask=Spans(bounds), direction="backward", **options)
        assert reason in text
        assert "family    flash" in text


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    code = (
        "import os; os.environ['CUPY_FLASH_DRIVER'] = 'simulator:sm_90a'\n"
        "from cupy_flash.device import simulator; simulator.multiprocessors = lambda device=0: 3\n"
        "from tests.simulator import test_hopper_spans as t\n"
        "t.check_band(64, (200, 270), 'random')\n"
        "t.check_band_of_gradients(64, (200, 270), 'random')\n"
    )
    found = sanitized.run(sanitizer, code)
    assert found.returncode == 0, found.stderr[-4000:]
