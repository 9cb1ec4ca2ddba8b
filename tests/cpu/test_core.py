"""The compiled core from inside: its struct, its libraries, its instructions, its threads and its memory."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupy_flash
from cupy_flash import CubinNotFound, InvalidArguments, prepare, testing
from cupy_flash.cpu import choose
from cupy_flash.cpu.core import build, family, isa, locate, params, sources
from tests.conftest import skip_without_core
from tests.paths import ROOT
from tests.plan_cases import BASE

SIZES = (2, 4, 384, 32)


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> locate.Library:
    """The library that this CPU runs."""
    monkeypatch.delenv("CUPY_FLASH_CPU", raising=False)
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    skip_without_core()
    found = choose.core()
    assert not isinstance(found, str)
    return found[1]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def results(shape: tuple[int, int, int, int] = SIZES, heads_k: int = 2, **options) -> list[np.ndarray]:
    batch, _, seqlen, dim = shape
    do, q = normal(*shape), normal(*shape, seed=1)
    k, v = (normal(batch, heads_k, seqlen, dim, seed=s) for s in (2, 3))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    along = {"dq": do, "dk": v, "dv": k, **options}
    tangents = cupy_flash.attention_jvp(q, k, v, o, lse, **along)
    second = cupy_flash.attention_hvp(do, q, k, v, o, lse, jvp=tangents, **along)
    return [o, lse, *tangents, *(x for x in (*gradients, *second) if x is not None)]


def run(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


# ---- the struct


@needs_compiler
def test_the_struct_is_that_of_the_header(tmp_path: Path) -> None:
    def fields(kind: np.dtype, name: str) -> list[str]:
        assert kind.fields is not None
        return [
            f'static_assert(offsetof({name}, {x}) == {at}, "{x}");' for x, (_, at, *_) in kind.fields.items()
        ]

    structs = {"Call": params.CALL, "Tensor": params.TENSOR, "Spans": params.SPANS, "Blocks": params.BLOCKS,
               "Codes": params.CODES, "Directed": params.DIRECTED,
               "SecondOrder": params.SECOND_ORDER}  # fmt: skip
    lines = ['#include "second_order.h"', "#include <stddef.h>"]
    for name, kind in structs.items():
        lines += [*fields(kind, name), f"static_assert(sizeof({name}) == {kind.itemsize});"]
    states = {"kStop": params.STOP, "kNoMemory": params.NO_MEMORY}
    lines += [f"static_assert({name} == {value});" for name, value in states.items()]
    source = tmp_path / "offsets.cpp"
    source.write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{sources.folder()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = re.search(r"enum Type : int32_t \{(.*?)\}", (sources.folder() / "call.h").read_text())
    assert names is not None
    short = {"kF32": "float32", "kF16": "float16", "kBf16": "bfloat16", "kF64": "float64",
             "kE4m3": "float8_e4m3fn", "kInt8": "int8", "kBool": "bool", "kCodes": "codes"}  # fmt: skip
    assert tuple(short[name.strip()] for name in names[1].split(",")) == params.TYPES


# ---- which library, and whether it may be trusted


def test_explain_and_info_name_the_library(core: locate.Library) -> None:
    q = normal(1, 2, 8, 4)
    text = cupy_flash.explain(q, q, q)
    assert "family    core on cpu" in text
    assert str(core.path) in text
    assert "passed by core: chooses its own tiles, and (4, 4) is asked for" in cupy_flash.explain(
        q, q, q, tile=(4, 4)
    )
    printed = run("from cupy_flash.__main__ import main; main(['info'])").stdout
    assert f"the compiled core for {choose.core()[0].title}" in printed


def test_the_environment_decides_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of an earlier call does not."""
    first = results()
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    q = normal(1, 2, 8, 4)
    assert "passed by core: CUPY_FLASH_CPU is numpy" in cupy_flash.explain(q, q, q)
    second = results()
    assert any((a != b).any() for a, b in zip(first, second, strict=True)), "two different ways"
    assert all(np.allclose(a, b, atol=1e-3) for a, b in zip(first, second, strict=True))


