"""A simulated GPU: the kernels of ``kernels_cu``, compiled by g++ and run on NumPy arrays.

It offers what `cupy_flash.driver` offers, so that plan, parameter packing and launch can be
exercised without a GPU. ``CUPY_FLASH_DRIVER=simulator`` selects it, ``simulator:sm_80`` with another
architecture than the default; pointers are host addresses.

The CUDA threads of a block are fibers, and asynchronous operations take effect under one of three
schedules (`schedule`): as late as the program allows, at once, or at random. A kernel that
deadlocks, diverges, uses a barrier wrongly, crashes or loops for ever raises `KernelFailed` with the
threads and the lines of the kernel. ``kernels_cu/README.md`` tells how to debug one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from . import catalog, sources

__all__ = [
    "Kernel",
    "KernelFailed",
    "SimulatorUnavailable",
    "Workspace",
    "arch",
    "build",
    "costs",
    "current_stream",
    "empty",
    "encode_tensor_map",
    "load",
    "multiprocessors",
    "schedule",
]


class KernelFailed(RuntimeError):
    """A simulated kernel did something that a GPU would not survive, or not repeat."""


class SimulatorUnavailable(RuntimeError):
    """The simulator cannot be built on this machine; the message says what is missing."""


class Buildable(Protocol):
    """What the simulator needs to know of a `cupy_flash.catalog.Variant`."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    def defines(self) -> Mapping[str, str]: ...


# ---- where things are


def _cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "cupy_flash" / "simulator"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # what is loaded from here runs with the user's rights
    return folder


def _cuda_headers() -> pathlib.Path:
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
    folders = [r / sub for r in roots for sub in ("cuda_runtime/include", "cu13/include")]
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, pathlib.Path(home) / "include")
    for folder in folders:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise SimulatorUnavailable(
        "no cuda_fp16.h: the simulator needs CUDA's headers (nothing else of CUDA).\n"
        "Try: pip install nvidia-cuda-runtime-cu12, or set CUDA_HOME to a toolkit"
    )


