"""The compiled core with a sanitizer: how it is built, what its process needs, and how it is used."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupy_flash.cpu import choose
from cupy_flash.cpu.core import isa, locate, sources
from cupy_flash.device import host_build
from tests.paths import ROOT

__all__ = ["SANITIZERS", "build", "surroundings", "use"]

SANITIZERS = {
    # why no leak check: Python's own memory is not the subject
    "undefined": (
        "-fsanitize=address,undefined",
        "ASAN_OPTIONS",
        "detect_leaks=0:verify_asan_link_order=0",
        "libasan.so",
    ),
    # why without UBSan: it takes most of the time of a compiler, and one instruction set shows what it shows.
    "address": (
        "-fsanitize=address",
        "ASAN_OPTIONS",
        "detect_leaks=0:verify_asan_link_order=0",
        "libasan.so",
    ),
    "thread": ("-fsanitize=thread", "TSAN_OPTIONS", "exitcode=66:report_signal_unsafe=0", "libtsan.so"),
}


def build(sanitizer: str, folder: Path, isas: Sequence[isa.Isa]) -> None:
    """Compile the libraries of instruction sets, those of each in one but products that this CPU has.

    A file is compiled once: what is made of it lies in the simulator's cache, for every process.

    Raises
    ------
    RuntimeError
        The compiler says no.
    """
    for mine in isas:
        parts = {"": [file for file in sources.files() if file.suffix == ".cpp"]}
        for part in sources.PRODUCTS.values():
            if sources.multiplies(mine, part):
                parts[part] = sources.compiled(part)
        for part, files in parts.items():
            library = _library(sanitizer, mine, part, files)
            shutil.copy(library, folder / f"{sources.library_name(mine, part)}.so")


def _library(sanitizer: str, mine: isa.Isa, part: str, files: Sequence[Path]) -> Path:
    flag = SANITIZERS[sanitizer][0]
    kept = [option for option in sources.OPTIONS if option != "-O2"]
    options = [*kept, "-O1", "-g1", flag, "-fno-sanitize-recover=undefined", *sources.options(mine, part)]
    headers = [file for file in sources.files() if file.suffix == ".h"]
    name = f"{sources.library_name(mine, part)}_{sanitizer}"

    def compiled(file: Path) -> Path:
        arguments = [*options, "-c", str(file)]
        return host_build.compile_library(f"{name}_{file.stem}", arguments, [file, *headers], suffix=".o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compiled, files)]
    return host_build.compile_library(name, [*options, *map(str, objects)], objects)


def surroundings(sanitizer: str) -> dict[str, str]:
    """The environment of a process that uses them."""
    _, variable, options, runtime = SANITIZERS[sanitizer]
    found = subprocess.run(["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    return {
        **os.environ, "PYTHONPATH": str(ROOT), variable: options, "LD_PRELOAD": found.stdout.strip(),
        "OPENBLAS_NUM_THREADS": "1", "PYTHONMALLOC": "malloc", "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip


def use(folder: Path) -> None:
    """Compute with the libraries of a folder in this process, whatever is installed."""

    def located(mine: isa.Isa, part: str = "") -> locate.Library | None:
        own = part if part in sources.PRODUCTS.values() else ""
        path = folder / f"{sources.library_name(mine, own)}.so"
        if not path.exists():
            return None
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return locate.Library(mine.name, path, 0, "g++", "test", digest, own)

    choose.locate = located  # type: ignore[assignment]
