"""The stand-ins for libcuda, the CUDA runtime and NVRTC, compiled by g++ into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.paths import KERNELS_CU

SOURCES = Path(__file__).with_name("stand_ins")
_SIMULATOR = KERNELS_CU / "simulator" / "headers"  # what the wheels' headers lack
# Folders of a CUDA major's headers in the wheels of NVIDIA.
_HEADERS = {12: "cuda_runtime/include", 13: "cu13/include"}
_FLAGS = ["-O0", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-missing-field-initializers"]
# why -w: the warnings of CuPy's kernels are not ours. why no contraction: products round before a sum.
_KERNEL_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]


def unavailable() -> str:
    """Why there can be no virtual GPU here; "" if there can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the virtual GPU writes jumps of x86-64 Linux; this is {platform.machine()} {sys.platform}"
    if shutil.which("g++") is None:
        return "the virtual GPU is compiled by g++, which is not installed"
    return ""


def cache() -> Path:
    """Where stand-ins and wheels are kept; private, because what is loaded from there runs as the user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cupy_flash" / "virtual_gpu"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Keep other processes from making the same thing at the same time."""
    with (cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def headers(cuda: int) -> Path:
    """The folder of cuda.h of a CUDA major.

    Raises
    ------
    FileNotFoundError
        Its wheel is not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec else None) or ():
        folder = Path(root) / _HEADERS[cuda]
        if (folder / "cuda.h").is_file() and (folder / "cuda_runtime_api.h").is_file():
            return folder
    wheel = {12: "nvidia-cuda-runtime-cu12", 13: "nvidia-cuda-runtime"}[cuda]
    raise FileNotFoundError(f"the stand-ins need the headers of CUDA {cuda}: pip install {wheel}")


def build(cuda: int) -> Path:
    """Compile the stand-ins of a CUDA major, or find them compiled.

    Returns
    -------
    Path
        A folder with libcuda.so.1, libnvrtc.so.<major> and kernels/, the cache for CuPy's own.
    """
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(f"{compiler}{cuda}{headers(cuda)}{_FLAGS}{_KERNEL_FLAGS}".encode())
    for file in (Path(__file__), *sorted(SOURCES.iterdir()), *sorted(_SIMULATOR.glob("*/*"))):
        key.update(file.name.encode() + file.read_bytes())
    target = cache() / f"cuda{cuda}-{key.hexdigest()[:16]}"
    with alone(f"cuda{cuda}"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache()) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                _compile(cuda, made, target)
                made.rename(target)
    return target


def _run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def _compile(cuda: int, made: Path, target: Path) -> None:
    # why a copy: the checkout may be gone when CuPy's kernels are compiled.
    shutil.copytree(_SIMULATOR, made / "headers")
    include = ["-isystem", headers(cuda), "-isystem", made / "headers"]
    units = [file for file in sorted(SOURCES.glob("*.cpp")) if file.name != "nvrtc.cpp"]

    def compiled(unit: Path) -> Path:
        _run("g++", "-std=c++20", *_FLAGS, *include, "-c", unit, "-o", made / f"{unit.stem}.o")
        return made / f"{unit.stem}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    _run("g++", "-shared", *objects, "-Wl,-soname,libcuda.so.1", "-o", made / "libcuda.so.1", "-ldl")
    for file in objects:
        file.unlink()
    kernel = ["g++", *_KERNEL_FLAGS, f"-DCUDA_MAJOR={cuda}"]
    # The header of CuPy's kernels, compiled once: it takes most of the time of each.
    shutil.copy(SOURCES / "cupy_kernels.h", made)
    _run(*kernel, *include, "-x", "c++-header", made / "cupy_kernels.h", "-o", made / "cupy_kernels.h.gch")
    command = " ".join([*kernel, f"-I'{target}' -isystem '{headers(cuda)}' -isystem '{target}/headers'"])
    _run(
        "g++", "-std=c++20", *_FLAGS, "-shared", f"-DCUDA_MAJOR={cuda}", f'-DCOMPILE="{command}"',
        SOURCES / "nvrtc.cpp", f"-Wl,-soname,libnvrtc.so.{cuda}", "-o", made / f"libnvrtc.so.{cuda}",
    )  # fmt: skip
    (made / "kernels").mkdir()
