"""Compile kernels for this CPU with g++ into the user's cache, for the simulator."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .. import trust
from ..cpu.core.build import Compiler, compiler_of
from ..cubins import sources
from ..store import BuildFailed, write_atomically, writing

__all__ = [
    "KERNEL", "LIBRARY", "Buildable", "SimulatorUnavailable", "build", "cache_folder", "compile_library",
    "core", "cuda_headers", "flags", "includes", "including", "precompiled", "primitives",
    "show_warnings", "simulator_headers",
]  # fmt: skip


class SimulatorUnavailable(RuntimeError):
    """The simulator or a kernel for it does not compile on this machine; the message says why."""


class Buildable(Protocol):
    """The part of a variant that the simulator uses. The source may also be an absolute path."""

    @property
    def name(self) -> str:
        """Name in messages and file names."""

    @property
    def source(self) -> str:
        """The .cu file, relative to the kernels' folder."""

    def defines(self) -> Mapping[str, str]:
        """Macros of the variant."""

    def __hash__(self) -> int:
        """Hash the variant; equal variants are built once."""


# why: reports need frame pointers for call chains; kernels alias a register as two halves; registers of a GPU
# start with arbitrary bits; a product is rounded before an addition (no FMA contraction).
_FLAGS = (
    "-std=c++20 -g1 -fPIC -shared -fvisibility=hidden -fno-gnu-unique -fno-omit-frame-pointer "
    "-fno-strict-aliasing -ftrivial-auto-var-init=pattern -ffp-contract=off "
    "-Wall -Wextra -Wno-unknown-pragmas -Wno-psabi -Wno-restrict -Wno-unused-parameter "
    # why: kernels declare constants as enumerators, since NVRTC writes static ones into every cubin.
    "-Wno-deprecated-enum-enum-conversion"
)
# why -O1 for kernels: most run for less time than g++ needs to optimise them further. These options precede
# `flags`, so that the level of a sanitizer or a user's -O0 overrides them.
KERNEL, LIBRARY = "-O1", "-O2"
_SANITIZERS = {
    "": "",
    "address": "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-O1 -fsanitize=thread",
}


def flags() -> tuple[str, ...]:
    """Options for g++.

    CUPY_FLASH_SIMULATOR_SANITIZE is ``address`` (with undefined behaviour) or ``thread``;
    CUPY_FLASH_SIMULATOR_FLAGS is appended, such as ``-O0 -g`` for a debugger.
    """
    sanitizer = os.environ.get("CUPY_FLASH_SIMULATOR_SANITIZE", "")
    if sanitizer not in _SANITIZERS:
        raise SimulatorUnavailable(
            f"CUPY_FLASH_SIMULATOR_SANITIZE is {sanitizer!r}; there are address and thread"
        )
    extra = os.environ.get("CUPY_FLASH_SIMULATOR_FLAGS", "")
    return tuple(shlex.split(f"{_FLAGS} {_SANITIZERS[sanitizer]} {extra}"))


def cache_folder() -> Path:
    """Folder of built kernels, writable by the user only, since code loaded from it runs as the user."""
    folder = trust.user_cache() / "simulator"
    with _writing(folder):
        trust.make_folder(folder)
    _require_private(folder)
    return folder


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say which folder cannot be written, and what helps."""
    try:
        with writing(folder):
            yield
    except BuildFailed as error:
        raise SimulatorUnavailable(str(error)) from error


def _require_private(path: Path) -> None:
    """Refuse a path that another user could have written."""
    if found := trust.exposed(path):
        step, reason = found
        raise SimulatorUnavailable(
            f"{step}, on the way to the simulator's cache, {reason}.\n"
            f"Try: chmod go-w {step}, or remove it if it is of someone else, or set XDG_CACHE_HOME"
        )


def cuda_headers() -> Path:
    """The folder of cuda_fp16.h, in a wheel or in the toolkit at CUDA_HOME."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
    folders = [root / sub for root in roots for sub in ("cuda_runtime/include", "cu13/include")]
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, Path(home) / "include")
    for folder in folders:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise SimulatorUnavailable(
        "no cuda_fp16.h: the simulator needs CUDA's headers, and nothing else of CUDA.\n"
        "Try: pip install nvidia-cuda-runtime-cu12, or set CUDA_HOME to a toolkit"
    )


@functools.cache
def _compiler() -> Compiler:
    """The C++ compiler."""
    try:
        return compiler_of(os.environ.get("CXX", "").strip() or "g++")
    except BuildFailed as error:
        raise SimulatorUnavailable(
            f"{str(error).partition('Try: ')[0]}"
            "Try: apt install g++, or set CXX to one that takes GCC's options (12 or newer)"
        ) from error


