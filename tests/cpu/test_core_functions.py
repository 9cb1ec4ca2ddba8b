"""Score functions in the compiled core: the interpreter against NumPy, its tables, its errors, its sums."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError
from cupy_flash.cpu import choose
from cupy_flash.cpu.core import family, function, isa, locate, params, sources
from cupy_flash.program.graph import Argument
from cupy_flash.program.machine import MOST_REGISTERS, OPS, machine
from cupy_flash.program.operations import OPERATIONS
from tests.conftest import skip_without_core
from tests.function_cases import MADE, WITH, FunctionCase, random_function

Arrays = list[np.ndarray]


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that this CPU runs."""
    monkeypatch.delenv("CUPY_FLASH_CPU", raising=False)
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    skip_without_core()


def both_passes(arrays: dict[str, np.ndarray], how: dict[str, Any]) -> Arrays:
    q, k, v = (arrays[n] for n in "qkv")
    assert "family    core" in cupy_flash.explain(q, k, v, **how) or choose.override() == "numpy"
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(arrays["do"], q, k, v, o, lse, **how)
    return [x for x in (o, lse, *grads[:5], *(grads.dscore or ())) if x is not None]


def inputs(seed: int, dtype: type, lengths: tuple[int, int] = (70, 170)) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    made = {"do": (1, 4, lengths[0], 8), "q": (1, 4, lengths[0], 8), "k": (1, 2, lengths[1], 8),
            "v": (1, 2, lengths[1], 8)}  # fmt: skip
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in made.items()}


# ---- the tables


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_structs_are_those_of_the_header(tmp_path: Path) -> None:
    structs = {"Instruction": function.INSTRUCTION, "FunctionProgram": function.PROGRAM,
               "FunctionArray": function.ARRAY, "Function": function.FUNCTION}  # fmt: skip
    lines = ['#include "function.h"', "#include <stddef.h>"]
    for name, kind in structs.items():
        assert kind.fields is not None
        lines.append(f"static_assert(sizeof({name}) == {kind.itemsize});")
        lines += [f"static_assert(offsetof({name}, {x}) == {at});" for x, (_, at, *_) in kind.fields.items()]
    lines.append(f"static_assert(kMostRegisters == {MOST_REGISTERS} && kOutside == {params.OUTSIDE});")
    source = tmp_path / "offsets.cpp"
    source.write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{sources.folder()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def enumerators(name: str) -> list[str]:
    text = (sources.folder() / "function.h").read_text()
    found = re.search(rf"enum {name} : int32_t \{{(.*?)\}}", text, re.DOTALL)
    assert found is not None
    return re.findall(r"\bk(\w+)", found[1])


def test_the_tables_are_those_of_the_header() -> None:
    """An operation is called the same there, but for letters: kDivideFloat is true_divide."""
    said = {"b": "batch", "h": "head", "i": "query", "j": "key", "true_divide": "divide float",
            "bool to_float": "bool to float", "int to_float": "int to float", "bool to_int": "bool to int",
            "floor_divide": "floor divide int", "remainder": "remainder int", "logical_and": "and",
            "logical_or": "or", "logical_not": "not"}  # fmt: skip
    spelled = [re.sub(r"[ _]", "", said.get(name, name)) for name in OPS]
    assert [name.lower() for name in enumerators("Op")] == spelled
    short = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}
    stored = [name.removeprefix("Of").lower() for name in enumerators("Stored")]
    assert tuple(short.get(name, name) for name in stored) == function.STORED
    mapped = {name.split()[0] for name in OPS} | {"greater", "greater_equal"}
    assert set(OPERATIONS) <= mapped, "an operation that the interpreter does not have"


