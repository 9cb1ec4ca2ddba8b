"""A simulated GPU: the kernels of ``kernels_cu``, compiled by g++ and run on NumPy arrays.

It has the interface of `cupy_flash.device.driver`, so that plan, parameters and launch run end to end without
a GPU. ``CUPY_FLASH_DRIVER=simulator`` selects it, and ``simulator:sm_80`` simulates that architecture instead
of the default, sm_90a. Pointers are host addresses.

The CUDA threads of a block are fibers, and asynchronous operations take effect under one of three
schedules (`schedule`): as late as the program allows, at once, or at random. A kernel that deadlocks,
diverges, uses a barrier wrongly, crashes or loops for ever raises `KernelFailed` with the threads and
the lines of the kernel. ``kernels_cu/simulator/README.md`` describes how to debug one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..cubins import sources
from ..plan import catalog
from .host_build import Buildable, SimulatorUnavailable, build, cache_folder, core, flags
from .run import Dim3
from .tensor_map import ITEM, SWIZZLES, TensorMap

__all__ = [
    "Kernel", "KernelFailed", "SimulatorUnavailable", "Workspace", "arch", "clear", "costs", "current_stream",
    "empty", "encode_tensor_map", "load", "multiprocessors", "read", "schedule",
]  # fmt: skip


class KernelFailed(RuntimeError):
    """A simulated kernel did something that would crash, hang or be nondeterministic on a GPU."""


# ---- settings of launches

_POLICIES = ("early", "late", "random")


class _Settings(threading.local):
    def __init__(self) -> None:
        name, _, seed = os.environ.get("CUPY_FLASH_SIMULATOR_POLICY", "late").partition(":")
        self.policy, self.seed = name, int(seed or 1)
        self.time_limit = int(os.environ.get("CUPY_FLASH_SIMULATOR_TIME_LIMIT", "120"))
        self.costs: list[tuple[str, dict[str, int]]] | None = None


_settings = _Settings()


@contextmanager
def schedule(policy: str, seed: int = 1, time_limit: int | None = None) -> Iterator[None]:
    """Run the launches in this context under another schedule.

    Parameters
    ----------
    policy : {"late", "early", "random"}
        "late": asynchronous operations complete only when no thread can run, and warps drift apart
        as far as they can; it finds the most faults. "early": they complete at once, and the last
        warp runs first. "random": anything in between, drawn from `seed`.
    seed : int
        For "random"; the same seed repeats a failure.
    time_limit : int, optional
        Seconds of CPU time after which a launch fails.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {', '.join(_POLICIES)}")
    saved = _settings.policy, _settings.seed, _settings.time_limit
    _settings.policy, _settings.seed = policy, seed
    if time_limit is not None:
        _settings.time_limit = time_limit
    try:
        yield
    finally:
        _settings.policy, _settings.seed, _settings.time_limit = saved


