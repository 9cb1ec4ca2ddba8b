"""Compile the core with the system's compiler or the ziglang wheel; builds are reproducible."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ...store import BuildFailed, locked, write_atomically, writing
from ...version import __version__
from .isa import ISAS, Isa, host
from .locate import FORMAT, MANIFEST
from .params import ABI_VERSION
from .sources import OPTIONS, compiled, digest, library_name, options, parts

__all__ = ["BuildFailed", "Compiler", "build", "compiler_of", "libraries_of"]

# Targets of zig by platform. why glibc 2.17: the manylinux2014 wheels of NumPy need it, too.
ZIG_TARGETS = {"linux-x86_64": "x86_64-linux-gnu.2.17", "linux-aarch64": "aarch64-linux-gnu.2.17",
               "macos-aarch64": "aarch64-macos.11.0", "windows-x86_64": "x86_64-windows-gnu"}  # fmt: skip
# zig's names of x86-64-v4, ... and armv8-a.
_ZIG_CPUS = {
    "v4": "-mcpu=x86_64_v4",
    "v3": "-mcpu=x86_64_v3",
    "v2": "-mcpu=x86_64_v2",
    "neon": "-mcpu=generic",
}
_WAYS = "pip install ziglang, or a g++ of 12 on"


class Compiler(NamedTuple):
    """A compiler of the core."""

    command: tuple[str, ...]
    version: str
    # Whether it is zig, which compiles for any platform; the others compile for this one only.
    zig: bool = False


def compiler_of(name: str | None = None) -> Compiler:
    """The first available compiler of $CXX, g++, clang++ and the ziglang wheel; or a command, or "zig"."""
    wanted = [name] if name else [os.environ.get("CXX", "").strip(), "g++", "clang++", "zig"]
    for one in filter(None, wanted):
        if one == "zig":
            if importlib.util.find_spec("ziglang") is None:
                continue
            command: tuple[str, ...] = (sys.executable, "-m", "ziglang")
            return Compiler((*command, "cc", "-x", "c++"), "zig " + _version((*command, "version")), True)
        try:
            command = tuple(shlex.split(one))
        except ValueError as error:
            raise BuildFailed(f"{one!r} is no command: {error}.\nTry: {_WAYS}") from error
        if shutil.which(command[0]):
            return Compiler(command, _version((*command, "--version")))
    raise BuildFailed(f"no C++ compiler: looked for {', '.join(filter(None, wanted))}.\nTry: {_WAYS}")


def _version(command: Sequence[str]) -> str:
    """The first line that a compiler prints about its version."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise BuildFailed(f"{shlex.join(command)} names no version.\n{done.stderr}Try: {_WAYS}")
    return done.stdout.strip().splitlines()[0]


def libraries_of(platform: str) -> tuple[Isa, ...]:
    """Instruction sets that are compiled for a platform."""
    return tuple(isa for isa in ISAS if isa.machine == platform.partition("-")[2])


def command_of(compiler: Compiler, isa: Isa, part: str, platform: str, output: Path) -> list[str]:
    """The command that compiles a library; for zig the command that links its object files."""
    sources = [str(file) for file in compiled(part)]
    if compiler.zig:
        # why the lowest instruction set: zig compiles Windows' C library for each one, which takes a minute.
        target, link = _zig_target(platform, libraries_of(platform)[-1]), ["-lm"]
        sources = [str(output.with_name(f"{Path(source).stem}.o")) for source in sources]
        return [*compiler.command[:-2], *OPTIONS, "-s", *target, *sources, "-o", str(output), *link]
    if platform.startswith("linux"):
        # why no other libraries: one file serves every system with this C library. Separate pages for code
        # and relocated data would cost 8 KB, aligned functions and labels 2 KB.
        target = [
            *options(isa, part),
            "-falign-functions=1",
            "-falign-jumps=1",
            "-falign-labels=1",
            "-nodefaultlibs",
            "-Wl,--build-id=none",
            "-Wl,-z,noseparate-code",
            "-Wl,-z,norelro",
        ]
        link = ["-lc", "-lm", "-lgcc"]
    else:
        target, link = list(options(isa, part)), []
    return [*compiler.command, *OPTIONS, "-s", *target, *sources, "-o", str(output), *link]


def _zig_target(platform: str, isa: Isa) -> list[str]:
    return ["-target", ZIG_TARGETS[platform], _ZIG_CPUS[isa.name]]


