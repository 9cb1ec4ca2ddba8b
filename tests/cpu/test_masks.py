"""Spans and BlockMasks on NumPy arrays: against FP64 and dense masks, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import BlockMask, InvalidArgumentsError, Spans, block_mask, spans, testing
from tests import block_cases, span_cases
from tests.block_cases import BlockCase, random_blocks
from tests.cases import Case
from tests.checks import Device
from tests.masked_case import MaskedCase
from tests.public import with_mask
from tests.span_cases import SpanCase, random_spans

LEADS = ("", "h", "b1", "bh")
WIDE = Case(lengths=(70, 301), head_dims=(16, 8), heads=(4, 2))
PLAIN: list[MaskedCase] = [
    *(SpanCase(WIDE, by, n, lead) for by in (False, True) for n in (1, 2) for lead in LEADS),
    *(BlockCase(WIDE, size, lead) for size in ((16, 16), (16, 64), (128, 32), (256, 256)) for lead in LEADS),
]
BESIDE: list[dict[str, Any]] = [
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
SPANS, BLOCKS = span_cases.crossed(BESIDE), block_cases.crossed(BESIDE)


def computed(arrays: dict[str, np.ndarray], how: dict[str, Any]) -> dict[str, np.ndarray]:
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=arrays.get("dlse"), **how)
    return {"o": o, "lse": lse, **{name: x for name, x in grads._asdict().items() if x is not None}}


def dense(mask: Spans | BlockMask, queries: int, keys: int) -> np.ndarray:
    """The pairs that a mask keeps."""
    of_kind = span_cases.as_mask if isinstance(mask, Spans) else block_cases.as_mask
    return of_kind(mask, queries, keys)  # type: ignore[operator]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN + SPANS + BLOCKS, ids=str)
def test_both_passes_are_what_the_specification_says(case: MaskedCase, device: Device) -> None:
    arrays = case.inputs()
    how = case.options(arrays)
    q, k, v = (arrays[name] for name in "qkv")
    actual = computed(arrays, how)
    testing.assert_within_budget(actual, q, k, v, do=arrays["do"], dlse=arrays.get("dlse"), **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN + SPANS + BLOCKS, ids=str)
def test_bits_are_those_of_the_dense_mask(case: MaskedCase, device: Device) -> None:
    arrays = case.inputs()
    ours = computed(arrays, case.options(arrays))
    for name, x in computed(arrays, case.with_mask(arrays)).items():
        assert np.array_equal(ours[name], x), name


def test_one_pair_is_enough(device: Device) -> None:
    """Of each tile that the mask leaves anything of."""
    arrays = Case(lengths=(40, 300), head_dims=(16, 8)).inputs()
    mask = np.zeros((40, 300), bool)
    mask[7, [3, 250]] = True
    q, k, v = (arrays[name] for name in "qkv")
    actual = computed(arrays, {"mask": mask})
    testing.assert_within_budget(actual, q, k, v, do=arrays["do"], mask=mask)


def test_blocks_meet_spans(device: Device) -> None:
    for case in SPANS[:4]:
        arrays = case.inputs()
        blocks = random_blocks(np.random.default_rng(1), (1, 1), case.case.lengths, (32, 64))
        both = computed(arrays, with_mask(case.options(arrays), blocks))
        how = with_mask(case.options(arrays), dense(blocks, *case.case.lengths))
        for name, x in computed(arrays, how).items():
            assert np.array_equal(both[name], x), name


@pytest.mark.parametrize("case", SPANS[:8] + BLOCKS[:8], ids=str)
def test_second_order(case: MaskedCase) -> None:
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


@pytest.mark.parametrize("kind", ["spans by key", "spans by query", "blocks"])
@pytest.mark.parametrize("lead", ["", "b", "h", "bh"])
def test_packed(kind: str, lead: str, device: Device) -> None:
    """Masks count from the start of each sequence; what is past its end is not looked at."""
    lengths_q, lengths_k, used = [40, 0, 150], [60, 9, 155], [60, 5, 150]
    draw = np.random.default_rng(0)
    q, do = draw.standard_normal((2, sum(lengths_q) + 3, 4, 8), np.float32)
    k, v = draw.standard_normal((2, sum(lengths_k), 2, 8), np.float32)
    cuts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    shape = (3 if "b" in lead else 1, 4 if "h" in lead else 1)
    given: Spans | BlockMask
    if kind == "blocks":
        given = random_blocks(draw, shape, (150, 155), (32, 16))
    elif kind == "spans by query":
        given = Spans(random_spans(draw, shape, 150, 155, 2)[..., :, None, :])
    else:
        given = Spans(random_spans(draw, shape, 155, 150, 2)[..., None, :, :])
    how = {"seqused_k": np.array(used, np.int32), "causal": True, "align": "bottom_right", "mask": given}
    o, lse = cupy_flash.attention_varlen(q, k, v, *cuts, return_lse=True, **how)
    grads = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, *cuts, **how)
    mask = dense(given, 150, 155)
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


def test_naive_attention_and_the_specification_take_them() -> None:
    for case in PLAIN[::4]:
        arrays = case.inputs()
        qkv, given = [arrays[name] for name in "qkv"], case.mask_of(arrays)
        without_bits = (
            (BlockMask(np.minimum(given.table, 1), given.bits[:0]),) if isinstance(case, BlockCase) else ()
        )
        for made in (given, *without_bits):
            how = {"causal": True, "align": 3}
            exact = testing.reference_attention(*qkv, mask=dense(made, 70, 301), **how)
            assert np.allclose(cupy_flash.naive_attention(*qkv, mask=made, **how).o, exact.o, atol=1e-5)
            assert all(map(np.array_equal, testing.reference_attention(*qkv, mask=made, **how), exact))


def between_intervals() -> Spans:
    made = np.broadcast_to(np.int32([0, 64]), (1, 1300, 2)).copy()
    made[:, 400:1100] = 0
    return Spans(made)


@pytest.mark.parametrize("kind", ["spans", "blocks"])
def test_keys_that_are_not_seen_may_be_infinite(kind: str, device: Device) -> None:
    """What is skipped is not read: infinite values times weights of 0 would be NaN."""
    draw = np.random.default_rng(1)
    q, do = draw.standard_normal((2, 1, 2, 64, 16), np.float32)
    k, v = draw.standard_normal((2, 1, 2, 1300, 16), np.float32)
    k[:, :, 512:1024] = v[:, :, 512:1024] = np.inf
    made: Any = between_intervals()
    if kind == "blocks":
        made = block_mask(lambda b, h, i, j: (j < 512) | (j >= 1152), None, None, 64, 1300)
        assert made.bits.shape[0] == 0
    results = computed({"q": q, "k": k, "v": v, "do": do}, {"mask": made})
    assert all(np.isfinite(x).all() for x in results.values())


# ---- what is refused


def test_explain_names_the_form() -> None:
    q = np.ones((1, 2, 8, 4), np.float32)
    for mask, said in (
        (spans.documents([8]), "Spans(1 of queries for each key)"),
        (spans.from_mask(np.indices((8, 8))[1] % 4 == 0), "Spans("),
        (block_mask(lambda b, h, i, j: j <= i, None, None, 8, 8, block=(16, 32)), "BlockMask(16 x 32, 1 in"),
    ):
        assert said in cupy_flash.explain(q, q, q, mask=mask)


def _zeros(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.zeros(shape, dtype)


BITS = np.zeros((2, 16, 2), np.uint8)
WRONG: list[tuple[Spans | BlockMask, str]] = [
    (Spans(_zeros(1, 9, 2, dtype=float)), "mask.bounds has dtype float64, not int32"),
    (Spans(_zeros(1, 9, 2, dtype=np.int64)), "mask.bounds has dtype int64, not int32"),
    (Spans(_zeros(9, 2)), r"mask.bounds has shape \(9, 2\) for 6 queries and 9 keys"),
    (Spans(_zeros(1, 9, 3)), r"mask.bounds has shape \(1, 9, 3\)"),
    (Spans(_zeros(1, 6, 2)), r"mask.bounds has shape \(1, 6, 2\)"),
    (Spans(_zeros(9, 1, 2)), r"mask.bounds has shape \(9, 1, 2\)"),
    (Spans(_zeros(2, 1, 9, 2)), r"mask.bounds has shape \(2, 1, 9, 2\)"),
    (Spans(_zeros(3, 1, 1, 9, 2)), r"mask.bounds has shape \(3, 1, 1, 9, 2\)"),
    (Spans(_zeros(1, 1, 1, 1, 9, 2)), r"mask.bounds has shape \(1, 1, 1, 1, 9, 2\)"),
    (Spans(_zeros(1, 9, 2) + np.int32(7)), "mask.bounds holds 7; its bounds are of 6 queries"),
    (Spans(_zeros(6, 1, 2) - np.int32(1)), "mask.bounds holds -1; its bounds are of 9 keys"),
    (Spans([[0, 9]]), "mask.bounds is a list"),
    (BlockMask(_zeros(1, 1, 1, 1, dtype=float), BITS), "mask.table has dtype float64, not int32"),
    (BlockMask(_zeros(1, 1, 1, 1, dtype=np.int64), BITS), "mask.table has dtype int64, not int32"),
    (BlockMask(_zeros(1, 1, 1, 1), BITS.astype(bool)), "mask.bits has dtype bool, not uint8"),
    (BlockMask(_zeros(1, 1, 1, 2), BITS), r"has shape \(1, 1, 1, 2\) for 6 queries and 9 keys"),
    (BlockMask(_zeros(3, 1, 1, 1), BITS), r"mask.table has shape \(3, 1, 1, 1\)"),
    (BlockMask(_zeros(1), BITS), r"mask.table has shape \(1,\)"),
    (BlockMask(_zeros(1, 1), BITS[:, :9]), r"mask.bits has shape \(2, 9, 2\)"),
    (BlockMask(_zeros(1, 1), BITS[0]), r"mask.bits has shape \(16, 2\)"),
    (BlockMask(_zeros(1, 1), BITS.repeat(2, 2)[..., :3]), r"mask.bits has shape \(2, 16, 3\)"),
    (BlockMask(_zeros(1, 1), BITS.repeat(2, 0)[::2]), r"mask.bits is not contiguous"),
    (BlockMask(_zeros(1, 1, 1, 1, 1), BITS), r"mask.table has shape \(1, 1, 1, 1, 1\)"),
    (BlockMask(_zeros(1, 1), BITS[:, ::-1]), r"mask.bits is not contiguous"),
    (BlockMask(_zeros(1, 1) + np.int32(4), BITS), "mask.table holds 4, and there are bits of 2"),
    (BlockMask(_zeros(1, 1) - np.int32(1), BITS), "mask.table holds -1, and there are bits of 2"),
]


@pytest.mark.parametrize(("given", "says"), WRONG)
def test_wrong_masks_are_refused(given: Spans | BlockMask, says: str, device: Device) -> None:
    q, k = np.ones((2, 4, 6, 8), np.float32), np.ones((2, 2, 9, 8), np.float32)
    o, lse = cupy_flash.attention(q, k, k, return_lse=True)
    for call in (
        lambda: cupy_flash.attention(q, k, k, mask=given),
        lambda: cupy_flash.attention_backward(o, q, k, k, o, lse, mask=given),
        lambda: cupy_flash.derivatives.jvp(q, k, k, o, lse, dq=q, mask=given),
        lambda: cupy_flash.naive_attention(q, k, k, mask=given),
    ):
        with pytest.raises(InvalidArgumentsError, match=rf"{says}[^\n]*\n(?s:.*)Try: ."):
            call()


def test_values_are_looked_at_in_every_call(device: Device) -> None:
    """Not only in the first of those that are alike."""
    q = np.ones((1, 1, 6, 8), np.float32)
    by_spans, by_blocks = spans.documents([2, 4]), BlockMask(np.ones((1, 1), np.int32), BITS)
    for mask, numbers in ((by_spans, by_spans.bounds), (by_blocks, by_blocks.table)):
        cupy_flash.attention(q, q, q, mask=mask)
        numbers[...] = 9
        with pytest.raises(InvalidArgumentsError, match=r"mask\.(bounds|table) holds 9"):
            cupy_flash.attention(q, q, q, mask=mask)
