"""What a library is made from: the C++ sources, the compiler's options, and one hash over all of it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .isa import Isa

__all__ = [
    "FUNCTIONS",
    "OPTIONS",
    "PARTS",
    "SECOND_ORDER",
    "compiled",
    "digest",
    "files",
    "folder",
    "library_name",
]

# why: no exceptions and no libstdc++; errno and traps would keep loops from becoming vectors; a product and a
# sum are one instruction; -O3 doubles the size, and the inner loops are vectors as they are written, so that
# those of a compiler's own would be size alone. Nothing that changes results otherwise, such as -ffast-math.
OPTIONS = (
    "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions",
    "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fno-asynchronous-unwind-tables", "-fno-tree-vectorize", "-Wall", "-Wextra", "-Wno-psabi", "-pthread",
)  # fmt: skip

SECOND_ORDER, FUNCTIONS = "second_order", "functions"
# The libraries of an instruction set, and which sources they are made from that the first is not.
# why others: most programs never ask for them. The second is nearly as large as the first; the first calls
# the third.
PARTS = {
    "": (),
    SECOND_ORDER: ("hessian.cpp", "hessian_dbias.cpp", "tangent.cpp"),
    FUNCTIONS: ("function.cpp",),
}


@functools.cache
def folder() -> Path:
    """The folder of the sources, beside the package in a checkout; an installation has none."""
    return Path(__file__).resolve().parents[3] / "kernels_cpu"


def files() -> list[Path]:
    """Everything that is compiled or included."""
    return sorted(path for path in folder().iterdir() if path.suffix in (".cpp", ".h"))


def compiled(part: str = "") -> list[Path]:
    """What is compiled into a library."""
    elsewhere = {name for names in PARTS.values() for name in names}
    return [
        file
        for file in files()
        if file.suffix == ".cpp" and (file.name in PARTS[part] if part else file.name not in elsewhere)
    ]


def library_name(isa: Isa, part: str = "") -> str:
    """What a library is called in its folder and its manifest."""
    return f"{isa.name}_{part}" if part else isa.name


def digest(isa: Isa, part: str = "") -> str:
    """Hash of what decides a library: sources and options."""
    total = hashlib.sha256("\n".join((*OPTIONS, *isa.options)).encode())
    for file in (*compiled(part), *(file for file in files() if file.suffix == ".h")):
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()