# ---- the same numbers as NumPy


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(16))
def test_random_functions_are_those_of_numpy(seed: int, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng([seed, 7])
    made = cupy_flash.score(random_function(draw), learned=("table",))
    arguments = (draw.standard_normal((4, 4)).astype(dtype), draw.integers(0, 4, 5).astype(np.int32))
    how = {"score": made(*arguments), "causal": seed % 2 == 1, "align": "bottom_right"}
    arrays = inputs(seed, dtype)
    ours = both_passes(arrays, how)
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    for a, b in zip(ours, both_passes(arrays, how), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=(2e-5 if dtype is np.float32 else 1e-13) * np.abs(b).max()
        )


def values_of(made: Any, *arguments: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """What a function of b makes, element by element: LSE of a query with one key is its score."""
    q = np.zeros((len(arguments[0]), 1, 1, 4), dtype)
    how = {"score": cupy_flash.score(made)(*arguments)}
    assert "family    core" in cupy_flash.explain(q, q, q, **how)
    return cupy_flash.attention(q, q, q, return_lse=True, **how)[1].ravel()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("exp", -85, 88),
        ("log", 1e-30, 1e30),
        ("log", 0.5, 2),
        ("tanh", -5, 5),
        ("tanh", -1e-4, 1e-4),
        ("sqrt", 0, 9),
    ],
)
def test_functions_are_exact_to_units_in_the_last_place(
    dtype: type, name: str, low: float, high: float
) -> None:
    draw = np.random.default_rng(0)
    x = np.exp(draw.uniform(np.log(low), np.log(high), 3000)) if low > 0 else draw.uniform(low, high, 3000)
    x = x.astype(dtype)
    exact = getattr(np, name)(x.astype(np.longdouble))
    found = values_of(lambda s, b, h, i, j, x: getattr(np, name)(x[b]), x, dtype=dtype)
    assert (np.abs(found - exact) <= 4 * np.spacing(np.abs(exact).astype(dtype))).all()


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sqrt"])
def test_ends_of_functions(name: str) -> None:
    x = np.array([0, 1e-42, np.inf, -1, 88.5, 89, -110, 700, -800], np.float32)
    ufunc = getattr(np, name)

    def finite(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:
        """Why the ends have other numbers: LSE of a score that is infinite is none."""
        y = ufunc(x[b])
        return np.where(y > 3e38, 7.0, np.where(y < -3e38, -7.0, y))

    with np.errstate(all="ignore"):
        exact = finite(0, np.arange(len(x)), 0, 0, 0, x)
    # A row whose only score is not a number has that for an LSE, too.
    np.testing.assert_allclose(values_of(finite, x), exact, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integers_have_32_bits(dtype: type) -> None:
    """To the last one: what would be larger is refused before."""
    draw = np.random.default_rng(1)

    def to(most: int) -> np.ndarray:
        small, large = draw.integers(-60, 61, (2, 2000)), draw.integers(-most, most + 1, (2, 2000))
        ends = [[most, -most, most, -most], [most, most, -most, -most]]
        return np.concatenate([small, large, [large[0], small[1]], ends], axis=1).astype(np.int32)

    cases: list[tuple[int, Any, Any]] = [
        (2**31 - 1, lambda s, bb, h, i, j, a, b: (a[bb] // b[bb]) % 65536 * 1.0, lambda a, b: a // b),
        (2**31 - 1, lambda s, bb, h, i, j, a, b: (a[bb] % b[bb]) % 65536 * 1.0, lambda a, b: a % b),
        (46340, lambda s, bb, h, i, j, a, b: (a[bb] * b[bb] - 7) % 65536 * 1.0, lambda a, b: a * b - 7),
        (2**30 - 1, lambda s, bb, h, i, j, a, b: (-a[bb] - abs(b[bb])) % 65536 * 1.0,
         lambda a, b: -a - abs(b)),
        (2**31 - 1, lambda s, bb, h, i, j, a, b: np.maximum(np.minimum(a[bb], b[bb]), -9) % 65536 * 1.0,
         lambda a, b: np.maximum(np.minimum(a, b), -9)),
    ]  # fmt: skip
    for most, made, of_numpy in cases:
        a, b = to(most)
        with np.errstate(all="ignore"):
            expected = of_numpy(a.astype(np.int64), b.astype(np.int64)) % 65536
        assert np.array_equal(values_of(made, a, b, dtype=dtype), expected.astype(dtype))


def test_conditions_compare_as_numbers() -> None:
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    found = values_of(
        lambda s, n, h, i, j, a, b: (a[n] < b[n]) * 1.0 + (a[n] >= b[n]) * 2.0 + (a[n] == b[n]) * 4.0
        + (~a[n] | b[n]) * 8.0 + (a[n] & ~b[n]) * 16.0, a, b,
    )  # fmt: skip
    assert np.array_equal(found, (a < b) * 1 + (a >= b) * 2 + (a == b) * 4 + (~a | b) * 8 + (a & ~b) * 16)


def test_a_byte_of_a_boolean_that_is_not_0_is_true() -> None:
    """As NumPy reads it; one of its own is 1."""
    bytes_ = np.array([0, 1, 2, 255], np.uint8)
    found = values_of(lambda s, n, h, i, j, a: 1.0 * (a[n] * 1) + 2.0 * ~a[n], bytes_.view(bool))
    assert found.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stored", [x for x in function.STORED if x != "bfloat16"])
def test_arguments_of_any_dtype_and_strides(stored: str, dtype: type) -> None:
    draw = np.random.default_rng(2)
    whole = (
        draw.integers(0, 2, (6, 80))
        if stored == "bool"
        else draw.integers(-9 * (stored[0] != "u"), 90, (6, 80))
    )
    table = whole.astype(stored)[::-2, 75:3:-3]
    draws = [draw.integers(0, n, 300).astype(np.int32) for n in table.shape]
    q = np.zeros((300, 1, 1, 4), dtype)
    made = cupy_flash.score(lambda s, b, h, i, j, t, x, y: 1.0 * t[x[b], y[b]])
    found = cupy_flash.attention(q, q, q, return_lse=True, score=made(table, *draws))[1].ravel()
    assert np.array_equal(found, table[draws[0], draws[1]].astype(dtype))


def by(index: Any) -> Any:
    return lambda s, b, h, i, j, t: s + t[h, index(i, j)]


def test_a_table_by_distance_is_read_in_one_piece_and_not() -> None:
    """Lanes read elements in a row, in a row backwards, all the same one, and any."""
    arrays = inputs(3, np.float32)
    table = np.random.default_rng(3).standard_normal((4, 400)).astype(np.float32)
    q, k, v = (arrays[n] for n in "qkv")
    i, j = np.ogrid[:70, :170]
    for index in (lambda i, j: i - j + 169, lambda i, j: j - i + 69, lambda i, j: j + 0 * i,
                  lambda i, j: (7 * i + 3 * j) % 400):  # fmt: skip
        made = cupy_flash.score(by(index))
        found = cupy_flash.attention(q, k, v, score=made(table))
        expected = cupy_flash.attention(
            q, k, v, bias=np.broadcast_to(table[:, index(i, j)], (4, 70, 170))[None]
        )
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_offsets_beyond_32_bits() -> None:
    q = np.zeros((1, 1, 40, 4), np.float32)
    table = np.broadcast_to(np.arange(7, dtype=np.float32), (2**20, 2**9, 7))
    made = cupy_flash.score(lambda s, b, h, i, j, t: s + t[i * 20000, j, (i + j) % 7])
    found = cupy_flash.attention(q, q, q, return_lse=True, score=made(table))[1]
    i, j = np.ogrid[:40, :40]
    exact = np.log(np.exp(((i + j) % 7).astype(np.float64)).sum(1))
    np.testing.assert_allclose(found[0, 0], exact, rtol=1e-6)


def test_one_query_is_no_job_of_decode() -> None:
    arrays = inputs(4, np.float32, (1, 300))
    q, k, v = (arrays[n] for n in "qkv")
    made = cupy_flash.score(lambda s, b, h, i, j: s - 0.1 * j)
    bias = -0.1 * np.arange(300, dtype=np.float32)
    np.testing.assert_allclose(
        cupy_flash.attention(q, k, v, score=made),
        cupy_flash.attention(q, k, v, bias=bias[None, None, None]),
        atol=1e-6,
    )


# ---- one order of sums


@pytest.mark.parametrize("case", [FunctionCase("relative"), FunctionCase("tempered"), *WITH[:3]], ids=str)
def test_bits_do_not_depend_on_threads(case: FunctionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = case.inputs()
    how = case.options(arrays)
    ways = []
    for count in (1, 2, 5):
        monkeypatch.setattr(family, "workers", lambda *_, count=count: count)
        ways.append(both_passes(arrays, how))
    for way in ways[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(ways[0], way, strict=True))


def test_large_tables_are_summed_in_fewer_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same numbers, whatever the memory."""
    case = FunctionCase("relative")
    arrays, made = case.inputs(), []
    for most in (64, 3, 1):
        monkeypatch.setattr(function, "_MOST_SLICES", most)
        cupy_flash.dispatch.memo.forget()
        made.append(both_passes(arrays, case.options(arrays))[-1])
    for x in made[1:]:
        np.testing.assert_allclose(x, made[0], atol=1e-6)
    cupy_flash.dispatch.memo.forget()


def test_slices_of_jobs_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five key heads in two slices."""
    arrays = dict(
        zip(("do", *"qkv"), np.random.default_rng(0).standard_normal((4, 1, 5, 20, 8)), strict=True)
    )
    made = cupy_flash.score(lambda s, b, h, i, j, x: s + x[j] * i, learned="x")
    how = {"score": made(np.ones(20))}
    wanted = both_passes(arrays, how)
    monkeypatch.setattr(function, "_MOST_SLICES", 2)
    cupy_flash.dispatch.memo.forget()
    for x, y in zip(both_passes(arrays, how), wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    cupy_flash.dispatch.memo.forget()


def test_bits_of_a_row_are_its_own() -> None:
    arrays = inputs(5, np.float32)
    q, k, v = (arrays[n] for n in "qkv")
    how: dict[str, Any] = {"score": MADE["softcap"][0], "reproducible": "batch"}
    whole = cupy_flash.attention(q, k, v, **how)
    shifted = cupy_flash.score(lambda s, b, h, i, j: 3.0 * np.tanh(s / 3.0))
    part = cupy_flash.attention(q[:, :, 20:50], k, v, score=shifted, reproducible="batch")
    assert whole[:, :, 20:50].tobytes() == part.tobytes()


# ---- what is refused


@pytest.mark.parametrize(
    ("made", "axis", "index"),
    [
        (lambda s, b, h, i, j, x: s + x[h, 0], 0, 3),
        (lambda s, b, h, i, j, x: s + x[0, j], 1, 5),
        (lambda s, b, h, i, j, x: s + x[0, j - i + 5], 1, None),
        (lambda s, b, h, i, j, x: np.where(i > j, x[1, j - 1], s), 1, -1),
    ],
    ids=["lanes", "keys", "pairs", "branch"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_index_outside_is_refused(made: Any, axis: int, index: int | None, dtype: type) -> None:
    arrays, table = inputs(6, dtype, (70, 200)), np.zeros((3, 5), dtype)
    q, k, v = (arrays[n] for n in "qkv")
    how = {"score": cupy_flash.score(made)(table)}
    says = (
        rf"shape \(3, 5\), and <lambda> reads element {'-?[0-9]+' if index is None else index} of axis {axis}"
    )
    if axis == 1 and index == 5:
        says = says.replace("element 5", r"element \d+")
    with pytest.raises(InvalidArgumentsError, match=says):
        cupy_flash.attention(q, k, v, **how)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    with pytest.raises(InvalidArgumentsError, match=says):
        cupy_flash.attention_backward(arrays["do"], q, k, v, o, lse, **how)


def test_an_index_outside_of_a_hidden_pair_is_nobodys() -> None:
    """Hidden by the band, by a mask, by intervals of keys and of queries, by blocks."""
    arrays = inputs(7, np.float32, (70, 70))
    q, k, v = (arrays[n] for n in "qkv")
    made = cupy_flash.score(lambda s, b, h, i, j, x: s + x[i - j])
    how = {"score": made(np.zeros(70, np.float32))}
    i, j = np.ogrid[:70, :70]
    by_key = np.stack([np.arange(70), np.full(70, 70)], -1).astype(np.int32)[None, None]
    by_query = np.stack([np.zeros(70), np.arange(70) + 1], -1).astype(np.int32)[:, None]
    blocks = cupy_flash.block_mask(lambda b, h, i, j: j <= i, None, None, 70, 70, block=32)
    expected = cupy_flash.attention(q, k, v, causal=True)
    for hidden in ({"causal": True}, {"mask": (j <= i)[None, None]}, {"mask": cupy_flash.Spans(by_key)},
                   {"mask": cupy_flash.Spans(by_query.reshape(1, 70, 1, 2))}, {"mask": blocks}):  # fmt: skip
        np.testing.assert_allclose(cupy_flash.attention(q, k, v, **how, **hidden), expected, atol=1e-6)
    of_function = cupy_flash.mask(lambda b, h, i, j, x: x[i - j] == 0)(np.zeros(70, np.float32))
    found = cupy_flash.attention(q, k, v, mask=((j <= i)[None, None], of_function))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(InvalidArgumentsError, match="reads element -"):
        cupy_flash.attention(q, k, v, **how, mask=(j <= i + 1)[None, None])


def test_an_index_outside_of_a_single_pair_is_refused() -> None:
    """Of the only query that sees the last key, which is another number than the key is."""
    arrays = inputs(7, np.float32, (70, 70))
    q, k, v = (arrays[n] for n in "qkv")
    for align in (-3, 0, 5):
        shown = {"window": (0, 0), "align": align}
        last = min(69 + align, 69)
        how = {"score": cupy_flash.score(lambda s, b, h, i, j, x: s + x[j])(np.zeros(last, np.float32))}
        with pytest.raises(InvalidArgumentsError, match=f"reads element {last} of axis 0"):
            cupy_flash.attention(q, k, v, **how, **shown)


def test_a_function_of_too_many_values_is_numpys() -> None:
    def wide(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        values = [np.tanh(s * (0.01 * n)) for n in range(200)]
        products = values[0]
        for n in range(200):
            products = products + values[n] * values[-1 - n]
        return products

    q = np.ones((1, 1, 4, 4), np.float32)
    text = cupy_flash.explain(q, q, q, score=cupy_flash.score(wide))
    assert "skipped   core: holds 256 values of a function at a time, and this one needs" in text
    assert np.isfinite(cupy_flash.attention(q, q, q, score=cupy_flash.score(wide))).all()


def test_registers_of_pairs_are_used_again() -> None:
    """A long function needs few, so that all of them stay in L1."""

    def long(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for n in range(50):
            s = np.tanh(s + 0.1 * n) * (i - j)
        return s

    values, _ = machine(cupy_flash.score(long).traced(()))
    assert values.registers[2] <= 3


def instructions(part: Any) -> list[str]:
    """Of a part of a machine those that run on pairs."""
    return [OPS[x.op] for x in part.code[-part.counts[2] :]]


def test_gradients_begin_where_values_have_been() -> None:
    """A soft cap's have no tanh again: with it they took 1.16 of what the option takes, now 1.06."""
    values, gradients = machine(cupy_flash.score(lambda s, b, h, i, j: 20.0 * np.tanh(s / 20.0)).traced(()))
    assert instructions(values) == ["true_divide", "tanh", "multiply float"]
    assert instructions(gradients) == [
        "multiply float", "subtract float", "multiply float", "true_divide", "slope",
    ]  # fmt: skip
    assert values.keeps == "made"
    for keeps, made in (
        ("", lambda s, b, h, i, j: 0.5 * s - i),
        ("made", lambda s, b, h, i, j: np.exp(s)),
        ("scores", lambda s, b, h, i, j: s * np.tanh(s)),
        ("scores", lambda s, b, h, i, j: np.maximum(s, 0.5) ** 2),
    ):
        assert machine(cupy_flash.score(made).traced(()))[0].keeps == keeps


@pytest.mark.parametrize(
    "made",
    [
        lambda s, b, h, i, j: np.exp(s),
        lambda s, b, h, i, j: np.tanh(np.tanh(s) * 2 - 0.1 * i) / 3,
        lambda s, b, h, i, j: np.sqrt(1 + np.exp(s)) * np.where(s > 0, 0.5, 1.0),
        lambda s, b, h, i, j: 0.25 * s - 0.1 * j,
    ],
    ids=["result", "last", "two", "nothing"],
)
def test_what_is_kept_gives_the_gradients_of_numpy(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, how = inputs(8, np.float64), {"score": cupy_flash.score(made)}
    ours = both_passes(arrays, how)
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    for a, b in zip(ours, both_passes(arrays, how), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * np.abs(b).max())


@pytest.mark.parametrize(
    "made",
    [
        lambda s, b, h, i, j, x: s * x[h, i],
        lambda s, b, h, i, j, x: s + x[1, j],
        lambda s, b, h, i, j, x: s + x[2, 7 * j % 240],
        lambda s, b, h, i, j, x: s + x[h, j],
        lambda s, b, h, i, j, x: s * np.sqrt(i - j) + x[h, 0] * np.log(i - j + 1),
    ],
    ids=["by lane", "by key", "by key in another order", "by pair", "without a slope where hidden"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_of_arguments_are_those_of_numpy(
    made: Any, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, table = inputs(9, dtype), np.random.default_rng(1).standard_normal((4, 240)).astype(dtype)
    how = {"score": cupy_flash.score(made, learned="x")(table), "causal": True, "align": "top_left"}
    ours = both_passes(arrays, how)
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    for a, b in zip(ours, both_passes(arrays, how), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=512 * np.finfo(dtype).eps * np.abs(b).max())


def test_what_only_hides_or_adds_has_no_slope() -> None:
    for name in ("window", "documents"):
        program, arguments = MADE[name][0], MADE[name][1](np.random.default_rng(0), FunctionCase(name).case)
        graph = program.traced([Argument(x.dtype.name, x.ndim) for x in arguments])
        assert machine(graph)[1].counts == (0, 0, 0)
    added = cupy_flash.score(lambda s, b, h, i, j: s + 0.5 * (i - j)).traced(())
    assert machine(added)[1].counts == (0, 0, 0)


def test_without_their_library_numpy_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose.core()
    assert not isinstance(found, str)
    copy = tmp_path / isa.host().platform
    shutil.copytree(found[1].path.parent, copy)
    manifest = json.loads((copy / locate.MANIFEST).read_text())
    for one in isa.ISAS:
        manifest["libraries"].pop(sources.library_name(one, sources.FUNCTIONS), None)
    (copy / locate.MANIFEST).write_text(json.dumps(manifest))
    origin = locate._Origin("test", tmp_path, "build it again")
    monkeypatch.setattr(locate, "_origins", lambda: iter([origin]))
    locate.locate.cache_clear()
    cupy_flash.dispatch.memo.forget()
    q = np.ones((1, 1, 4, 4), np.float32)
    text = cupy_flash.explain(q, q, q, score=MADE["softcap"][0])
    assert "family    numpy" in text
    assert "skipped   core: no library for" in text
    assert "family    core" in cupy_flash.explain(q, q, q)
    locate.locate.cache_clear()
    cupy_flash.dispatch.memo.forget()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_a_function_hides_is_as_what_a_mask_hides(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with a mask besides, whatever lies in the keys that nobody sees, by the same products."""
    mine = isa.runnable()[0]
    monkeypatch.setenv(isa.OVERRIDE, mine.name + isa.FLOATS * sources.multiplies(mine, sources.AMX))
    draw = np.random.default_rng(2)
    q, do = draw.standard_normal((2, 1, 4, 300, 16)).astype(dtype)
    k, v = draw.standard_normal((2, 1, 2, 400, 16)).astype(dtype)
    k[:, :, 200:] = np.inf
    mask = draw.random((300, 400)) < 0.8
    i, j = np.ogrid[:300, :400]
    keep = (j < 200) & (abs(i - j) < 90)
    of_positions = cupy_flash.mask(lambda b, h, i, j: (j < 200) & (abs(i - j) < 90))
    results = []
    for how in ({"mask": mask & keep}, {"mask": (mask, of_positions)}):
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, softcap=2.0, **how)
        assert np.isfinite(o).all()
        grads = cupy_flash.attention_backward(do, q, k, v, o, lse, softcap=2.0, **how)
        results.append([x.tobytes() for x in (o, lse, *grads[:3])])
    assert results[0] == results[1]


def test_tiles_that_a_function_hides_have_no_products() -> None:
    """Processor time of a narrow window over long sequences, of which products would be nearly all."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 2048, 128)).astype(np.float32)
    near = cupy_flash.mask(lambda b, h, i, j: abs(i - j) < 16)
    best = {}
    for name, how in (("near", {"mask": near}), ("all", {})):
        spent = []
        for _ in range(5):
            start = time.process_time()
            cupy_flash.attention(q, k, v, **how)
            spent.append(time.process_time() - start)
        best[name] = min(spent)
    assert best["near"] < 0.6 * best["all"]


def fastest(*calls: Callable[[], object]) -> list[float]:
    """Microseconds of processor time of each, the least of many turns, taken one after the other."""
    spent: list[list[int]] = [[] for _ in calls]
    for _ in range(100):
        for call, turns in zip(calls, spent, strict=True):
            start = time.process_time_ns()
            for _ in range(10):
                call()
            turns.append(time.process_time_ns() - start)
    return [min(turns) / 10_000 for turns in spent]


def steps() -> None:
    """A yardstick of what tracing is made of: tuples with names, looked up by what they hold."""
    known: dict[Argument, int] = {}
    for n in range(30):
        known.setdefault(Argument("float32", n), n)


# Where the 50 microseconds were asked it takes 35, on an idle core of an AMD EPYC with AVX-512. An older EPYC
# takes 73 for the same, 6.4 times as long as for the steps. An Intel with Debian's Python 3.11.2 takes 47,
# and 4.7 for the steps: that Python is faster at these than at what tracing does.
IN_STEPS, ON_INTEL = 6.4, 47


def most_microseconds(stepped: float) -> float:
    """What 50 are on this processor, by the steps it takes."""
    return 50 / 35 * max(IN_STEPS * stepped, ON_INTEL)


def test_tracing_a_function_and_finding_it_again_take_50_microseconds() -> None:
    """Beyond what the call takes without one; about 30 and 5, where nobody shares the core."""

    def traced() -> cupy_flash.ScoreFunction:
        made = cupy_flash.score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j))
        made.traced((Argument("float32", 1),))
        return made

    q, slopes, known = np.ones((1, 1, 1, 4), np.float32), np.ones(1, np.float32), traced()
    calls = (
        traced,
        lambda: cupy_flash.attention(q, q, q, score=known(slopes)),
        lambda: cupy_flash.attention(q, q, q, return_lse=True),  # which Python repeats, and not the core
        steps,
    )
    least = fastest(*calls)
    for _ in range(10):  # why again: beside other programs a call may find no quiet moment in a hundred turns
        trace, found, plain, stepped = least
        if trace + found - plain < most_microseconds(stepped):
            break
        least = [min(pair) for pair in zip(least, fastest(*calls), strict=True)]
    # why steps: other processors, and other programs on the same core, make Python up to twice as slow.
    assert trace + found - plain < most_microseconds(stepped), (trace, found, plain, stepped)
