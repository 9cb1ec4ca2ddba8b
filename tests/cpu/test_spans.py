"""Spans on NumPy arrays: its makers, against FP64 and dense masks, what is skipped, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, Spans, spans, testing
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.cpu import tiles
from cupy_flash.cpu.spans import TileSpans
from tests.cases import Case
from tests.checks import Device
from tests.span_cases import SpanCase, as_mask, crossed, random_spans

KINDS = [(by, n, lead) for by in (False, True) for n in (1, 2) for lead in ("", "h", "b1", "bh")]
PLAIN = [SpanCase(Case(lengths=(70, 301), head_dims=(16, 8), heads=(4, 2)), *kind) for kind in KINDS]
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


def computed(arrays: dict[str, np.ndarray], how: dict[str, object]) -> dict[str, np.ndarray]:
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=arrays.get("dlse"), **how)
    return {"o": o, "lse": lse, **{name: x for name, x in grads._asdict().items() if x is not None}}


# ---- makers


def positions(queries: int, keys: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(queries)[:, None], np.arange(queries if keys is None else keys)[None]


def test_documents() -> None:
    of = np.repeat(np.arange(4), [3, 0, 5, 1])
    made = spans.documents([3, 0, 5, 1])
    assert made.bounds.shape == (1, 9, 2)
    assert made.bounds.dtype == np.int32
    assert np.array_equal(as_mask(made, 9, 9), of[:, None] == of[None])
    assert spans.documents([]).bounds.shape == (1, 0, 2)


@pytest.mark.parametrize("prefix", [0, 4, 9])
def test_prefix_lm(prefix: int) -> None:
    i, j = positions(9)
    assert np.array_equal(as_mask(spans.prefix_lm(prefix, 9), 9, 9), (j < prefix) | (j <= i))
    several = spans.prefix_lm([2, prefix], 9)
    assert several.bounds.shape == (2, 1, 1, 9, 2)
    assert np.array_equal(as_mask(several, 9, 9)[1, 0], (j < prefix) | (j <= i))


def test_shared_prefix() -> None:
    i, j = positions(12)
    of = np.repeat([0, 1, 2], [5, 3, 4])
    expected = (j <= i) & ((j < 5) | (of[:, None] == of[None]))
    assert np.array_equal(as_mask(spans.shared_prefix(5, [3, 0, 4]), 12, 12), expected)


@pytest.mark.parametrize("window", [(2, 1), (0, 0), (None, 2), (3, None)])
@pytest.mark.parametrize("tokens", [0, 2, 30])
def test_global_and_window(tokens: int, window: tuple[int | None, int | None]) -> None:
    i, j = positions(11)
    left, right = (11 if side is None else side for side in window)
    inside = (j >= i - left) & (j <= i + right)
    made = spans.global_and_window(11, tokens, window)
    assert np.array_equal(as_mask(made, 11, 11), inside | (j < tokens) | (i < tokens))


@pytest.mark.parametrize("prefix", [0, 3])
def test_tree(prefix: int) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        parents, path = [], []
        for token in range(12):
            path = path[: draw.integers(0, len(path) + 1)]
            parents.append(path[-1] if path else -1)
            path.append(token)
        expected = np.zeros((12, 12), bool)
        for token in range(12):
            at = token
            while at >= 0:
                expected[token, at] = True
                at = parents[at]
        expected = np.concatenate([np.ones((12, prefix), bool), expected], axis=1)
        assert np.array_equal(as_mask(spans.tree(parents, prefix), 12, 12 + prefix), expected)


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("intervals", [1, 2])
def test_from_mask_finds_what_there_is(by_query: bool, intervals: int) -> None:
    draw = np.random.default_rng(int(by_query) + 2 * intervals)
    for lead in ((), (2,), (2, 3)):
        made = random_spans(draw, lead, 13, 9, intervals)
        given = made[..., :, None, :] if by_query else made[..., None, :, :]
        lengths = (13, 9) if by_query else (9, 13)
        mask = as_mask(given, *lengths)
        found = spans.from_mask(mask)
        assert np.array_equal(as_mask(found, *lengths), mask)
        assert found.bounds.shape[-1] <= 2 * intervals


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: spans.documents([3, -1]), r"lengths is \[3, -1\]"),
        (lambda: spans.documents([1.5]), r"lengths is \[1.5\]"),
        (lambda: spans.prefix_lm(5, 4), r"prefix is 5, and seqlen 4"),
        (lambda: spans.prefix_lm(True, 4), r"prefix is True"),
        (lambda: spans.shared_prefix(-1, [2]), r"prefix is -1"),
        (lambda: spans.global_and_window(5, 1, 3), r"window is 3"),
        (lambda: spans.global_and_window(5, 1, (-1, 0)), r"window is -1"),
        (lambda: spans.tree([0]), r"parents\[0\] is 0"),
        (lambda: spans.tree([[-1]]), r"parents is \[\[-1\]\]"),
        (lambda: spans.tree([-1.0]), r"parents is \[-1.0\]"),
        (lambda: spans.tree([-2]), r"parents\[0\] is -2"),
        (lambda: spans.tree([-1, 0, 0, 1]), r"parents\[3\] is 1, whose subtree has ended before token 3"),
        (lambda: spans.from_mask(np.ones((3, 3))), r"mask has dtype float64"),
        (lambda: spans.from_mask(np.indices((6, 6)).sum(0) % 2 == 0), r"more than two intervals"),
    ],
)  # fmt: skip
def test_makers_refuse(make, says: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=rf"{says}[^\n]*\n(?s:.*)Try: ."):
        make()


# ---- what is computed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN + WITH, ids=str)
def test_both_passes_are_what_the_specification_says(case: SpanCase, device: Device) -> None:
    arrays = case.inputs()
    how = case.options(arrays)
    q, k, v = (arrays[name] for name in "qkv")
    actual = computed(arrays, how)
    testing.assert_within_budget(actual, q, k, v, do=arrays["do"], dlse=arrays.get("dlse"), **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN + WITH, ids=str)
def test_bits_are_those_of_the_mask(case: SpanCase, device: Device) -> None:
    arrays = case.inputs()
    by_spans, by_mask = computed(arrays, case.options(arrays)), computed(arrays, case.with_mask(arrays))
    for name, x in by_mask.items():
        assert np.array_equal(by_spans[name], x), name


@pytest.mark.parametrize("case", WITH[:8], ids=str)
def test_second_order(case: SpanCase) -> None:
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


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("lead", ["", "b", "h", "bh"])
def test_packed(by_query: bool, lead: str, device: Device) -> None:
    """Spans count from the start of each sequence; those past its end are not looked at."""
    lengths_q, lengths_k, used = [40, 0, 150], [60, 9, 155], [60, 5, 150]
    draw = np.random.default_rng(0)
    q, do = draw.standard_normal((2, sum(lengths_q) + 3, 4, 8), np.float32)
    k, v = draw.standard_normal((2, sum(lengths_k), 2, 8), np.float32)
    cuts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    rows, along = (150, 155) if by_query else (155, 150)
    shape = (3 if "b" in lead else 1, 4 if "h" in lead else 1)
    bounds = random_spans(draw, shape, rows, along, 2)
    given = bounds[..., :, None, :] if by_query else bounds[..., None, :, :]
    how = {
        "seqused_k": np.array(used, np.int32),
        "causal": True,
        "align": "bottom_right",
        "mask": Spans(given),
    }
    o, lse = cupy_flash.attention_varlen(q, k, v, *cuts, return_lse=True, **how)
    grads = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, *cuts, **how)
    mask = as_mask(given, 150, 155)
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
        qkv = [arrays[name] for name in "qkv"]
        ours = cupy_flash.naive_attention(*qkv, mask=Spans(arrays["spans"]), causal=True, align=3)
        exact = testing.reference_attention(*qkv, mask=Spans(arrays["spans"]), causal=True, align=3)
        assert np.allclose(ours.o, exact.o, atol=1e-5)


def test_keys_that_no_interval_has_may_be_infinite(device: Device) -> None:
    """What is skipped is not read: infinite values times weights of 0 would be NaN."""
    draw = np.random.default_rng(1)
    q, do = draw.standard_normal((2, 1, 2, 64, 16), np.float32)
    k, v = draw.standard_normal((2, 1, 2, 1300, 16), np.float32)
    k[:, :, 512:1024] = v[:, :, 512:1024] = np.inf
    made = np.broadcast_to(np.int32([0, 64]), (1, 1300, 2)).copy()
    made[:, 400:1100] = 0
    results = computed({"q": q, "k": k, "v": v, "do": do}, {"mask": Spans(made)})
    assert all(np.isfinite(x).all() for x in results.values())


def test_tiles_between_intervals_are_skipped() -> None:
    q = np.ones((1, 1, 256, 8), np.float32)
    arrays = {"q": q, "k": q, "v": q, "spans": spans.documents([64, 128, 64]).bounds}
    asked, views, _ = describe("forward", arrays, Options(tile=(64, 64)))
    of_tiles = TileSpans(asked, views["spans"].numpy()[:, :, None])
    kinds = [
        of_tiles.visible(box, block)
        for box in tiles.boxes(asked)
        for _, _, blocks in tiles.visited(asked)
        for block in blocks
    ]
    assert len(kinds) == 16
    assert sum(nothing for _, nothing in kinds) == 10
    assert sum(tile is None and not nothing for tile, nothing in kinds) == 6, "whole tiles need no test"


# ---- what making them costs

MAKERS: dict[str, tuple[Callable[[], Spans], dict[str, object]]] = {
    "documents": (lambda: spans.documents([128] * 32), {"causal": True}),
    "prefix": (lambda: spans.prefix_lm(1000, 4096), {}),
    "shared prefix": (lambda: spans.shared_prefix(2048, [512] * 4), {}),
    "window": (lambda: spans.global_and_window(4096, 4, (512, 0)), {"causal": True}),
    "tree": (lambda: spans.tree(np.arange(4096) - 1), {}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_making_them_takes_a_hundredth_of_a_forward_pass(name: str) -> None:
    """At most, of the one that takes them: 8 heads of 4096 tokens. Found were 0.02 to 0.4."""
    make, how = MAKERS[name]
    made = make()
    q = np.ones((1, 8, 4096, 64), np.float32)

    def fastest(call: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert fastest(make, 5) <= 0.01 * fastest(lambda: cupy_flash.attention(q, q, q, mask=made, **how), 1)


_MEMORY = """
import resource, sys, numpy as np, cupy_flash
def grown(documents):
    n = 512 * documents
    q = np.ones((1, 1, n, 8), np.float32)
    made = cupy_flash.spans.documents([512] * documents)
    made = cupy_flash.Spans(made.bounds.swapaxes(0, 1).copy()) if sys.argv[1] == "by query" else made
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    o, lse = cupy_flash.attention(q, q, q, mask=made, return_lse=True)
    cupy_flash.attention_backward(o, q, q, q, o, lse, mask=made)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
