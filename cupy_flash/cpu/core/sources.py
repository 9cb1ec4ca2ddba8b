"""The inputs of a library of the core: C++ sources and compiler options, and the hash over both."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from ...trust import own_folder
from .isa import BY_AMX, FLOATS, PAIRS, Isa, amx_is_permitted, host

__all__ = [
    "AMX",
    "BFLOAT16",
    "FUNCTIONS",
    "OPTIONS",
    "PARTS",
    "PRODUCTS",
    "SECOND_ORDER",
    "STATISTICS",
    "choices",
    "compiled",
    "digest",
    "files",
    "folder",
    "library_name",
    "multiplies",
    "needs",
    "options",
    "parts",
]

# why: no exceptions and no libstdc++; errno and traps prevent vectorisation; FMA contraction is allowed; -O3
# doubles the size, and the inner loops are written with vectors, so that automatic vectorisation would only
# add size. No option that changes results otherwise, such as -ffast-math.
OPTIONS = (
    "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions",
    "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fno-asynchronous-unwind-tables", "-fno-tree-vectorize",
    "-fno-unroll-loops",  # loops that only clang unrolls would be a tenth of a library
    "-Wall", "-Wextra", "-Wno-psabi", "-pthread",
)  # fmt: skip

SECOND_ORDER, STATISTICS, FUNCTIONS = "second_order", "statistics", "functions"
BFLOAT16, AMX = "bfloat16", "amx"
# The libraries of an instruction set, and their sources; the main library "" has all sources that are not
# in second order, statistics or functions. why several: most programs never load the others, and second order
# is nearly as large as the main library. Passes call the library of functions through a pointer. The last two
# hold passes of the main library with products that few CPUs support.
PARTS = {
    "": (),
    SECOND_ORDER: ("hessian.cpp", "hessian_dbias.cpp", "tangent.cpp"),
    STATISTICS: ("statistics.cpp",),
    FUNCTIONS: ("function.cpp",),
    BFLOAT16: ("backward.cpp", "decode.cpp", "forward.cpp", "repeat.cpp"),
    AMX: ("backward.cpp", "decode.cpp", "forward.cpp", "repeat.cpp"),
}
# Libraries with other products of bfloat16, by their suffix in CUPY_FLASH_CPU, the fastest first.
PRODUCTS = {BY_AMX: AMX, PAIRS: BFLOAT16}
# CPU flags and compiler options of a library, in addition to those of the instruction set.
_BESIDES = {
    ("v4", BFLOAT16): (frozenset(["avx512_bf16"]), ("-mavx512bf16",)),
    ("v4", AMX): (
        frozenset(["avx512_bf16", "amx_tile", "amx_bf16"]), ("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
}  # fmt: skip


def parts(isa: Isa) -> tuple[str, ...]:
    """The libraries that an instruction set has."""
    return tuple(part for part in PARTS if part not in (BFLOAT16, AMX) or (isa.name, part) in _BESIDES)


def needs(isa: Isa, part: str) -> frozenset[str]:
    """CPU flags that a library needs, as in /proc/cpuinfo."""
    return isa.flags | _BESIDES.get((isa.name, part), (frozenset[str](), ()))[0]


def options(isa: Isa, part: str) -> tuple[str, ...]:
    """Compiler options that select the CPU."""
    return isa.options + _BESIDES.get((isa.name, part), (frozenset[str](), ()))[1]


def multiplies(isa: Isa, part: str) -> bool:
    """Whether an instruction set has a library for BFLOAT16 or AMX, and this CPU supports it."""
    there = part in parts(isa) and needs(isa, part) <= host().flags
    return there and (part != AMX or amx_is_permitted())


def choices(isas: Iterable[Isa]) -> tuple[str, ...]:
    """Values of CUPY_FLASH_CPU for instruction sets, with every supported suffix, best first."""
    found = []
    for isa in isas:
        ways = [way for way, part in PRODUCTS.items() if multiplies(isa, part)]
        found += [isa.name + way for way in (*ways, FLOATS)] if ways else [isa.name]
    return tuple(found)


@functools.cache
def folder() -> Path:
    """The folder of the sources, next to the package in a checkout; it does not exist in an installation."""
    return own_folder().parent / "kernels_cpu"


def files() -> list[Path]:
    """All source files and headers."""
    return sorted(path for path in folder().iterdir() if path.suffix in (".cpp", ".h"))


def compiled(part: str) -> list[Path]:
    """Source files that are compiled into a library."""
    elsewhere = {*PARTS[SECOND_ORDER], *PARTS[STATISTICS], *PARTS[FUNCTIONS]}
    return [
        file
        for file in files()
        if file.suffix == ".cpp" and (file.name in PARTS[part] if part else file.name not in elsewhere)
    ]


def library_name(isa: Isa, part: str) -> str:
    """Name of a library in its folder and its manifest."""
    return f"{isa.name}_{part}" if part else isa.name


def digest(isa: Isa, part: str = "") -> str:
    """Hash over the sources and options of a library."""
    total = hashlib.sha256("\n".join((*OPTIONS, *options(isa, part))).encode())
    for file in (*compiled(part), *(file for file in files() if file.suffix == ".h")):
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()
