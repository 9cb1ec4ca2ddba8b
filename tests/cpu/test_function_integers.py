"""Integers of score functions and of masks by blocks: never wrapped in silence, whatever the lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.dispatch import memo
from cupy_flash.program.graph import POSITIONS, Argument, Graph
from cupy_flash.program.operations import OPERATIONS
from cupy_flash.program.ranges import OF_DTYPE, too_large, wide_nodes

LENGTH = 50_000
QUERIES, KEYS = np.arange(2)[:, None], np.arange(LENGTH)

# Products, differences and powers beyond 32 bits at that length.
BEYOND: dict[str, Any] = {
    "a hash": lambda b, h, i, j: (j * 100003 + i) % 7 != 0,
    "squares": lambda b, h, i, j: (j * j) % 11 < 6,
    "a key's number": lambda b, h, i, j: (j * 131072 + i) // 131072 % 2 == 0,
    "negative": lambda b, h, i, j: (i - j * j) // 3 % 5 == 2,
    "a power": lambda b, h, i, j: abs(i - j) ** 3 % 13 > 4,
    "largest": lambda b, h, i, j: np.minimum(j * 65536, 2**31 - 1) - np.maximum(i, -(j * j)) > 10**9,
    "not taken": lambda b, h, i, j: np.where(j < 100, j * j * 500000, j) % 3 == 0,
}


def qkv(length: int = LENGTH, queries: int = 2) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(0)
    k, v = draw.standard_normal((2, 1, 1, length, 8), np.float32)
    return draw.standard_normal((1, 1, queries, 8), np.float32), k, v


@pytest.mark.usefixtures("cpu_family")
@pytest.mark.parametrize("name", BEYOND)
def test_masks_are_those_of_numpy(name: str) -> None:
    mask = cupy_flash.mask(BEYOND[name])
    keep = np.broadcast_to(BEYOND[name](0, 0, QUERIES, KEYS), (2, LENGTH))
    assert 0 < keep.sum() < keep.size
    expected = cupy_flash.attention(*qkv(), mask=keep)
    np.testing.assert_allclose(cupy_flash.attention(*qkv(), mask=mask), expected, atol=1e-6)
    np.testing.assert_allclose(cupy_flash.naive_attention(*qkv(), mask=mask).o, expected, atol=1e-6)
    for function in (mask, BEYOND[name]):
        blocks = cupy_flash.block_mask(function, None, None, 2, LENGTH)
        np.testing.assert_allclose(cupy_flash.attention(*qkv(), mask=blocks), expected, atol=1e-6)


def test_every_pass_is() -> None:
    """Gradients, second order and packed sequences."""
    score = cupy_flash.score(lambda s, b, h, i, j: s - (j * j) * 1e-9)
    bias = (-(KEYS * KEYS) * 1e-9)[None].astype(np.float32)
    q, k, v = qkv()
    (o, lse), (again, lse_again) = (
        cupy_flash.attention(q, k, v, return_lse=True, **how) for how in ({"score": score}, {"bias": bias})
    )
    np.testing.assert_allclose(o, again, atol=1e-5)
    pairs = [
        (cupy_flash.attention_backward(o, q, k, v, o, lse, score=score)[:3],
         cupy_flash.attention_backward(o, q, k, v, again, lse_again, bias=bias)[:3]),
        (cupy_flash.derivatives.jvp(q, k, v, o, lse, dq=q, score=score),
         cupy_flash.derivatives.jvp(q, k, v, again, lse_again, dq=q, bias=bias)),
    ]  # fmt: skip
    rows = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    cuts = [np.array([0, len(x)], np.int32) for x in rows[:2]]
    pairs.append(((cupy_flash.attention_varlen(*rows, *cuts, score=score).swapaxes(0, 1),), (o[0],)))
    for ours, theirs in pairs:
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.usefixtures("core")
def test_the_core_says_why_it_does_not_run_them() -> None:
    mask = cupy_flash.mask(BEYOND["squares"])
    text = cupy_flash.explain(*qkv(), mask=mask)
    assert "skipped   core: has integers of 32 bits, and j * j can be 2499900001" in text
    assert "family    numpy" in text
    assert "family    core" in cupy_flash.explain(*qkv(46341), mask=mask)  # 46340 ** 2 fits


def test_beyond_64_bits_they_are_refused() -> None:
    power = cupy_flash.mask(lambda b, h, i, j: j**5 % 7 < 3)
    says = r"(?s)j \* j.* can be \d{20,}, and integers have 64 bits.*Try: ."
    for call in (cupy_flash.attention, cupy_flash.naive_attention):
        with pytest.raises(UnsupportedError, match=says):
            call(*qkv(), mask=power)
    assert cupy_flash.attention(*qkv(5000), mask=power).shape == (1, 1, 2, 8)


@pytest.mark.parametrize("arch", ["sm_61", "sm_80", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_refuse_them(arch: str, direction: str) -> None:
    """By the lengths of the call; what fits is planned."""
    half = [x.astype(np.float16) for x in qkv()]
    how: dict[str, Any] = {"arch": arch, "direction": direction, "mask": cupy_flash.mask(BEYOND["squares"])}
    with pytest.raises(
        UnsupportedError, match=r"(?s)j \* j can be 2499900001, and integers have 32 bits.*Try: ."
    ):
        cupy_flash.explain(*half, **how)
    half = [x.astype(np.float16) for x in qkv(46341)]
    assert "kernel" in cupy_flash.explain(*half, **how)


HASHED = cupy_flash.mask(lambda b, h, i, j, of: of[i] * of[j] % 7 < 3)


def hashed(of: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The result of the mask above, and what NumPy makes of it in 64 bits."""
    draw = np.random.default_rng(1)
    q = draw.standard_normal((1, 1, length, 8), np.float32)
    wide = of.astype(np.int64)
    keep = wide[:length, None] * wide[:length] % 7 < 3
    expected = cupy_flash.attention(q, q, q, mask=keep)
    return cupy_flash.attention(q, q, q, mask=HASHED(of)), expected


