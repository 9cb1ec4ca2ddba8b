"""Tables of docs/limits.md are what the planner does. `python -m tests.cpu.test_limits` writes them."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash.call.problem import Problem
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.catalog import ARCHITECTURES
from cupy_flash.plan.choose import choose
from tests.paths import ROOT

PAGE = ROOT / "docs" / "limits.md"
NAMES = [arch.name for arch in ARCHITECTURES]
# Head dims on both sides of every limit that a tile can have.
HEAD_DIMS = [dim for k in range(1, 19) for dim in (32 * k - 1, 32 * k)]
BASE = Problem("forward", "float16", None, 2, 16, 16, 4096, 4096, 128, 128, 128**-0.5)
FLOAT8 = {"dtype": "float8_e4m3fn", "of_float8": "bfloat16"}
KINDS: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": {"dtype": "bfloat16"},
    'float32, `"tf32x3"`': {"dtype": "float32", "precision": "tf32x3"},
    'float32, `"ieee"`': {"dtype": "float32", "precision": "ieee"},
    "float64": {"dtype": "float64"},
    "float8_e4m3fn": FLOAT8,
}

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
ROWS = np.array([0, 64], np.int32)
KEEP = np.ones((64, 64), bool)
ADDED = np.zeros((64, 64), np.float16)
SLOPES = np.ones(4, np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "none, `scale`, GQA": {},
    "`causal`, `window`": {"window": (16, 0)},
    "`softcap`": {"softcap": 10.0},
    "`alibi_slopes`": {"alibi_slopes": SLOPES},
    "`sinks`": {"sinks": SLOPES},
    "`mask`, an array": {"mask": KEEP},
    "`mask`, `Spans`": {"mask": cupy_flash.spans.documents([30, 34])},
    "`mask`, `BlockMask`": {"mask": cupy_flash.block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64)},
    "`mask`, a function": {"mask": cupy_flash.mask(lambda b, h, i, j: i >= j)},
    "`score`": {"score": cupy_flash.score(lambda s, b, h, i, j: s + (i - j) / 8)},
    "`bias`": {"bias": ADDED},
    "`dropout`": {"dropout": 0.1, "seed": 1},
    '`reproducible="run"`': {"reproducible": "run"},
    '`reproducible="batch"`': {"reproducible": "batch"},
    '`reproducible="prefill"`': {"reproducible": "prefill"},
}


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n".replace("  ", " ") for row in rows)


def grouped(columns: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Architectures whose columns are equal, as one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, column in columns.items():
        alike.setdefault(column, []).append(name)
    return {
        ", ".join([names[0], *(name.removeprefix("sm_") for name in names[1:])]): column
        for column, names in alike.items()
    }


def transposed(first: str, labels: list[str], columns: dict[str, tuple[str, ...]]) -> str:
    columns = grouped(columns)
    lines = [[label, *(column[n] for column in columns.values())] for n, label in enumerate(labels)]
    return table([first, *columns], lines)


def head_dims(direction: str, arch: str, kind: dict[str, Any]) -> str:
    """Families in the order of the head dims that they take, each with its largest."""
    most: dict[str, int] = {}
    for dim in HEAD_DIMS:
        problem = BASE._replace(direction=direction, head_dim=dim, head_dim_v=dim, **kind)
        try:
            most[choose(problem, arch).family] = dim
        except UnsupportedError:
            continue
    return ", ".join(f"{family} {dim}" for family, dim in most.items()) or "no"


def of_head_dims(direction: str) -> str:
    """Before a backward pass is planned, float8 is refused."""
    kinds = {name: kind for name, kind in KINDS.items() if direction == "forward" or kind != FLOAT8}
    columns = {arch: tuple(head_dims(direction, arch, kind) for kind in kinds.values()) for arch in NAMES}
    return transposed(direction, list(kinds), columns)


def family_of(arch: str, *arrays: Any, **options: Any) -> str:
    try:
        text = cupy_flash.explain(*arrays, arch=arch, **options)
    except UnsupportedError:
        return "no"
    found = re.search(r"^family +(\w+) on", text, re.MULTILINE)
    assert found
    return found[1]


def of_options(direction: str) -> str:
    q = np.ones((1, 4, 64, 128), F16)
    columns = {
        arch: tuple(family_of(arch, q, q, q, direction=direction, **option) for option in OPTIONS.values())
        for arch in NAMES
    }
    return transposed(direction, list(OPTIONS), columns)


def of_caches() -> str:
    """One query per sequence."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "dtype of q": (lambda x: x, {}),
        "pages of 16": (lambda x: x, {"block_table": np.array([[0]], np.int32)}),
        "int8": (lambda x: cupy_flash.QuantizedCache(x.astype(np.int8), SLOPES), {}),
        "float8_e4m3fn": (
            lambda x: cupy_flash.QuantizedCache(x.astype(ml_dtypes.float8_e4m3fn), SLOPES),
            {},
        ),
        "4 bits": (lambda x: cupy_flash.quantized.int4(x, group=64), {}),
        "NVFP4": (cupy_flash.quantized.nvfp4, {}),
        "left padding": (lambda x: x, {"cache_leftpad": np.array([1], np.int32)}),
        "tree attention (`Spans`)": (lambda x: x, {"mask": cupy_flash.spans.tree([-1])}),
        "`mask`, an array": (lambda x: x, {"mask": np.ones((1, 1, 1, 16), bool)}),
        "RoPE on read": (
            lambda x: x,
            {"rotary": cupy_flash.Rotary(np.ones((64, 32), F16), np.ones((64, 32), F16), on_read=True)},
        ),
        '`reproducible="batch"`': (lambda x: x, {"reproducible": "batch"}),
    }
    q = np.ones((1, 4, 1, 128), F16)
    columns = {}
    for arch in NAMES:
        cells = []
        for make, options in kinds.values():
            cache = make(np.ones((1, 4, 16, 128), F16))
            cells.append(family_of(arch, q, cache, cache, kv_cache={"cache_seqlens": 16} | options))
        columns[arch] = tuple(cells)
    return transposed("cache", list(kinds), columns)


TABLES = {
    "head dims, forward": lambda: of_head_dims("forward"),
    "head dims, backward": lambda: of_head_dims("backward"),
    "options, forward": lambda: of_options("forward"),
    "options, backward": lambda: of_options("backward"),
    "caches": of_caches,
}


# A table stands below a comment with its name.
PLACE = re.compile(r"(?<=^<!-- )(.+?)( -->\n\n)((?:\|.*\n)+)", re.MULTILINE)


@pytest.mark.parametrize("name", TABLES)
def test_limits_are_those_of_the_planner(name: str) -> None:
    tables = {found[1]: found[3] for found in PLACE.finditer(PAGE.read_text(encoding="utf-8"))}
    assert tables[name] == TABLES[name](), (
        "python -m tests.cpu.test_limits writes the tables of docs/limits.md"
    )


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    text = PLACE.sub(lambda found: f"{found[1]}{found[2]}{TABLES[found[1]]()}", text)
    PAGE.write_text(text, encoding="utf-8")
