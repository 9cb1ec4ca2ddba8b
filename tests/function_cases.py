"""Score functions for tests: those that people write, each with its arguments, and random ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_flash
from tests.cases import Case
from tests.public import with_function

PLAIN = Case(lengths=(50, 70), heads=(4, 2), head_dims=(16, 8))


def head_slopes(draw: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    return (draw.random(case.heads[0]).astype(case.accumulator),)


def documents(draw: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    return tuple(np.sort(draw.integers(0, 3, (case.batch, n)), axis=1).astype(np.int32) for n in case.lengths)


def relative_table(draw: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    size = sum(case.lengths)
    table = draw.standard_normal((case.heads[0], size)).astype(case.accumulator)
    return table, np.array(case.lengths[1] - 1, np.int32)


def buckets(draw: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    return (draw.standard_normal((2, 9))[:, ::-1].astype(np.float16),)


def prefixes(draw: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    return (draw.integers(0, case.lengths[1], case.batch).astype(np.int32),)


def pair_table(draw: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    return (draw.random((case.batch, 1, *case.lengths)) < 0.7, draw.standard_normal(2))


def capped_distance(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """T5's: the nearer the finer."""
    away = abs(i - j)
    bucket = np.minimum(np.where(away < 4, away, 4 + away // 16), 8)
    return s + table[h % 2, bucket]


def natten(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A neighbourhood of 5 x 5 in a picture that is 12 wide."""
    return (abs(i // 12 - j // 12) <= 2) & (abs(i % 12 - j % 12) <= 2)


def tempered(s: Any, b: Any, h: Any, i: Any, j: Any, by_head: Any, common: Any) -> Any:
    return s * np.exp(by_head[h] - 1.0) * common + np.log(1.0 + i) / np.sqrt(2.0 + j)


MADE: dict[str, tuple[cupy_flash.ScoreFunction, Callable[..., Any]]] = {
    "alibi": (
        cupy_flash.score(lambda s, b, h, i, j, slope: s - slope[h] * abs(i - j), learned="slope"),
        head_slopes,
    ),
    "softcap": (cupy_flash.score(lambda s, b, h, i, j: 3.0 * np.tanh(s / 3.0)), lambda *_: ()),
    "relative": (
        cupy_flash.score(
            lambda s, b, h, i, j, table, middle: s + table[h, i - j + middle], learned=("table",)
        ),
        relative_table,
    ),
    "buckets": (cupy_flash.score(capped_distance, learned=("table",)), buckets),
    "tempered": (
        cupy_flash.score(tempered, learned=("by_head", "common")),
        lambda draw, case: (*head_slopes(draw, case), np.array(0.7, case.accumulator)),
    ),
    "kinks": (
        cupy_flash.score(
            lambda s, b, h, i, j: np.maximum(s, -0.5) - np.minimum(abs(s), 1.0) ** 2 / (1 + j % 3)
        ),
        lambda *_: (),
    ),
    "documents": (cupy_flash.mask(lambda b, h, i, j, of_q, of_k: of_q[b, i] == of_k[b, j]), documents),
    "prefix_lm": (cupy_flash.mask(lambda b, h, i, j, prefix: (j < prefix[b]) | (j <= i)), prefixes),
    "window": (cupy_flash.mask(lambda b, h, i, j: (i - j < 20) & (j - i < 9)), lambda *_: ()),
    "dilated": (
        cupy_flash.mask(lambda b, h, i, j: (abs(i - j) <= 30) & ((i - j) % (h + 2) == 0)),
        lambda *_: (),
    ),
    "natten": (cupy_flash.mask(natten), lambda *_: ()),
    "pairs": (
        cupy_flash.score(
            lambda s, b, h, i, j, keep, two: np.where(keep[b, 0, i, j], s + two[h % 2], -np.inf),
            learned="two",
        ),
        pair_table,
    ),
}


ALIBI = MADE["alibi"][0]  # by a name of this module, for command lines


@dataclass(frozen=True)
class FunctionCase:
    """A case, and a function of its scores, by its name in MADE."""

    name: str
    case: Case = PLAIN

    def __str__(self) -> str:
        return f"{self.name} {self.case}"

    def __getattr__(self, name: str) -> object:
        """A field of the case: functional tests take either."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.case, name)

    def arguments(self) -> tuple[np.ndarray, ...]:
        """What the function takes."""
        draw = np.random.default_rng(zlib.crc32(str(self).encode()))
        made: tuple[np.ndarray, ...] = MADE[self.name][1](draw, self.case)
        return made

    def inputs(self) -> dict[str, np.ndarray]:
        """Those of the case."""
        return self.case.inputs()

    def options(self, arrays: dict[str, np.ndarray]) -> dict[str, object]:
        """Those of the case, the function and its arguments."""
        return with_function(self.case.options(arrays), MADE[self.name][0], self.arguments())


# Each with other options.
WITH = [
    FunctionCase("alibi", Case(lengths=(200, 200), causal=True, heads=(4, 2))),
    FunctionCase("relative", Case(lengths=(90, 60), window=(20, 40), align="bottom_right", bias="1hqk")),
    FunctionCase("tempered", Case(lengths=(65, 130), mask="b1q1", heads=(2, 1), dlse=True)),
    FunctionCase("softcap", Case(lengths=(33, 70), softcap=2.0, alibi="bh", align=7, sinks=True)),
    FunctionCase("documents", Case(lengths=(60, 60), dropout=0.2, dlse=True, layout="bshd")),
    FunctionCase("buckets", Case(lengths=(70, 150), bias="1h11", heads=(6, 2), dtype="float16")),
    FunctionCase("kinks", Case(lengths=(40, 300), dtype="float64", sinks=True)),
    FunctionCase("pairs", Case(lengths=(31, 45), dtype="bfloat16", causal=True, align="top_left")),
    FunctionCase("natten", Case(lengths=(72, 72), rank=3, batch=1)),
    FunctionCase("prefix_lm", Case(lengths=(1, 1))),
    FunctionCase("alibi", Case(lengths=(1, 600), heads=(4, 4))),
]


def random_function(draw: np.random.Generator) -> Callable[..., Any]:
    """A function of random operations, smooth almost everywhere, as people would write it."""
    program = [
        (int(draw.integers(0, 14)), *map(int, draw.integers(0, 100, 3))) for _ in range(draw.integers(3, 14))
    ]
    numbers = draw.standard_normal(len(program)).tolist()

    def made(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, which: Any) -> Any:
        floats = [s, table[h, which[j % 5]], 0.25 * s + 0.1 * (i - j) / (1 + abs(i - j))]
        integers = [i, j, b + h, which[i % 5]]
        for (op, x, y, z), number in zip(program, numbers, strict=True):
            p, q = floats[x % len(floats)], floats[y % len(floats)]
            m, n = integers[x % len(integers)], integers[y % len(integers)]
            condition = [m < n, p > number, (m == n) | (p <= q), ~(m >= n) & (n != z)][z % 4]
            if op == 0:
                floats.append(p + number * q)
            elif op == 1:
                floats.append(p * np.tanh(q))
            elif op == 2:
                floats.append(np.where(condition, p, q - number))
            elif op == 3:
                floats.append(np.exp(-abs(p)))
            elif op == 4:
                floats.append(np.log(1.5 + p * p))
            elif op == 5:
                floats.append(np.sqrt(0.5 + np.square(p)) / (1.0 + abs(q)))
            elif op == 6:
                floats.append(np.minimum(p, number) - np.maximum(q, -number))
            elif op == 7:
                integers.append((m - n) % (2 + z % 7))
            elif op == 8:
                integers.append((m + 3 * n) // (1 + z % 9))
            elif op == 9:
                integers.append(np.where(condition, m, np.minimum(n, 17)))
            elif op == 10:
                floats.append(p - number * (m % 11) / 11)
            elif op == 11:
                floats.append(np.clip(p, -2.0, 2.0) + table[h, which[abs(m) % 5]])
            elif op == 12:
                floats.append(-p if z % 2 else +q)
            else:
                floats.append(p * number - condition * 0.5)
        return np.tanh(floats[-1]) + 0.5 * floats[-2] / (1 + abs(floats[-2])) + 0.1 * s

    return made
