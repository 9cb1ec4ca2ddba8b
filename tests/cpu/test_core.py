"""The compiled core from outside: its struct, its libraries, and how they are made."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import cupy_flash
from cupy_flash import CubinNotFoundError, InvalidArgumentsError, info
from cupy_flash.call.problem import Codes
from cupy_flash.cpu import choose
from cupy_flash.cpu.core import build, family, isa, locate, params, repeat, sources
from cupy_flash.dispatch import memo
from tests.cpu.core_calls import normal, results, run
from tests.paths import ROOT
from tests.plan_cases import BASE, CASES

pytestmark = pytest.mark.usefixtures("core")


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
               "Codes": params.CODES, "Directed": params.DIRECTED, "SecondOrder": params.SECOND_ORDER,
               "Statistics": params.STATISTICS, "Repeat": repeat.REPEAT}  # fmt: skip
    headers = '"second_order.h"', '"statistics.h"', '"repeat.h"', "<stddef.h>"
    lines = [f"#include {header}" for header in headers]
    for name, kind in structs.items():
        lines += [*fields(kind, name), f"static_assert(sizeof({name}) == {kind.itemsize});"]
    functions = enumerate(["none", "yes", "tuple", *repeat.PYTHON])
    lines += [f"static_assert(offsetof(Python, {x}) == {8 * at});" for at, x in functions]
    lines.append(f"static_assert(sizeof(Python) == {8 * (3 + len(repeat.PYTHON))});")
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


# ---- what it computes: NumPy takes over what it refuses, so that its tests would pass without it


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_gpus_do(name: str) -> None:
    assert not family.refusals(CASES[name])


CACHED = CASES["decode_f16_d128_32k"]
OF_CODES = CACHED._replace(cache=CACHED.cache._replace(codes=Codes("int4", "float16", (32, 32), True)))
ROTATED = CACHED._replace(cache=CACHED.cache._replace(rotary=64))
LEFT_TO_NUMPY = {
    "nothing": (BASE._replace(seqlen_q=0), BASE, "there is nothing to compute"),
    "no heads": (BASE._replace(heads_k=0), BASE, "there is nothing to compute"),
    "a tile": (BASE._replace(tile=(4, 4)), BASE, "chooses its own tiles"),
    "codes of float64": (OF_CODES._replace(dtype="float64"), OF_CODES, "not to float64"),
    "codes apart": (OF_CODES._replace(in_rows=False), CACHED._replace(in_rows=False), "contiguous"),
    "distances beyond 31 bits": (
        BASE._replace(per_head=("alibi_slopes",), offset=-(2**31)),
        BASE._replace(per_head=("alibi_slopes",), offset=-(2**30)),
        "ALiBi in 31 bits",
    ),
    "curvature of a function": (
        BASE._replace(direction="hvp", function=object()),
        BASE._replace(direction="backward", function=object()),
        "no second derivatives of score functions",
    ),
    "statistics of rotated keys": (
        ROTATED._replace(direction="statistics"),
        CACHED._replace(direction="statistics"),
        "rotated already",
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_NUMPY)
def test_it_leaves_this_to_numpy(name: str) -> None:
    refused, computed, reason = LEFT_TO_NUMPY[name]
    (said,) = family.refusals(refused)
    assert reason in said
    assert not family.refusals(computed)


IN_FLOAT32: dict[str, dict[str, object]] = {
    "a cache of another dtype": {"cache": CACHED.cache._replace(dtype="int8")},
    "a score function": {"function": object()},
    "a gradient of bias": {"direction": "backward", "want_dbias": True},
    "dropout": {"dropout": 0.1},
    "tangents": {"direction": "jvp"},
    "curvature": {"direction": "hvp"},
    "statistics": {"direction": "statistics"},
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_products_of_bfloat16_do_not_compute(name: str) -> None:
    """Only a CPU with such products would show it."""
    assert family.needs_float32(BASE._replace(dtype="bfloat16", **IN_FLOAT32[name]))
    cached = CACHED._replace(dtype="bfloat16", cache=CACHED.cache._replace(dtype="bfloat16"))
    for p in (BASE._replace(dtype="bfloat16"), BASE._replace(dtype="bfloat16", direction="backward"), cached):
        assert not family.needs_float32(p)


@pytest.mark.parametrize(("heads", "rows"), [((8, 8), 1), ((24, 2), 12), ((4, 1), 4)])
def test_few_rows_of_a_key_head_are_decode(heads: tuple[int, int], rows: int) -> None:
    """12 rows and more fill tiles of AMX; fewer are decode, if they need no bits of prompts."""
    for queries in (1, 2, 3, 11, 12):
        p = CACHED._replace(heads_q=heads[0], heads_k=heads[1], seqlen_q=queries)
        few = queries * rows < 12
        assert family.decodes(p) is few
        assert family.decodes(p._replace(cache=None)) is few
        assert not family.decodes(p._replace(reproducible="batch"))
        assert family.fills_tiles(p) is (not few)
        assert family.fills_tiles(p._replace(reproducible="run")) is (not few)
        assert not family.fills_tiles(p._replace(reproducible="batch"))


# ---- which library, and whether it may be trusted


def test_explain_and_info_name_the_library(core: locate.Library) -> None:
    q = normal(1, 2, 8, 4)
    text = cupy_flash.explain(q, q, q)
    assert "family    core on cpu" in text
    assert str(core.path) in text
    assert "skipped   core: chooses its own tiles, and (4, 4) is asked for" in cupy_flash.explain(
        q, q, q, tuning=cupy_flash.Tuning(tile=(4, 4))
    )
    printed = run("from cupy_flash.__main__ import main; main(['info'])").stdout
    assert f"the compiled core for {choose.core()[0].title}" in printed


def test_the_environment_decides_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of an earlier call does not."""
    first = results()
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    q = normal(1, 2, 8, 4)
    assert "skipped   core: CUPY_FLASH_CPU is numpy" in cupy_flash.explain(q, q, q)
    second = results()
    assert any((a != b).any() for a, b in zip(first, second, strict=True)), "two different ways"
    assert all(np.allclose(a, b, atol=1e-3) for a, b in zip(first, second, strict=True))


