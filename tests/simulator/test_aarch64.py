"""The simulator on 64-bit ARM: cross-compiled, run by an emulator, with the same output as here."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cupy_flash.cubins import sources
from cupy_flash.device import host_build
from tests.simulator.units import KERNELS, SIMULATED

pytestmark = SIMULATED

EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
_COMPILERS = [shutil.which(f"aarch64-linux-gnu-g++{suffix}") for suffix in ("", "-12", "-13", "-14")]
COMPILER = next(filter(None, _COMPILERS), None)


def run(compiler: str, emulator: list[str], kernel: str, scratch: Path, macro: str) -> str:
    folder = sources.folder()
    flags = [f for f in host_build.flags() if f not in ("-shared", "-fPIC", "-fno-gnu-unique")]
    program = scratch / "program"
    includes = [f"-I{folder / sub}" for sub in ("include", ".", "simulator/headers")]
    files = [KERNELS / f"{kernel}.cu", Path(__file__).parent / "aarch64/main.cpp"]
    files += sorted((folder / "simulator").glob("*.cpp"))
    command = [
        compiler, *flags, "-O1", "-static", *includes, "-isystem", str(host_build.cuda_headers()),
        f"-D{macro}", "-x", "c++", *map(str, files), "-o", str(program),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True, timeout=120)
    # Which thread the clock catches in an endless loop is the same; paths and addresses are not.
    return re.sub(r"0x[0-9a-f]+|/\S*/", "", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "macro"), [("warp", "RUN_WARP"), ("faults", "RUN_FAULTS")])
def test_same_output_as_here(kernel: str, macro: str, tmp_path: Path) -> None:
    if platform.machine() == "aarch64":
        pytest.skip("every other test of the simulator runs on aarch64 here")
    if COMPILER is None or EMULATOR is None:
        pytest.skip("needs g++-12-aarch64-linux-gnu and qemu-user-static")
    (tmp_path / "arm").mkdir()
    there = run(COMPILER, [EMULATOR], kernel, tmp_path / "arm", macro)
    here = run("g++", [], kernel, tmp_path, macro)
    assert there.count("\n") >= 3
    assert there == here