def test_values_of_arguments_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each call: kinds are the same."""
    draw = np.random.default_rng(0)
    small, large = (draw.integers(0, most, 40).astype(np.int32) for most in (46340, 2**31))
    memo.forget()
    np.testing.assert_allclose(*hashed(small, 40), atol=1e-6)
    if "family    core" in cupy_flash.explain(*qkv(40), mask=HASHED(small)):
        with pytest.raises(UnsupportedError) as raised:
            hashed(large, 40)
        assert "arguments[0][i] * arguments[0][j] can be " in str(raised.value)
        assert "CUPY_FLASH_CPU=numpy" in str(raised.value)
    np.testing.assert_allclose(*hashed(small, 40), atol=1e-6)
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    np.testing.assert_allclose(*hashed(large, 40), atol=1e-6)


def test_arguments_that_nobody_looks_at() -> None:
    """On GPUs their products have 64 bits, and three of them are refused."""
    half = [x.astype(np.float16) for x in qkv(64)]
    of = np.ones(64, np.int32)
    assert "kernel" in cupy_flash.explain(*half, arch="sm_80", mask=HASHED(of))
    three = cupy_flash.mask(lambda b, h, i, j, of: of[i] * of[j] * of[b] > 0)
    with pytest.raises(
        UnsupportedError, match="can be -9903520314283042199192993792, and integers have 64 bits"
    ):
        cupy_flash.explain(*half, arch="sm_80", mask=three(of))
    assert "kernel" in cupy_flash.explain(*half, arch="sm_80", mask=three(of.astype(np.int8)))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
def test_small_integers_are_not_computed_in_what_they_hold(dtype: str) -> None:
    """One function of arrays gives one mask: in attention, in the textbook and by blocks."""
    of = np.array([0, 3, 100, 127, 90, 2, 1, 60] * 2, dtype)
    mask = cupy_flash.mask(lambda b, h, i, j, x: (x[i] - x[j] < 50) & (x[i] + x[j] < 200) & (x[i] * 3 > 8))
    q = np.random.default_rng(0).standard_normal((1, 1, 16, 8), np.float32)
    wide = of.astype(np.int64)
    keep = (wide[:, None] - wide < 50) & (wide[:, None] + wide < 200) & (wide[:, None] * 3 > 8)
    expected = cupy_flash.attention(q, q, q, mask=keep)
    blocks = cupy_flash.block_mask(mask(of), None, None, 16, 16, block=16)
    how = {"mask": mask(of)}
    for o in (
        cupy_flash.attention(q, q, q, **how),
        cupy_flash.naive_attention(q, q, q, **how).o,
        cupy_flash.attention(q, q, q, mask=blocks),
    ):
        np.testing.assert_allclose(o, expected, atol=1e-6)


# ---- intervals


def random_integers(draw: np.random.Generator) -> Any:
    """A function of many operations on integers."""
    steps = [(int(draw.integers(0, 10)), *map(int, draw.integers(0, 100, 3))) for _ in range(12)]
    numbers = draw.integers(-9, 10, 12).tolist()

    def made(b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
        values = [b, h, i, j, x[i % 3], y[j % 3]]
        for (op, first, second, third), number in zip(steps, numbers, strict=True):
            m, n, k = (values[at % len(values)] for at in (first, second, third))
            values.append(
                [m + n, m - n, m * n, m // n, m % n, m + number, m * number, np.where(m < n, k, m),
                 np.minimum(m, np.maximum(n, number)), abs(-m) // (number or 1)][op]
            )  # fmt: skip
        return sum(values[6:]) > 0

    return made


def values_of(graph: Graph, at: dict[str, int], held: list[np.ndarray]) -> list[Any]:
    """Every value of a graph at one place, of Python's integers; NumPy's rule for what divides by 0."""
    found: list[Any] = []
    for node in graph.nodes:
        operands = [found[x] for x in node.operands]
        if node.op in POSITIONS or node.op == "s":
            found.append(at[node.op])
        elif node.op == "constant":
            found.append(node.value)
        elif node.op == "load":
            found.append(int(held[int(node.value or 0)][tuple(operands)]))
        elif node.op in ("floor_divide", "remainder"):
            a, b = operands
            found.append(0 if b == 0 else a // b if node.op == "floor_divide" else a % b)
        elif node.op == "to_int":
            found.append(int(operands[0]))
        elif node.op == "where":
            found.append(operands[1] if operands[0] else operands[2])
        else:
            found.append(OPERATIONS[node.op].numpy(*(np.array([x], object) for x in operands))[0])
    return found


@pytest.mark.parametrize("seed", range(30))
def test_intervals_hold_what_they_say(seed: int) -> None:
    """Of random functions: no value is ever beyond bits that are said to hold it."""
    draw = np.random.default_rng(seed)
    sizes = (3, 5, 9, 11)
    held = [draw.integers(-4, 5, 3).astype(np.int32), draw.integers(0, 3, 3).astype(np.uint8)]
    graph = cupy_flash.mask(random_integers(draw)).traced([Argument("int32", 1), Argument("uint8", 1)])
    assert isinstance(graph, Graph)
    ranges = tuple((int(x.min()), int(x.max())) for x in held)
    fits = next(bits for bits in range(1, 500) if too_large(graph, bits, sizes, ranges) is None)
    assert too_large(graph, fits - 1, sizes, ranges) is not None
    wide = wide_nodes(graph)
    for _ in range(20):
        at = {"s": 0.0, **{p: int(draw.integers(0, n)) for p, n in zip(POSITIONS, sizes, strict=True)}}
        for number, (node, value) in enumerate(zip(graph.nodes, values_of(graph, at, held), strict=True)):
            if node.kind == "int":
                assert -(2 ** (fits - 1)) <= value < 2 ** (fits - 1)
                assert number in wide or -(2**31) <= value < 2**31 or not reads(graph, number)


def reads(graph: Graph, at: int) -> bool:
    """Whether a value depends on an argument."""
    node = graph.nodes[at]
    return node.op == "load" or any(reads(graph, x) for x in node.operands)


def test_dtypes_of_integer_arguments_have_a_range() -> None:
    for dtype, (low, high) in OF_DTYPE.items():
        if dtype != "bool":
            assert (low, high) == (np.iinfo(dtype).min, np.iinfo(dtype).max)
    with pytest.raises(InvalidArgumentsError, match="has dtype int64"):  # a dtype beyond them has no function
        cupy_flash.attention(*qkv(8), mask=HASHED(np.arange(8)))