def test_unknown_and_missing_instruction_sets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(1, 2, 8, 4)
    monkeypatch.setenv("CUPY_FLASH_CPU", "avx9")
    with pytest.raises(
        InvalidArguments, match=r"CUPY_FLASH_CPU is 'avx9'.\nTry: unset it, or one of numpy, v4, v3"
    ):
        cupy_flash.attention(q, q, q)
    old = isa.Host("linux", "x86_64", isa.ISAS[2].flags)
    monkeypatch.setattr(isa, "host", lambda: old)
    monkeypatch.setenv("CUPY_FLASH_CPU", "v3")
    with pytest.raises(InvalidArguments, match=r"this CPU lacks abm avx avx2 .*\nTry: unset it, or v2"):
        cupy_flash.attention(q, q, q)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (isa.ISAS[0].flags | {"sse"}, ["v4", "v3", "v2"]),
        (isa.ISAS[0].flags - {"avx512vl"}, ["v3", "v2"]),
        (isa.ISAS[1].flags - {"fma"}, ["v2"]),
        (frozenset(), []),
    ],
)
def test_a_cpu_gets_what_it_has(
    flags: frozenset[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "host", lambda: isa.Host("linux", "x86_64", flags))
    assert [one.name for one in isa.runnable()] == names
    monkeypatch.setattr(isa, "host", lambda: isa.Host("linux", "aarch64", frozenset()))
    assert [one.name for one in isa.runnable()] == ["neon"]


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ({}, []),
        ({"X86_V2": True, "X86_V3": True, "X86_V4": True, "AVX512F": True}, ["v4", "v3", "v2"]),
        ({"X86_V2": True, "X86_V3": True, "X86_V4": False, "AVX512F": True}, ["v3", "v2"]),
        # Before 2.4 NumPy had names for less.
        ({"SSE42": True, "POPCNT": True, "AVX2": True, "FMA3": True, "F16C": True}, ["v3", "v2"]),
        ({"SSE42": True, "POPCNT": True, "AVX2": True, "FMA3": False, "F16C": True}, ["v2"]),
    ],
)
def test_elsewhere_numpy_knows_the_cpu(features, names, monkeypatch):
    """Windows has no /proc: what a library needs and NumPy does not name is not run."""
    found = isa.Host("windows", "x86_64", isa.flags_by_numpy(features))
    monkeypatch.setattr(isa, "host", lambda: found)
    assert [one.name for one in isa.runnable()] == names


def test_numpy_and_linux_agree():
    flags = isa._flags()
    if not flags or isa.host().machine != "x86_64":
        pytest.skip("x86-64 Linux has both")
    by_numpy = isa.flags_by_numpy(isa._numpy_features())
    for one in isa.ISAS[:3]:
        assert (one.flags <= flags) == (one.flags <= by_numpy)


