"""From a variant to its PTX, and from there to a library for this CPU: both kept in the simulator's cache.

The key of PTX is the sources, the options (with the target) and the version of NVRTC; that of a library the
C++ that the translator wrote, the runtime, the simulator, and g++ with its options.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path

from cupy_flash.cubins import nvrtc, sources
from cupy_flash.device import host_build
from cupy_flash.program.c_text import header
from cupy_flash.store import write_atomically
from tests.simulator.ptx.translate import translate

__all__ = ["build", "library", "ptx", "ptx_of", "runtime"]

RUNTIME = Path(__file__).with_name("runtime")
# why -O0: what takes time is in the runtime, which is optimised; a kernel compiles in a third of it. -w: some
# registers are set and not read.
_KERNEL_FLAGS = ("-O0", "-w")


@functools.cache
def _compiler(cuda: int) -> nvrtc.Compiler:
    return nvrtc.Compiler(cuda)


def _options(variant: host_build.Buildable, target: str) -> list[str]:
    """Those of a build, but without ptxas, and with the lines of the sources for reports."""
    common = [x for x in sources.common(variant.defines()) if not x.startswith("--ptxas")]
    return [f"--gpu-architecture={target.replace('sm_', 'compute_')}", "-lineinfo", *common]


def ptx_of(variant: host_build.Buildable, target: str, cuda: int) -> str:
    """The PTX that NVRTC makes of a variant for a target such as "sm_90a"."""
    source = sources.folder() / variant.source
    folders = [f"-I{source.parent}", f"-I{sources.folder() / 'include'}"]
    with tempfile.TemporaryDirectory() as scratch:
        if function := getattr(variant, "function", None):
            folders.append(f"-I{sources.write_function(function, Path(scratch))}")
        options = [*_options(variant, target), *folders]
        text, _ = _compiler(cuda).compile(source.read_text(), source.name, options, result="PTX")
    return text.decode()


def ptx(variant: host_build.Buildable, target: str, cuda: int) -> Path:
    """The same as a file in the cache."""
    root = sources.folder()
    key = hashlib.sha256(repr((nvrtc.TOOLKITS[cuda].compiler, _options(variant, target))).encode())
    for file in sources.closure(root / variant.source, root / "include"):
        key.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    if function := getattr(variant, "function", None):
        key.update(header(function).encode())
    path = host_build.cache_folder() / f"{variant.name}-{target}-cuda{cuda}-{key.hexdigest()[:16]}.ptx"
    if not path.exists():
        write_atomically(path, ptx_of(variant, target, cuda).encode())
    return path


@functools.cache
def runtime(options: tuple[str, ...]) -> Path:
    """What all translated kernels call, compiled once."""
    core = host_build.core(options)
    units = sorted(RUNTIME.glob("*.cpp"))
    arguments = [
        host_build.LIBRARY,
        *options,
        "-g0",
        "-fvisibility=default",
        *host_build.includes(),
        "-x",
        "c++",
        "-",
        "-x",
        "none",
        *_link(core),
    ]
    inputs = [*units, *_headers(), *host_build.simulator_headers()]
    return host_build.compile_library("ptx_runtime", arguments, inputs, text=host_build.including(units))


def _headers() -> list[Path]:
    return sorted(RUNTIME.glob("*.h"))


@functools.cache
def _first(options: tuple[str, ...]) -> Path:
    """ptx.h, precompiled: reading it is a third of the 0.3 s that a kernel takes."""
    arguments = [*options, *_KERNEL_FLAGS, f"-I{RUNTIME}", *host_build.includes()]
    return host_build.precompiled(RUNTIME / "translated.h", arguments, _headers())


def _link(*libraries: Path) -> list[str]:
    return [argument for path in libraries for argument in (str(path), f"-Wl,-rpath,{path.parent}")]


def library(text: str, name: str) -> Path:
    """The library of PTX that was translated; `name` is that of the file in reports."""
    options = host_build.flags()
    code = translate(text, name)
    key = hashlib.sha256(code.encode()).hexdigest()[:16]
    source = host_build.cache_folder() / f"{name}-{key}.cpp"
    if not source.exists():
        write_atomically(source, code.encode())
    arguments = [
        *options, *_KERNEL_FLAGS, f"-I{RUNTIME}", *host_build.includes(), "-include", str(_first(options)),
        "-x", "c++", str(source), "-x", "none", *_link(runtime(options), host_build.core(options)),
    ]  # fmt: skip
    return host_build.compile_library(f"ptx_{Path(name).stem}", arguments, [source, *_headers()])


def build(variant: host_build.Buildable, target: str, cuda: int) -> tuple[Path, Path]:
    """The PTX of a variant and its library."""
    path = ptx(variant, target, cuda)
    return path, library(path.read_text(), path.name)
