"""The inputs of a cubin: CUDA sources and compiler options, and the hash over both."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..plan.catalog import Variant
from ..program.c_text import NAME, header
from ..program.graph import Body
from ..trust import own_folder
from .nvrtc import TOOLKITS

__all__ = ["closure", "common", "digest", "folder", "options", "write_function"]

# why these: both NVRTCs support C++17; helpers need no __device__; -v makes ptxas print the registers and
# spills that a build checks. No fast math: FP32 and FP64 stay exact, other kernels call fast instructions by
# name.
OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@functools.cache
def folder() -> Path:
    """The folder of the .cu files: inside an installed package, next to it in a checkout."""
    package = own_folder()
    shipped = package / "_kernels"
    return shipped if shipped.is_dir() else package.parent / "kernels_cu"


def common(defines: Mapping[str, str]) -> list[str]:
    """Compiler options for a variant with these macros, for any target, without paths."""
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    # why: kernels of reproducible="device" may fuse a product and a sum only where the source says fma.
    return [*OPTIONS, *["--fmad=false"] * ("CF_SAME_BITS" in defines), *macros]


def options(variant: Variant, target: str) -> list[str]:
    """Compiler options for a variant and a target, without paths."""
    return [f"--gpu-architecture={target}", *common(variant.defines())]


def digest(variant: Variant, target: str, cuda: int) -> str:
    """Hash over every input of a cubin and of its checks: source, includes, options, compiler, limits."""
    parts = [
        _source_digest(folder() / variant.source),
        header(variant.function) if variant.function else "",
        TOOLKITS[cuda].compiler,
        *options(variant, target),
        *(f"{count} {shape}" for shape, count in variant.products),
        f"{variant.covered} covered, {variant.stall_limits} in a turn",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write_function(function: Body, into: Path) -> Path:
    """Write the header of a score function; return the include folder."""
    into.mkdir(parents=True, exist_ok=True)
    path, text = into / NAME, header(function)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return into


@functools.lru_cache(maxsize=256)
def _source_digest(source: Path) -> str:
    total, root = hashlib.sha256(), _plain(folder())
    for file in closure(source, root / "include"):
        total.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def _plain(path: Path) -> Path:
    """Normalise a path but keep symbolic links: in a cache of the Hugging Face hub each file is a link."""
    return Path(os.path.normpath(path.absolute()))


def closure(source: Path, include: Path) -> list[Path]:
    """The file and all files that it includes with quotes, sorted by path; conditionals are ignored."""
    source = _plain(source)
    found, waiting = {source}, [source]
    while waiting:
        file = waiting.pop()
        for name in _INCLUDE.findall(file.read_text(encoding="utf-8")):
            candidates = (_plain(file.parent / name), _plain(include / name))
            path = next((p for p in candidates if p.is_file()), None)
            if path is not None and path not in found:
                found.add(path)
                waiting.append(path)
    return sorted(found, key=lambda path: path.as_posix())