def compile_library(
    stem: str, arguments: Sequence[str], inputs: Sequence[Path], *, text: str = "", suffix: str = ".so"
) -> Path:
    """Compile into the cache, unless the same inputs were compiled with the same arguments.

    ``text`` is the standard input, which the argument ``-`` names.
    """
    compiler = _compiler()
    options = (*compiler.command[1:], *arguments)
    # why: the cache key must not depend on the folder of the sources.
    placeless = [argument.replace(str(sources.folder()), "") for argument in (*options, text)]
    key = hashlib.sha256(repr((compiler.version, placeless)).encode())
    for file in inputs:
        key.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    target = cache_folder() / f"{stem}-{key.hexdigest()[:16]}{suffix}"
    if not target.exists():
        with _writing(target.parent), _alone(target):
            if not target.exists():
                _compile(stem, [compiler.command[0], *options], text, target)
    _require_private(target)
    return target


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of a target, so that two processes do not compile it at once; it is freed if one dies.

    Each target locks its own byte of one file.
    """
    import fcntl  # why here: Windows has none

    with (target.parent / "lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, zlib.crc32(target.name.encode()))
        yield


def _compile(stem: str, command: Sequence[str], text: str, target: Path) -> None:
    """Run g++, and move its output to the target atomically."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / "kernel.so"
        # why: a sanitizer preloaded into this process would slow the compiler down tenfold.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run(
            [*command, "-o", str(output)], input=text, capture_output=True, text=True, env=environment,
            # why: otherwise Python forks, which copies the page tables of a sanitizer's shadow memory.
            close_fds=False,
        )  # fmt: skip
        if done.returncode or not output.is_file():
            again = shlex.join([*command, "-o", output.name])  # why the name: the folder is gone by then
            again += f" <<'END'\n{text}END" if text else ""
            raise SimulatorUnavailable(
                f"g++ failed on {stem}\n{done.stderr}\n{again}\n"
                "Try: mend the line that it names, if it is yours; else set CXX to a g++ of 12 or newer, or "
                "free memory and space"
            )
        show_warnings(done.stderr)
        output.chmod(0o755)  # whatever the umask: a file that others may write to would be refused
        output.replace(target)  # atomic: another process sees the whole file or none


def show_warnings(text: str) -> None:
    """Print the warnings of g++ on a kernel that compiles."""
    sys.stderr.write(text)


def includes() -> list[str]:
    """Include options for the headers of the kernels, the simulator and CUDA."""
    root = sources.folder()
    folders = [root / "include", root, root / "simulator" / "headers"]
    return [*(f"-I{folder}" for folder in folders), "-isystem", str(cuda_headers())]


def including(units: Sequence[Path]) -> str:
    """Return one source text that includes several files, so that shared headers are compiled once."""
    return "".join(f'#include "{unit}"\n' for unit in units)


def simulator_headers() -> list[Path]:
    """Headers of the simulator that a kernel includes, without the PTX that prim.cuh includes for GPUs."""
    root = sources.folder()
    included = sources.closure(root / "include" / "prim.cuh", root / "include")
    return [
        *sorted((root / "simulator").glob("*.h")),
        *(file for file in included if file.parent.name != "prim"),
    ]


@functools.cache
def core(options: tuple[str, ...]) -> Path:
    """Build the scheduler and its state, which all kernels of a process share.

    why cached: kernels built before and after an edit of the sources must share one scheduler.
    """
    units = sorted((sources.folder() / "simulator").glob("*.cpp"))
    arguments = [LIBRARY, *options, *includes(), "-x", "c++", "-"]
    return compile_library("simulator", arguments, [*units, *simulator_headers()], text=including(units))


_KEPT = 8  # precompiled headers, 63 MB each: for two checkouts, plain and with two sanitizers, and 2 more


@functools.cache
def primitives(options: tuple[str, ...]) -> Path:
    """Precompile prim.cuh: parsing its headers would take 0.7 of the 1.4 s of a small kernel."""
    source = sources.folder() / "simulator" / "primitives.h"
    return precompiled(source, [KERNEL, *options, *includes()], simulator_headers())


def precompiled(source: Path, arguments: Sequence[str], inputs: Sequence[Path]) -> Path:
    """Return a copy of a header for ``-include``, precompiled for these arguments.

    g++ uses the precompiled file next to the copy, and reads the copy if that file is gone.
    """
    stem = source.stem
    compiled = compile_library(stem, [*arguments, "-x", "c++-header", str(source)], inputs, suffix=".h.gch")
    header = compiled.with_suffix("")
    if not header.exists():  # another process may be reading it
        with _writing(header.parent):
            write_atomically(header, source.read_bytes())
    with contextlib.suppress(FileNotFoundError):  # another process removes old files, too
        by_age = sorted(compiled.parent.glob(f"{stem}-*.h.gch"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-_KEPT]:
            old.unlink()
    return header


def build(variant: Buildable) -> Path:
    """Compile a variant for this CPU into a shared library in the user's cache, or find it there."""
    root, options = sources.folder(), flags()
    shared = core(options)
    source = root / variant.source
    # why not -D: g++ rejects a precompiled header if macros are defined before it.
    macros = (f"#undef {name}\n#define {name} {value}\n" for name, value in variant.defines().items())
    text = "".join((*macros, f'#include "{source}"\n'))
    inputs = [*sources.closure(source, root / "include"), *simulator_headers()]
    arguments = [KERNEL, *options, *includes(), "-include", str(primitives(options))]
    if function := getattr(variant, "function", None):
        headers = cache_folder() / "functions" / function.digest
        arguments.append(f"-I{sources.write_function(function, headers)}")
        inputs += headers.iterdir()
    arguments += ["-x", "c++", "-", "-x", "none", str(shared), f"-Wl,-rpath,{shared.parent}"]
    return compile_library(variant.name, arguments, inputs, text=text)