@functools.cache
def _compiler() -> tuple[str, str]:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise SimulatorUnavailable(
            f"no C++ compiler: {name!r} is not on PATH.\n"
            "Try: apt install g++, or set CXX to a compiler that takes GCC's options (g++ 11 or newer)"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, version.stdout.splitlines()[0]


# ---- building

_FLAGS = (
    "-std=c++20 -O2 -g1 -fPIC -shared -fvisibility=hidden -fno-gnu-unique -fno-omit-frame-pointer "
    # why: kernels read halves of a register through other types, and start with undefined registers
    "-fno-strict-aliasing -ffp-contract=off -ftrivial-auto-var-init=pattern "
    "-Wall -Wextra -Wno-unknown-pragmas -Wno-psabi -Wno-restrict -Wno-unused-parameter"
)
_SANITIZERS = {
    "": "",
    # why -O1: reports keep their lines; UBSan stops at its first report, as ASan does
    "address": "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-O1 -fsanitize=thread",
}


def _flags() -> list[str]:
    sanitizer = os.environ.get("CUPY_FLASH_SIMULATOR_SANITIZE", "")
    extra = os.environ.get("CUPY_FLASH_SIMULATOR_FLAGS", "")
    return shlex.split(f"{_FLAGS} {_SANITIZERS[sanitizer]} {extra}")


def _compile(stem: str, arguments: Sequence[str], inputs: Sequence[pathlib.Path]) -> pathlib.Path:
    """Compile into the cache unless the same sources were compiled with the same arguments."""
    path, version = _compiler()
    key = hashlib.sha256(repr((version, list(arguments))).encode())
    for source in inputs:
        key.update(source.name.encode() + source.read_bytes())
    target = _cache() / f"{stem}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = pathlib.Path(scratch) / "kernel.so"
        command = [path, *arguments, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SimulatorUnavailable(f"g++ failed on {stem}\n{done.stderr}\n{shlex.join(command)}")
        if done.stderr:
            print(done.stderr)
        output.replace(target)  # atomic: another process sees all of it or nothing
    return target


def _core() -> pathlib.Path:
    """Scheduler and state, which all kernels of a process share."""
    folder = sources.folder() / "simulator"
    units = sorted(folder.glob("*.cpp"))
    includes = ["-I", str(folder.parent), "-I", str(folder / "headers"), "-isystem", str(_cuda_headers())]
    inputs = [*units, *sorted(folder.glob("*.h")), *sorted((sources.folder() / "include").glob("*.cuh"))]
    return _compile("simulator", [*_flags(), *includes, *map(str, units)], inputs)


def build(variant: Buildable) -> pathlib.Path:
    """Compile a variant for this CPU, or find it compiled.

    Parameters
    ----------
    variant
        What to build; its source may also be an absolute path.

    Returns
    -------
    pathlib.Path
        The shared library, in the user's cache.
    """
    root, core = sources.folder(), _core()
    source = root / variant.source
    arguments = [*_flags(), "-I", str(root / "include"), "-I", str(root)]
    arguments += ["-I", str(root / "simulator" / "headers"), "-isystem", str(_cuda_headers())]
    arguments += [f"-D{name}={value}" for name, value in variant.defines().items()]
    arguments += ["-x", "c++", str(source), "-x", "none", str(core), f"-Wl,-rpath,{core.parent}"]
    headers = [*sorted((root / "include").glob("*.cuh")), *sorted((root / "simulator").glob("*.h"))]
    return _compile(variant.name, arguments, [source, *headers])


# ---- running

_POLICIES = ("early", "late", "random")
_lock = threading.Lock()  # the simulator runs one block at a time


class _Settings:
    def __init__(self) -> None:
        name, _, seed = os.environ.get("CUPY_FLASH_SIMULATOR_POLICY", "late").partition(":")
        self.policy, self.seed = name, int(seed or 1)
        self.time_limit = int(os.environ.get("CUPY_FLASH_SIMULATOR_TIME_LIMIT", "120"))
        self.costs: list[tuple[str, dict[str, int]]] | None = None


_settings = _Settings()


@contextmanager
def schedule(policy: str, seed: int = 1, time_limit: int | None = None) -> Iterator[None]:
    """Run the launches inside under another schedule.

    Parameters
    ----------
    policy
        ``"late"``: asynchronous operations complete only when no thread can run, and warps drift
        apart as far as they can; the strongest. ``"early"``: they complete at once, and the last
        warp goes first. ``"random"``: anything in between, drawn from `seed`.
    seed
        Of ``"random"``; a failure repeats with its seed.
    time_limit
        Seconds of processor time after which a launch fails.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {', '.join(_POLICIES)}")
    saved = dict(vars(_settings))
    _settings.policy, _settings.seed = policy, seed
    _settings.time_limit = saved["time_limit"] if time_limit is None else time_limit
    try:
        yield
    finally:
        vars(_settings).update(policy=saved["policy"], seed=saved["seed"], time_limit=saved["time_limit"])


@contextmanager
def costs() -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Count what the launches inside cost: one (variant name, counts) for each, in order.

    The counts are those of ``kernels_cu/simulator/cost.h``, where each is explained.
    """
    saved, _settings.costs = _settings.costs, []
    try:
        yield _settings.costs
    finally:
        _settings.costs = saved


def _cost_names() -> list[str]:
    text = (sources.folder() / "simulator" / "cost.h").read_text()
    body = text.split("struct Cost {")[1].split("};")[0]
    declared = re.sub(r"//.*", "", body)
    return [name.strip() for line in re.findall(r"uint64_t ([^;]*);", declared) for name in line.split(",")]


@functools.cache
def _library(path: pathlib.Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if path.name.startswith("simulator-"):
        library.simulator_report.restype = ctypes.c_char_p
        library.simulator_configure.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    return library


def _readable(report: str) -> str:
    """Turn the addresses of call chains into lines of the kernel."""
    simulator = str(sources.folder() / "simulator")
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps if ".so" in line]
    starts: dict[str, int] = {}
    spans = []
    for region in regions:
        low, high = (int(x, 16) for x in region[0].split("-"))
        starts.setdefault(region[-1], low)
        spans.append((low, high, region[-1]))

    def lines(addresses: Sequence[int]) -> list[str]:
        out: list[str] = []
        for address in addresses:
            home = next((s[2] for s in spans if s[0] <= address < s[1]), None)
            if home is None or not home.startswith(str(_cache())):
                continue
            offset = hex(address - 1 - starts[home])
            found = subprocess.run(["addr2line", "-i", "-e", home, offset], capture_output=True, text=True)
            for line in found.stdout.split("\n"):
                position = line.split(" (")[0]
                if position and "?" not in position and not position.startswith(simulator):
                    out.append(pathlib.PurePath(position).name)
        return [x for i, x in enumerate(out) if i == 0 or out[i - 1] != x]

    def chain(match: re.Match[str]) -> str:
        found = lines([int(x, 16) for x in match[1].split()])
        return f"\n      called at {' < '.join(found)}" if found else ""

    if shutil.which("addr2line") is None:
        return re.sub(r" \{[0-9a-fx ]*\}", "", report)
    return re.sub(r" \{([0-9a-fx ]*)\}", chain, report)


class Kernel:
    """A variant built for this CPU; launches run to the end before they return."""

    def __init__(self, variant: Buildable) -> None:
        self.variant = variant
        library = _library(build(variant))
        self._entry = getattr(library, f"simulate_{variant.defines().get('CF_ENTRY', 'kernel')}")
        self._entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
        self._core = _library(_core())

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        params: Any,
        stream: int = 0,
    ) -> None:
        """Run the grid.

        Parameters
        ----------
        grid, block
            Up to three extents each. Nothing is launched if the grid is empty.
        shared_bytes
            Dynamic shared memory of a block.
        params
            The parameters struct: bytes, or a NumPy scalar or array of its structured dtype.
        stream
            Ignored: everything is in order here.

        Raises
        ------
        KernelFailed
            With the block, the threads and the lines of the kernel.
        """
        if 0 in grid:
            return
        limit = catalog.architecture(arch()).shared_bytes
        if shared_bytes > limit:
            raise KernelFailed(
                f"{self.variant.name}: {shared_bytes} bytes of shared memory are more than the {limit} "
                f"that a block has on {arch()}"
            )
        raw = bytes(params) if isinstance(params, (bytes, bytearray, memoryview)) else params.tobytes()
        dims = [(ctypes.c_uint32 * 3)(*d, *[1] * (3 - len(d))) for d in (tuple(grid), tuple(block))]
        with _lock:
            wanted = _settings
            self._core.simulator_configure(
                _POLICIES.index(wanted.policy), wanted.seed, wanted.time_limit, wanted.costs is not None
            )
            good = self._entry(dims[0], dims[1], shared_bytes, raw)
            if wanted.costs is not None:
                names = _cost_names()
                counts = (ctypes.c_uint64 * len(names))()
                self._core.simulator_cost(counts)
                wanted.costs.append((self.variant.name, dict(zip(names, counts, strict=True))))
            if not good:
                report = self._core.simulator_report().decode()
                policy = wanted.policy + (f" (seed {wanted.seed})" if wanted.policy == "random" else "")
                raise KernelFailed(f"{self.variant.name}, schedule {policy}: {_readable(report)}")


@functools.lru_cache(maxsize=None)
def _loaded(variant: Buildable, flags: tuple[str, ...]) -> Kernel:
    return Kernel(variant)


def load(variant: Buildable, device: int = 0) -> Kernel:
    """Build and load a variant, once.

    Parameters
    ----------
    variant
        Hashable; the same variant gives the same kernel.
    device
        There is one.
    """
    return _loaded(variant, tuple(_flags()))


# ---- the device


def arch(device: int = 0) -> str:
    """Architecture of the simulated GPU: what follows ``simulator:`` in CUPY_FLASH_DRIVER, or sm_90a."""
    name, _, chosen = os.environ.get("CUPY_FLASH_DRIVER", "").partition(":")
    return chosen if name == "simulator" and chosen else "sm_90a"


def multiprocessors(device: int = 0) -> int:
    """Multiprocessors of a typical GPU of the architecture."""
    return catalog.architecture(arch(device)).multiprocessors


def current_stream(device: int = 0, library: str = "numpy") -> int:
    """There are no streams: a launch returns when its work is done."""
    return 0


class Workspace:
    """Memory for one call, full of NaN, as reused GPU memory may be."""

    __slots__ = ("_owner", "pointer")

    def __init__(self, nbytes: int) -> None:
        self._owner = np.full(nbytes + 255, 0xFF, np.uint8)
        self.pointer = -(-self._owner.ctypes.data // 256) * 256 if nbytes else 0


def empty(nbytes: int, device: int = 0, library: str = "numpy") -> Workspace:
    """Allocate workspace, aligned to 256 bytes."""
    return Workspace(nbytes)


_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1, "float64": 8, "int32": 4}


def encode_tensor_map(
    pointer: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 128,
) -> bytes:
    """Describe a tensor for the bulk copies of a kernel, as the driver's cuTensorMapEncodeTiled does.

    Parameters
    ----------
    pointer
        Address of the first element, a multiple of 16.
    dtype
        Of the elements.
    shape
        Extents, the contiguous axis first; up to five.
    strides
        Bytes between neighbours on every axis but the first, multiples of 16.
    box
        Extents of what one copy moves, each up to 256.
    swizzle
        Width of the pattern in bytes: 0, 32, 64 or 128.

    Returns
    -------
    bytes
        The 128 bytes of a ``TensorMap`` field.
    """
    size = _ELEMENT_BYTES[dtype]
    rank = len(shape)
    inner = box[0] * size
    complaints = [
        (not 1 <= rank <= 5, f"rank {rank} is not 1 to 5"),
        (len(strides) != rank - 1 or len(box) != rank, "strides or box do not fit the rank"),
        (pointer % 16 != 0, f"address {pointer:#x} is not a multiple of 16"),
        (any(s % 16 or not 0 <= s < 1 << 40 for s in strides), f"strides {strides} are not multiples of 16"),
        (any(not 1 <= n <= 1 << 32 for n in shape), f"extents {shape} are not 1 to 2**32"),
        (any(not 1 <= n <= 256 for n in box), f"box {box} is not 1 to 256"),
        (inner % 16 != 0, f"the box is {inner} bytes wide, no multiple of 16"),
        (swizzle not in (0, 32, 64, 128), f"swizzle {swizzle} is not 0, 32, 64 or 128"),
        (swizzle != 0 and inner > swizzle, f"the box is {inner} bytes wide, the swizzle {swizzle}"),
    ]
    if reasons := [text for wrong, text in complaints if wrong]:
        raise ValueError("cannot encode the tensor map: " + "; ".join(reasons))
    encoded = (ctypes.c_uint64 * 16)()
    # layout: as struct Map of kernels_cu/simulator/bulk.h
    encoded[0] = pointer
    encoded[1] = rank | size << 8 | {0: 0, 32: 1, 64: 2, 128: 3}[swizzle] << 16 | 0xCF << 24
    for axis in range(rank):
        encoded[2 + axis] = shape[axis]
        encoded[7 + axis] = strides[axis - 1] if axis else size
    for axis in range(rank):
        encoded[12 + axis // 2] |= box[axis] << 32 * (axis % 2)
    return bytes(encoded)