def _objects_of(compiler: Compiler, isa: Isa, part: str, platform: str, output: Path) -> list[list[str]]:
    """The commands that compile object files with zig; none for other compilers."""
    if not compiler.zig:
        return []
    plain = [option for option in OPTIONS if option != "-shared"]
    target = [*_zig_target(platform, isa), *options(isa, part)[1:], "-nostdinc++"]
    return [[*compiler.command, *plain, *target, "-c", str(source), "-o",
             str(output.with_name(f"{source.stem}.o"))] for source in compiled(part)]  # fmt: skip


def build(platform: str, out: Path, compiler: Compiler, isas: Sequence[Isa] | None = None) -> list[Path]:
    """Compile the libraries of a platform that are not up to date, and write the manifest.

    Parameters
    ----------
    platform : str
        Such as "linux-x86_64".
    out : Path
        Holds <platform>/<isa>.so and the other libraries of an instruction set, such as <isa>_functions.so.
    compiler : Compiler
    isas : sequence of Isa, optional
        Default: all of the platform.

    Returns
    -------
    list of Path
        Compiled libraries.
    """
    wanted = libraries_of(platform) if isas is None else isas
    if not wanted:
        raise BuildFailed(f"the CPU core does not support {platform}.\nTry: one of {', '.join(ZIG_TARGETS)}")
    if platform != host().platform and not compiler.zig:
        raise BuildFailed(f"{compiler.version} does not compile for {platform}.\nTry: --compiler zig")
    with writing(out):
        (out / platform).mkdir(parents=True, exist_ok=True)
        with locked(out):
            return _build(platform, out / platform, compiler, wanted)


def _build(platform: str, target: Path, compiler: Compiler, wanted: Sequence[Isa]) -> list[Path]:
    """`build` into the folder of a platform, while its lock is held."""
    manifest = {"format": FORMAT, "version": __version__, "abi": ABI_VERSION, "platform": platform}
    entries = _up_to_date(target, manifest, compiler)
    made = []
    missing = [(isa, part) for isa in wanted for part in parts(isa) if library_name(isa, part) not in entries]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        # why all before any is written: until the manifest is written, a new library seems damaged
        compiled_now = [*compilers.map(lambda one: _compile(compiler, one[0], one[1], platform), missing)]
    for (isa, part), data in zip(missing, compiled_now, strict=True):
        name, made_from = library_name(isa, part), digest(isa, part)
        path = target / f"{name}.so"
        write_atomically(path, data)
        entries[name] = {
            "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "source": made_from,
            "compiler": compiler.version,
        }  # fmt: skip
        made.append(path)
    text = json.dumps({**manifest, "libraries": dict(sorted(entries.items()))}, indent=1) + "\n"
    write_atomically(target / MANIFEST, text.encode())
    # A wheel would include stale files, and temporary ones of a killed build: we hold the lock.
    for file in (*target.glob("*.so"), *target.glob(".*")):
        if file.stem not in entries:
            with contextlib.suppress(OSError):  # Windows cannot delete a loaded library
                file.unlink()
    return made


def _up_to_date(
    target: Path, manifest: dict[str, object], compiler: Compiler
) -> dict[str, dict[str, object]]:
    """Entries of the existing manifest whose libraries are up to date."""
    try:
        found = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        if {name: found[name] for name in manifest} != manifest:
            return {}
        there = found["libraries"]
        sources = {library_name(isa, part): digest(isa, part) for isa in ISAS for part in parts(isa)}
        return {
            name: there[name]
            for name, source in sources.items()
            if name in there
            and there[name]["source"] == source
            and _release_of(there[name]["compiler"]) == _release_of(compiler.version)
            and hashlib.sha256((target / f"{name}.so").read_bytes()).hexdigest() == there[name]["sha256"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _release_of(version: str) -> str:
    """A compiler's version line without its name, which for GCC is the name of the command."""
    return version.partition(" ")[2]


def _compile(compiler: Compiler, isa: Isa, part: str, platform: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / f"{isa.name}.so"
        objects = _objects_of(compiler, isa, part, platform, output)
        commands = [*objects, command_of(compiler, isa, part, platform, output)]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not Path(command[command.index("-o") + 1]).is_file():
                shown = "\n".join(map(shlex.join, [command] if command in objects else commands))
                # why replace: the folder is gone when the user repeats the command
                shown = shown.replace(f"{scratch}{os.sep}", "")
                raise BuildFailed(
                    f"{isa.name} for {platform} does not compile:\n{shown}\n{done.stderr}"
                    "Try: its source in kernels_cpu, by the lines above, or another compiler"
                )
            sys.stderr.write(done.stderr)
        return output.read_bytes()
