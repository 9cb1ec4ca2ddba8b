"""A wheel whose runtime cannot be redirected is an error that says what is missing."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.virtual_gpu import build, redirect
from tests.virtual_gpu.process import run_tests
from tests.virtual_gpu.wheels import WHEELS, Wheel

pytestmark = [pytest.mark.slow, pytest.mark.simulator]

OURS = """
int cudaOne(void) { volatile int a = 1; for (int i = 0; i < 9; i++) a += 10; return a; }
int cudaTwo(void) { volatile int a = 2; for (int i = 0; i < 9; i++) a += 10; return a; }
int virtual_gpu_missing(const char *name) { return name[4] == 'T' ? 801 : 0; }
"""
THEIRS = """
static int cudaOne(void) { volatile int a = 5; for (int i = 0; i < 9; i++) a += i; return a; }
static int cudaThree(void) { volatile int a = 6; for (int i = 0; i < 9; i++) a += i; return a; }
int one(void) { return cudaOne(); }
int three(void) { return cudaThree(); }
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Path]:
    if reason := build.unavailable():
        pytest.skip(reason)

    def compile_(name: str, text: str, *options: str) -> Path:
        source, library = tmp_path / f"{name}.c", tmp_path / f"{name}.so"
        source.write_text(text)
        command = ["g++", "-x", "c", "-O0", "-fPIC", "-shared", *options, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return library

    return compile_


def test_functions_lead_to_ours_or_to_a_refusal(compiled: Callable[..., Path]) -> None:
    ours = compiled("ours", OURS.replace("cudaTwo", "other"))
    theirs = ctypes.CDLL(str(compiled("theirs", THEIRS)))
    assert theirs.one() != 91
    done = redirect.redirect(Path(theirs._name), ctypes.CDLL(str(ours)), ours)
    assert done == (("cudaOne",), ("cudaThree",))
    assert theirs.one() == 91
    assert theirs.three() == 801


@pytest.mark.parametrize("options", [(), ("-s",)], ids=["function lacking", "stripped"])
def test_what_cannot_be_redirected_is_refused(
    options: tuple[str, ...], compiled: Callable[..., Path]
) -> None:
    ours, theirs = compiled("ours", OURS), compiled("theirs", THEIRS, *options)
    library = ctypes.CDLL(str(theirs))
    with pytest.raises(redirect.CannotRedirect, match="cudaTwo"):
        redirect.redirect(theirs, ctypes.CDLL(str(ours)), ours)
    assert library.one() == 41, "nothing has been written"


@pytest.mark.parametrize("wheel", WHEELS[:1], ids=str)
def test_stripped_wheel_ends_the_session(wheel: Wheel, site: Callable[[Wheel], Path], tmp_path: Path) -> None:
    """With an error, where a skip would look as if all were well."""
    folder = tmp_path / "site"
    shutil.copytree(site(wheel), folder, copy_function=os.symlink)
    (runtime,) = (folder / "cupy_backends" / "cuda" / "api").glob("runtime*.so")
    subprocess.run(["strip", "-o", str(tmp_path / "stripped"), str(runtime)], check=True)
    runtime.unlink()
    (tmp_path / "stripped").rename(runtime)
    outcome = run_tests(folder, "tests/gpu/test_streams.py")
    assert outcome.status
    assert "CannotRedirect" in outcome.output
    assert not outcome.report