def test_unknown_and_missing_instruction_sets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(1, 2, 8, 4)
    monkeypatch.setenv("CUPY_FLASH_CPU", "avx9")
    with pytest.raises(
        InvalidArgumentsError, match=r"CUPY_FLASH_CPU is 'avx9'.\nTry: unset it, or one of numpy, v4, v3"
    ):
        cupy_flash.attention(q, q, q)
    old = isa.Host("linux", "x86_64", isa.ISAS[2].flags)
    monkeypatch.setattr(isa, "host", lambda: old)
    monkeypatch.setenv("CUPY_FLASH_CPU", "v3")
    with pytest.raises(InvalidArgumentsError, match=r"this CPU lacks abm avx avx2 .*\nTry: unset it, or v2"):
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
    flags = isa.host().flags
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
    origin = locate._Origin("copy", tmp_path, "repair it")
    monkeypatch.setattr(locate, "_origins", lambda: iter([origin]))
    locate.locate.cache_clear()
    memo.forget()
    yield place
    locate.locate.cache_clear()
    memo.forget()


def test_who_has_no_checkout_is_told_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert locate.how_to_get_one() == "scripts/build_cpu.py"
    monkeypatch.setattr(locate, "folder", lambda: tmp_path / "kernels_cpu")
    version = cupy_flash.__version__
    from_sources = "pip install . in a checkout, with a C++ compiler (g++ 12 or clang++ 15)"
    told = f"pip install cupy-flash-cpu=={version} (until {version} is published: {from_sources})"
    assert locate.how_to_get_one() == told
    (tmp_path / "cupy_flash_cpu").mkdir()  # as its wheel for other platforms is installed
    (tmp_path / "cupy_flash_cpu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert locate.how_to_get_one() == from_sources


def test_a_folder_that_only_has_the_name_of_the_package_is_not_one(
    core: locate.Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as one in the current directory, a namespace package to Python. Ours comes first."""
    there = tmp_path / "cupy_flash_cpu"
    shutil.copytree(core.path.parent, there / "_core" / isa.host().platform)
    monkeypatch.syspath_prepend(tmp_path)
    assert [origin.name for origin in locate._origins()][-1] == "checkout"
    (there / "__init__.py").touch()
    importlib.invalidate_caches()
    assert [origin.name for origin in locate._origins()] == ["cupy-flash", "checkout", "cupy-flash-cpu"]
    locate.locate.cache_clear()
    found = locate.locate(isa.runnable()[0])
    assert found is not None
    assert found.origin == core.origin
    monkeypatch.setattr(locate, "folder", lambda: tmp_path / "no checkout")
    locate.locate.cache_clear()
    found = locate.locate(isa.runnable()[0])
    locate.locate.cache_clear()
    assert found is not None
    assert found.origin == "cupy-flash-cpu"


def test_what_is_loaded_is_what_was_checked(copy: Path, core: locate.Library) -> None:
    """Not a file that took its place after it was found, nor one that takes it while it is loaded."""
    mine = isa.runnable()[0]
    found = locate.locate(mine)
    assert found is not None
    good, other = found.path.read_bytes(), copy / "other"
    other.write_bytes(b"another one")
    other.replace(found.path)
    with pytest.raises(CubinNotFoundError, match=r"was replaced after it was checked.\nTry: "):
        locate.load(found)
    found.path.write_bytes(good)
    asked: list[str] = []

    def replaced(name: str) -> str:
        other.write_bytes(b"another one")
        other.replace(found.path)
        asked.append(str(Path(name).resolve()))
        return name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate.ctypes, "CDLL", replaced)
        name = locate.load.__wrapped__(found)
    if sys.platform == "linux":
        assert str(name).startswith("/proc/self/fd/")
        assert asked == [f"{found.path} (deleted)"], (
            "the file that was hashed, though it has no path any more"
        )


def test_a_library_that_the_system_refuses_is_named_with_a_remedy(
    core: locate.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a file system that is mounted noexec; `info` says it before a call does."""

    def refused(name: str) -> None:
        raise OSError(f"{name}: failed to map segment from shared object")

    locate.load.cache_clear()
    monkeypatch.setattr(locate.ctypes, "CDLL", refused)
    says = (
        rf"{re.escape(str(core.path))} does not load: failed to map segment[^/]*\nTry: .*CUPY_FLASH_CPU=numpy"
    )
    with pytest.raises(CubinNotFoundError, match=says):
        locate.load(core)
    problems: list[str] = []
    assert info._on_cpu(problems).startswith("nothing")
    assert re.match(f"cpu: {says}", problems[0])


def test_two_libraries_by_one_number_of_a_file_are_two(copy: Path, core: locate.Library) -> None:
    """glibc takes a name that it knows for the library that had it, and numbers are used again."""
    mine = isa.runnable()[0]
    first, second = locate.locate(mine), locate.locate(mine, sources.SECOND_ORDER)
    assert first is not None
    assert second is not None
    locate.load.cache_clear()
    loaded = [locate.load(one) for one in (first, second)]
    locate.load.cache_clear()
    assert loaded[0]._handle != loaded[1]._handle
    assert hasattr(loaded[1], "cupy_flash_jvp")
    assert not hasattr(loaded[0], "cupy_flash_jvp")


def test_a_damaged_library_is_refused(copy: Path, core: locate.Library) -> None:
    q, path = normal(1, 2, 8, 4), copy / core.path.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CubinNotFoundError, match=r"cannot be used: its SHA-256 is .*\nTry: repair it"):
        cupy_flash.attention(q, q, q)
    path.write_bytes(data[:100])
    with pytest.raises(CubinNotFoundError, match="it has 100 of"):
        cupy_flash.attention(q, q, q)
    path.unlink()
    with pytest.raises(CubinNotFoundError, match="No such file"):
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
    with pytest.raises(CubinNotFoundError, match=says):
        cupy_flash.attention(q, q, q)


def test_a_manifest_that_cannot_be_read_is_refused(copy: Path) -> None:
    """Not taken for one that is not there: NumPy would compute, ten times slower."""
    (copy / locate.MANIFEST).unlink()
    (copy / locate.MANIFEST).mkdir()
    q = normal(1, 2, 8, 4)
    with pytest.raises(CubinNotFoundError, match=r"is not a manifest of the core: (Is|Perm)"):
        cupy_flash.attention(q, q, q)


def test_without_a_library_numpy_computes_and_explain_says_so(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / locate.MANIFEST).unlink()
    q = normal(1, 2, 8, 4)
    assert np.isfinite(cupy_flash.attention(q, q, q)).all()
    assert "skipped   core: no library for" in cupy_flash.explain(q, q, q)
    monkeypatch.setenv("CUPY_FLASH_CPU", isa.runnable()[0].name)
    with pytest.raises(CubinNotFoundError, match="there is no such library"):
        cupy_flash.attention(q, q, q)


@pytest.mark.parametrize(
    ("part", "direction"), [(sources.SECOND_ORDER, "jvp"), (sources.STATISTICS, "statistics")]
)
def test_what_few_programs_ask_for_has_a_library_of_its_own(
    part: str, direction: str, copy: Path, core: locate.Library
) -> None:
    """Without it, that is computed in NumPy, to the same numbers; the rest is as it was."""
    with_both = results()
    manifest = json.loads((copy / locate.MANIFEST).read_text())
    for one in isa.ISAS:
        manifest["libraries"].pop(sources.library_name(one, part), None)
    (copy / locate.MANIFEST).write_text(json.dumps(manifest))
    locate.locate.cache_clear()
    asked = BASE._replace(direction=direction)
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
    memo.forget()
    monkeypatch.setattr(locate, "digest", lambda *_: "another one")
    q = normal(1, 2, 8, 4)
    with pytest.raises(
        CubinNotFoundError, match=r"its sources have changed since.\nTry: scripts/build_cpu.py"
    ):
        cupy_flash.attention(q, q, q)
    locate.locate.cache_clear()


# ---- how it is made


@pytest.mark.slow
def test_the_same_sources_give_the_same_bytes(
    core: locate.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, at another time. The smallest library: all are compiled with the same options."""
    monkeypatch.setattr(build, "parts", lambda isa: (sources.FUNCTIONS,))
    compiler = build.compiler_of()
    mine = [one for one in isa.runnable() if one.name == core.isa]
    made = [
        build.build(isa.host().platform, tmp_path / name, compiler, mine)[0].read_bytes()
        for name in ("one", "two")
    ]
    assert made[0] == made[1]
    assert build.build(isa.host().platform, tmp_path / "one", compiler, mine) == [], "up to date"


def test_a_build_leaves_nothing_else_for_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a library that an earlier version had, and that no manifest names."""
    monkeypatch.setattr(build, "_compile", lambda *_: b"library")
    platform = isa.host().platform
    build.build(platform, tmp_path, build.Compiler(("c++",), "c++ 1"))
    folder = tmp_path / platform
    listed = json.loads((folder / locate.MANIFEST).read_text())["libraries"]
    (folder / "v0.so").touch()
    (folder / ".v4.so.k1ll3d").touch()  # of a build that was killed
    assert build.build(platform, tmp_path, build.Compiler(("c++",), "c++ 1")) == []
    assert {path.name for path in folder.iterdir()} == {locate.MANIFEST, *(f"{name}.so" for name in listed)}


def test_a_compiler_by_another_name_makes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own build calls GCC x86_64-linux-gnu-g++; another release of it does make all again."""
    monkeypatch.setattr(build, "_compile", lambda *_: b"library")
    platform = isa.host().platform
    every = build.build(platform, tmp_path, build.Compiler(("g++",), "g++ (Debian 12.2) 12.2.0"))
    assert every
    other = build.Compiler(("x86_64-linux-gnu-g++",), "x86_64-linux-gnu-g++ (Debian 12.2) 12.2.0")
    assert build.build(platform, tmp_path, other, isa.runnable()[:1]) == []
    assert len(json.loads((tmp_path / platform / locate.MANIFEST).read_text())["libraries"]) == len(every)
    assert build.build(platform, tmp_path, build.Compiler(("g++",), "g++ (Debian 14.1) 14.1.0")) == every


def test_libraries_are_replaced_when_all_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that computes meanwhile finds what the manifest says."""
    platform = isa.host().platform

    def compiled(*_: object) -> bytes:
        assert not [*(tmp_path / platform).glob("*.so")]
        return b"library"

    monkeypatch.setattr(build, "_compile", compiled)
    monkeypatch.setattr(build.os, "cpu_count", lambda: 1)
    assert build.build(platform, tmp_path, build.Compiler(("g++",), "g++ 1"))


def test_builds_at_once_keep_the_libraries_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits: it would write a manifest without what the first one adds, and delete that."""

    def compiled(compiler: object, one: isa.Isa, *_: object) -> bytes:
        time.sleep(0.2)
        return one.name.encode()

    monkeypatch.setattr(build, "_compile", compiled)
    platform = isa.host().platform
    isas = build.libraries_of(platform)
    if len(isas) < 2:
        pytest.skip("this platform has one instruction set")
    threads = [
        threading.Thread(
            target=build.build, args=(platform, tmp_path, build.Compiler(("c++",), "c++ 1"), [one])
        )
        for one in isas
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {
        library for one in isas for library in (sources.library_name(one, x) for x in sources.parts(one))
    }
    assert {file.stem for file in (tmp_path / platform).glob("*.so")} == names
    assert {*json.loads((tmp_path / platform / locate.MANIFEST).read_text())["libraries"]} == names


def test_a_disk_that_is_full_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "_compile", lambda *_: b"library")
    platform = isa.host().platform
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(build.BuildFailed, match=r"cannot write .*\.so: No space left.*\nTry: "):
            build.build(platform, tmp_path, build.Compiler(("c++",), "c++ 1"))
    assert [*(tmp_path / platform).iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildFailed, match=r"cannot write .*file.*\nTry: "):
        build.build(platform, tmp_path / "file", build.Compiler(("c++",), "c++ 1"))


@pytest.mark.skipif(sys.platform == "win32", reason="commands of a POSIX shell")
@pytest.mark.parametrize("name", ["false", "g++ '"])
def test_what_is_no_compiler_is_refused_with_what_helps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", name)
    with pytest.raises(build.BuildFailed, match=re.escape(name) + r"(?s:.*)\nTry: pip install ziglang"):
        build.compiler_of()


@needs_compiler
def test_a_blank_cxx_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    assert build.compiler_of().command == ("g++",)


def test_a_compiler_that_writes_no_library_is_shown(tmp_path: Path) -> None:
    silent = build.Compiler((sys.executable, "-c", ""), "c++ 1")
    with pytest.raises(build.BuildFailed, match=r"does not compile(?s:.*) -o \w+\.so "):
        build.build(isa.host().platform, tmp_path, silent, isa.runnable()[:1])


@pytest.mark.skipif(isa.host().platform not in build.ZIG_TARGETS, reason="zig has no target for this machine")
@pytest.mark.parametrize("fails", ["-c", "-s"])
def test_a_failed_command_can_be_run_again(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose results a failed linker reads; "-c" compiles an object file, and "-s" links."""
    code = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w'); sys.exit(sys.argv[1] in sys.argv[2:])"
    zig = build.Compiler((sys.executable, "-c", code, fails, "-x", "c++"), "zig 1", True)
    with pytest.raises(build.BuildFailed, match="does not compile") as caught:
        build.build(isa.host().platform, tmp_path / "out", zig, isa.runnable()[:1])
    monkeypatch.chdir(tmp_path)
    *commands, last = [shlex.split(line) for line in str(caught.value).splitlines()[1:-1]]
    for command in commands:
        subprocess.run(command, check=True)
    assert subprocess.run(last).returncode == 1
    assert {word for word in last if word.endswith(".o")} <= {file.name for file in tmp_path.iterdir()}


@needs_compiler
@pytest.mark.parametrize(
    ("words", "says"),
    [("--isa v2 --isa v9", "has no instruction set v9"), ("--isa v2 --native", "not allowed with")],
)
def test_instruction_sets_that_are_none_are_refused(words: str, says: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build_cpu.py"), "--out", str(tmp_path), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert says in done.stderr
    assert "does not support" not in done.stderr


@pytest.mark.parametrize("script", ["build_cpu.py", "build_cubins.py"])
def test_the_scripts_of_an_install_run_without_docstrings(script: str) -> None:
    """CMake calls them, and PYTHONOPTIMIZE=2 in the environment of pip reaches them."""
    command = [sys.executable, "-OO", str(ROOT / "scripts" / script), "--help"]
    assert "--list FILE" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_folder_of_a_list_is_made_or_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build_cpu.py"), "--if-possible", "--compiler", "none"]
    listed = tmp_path / "new" / "list"
    subprocess.run([*command, "--list", str(listed)], check=True, capture_output=True)
    assert listed.read_text() == ""
    done = subprocess.run([*command, "--list", str(listed / "file")], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"cannot make {listed}: File exists" in done.stderr


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
    assert found[1].bytes <= 170_000
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


OF_A_COPY = """
import importlib.util
from cupy_flash.cpu.core import isa, locate, sources

found = importlib.util.spec_from_file_location("cupy_flash.cpu.core.locate_of_a_copy", locate.__file__)
copy = importlib.util.module_from_spec(found)
found.loader.exec_module(copy)
mine = isa.runnable()[0]
ours, theirs = locate.load(locate.locate(mine)), copy.load(copy.locate(mine, sources.SECOND_ORDER))
assert ours._handle != theirs._handle
assert hasattr(theirs, "cupy_flash_jvp")
"""


def test_a_second_copy_of_the_package_loads_its_own_libraries(core: locate.Library) -> None:
    """Such as a kernel of the Hugging Face hub beside an installation."""
    run(OF_A_COPY)