grown(2)  # loads the libraries
print(grown(128))
"""


@pytest.mark.parametrize("form", ["by key", "by query"])
def test_memory_is_linear(form: str) -> None:
    """Both passes over 65536 tokens take less than half of a bit of each pair, 75 MB of 512."""
    done = subprocess.run([sys.executable, "-c", _MEMORY, form], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 65536**2 / 8 / 1024 / 2, "KB"


# ---- what is refused


def test_explain_names_the_form() -> None:
    q = np.ones((1, 2, 8, 4), np.float32)
    assert "Spans(1 of queries for each key)" in cupy_flash.explain(q, q, q, mask=spans.documents([8]))
    by_query = spans.from_mask(np.indices((8, 8))[1] % 4 == 0)
    assert "Spans(" in cupy_flash.explain(q, q, q, mask=by_query)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((1, 9, 2)), "mask.bounds has dtype float64, not int32"),
        (np.zeros((1, 9, 2), np.int64), "mask.bounds has dtype int64, not int32"),
        (np.zeros((9, 2), np.int32), r"mask.bounds has shape \(9, 2\) for 6 queries and 9 keys"),
        (np.zeros((1, 9, 3), np.int32), r"mask.bounds has shape \(1, 9, 3\)"),
        (np.zeros((1, 6, 2), np.int32), r"mask.bounds has shape \(1, 6, 2\)"),
        (np.zeros((9, 1, 2), np.int32), r"mask.bounds has shape \(9, 1, 2\)"),
        (np.zeros((2, 1, 9, 2), np.int32), r"mask.bounds has shape \(2, 1, 9, 2\)"),
        (np.zeros((3, 1, 1, 9, 2), np.int32), r"mask.bounds has shape \(3, 1, 1, 9, 2\)"),
        (np.zeros((1, 1, 1, 1, 9, 2), np.int32), r"mask.bounds has shape \(1, 1, 1, 1, 9, 2\)"),
        (np.full((1, 9, 2), 7, np.int32), "mask.bounds holds 7; its bounds are of 6 queries"),
        (np.full((6, 1, 2), -1, np.int32), "mask.bounds holds -1; its bounds are of 9 keys"),
        ([[0, 9]], "mask.bounds is a list"),
    ],
)  # fmt: skip
def test_wrong_spans_are_refused(given, says: str, device: Device) -> None:
    q, k = np.ones((2, 4, 6, 8), np.float32), np.ones((2, 2, 9, 8), np.float32)
    o, lse = cupy_flash.attention(q, k, k, return_lse=True)
    for call in (
        lambda: cupy_flash.attention(q, k, k, mask=Spans(given)),
        lambda: cupy_flash.attention_backward(o, q, k, k, o, lse, mask=Spans(given)),
        lambda: cupy_flash.derivatives.jvp(q, k, k, o, lse, dq=q, mask=Spans(given)),
        lambda: cupy_flash.naive_attention(q, k, k, mask=Spans(given)),
    ):
        with pytest.raises(InvalidArgumentsError, match=rf"{says}[^\n]*\n(?s:.*)Try: ."):
            call()


def test_values_are_looked_at_in_every_call(device: Device) -> None:
    """Not only in the first of those that are alike."""
    q, bounds = np.ones((1, 1, 6, 8), np.float32), spans.documents([2, 4])
    cupy_flash.attention(q, q, q, mask=bounds)
    bounds.bounds[0, 3, 1] = 9
    with pytest.raises(InvalidArgumentsError, match=r"mask\.bounds holds 9"):
        cupy_flash.attention(q, q, q, mask=bounds)
