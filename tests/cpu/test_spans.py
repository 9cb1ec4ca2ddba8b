"""Makers of Spans, against dense masks; what is skipped, and what it costs to make and to use them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, Spans, spans
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.cpu import tiles
from cupy_flash.cpu.spans import TileSpans
from tests.span_cases import as_mask, random_spans

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


# ---- what they cost


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
