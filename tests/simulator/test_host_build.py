"""What kernels share is compiled once, and a kernel is compiled without its header where that is gone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupy_flash.device import host_build
from tests.paths import ROOT

OPTIONS = host_build.flags()


def headers_read(first: Path) -> str:
    """What g++ reads for a kernel: "! file" is a precompiled header, "x file" one that it refused."""
    options = [host_build.KERNEL, *OPTIONS, *host_build.includes()]
    command = ["g++", *options, "-fsyntax-only", "-H", "-include", str(first)]
    kernel = '#undef CF_ENTRY\n#define CF_ENTRY other\n#include "flash_reach.cu"\n'
    done = subprocess.run(
        [*command, "-x", "c++", "-"], input=kernel, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_a_kernel_starts_from_the_precompiled_header() -> None:
    first = host_build.primitives(OPTIONS)
    assert headers_read(first).splitlines()[0] == f"! {first}.gch"


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_kernel_compiles_where_the_precompiled_header_is_no_use(damage: str, tmp_path: Path) -> None:
    first = tmp_path / "primitives.h"
    first.write_bytes(host_build.primitives(OPTIONS).read_bytes())
    if damage == "other":
        first.with_suffix(".h.gch").write_bytes(b"of another compiler")
    assert "!" not in headers_read(first)


@pytest.mark.slow
def test_few_precompiled_headers_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are large, and each edit of the simulator makes another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = host_build.cache_folder()
    for age in range(20):
        old = folder / f"primitives-{age:016x}.h.gch"
        old.touch()
        os.utime(old, (1e9 - age, 1e9 - age))
    new = host_build.primitives.__wrapped__(OPTIONS)
    kept = {file.name for file in folder.glob("*.gch")}
    assert kept == {f"{new.name}.gch", *(f"primitives-{age:016x}.h.gch" for age in range(7))}


_BOTH_WANT = """
from cupy_flash.device import host_build
print(host_build.compile_library("wanted", ["-shared", "-x", "c++", "-"], [], text="int wanted;"))
"""


@pytest.mark.slow
def test_what_two_processes_want_is_compiled_once(tmp_path: Path) -> None:
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-o*) echo compiled >> {log}; sleep 3;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _BOTH_WANT]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) for _ in range(2)
    ]
    answers = {process.communicate(timeout=100)[0] for process in processes}
    assert len(answers) == 1
    assert b"wanted-" in answers.pop()
    assert log.read_text() == "compiled\n"


@pytest.fixture
def another_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host_build._compiler.cache_clear()
    yield monkeypatch
    host_build._compiler.cache_clear()


def nothing_compiled() -> Path:
    return host_build.compile_library("nothing", ["-shared", "-x", "c++", "-"], [], text="int nothing;")


def test_options_in_cxx_are_passed_on(another_compiler: pytest.MonkeyPatch) -> None:
    plain = nothing_compiled()
    host_build._compiler.cache_clear()
    another_compiler.setenv("CXX", "g++ -O1")
    assert nothing_compiled() not in (plain, None)


@pytest.mark.parametrize("name", ["false", "no-such-compiler", "g++ '"])
def test_what_is_no_compiler_is_refused(name: str, another_compiler: pytest.MonkeyPatch) -> None:
    another_compiler.setenv("CXX", name)
    with pytest.raises(host_build.SimulatorUnavailable, match=re.escape(name) + r"(?s:.*)\nTry: apt install"):
        nothing_compiled()


def test_what_gcc_refuses_is_shown_with_what_helps(another_compiler: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        host_build.SimulatorUnavailable,
        match=r"g\+\+ failed on wrong\n(?s:.*)-shared .* -o kernel\.so <<'END'\nint wrong\nEND\nTry: .*CXX",
    ):
        host_build.compile_library("wrong", ["-shared", "-x", "c++", "-"], [], text="int wrong\n")


def test_a_cache_that_cannot_be_written_is_named(another_compiler: pytest.MonkeyPatch) -> None:
    another_compiler.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(
        host_build.SimulatorUnavailable, match=r"cannot write /dev/null.*\nTry: .*XDG_CACHE_HOME"
    ):
        nothing_compiled()