@pytest.fixture
def copy(core: locate.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library alone in a place of its own, which is looked at first."""
    place = tmp_path / isa.host().platform
    shutil.copytree(core.path.parent, place)
    origin = locate._Origin("copy", tmp_path, "mend it")
    monkeypatch.setattr(locate, "_origins", lambda: iter([origin]))
    locate.locate.cache_clear()
    prepare.forget()
    yield place
    locate.locate.cache_clear()
    prepare.forget()


def test_who_has_no_checkout_is_told_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert locate.how_to_get_one() == "scripts/build_cpu.py"
    monkeypatch.setattr(locate, "folder", lambda: tmp_path / "kernels_cpu")
    assert locate.how_to_get_one() == f"pip install cupy-flash-cpu=={cupy_flash.__version__}"
    (tmp_path / "cupy_flash_cpu").mkdir()  # as its wheel for other platforms is installed
    (tmp_path / "cupy_flash_cpu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert locate.how_to_get_one() == "pip install . in a checkout, with a C++ compiler"


def test_a_damaged_library_is_refused(copy: Path, core: locate.Library) -> None:
    q, path = normal(1, 2, 8, 4), copy / core.path.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CubinNotFound, match=r"cannot be used: its SHA-256 is .*\nTry: mend it"):
        cupy_flash.attention(q, q, q)
    path.write_bytes(data[:100])
    with pytest.raises(CubinNotFound, match="it has 100 of"):
        cupy_flash.attention(q, q, q)
    path.unlink()
    with pytest.raises(CubinNotFound, match="No such file"):
        cupy_flash.attention(q, q, q)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "0.0.1"}, "are of cupy_flash 0.0.1"),
        ({"abi": 0}, r"\(ABI 0\)"),
        ({"format": 7}, "is not a manifest of the core"),
        ({"libraries": {"v3": {}}}, "v3 lacks bytes, compiler, sha256, source"),
    ],
)
def test_another_version_is_refused(change: dict, says: str, copy: Path) -> None:
    manifest = copy / locate.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    q = normal(1, 2, 8, 4)
    with pytest.raises(CubinNotFound, match=says):
        cupy_flash.attention(q, q, q)


def test_without_a_library_numpy_computes_and_explain_says_so(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / locate.MANIFEST).unlink()
    q = normal(1, 2, 8, 4)
    assert np.isfinite(cupy_flash.attention(q, q, q)).all()
    assert "passed by core: no library for" in cupy_flash.explain(q, q, q)
    monkeypatch.setenv("CUPY_FLASH_CPU", isa.runnable()[0].name)
    with pytest.raises(CubinNotFound, match="there is no such library"):
        cupy_flash.attention(q, q, q)


def test_second_order_has_a_library_of_its_own(copy: Path, core: locate.Library) -> None:
    """Without it, that is computed in NumPy, to the same numbers; the rest is as it was."""
    with_both = results()
    manifest = json.loads((copy / locate.MANIFEST).read_text())
    for one in isa.ISAS:
        manifest["libraries"].pop(sources.library_name(one, sources.SECOND_ORDER), None)
    (copy / locate.MANIFEST).write_text(json.dumps(manifest))
    locate.locate.cache_clear()
    asked = BASE._replace(direction="jvp")
    assert choose.choose(BASE).family == "core"
    assert choose.choose(asked).family == "numpy"
    for a, b in zip(with_both, results(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_next_lower_library_is_taken(
    copy: Path, core: locate.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU may have more than what is installed."""
    mine = isa.runnable()
    better = mine[0]._replace(name="v9")
    monkeypatch.setattr(isa, "ISAS", (better, *isa.ISAS))
    found = choose.core()
    assert not isinstance(found, str)
    assert found[0].name == core.isa


def test_changed_sources_are_noticed(core: locate.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    if core.origin != "checkout":
        pytest.skip(f"the library is of {core.origin}, which has no sources")
    locate.locate.cache_clear()
    prepare.forget()
    monkeypatch.setattr(locate, "digest", lambda *_: "another one")
    q = normal(1, 2, 8, 4)
    with pytest.raises(CubinNotFound, match=r"its sources have changed since.\nTry: scripts/build_cpu.py"):
        cupy_flash.attention(q, q, q)
    locate.locate.cache_clear()


# ---- how it is made


@pytest.mark.slow
def test_the_same_sources_give_the_same_bytes(core: locate.Library, tmp_path: Path) -> None:
    """In another folder, at another time."""
    compiler = build.compiler_of()
    mine = [one for one in isa.runnable() if one.name == core.isa]
    made = [
        build.build(isa.host().platform, tmp_path / name, compiler, mine)[0].read_bytes()
        for name in ("one", "two")
    ]
    assert made[0] == made[1]
    assert build.build(isa.host().platform, tmp_path / "one", compiler, mine) == [], "up to date"


def test_a_build_without_a_compiler_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(build.BuildFailed, match="Try: pip install ziglang"):
        build.compiler_of("g++")


@pytest.mark.parametrize("part", sources.PARTS)
def test_it_needs_only_the_c_library(part: str) -> None:
    found = choose.core(part)
    if part == sources.BFLOAT16 and isinstance(found, str):
        pytest.skip(f"the library of pairs: {found}")
    assert not isinstance(found, str)
    assert found[1].bytes <= 153_600
    listing = subprocess.run(
        ["objdump", "-p", str(found[1].path)], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"NEEDED\s+(\S+)", listing)
    of_the_c_library = {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
    assert set(needed) <= of_the_c_library


# ---- instructions


def loops_of(path: Path) -> list[list[str]]:
    """The bodies of the innermost loops: instructions from the target of a jump back to the jump."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-M", "intel", str(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = re.findall(r"^\s+([0-9a-f]+):\t(.*)$", listing, re.MULTILINE)
    place = {address: n for n, (address, _) in enumerate(lines)}
    found = []
    for n, (_, text) in enumerate(lines):
        jump = re.match(r"j\w+\s+(?:0x)?([0-9a-f]+)", text)
        if jump and jump[1] in place and place[jump[1]] < n:
            body = [text for _, text in lines[place[jump[1]] : n + 1]]
            if not any(text.startswith("j") for text in body[:-1]):
                found.append(body)
    return found


@pytest.mark.parametrize(
    "name", [one.name for one in isa.ISAS if one.machine == "x86_64" and one.name != "v2"]
)
def test_the_inner_loop_of_the_product_multiplies_and_loads(name: str, core: locate.Library) -> None:
    """A full tile of accumulators: no shuffle, no spill, scalars of A broadcast, vectors of B loaded."""
    path = core.path.with_name(f"{name}.so")
    if not path.exists():
        pytest.skip(f"the library {name} is not built")
    one = next(one for one in isa.ISAS if one.name == name)
    register = "zmm" if one.lanes == 16 else "ymm"
    tiles = [
        body for body in loops_of(path)
        if sum(text.startswith("vfmadd") and register in text for text in body) == one.rows * one.vectors
        and all("ps" in text.split()[0] for text in body if text.startswith("vfmadd"))
    ]  # fmt: skip
    assert len(tiles) >= 2, "A along its rows, and along the depth"
    for body in tiles:
        kinds = [text.split()[0] for text in body]
        vectors = [text for text in body if register in text]
        stored = [text for text in vectors if re.match(r"v?mov\w+\s+\w*\s*(?:PTR )?\[", text)]
        shuffled = [
            k
            for k in kinds
            if re.match(r"vperm|vshuf|vunpck|vinsert|vextract|vblend|vadd|vsub|vpbroadcastd$", k)
        ]
        assert not stored, body
        assert not shuffled, body
        assert not [text for text in body if "rsp" in text and register in text], body
        of_memory = [text for text in vectors if "PTR" in text and not text.startswith("vfmadd")]
        broadcast_in_place = [text for text in vectors if text.startswith("vfmadd") and "PTR" in text]
        assert len(of_memory) + len(broadcast_in_place) <= one.rows * 2 + one.vectors * 2, body


def test_the_inner_loop_of_pairs_multiplies_and_loads() -> None:
    """Of the library for AVX512-BF16: two products at once, scalars broadcast from where they lie."""
    mine, path = pairs()
    tiles = [
        body for body in loops_of(path)
        if sum(text.startswith("vdpbf16ps") for text in body) == mine.rows * mine.vectors
    ]  # fmt: skip
    assert len(tiles) >= 2, "A along its rows, and along the depth"
    for body in tiles:
        vectors = [text.split()[0] for text in body if "zmm" in text]
        assert vectors.count("vpbroadcastd") == mine.rows, body
        assert set(vectors) <= {"vdpbf16ps", "vpbroadcastd", "vmovdqu32", "vmovups"}, body
        assert sum(kind.startswith("vmov") for kind in vectors) <= mine.vectors, body


# ---- pairs of bfloat16


def pairs() -> tuple[isa.Isa, Path]:
    """The instruction set and the library whose products are of pairs; skips where there are none."""
    mine = isa.runnable()[0]
    if (
        sources.BFLOAT16 not in sources.parts(mine)
        or not sources.needs(mine, sources.BFLOAT16) <= isa.host().flags
    ):
        pytest.skip(f"this CPU ({mine.title}) has no products of pairs")
    library = locate.locate(mine, sources.BFLOAT16)
    if library is None:
        pytest.skip("the library of pairs is not built")
    return mine, library.path


PAIRED = BASE._replace(dtype="bfloat16", seqlen_q=64)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"reproducible": "batch"}, {"seqlen_q": 15, "heads_q": 2, "heads_k": 2},
     {"dropout": 0.5}, {"want_dbias": True, "direction": "backward"}, {"direction": "jvp"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_reals_are_multiplied_where_pairs_would_not_do(change: dict[str, Any]) -> None:
    pairs()
    assert choose.choose(PAIRED).library.part == sources.BFLOAT16
    assert choose.choose(PAIRED._replace(direction="backward")).library.part == sources.BFLOAT16
    assert choose.choose(PAIRED._replace(**change)).library.part != sources.BFLOAT16


def test_without_avx512_bf16_or_its_library_reals_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is an error: most CPUs have none, and an older wheel brings none."""
    pairs()
    here = isa.host()
    with monkeypatch.context() as within:
        within.setattr(choose, "host", lambda: here._replace(flags=here.flags - {"avx512_bf16"}))
        assert choose.choose(PAIRED).library.part == ""
    found = choose.locate
    monkeypatch.setattr(
        choose, "locate", lambda one, part="": None if part == sources.BFLOAT16 else found(one, part)
    )
    assert choose.choose(PAIRED).library.part == ""


@pytest.mark.parametrize("features", [(64, 64), (7, 5), (33, 80), (2, 1)], ids=str)
@pytest.mark.parametrize("keys", [1, 143, 301], ids=str)
def test_pairs_are_products_of_bfloat16(keys: int, features: tuple[int, int]) -> None:
    """Odd keys and features, a layout among NaN that is not theirs, options: within the error budget."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    pairs()
    (d, dv), queries = features, 37

    def made(*shape: int, seed: int) -> np.ndarray:
        return normal(*shape, seed=seed).astype(bfloat16)

    do, q = made(2, 4, queries, dv, seed=1), made(2, 4, queries, d, seed=2)
    # Keys that lie among others, which are NaN.
    around = np.full((2, keys + 2, 2, d + dv + 3), np.nan, bfloat16)
    k, v = around[:, 1:-1, :, 1 : d + 1].swapaxes(1, 2), around[:, 1:-1, :, d + 2 : -1].swapaxes(1, 2)
    k[:], v[:] = made(2, 2, keys, d, seed=3), made(2, 2, keys, dv, seed=4)
    mask = np.random.default_rng(keys).random((2, 1, queries, keys)) < 0.7
    options: list[dict[str, Any]] = [
        {}, {"causal": True, "align": "bottom_right"}, {"mask": mask, "softcap": 5.0},
        {"window": (20, 3), "align": keys - queries, "sinks": normal(4)},
        {"bias": normal(1, 4, queries, keys), "alibi_slopes": normal(4), "align": "top_left"},
    ]  # fmt: skip
    for own in options:
        assert "products  of pairs" in cupy_flash.explain(q, k, v, **own)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **own)
        gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **own)
        made_of = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients[:3]), strict=True))
        testing.assert_within_budget(made_of, q, k, v, do=do, **own)


# ---- few queries


@pytest.mark.parametrize("queries", [1, 2, 11])
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "align": "bottom_right"}, {"window": (40, 3), "align": 150, "softcap": 3.0},
     {"alibi_slopes": normal(4), "align": "bottom_right", "sinks": normal(4, seed=1)}],
    ids=["causal", "window", "alibi"],
)  # fmt: skip
def test_few_queries_take_the_loops_of_decode(queries: int, options: dict[str, Any]) -> None:
    """Of one key head; a mask that hides nothing takes those of the panels, and gives the same bits."""
    q, k, v = normal(2, 4, queries, 40), normal(2, 4, 700, 40, seed=1), normal(2, 4, 700, 24, seed=2)
    few = cupy_flash.attention(q, k, v, return_lse=True, **options)
    panels = cupy_flash.attention(q, k, v, return_lse=True, mask=np.ones((1, 1), bool), **options)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(few, panels, strict=True))


# ---- threads


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        {"causal": True, "bias": normal(1, 1, SIZES[2], SIZES[2])}, {"dropout": 0.3, "seed": 5},
        {"window": (100, 20), "sinks": normal(4)},
    ]  # fmt: skip
    cache = normal(1, 2, 5000, 32)
    q = normal(1, 4, 1, 32)
    for options in cases:
        ways = []
        for count in (1, 2, 5):
            monkeypatch.setattr(family, "workers", lambda _, count=count: count)
            decoded = cupy_flash.attention_with_kv_cache(q, cache, cache, cache_seqlens=4900)
            ways.append([*results(**options), *results((1, 1, 2100, 24), heads_k=1), decoded])
        for way in ways[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(ways[0], way, strict=True))


def test_many_callers_at_once() -> None:
    """One has the helpers, the others compute alone; and all get the same."""
    expected = results()
    wrong: list[int] = []

    def call() -> None:
        for _ in range(5):
            wrong.extend((a != b).any() for a, b in zip(results(), expected, strict=True))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert len(wrong) == 4 * 5 * len(expected)
    assert not any(wrong)


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results()
    monkeypatch.setattr(family, "workers", lambda _: 16)
    start = time.perf_counter()
    for _ in range(20):
        assert all(np.array_equal(a, b) for a, b in zip(expected, results(), strict=True))
    assert time.perf_counter() - start < 60


def test_no_more_threads_than_the_blas_was_allowed() -> None:
    with threadpool_limits(1, user_api="blas"):
        assert family.workers(1e12) == 1
    assert family.workers(1e3) == 1, "too small to share"


FORKED = """
import multiprocessing, threading, warnings
import numpy as np
import cupy_flash

warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is what is tested
qkv = np.random.default_rng(0).standard_normal((3, 2, 4, 384, 32), np.float32)
expected = cupy_flash.attention(*qkv)

def attend(pipe):
    pipe.send(np.array_equal(cupy_flash.attention(*qkv), expected))

done = False
def keep_busy():
    while not done:
        cupy_flash.attention(*qkv)

busy = threading.Thread(target=keep_busy)  # so that some forks find the pool at work, and its locks taken
busy.start()
context = multiprocessing.get_context("fork")
for _ in range(20):
    ours, theirs = context.Pipe()
    child = context.Process(target=attend, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv()
    child.join(60)
done = True
busy.join()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
def test_after_fork() -> None:
    """A child has no helpers; it starts its own instead of waiting for them."""
    run(FORKED)


INTERRUPTED = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
import numpy as np
import cupy_flash

q, small = np.ones((1, 16, 8192, 64), np.float32), np.ones((1, 8, 256, 64), np.float32)
def interrupt():
    time.sleep(0.3)
    global sent
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGINT)
threads = threading.Thread(target=interrupt)
threads.start()
try:
    {call}
except KeyboardInterrupt:
    took = time.perf_counter() - sent
else:
    raise AssertionError("it was done before")
assert took < {limit}, took
busy = time.process_time()
time.sleep(0.2)
assert time.process_time() - busy < 0.1, "workers go on"
assert np.allclose(cupy_flash.attention(small, small, small), 1)
print(took)
"""


@pytest.mark.parametrize(
    "call",
    ["cupy_flash.attention(q, q, q)",
     "cupy_flash.attention_backward(q, q, q, q, q, np.zeros(q.shape[:3], np.float32))"],
    ids=["forward", "backward"],
)  # fmt: skip
def test_ctrl_c_is_heard(call: str) -> None:
    """Under 0.2 s, on a machine that has nothing else to do; the workers stop and the next call works."""
    busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    run(INTERRUPTED.format(call=call, limit=2.0 if busy else 0.2))


# ---- memory

LITTLE_MEMORY = """
import resource
import numpy as np
import cupy_flash
from cupy_flash.cpu import choose

q = np.ones((1, 1, 64, 128), np.float32)
k = np.ones((1, 1, 100_000, 128), np.float32)
o, lse = cupy_flash.attention(q, k, k, return_lse=True)
cupy_flash.attention_backward(o, q, k, k, o, lse)
def pages():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
used = pages()
dk = 2 * k.nbytes  # what the call returns; the sums that it needs besides are as large
resource.setrlimit(resource.RLIMIT_AS, (used + dk + dk // 2, -1))
try:
    cupy_flash.attention_backward(o, q, k, k, o, lse)
except MemoryError as error:
    assert "no memory for its tiles" in str(error), error
else:
    raise AssertionError("there was memory enough")
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert np.isfinite(cupy_flash.attention_backward(o, q, k, k, o, lse).dk).all()
"""

GIVEN_BACK = """
import numpy as np
import cupy_flash

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
q = np.ones((1, 1, 64, 128), np.float32)
small = np.ones((1, 2, 256, 32), np.float32)
cupy_flash.attention(small, small, small)
k = np.ones((1, 1, 100_000, 128), np.float32)
o, lse = cupy_flash.attention(q, k, k, return_lse=True)
before = resident()
for _ in range(3):
    cupy_flash.attention_backward(o, q, k, k, o, lse)
assert resident() - before < 32 << 20, resident() - before
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and counts as Linux has them")
@pytest.mark.parametrize("code", [LITTLE_MEMORY, GIVEN_BACK], ids=["a failed allocation", "given back"])
def test_memory(code: str) -> None:
    run(code)


def test_scratch_is_bounded() -> None:
    """Of a forward pass over very many keys: panels and a block, whatever the lengths."""
    run(
        """
import resource
import numpy as np
import cupy_flash
q = np.ones((1, 1, 32, 64), np.float16)
k = np.ones((1, 1, 2_000_000, 64), np.float16)
small = np.ones((1, 1, 64, 64), np.float16)
cupy_flash.attention(small, small, small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cupy_flash.attention(q, k, k)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 8 << 10, grown  # KB; K in float32 would be 512 MB
"""
    )


def test_the_last_word_of_a_call_is_its_state() -> None:
    """A call that is stopped before it begins touches nothing."""
    q = normal(1, 2, 64, 16)
    out = np.full_like(q, 7)
    views = {
        name: cupy_flash.call.adopt.adopt(x, name) for name, x in {"q": q, "k": q, "v": q, "o": out}.items()
    }
    problem = cupy_flash.call.problem.Problem("forward", "float32", None, 1, 2, 2, 64, 64, 16, 16, 0.25)
    found = choose.choose(problem)
    assert found.library is not None
    call = family.Core.of(problem, views, found.library)
    struct = call.params.filled({name: view.pointer for name, view in views.items()}, 0, 2)
    buffer = (ctypes.c_char * len(struct)).from_buffer(struct)
    ctypes.c_int32.from_buffer(buffer, params.STATE).value = params.STOP
    assert call.entries[0](ctypes.addressof(buffer)) == params.STOP
    assert (out == 7).all()
    assert signal.getsignal(signal.SIGINT) is not None