@contextmanager
def costs() -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Collect the cost of each launch in this context, in order, as (variant name, counts).

    ``kernels_cu/simulator/cost.h`` explains every count.
    """
    saved, _settings.costs = _settings.costs, []
    try:
        yield _settings.costs
    finally:
        _settings.costs = saved


@functools.cache
def _cost_names() -> list[str]:
    text = (sources.folder() / "simulator" / "cost.h").read_text()
    body = re.sub(r"//.*", "", text.split("struct Cost {")[1].split("};")[0])
    return [name.strip() for line in re.findall(r"uint64_t ([^;]*);", body) for name in line.split(",")]


# ---- reports


def _lines(library: str, offsets: Sequence[int]) -> list[str]:
    """Source lines of the kernel at these offsets, innermost first."""
    simulator = str(sources.folder() / "simulator")
    command = ["addr2line", "-i", "-e", library, *map(hex, offsets)]
    answer = subprocess.run(command, capture_output=True, text=True).stdout
    positions = [line.split(" (")[0] for line in answer.split("\n")]
    return [
        re.sub("^(?:.*/include/|.*/)", "", position)
        for position in positions
        if position and "?" not in position and not position.startswith((simulator, "/usr/"))
    ]


def _readable(report: str) -> str:
    """Replace addresses of call chains, which are in braces, by source lines of the kernel."""
    if shutil.which("addr2line") is None:
        return re.sub(r" \{[0-9a-fx ]*\}", "", report)
    regions: list[tuple[int, int, str]] = []
    folder = str(cache_folder())
    for line in Path("/proc/self/maps").read_text().splitlines():
        if folder in line:
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            regions.append((low, high, line.split()[-1]))

    def chain(match: re.Match[str]) -> str:
        found: list[str] = []
        for address in (int(x, 16) for x in match[1].split()):
            home = next((name for low, high, name in regions if low <= address < high), None)
            if home is not None:
                start = min(low for low, _, name in regions if name == home)
                found += _lines(home, [address - 1 - start])  # - 1: it is a return address
        kept = [x for i, x in enumerate(found) if i == 0 or found[i - 1] != x]
        return f"\n      called at {' < '.join(kept)}" if kept else ""

    return re.sub(r" \{([0-9a-fx ]*)\}", chain, report)


# ---- tensor maps


def encode_tensor_map(tensor: TensorMap, pointer: int) -> bytes:
    """Encode a tensor map as the simulator reads it; ValueError where the CUDA driver would refuse it."""
    tensor.check(pointer)
    size, rank = ITEM[tensor.dtype], len(tensor.shape)
    # layout: as struct Map of kernels_cu/simulator/bulk.cpp
    words = [pointer, rank | size << 8 | SWIZZLES[tensor.swizzle] << 16 | 0xCF << 24]
    words += [*tensor.shape, *[0] * (5 - rank)]
    words += [size, *tensor.strides, *[0] * (5 - rank)]
    extents = [*tensor.box, *[0] * (6 - rank)]
    words += [low | high << 32 for low, high in zip(extents[::2], extents[1::2], strict=True)]
    return np.array([*words, 0], np.uint64).tobytes()


# ---- kernels


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@functools.cache
def _core(path: Path) -> ctypes.CDLL:
    library = _library(path)
    library.simulator_report.restype = ctypes.c_char_p
    library.simulator_configure.argtypes = [
        ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library


class Kernel:
    """A variant built for this CPU; a launch returns when its work is done."""

    _lock = threading.Lock()  # the simulator runs one block at a time
    encode_tensor_map = staticmethod(encode_tensor_map)

    def clear(self, pointer: int, nbytes: int, stream: int = 0) -> None:
        """Set memory to zero."""
        clear(pointer, nbytes, 0, stream)

    def __init__(self, variant: Buildable, library: Path | None = None) -> None:
        self.variant = variant
        self._core = _core(core(flags()))
        entry = variant.defines().get("CF_ENTRY", "kernel")
        self._entry = getattr(_library(library or build(variant)), f"simulate_{entry}")
        self._entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p]

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        params: bytes,
        stream: int = 0,  # noqa: ARG002  (part of the interface)
    ) -> None:
        """Run the grid, block after block; parameters as in `run.Kernel`.

        Raises
        ------
        KernelFailed
            The message has the block, the threads and the source lines.
        """
        if 0 in grid:
            return
        limit = catalog.architecture(arch()).shared_bytes
        if shared_bytes > limit:
            raise KernelFailed(
                f"{self.variant.name}: {shared_bytes} bytes of shared memory are more than the "
                f"{limit} of a block on {arch()}"
            )
        policy, seed = _settings.policy, _settings.seed
        counting = _settings.costs is not None
        with self._lock:
            self._core.simulator_configure(_POLICIES.index(policy), seed, _settings.time_limit, counting)
            extents = [(ctypes.c_uint32 * 3)(*extent) for extent in (grid, block)]
            good = self._entry(*extents, shared_bytes, bytes(params))
            report = self._core.simulator_report().decode()
            if _settings.costs is not None:
                counts = (ctypes.c_uint64 * len(_cost_names()))()
                self._core.simulator_cost(counts)
                named = dict(zip(_cost_names(), counts, strict=True))
                _settings.costs.append((self.variant.name, named))
        if not good:
            drawn = f" (seed {seed})" if policy == "random" else ""
            raise KernelFailed(f"{self.variant.name}, schedule {policy}{drawn}: {_readable(report)}")


@functools.cache
def _loaded(variant: Buildable, _options: tuple[str, ...]) -> Kernel:
    return Kernel(variant)


def load(variant: Buildable, device: int = 0) -> Kernel:  # noqa: ARG001
    """Build and load a variant, once."""
    return _loaded(variant, flags())


# ---- the one device


def arch(device: int = 0) -> str:  # noqa: ARG001
    """The architecture after ``simulator:`` in CUPY_FLASH_DRIVER, or sm_90a."""
    name, _, chosen = os.environ.get("CUPY_FLASH_DRIVER", "").partition(":")
    return chosen if name == "simulator" and chosen else "sm_90a"


def multiprocessors(device: int = 0) -> int:
    """Multiprocessors of a typical GPU of the architecture."""
    return catalog.architecture(arch(device)).multiprocessors


def current_stream(device: int = 0, library: str = "numpy") -> int:  # noqa: ARG001
    """Return 0: there are no streams, and launches run in order."""
    return 0


class Workspace:
    """Memory of one call, filled with NaN, as reused GPU memory may be; see `run.Workspace`."""

    __slots__ = ("_owner", "pointer")

    def __init__(self, nbytes: int) -> None:
        self._owner = np.full(nbytes + 255, 0xFF, np.uint8)
        self.pointer = -(-self._owner.ctypes.data // 256) * 256 if nbytes else 0


def read(pointer: int, nbytes: int, device: int = 0, stream: int = 0) -> bytes:  # noqa: ARG001
    """Read memory."""
    return ctypes.string_at(pointer, nbytes)


def clear(pointer: int, nbytes: int, device: int = 0, stream: int = 0) -> None:  # noqa: ARG001
    """Set memory to zero."""
    ctypes.memset(pointer, 0, nbytes)


def empty(nbytes: int, device: int = 0, library: str = "numpy", stream: int = 0) -> Workspace:  # noqa: ARG001
    """Allocate workspace."""
    return Workspace(nbytes)
