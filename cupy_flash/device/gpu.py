"""Code that both GPU drivers share: `driver`, which uses CuPy, and `cuda`, which calls libcuda by ctypes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..cubins import locate, on_demand
from ..errors import CubinNotFoundError, UnsupportedError
from ..log import LOG
from ..plan.catalog import Variant
from .run import Driver

__all__ = [
    "MAX_SHARED_BYTES", "NOT_STARTED", "SHARED_BYTES_BY_DEFAULT", "STILL", "Device", "GpuDriver", "Loader",
    "Workspace", "forked", "torch_stream", "torch_workspace", "version_text",
]  # fmt: skip

# Shared memory that any kernel may use; a kernel that needs more has to set the attribute below first.
SHARED_BYTES_BY_DEFAULT = 48 * 1024
MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STILL = "attention on NumPy arrays needs neither CuPy nor a GPU"
NOT_STARTED = 3  # status of driver and runtime in a child forked from a process that has used CUDA


class Device(NamedTuple):
    """A GPU of this machine."""

    ordinal: int  # CUDA device number
    name: str
    arch: str  # e.g. "sm_86"
    multiprocessors: int
    memory_bytes: int  # total global memory


class GpuDriver(Driver, Protocol):
    """A driver for GPUs, which also lists them."""

    def devices(self) -> tuple[Device, ...]:
        """The GPUs of this machine, at least one."""

    def driver_version(self) -> int:
        """The CUDA version of the driver, as CUDA counts: 12040 is 12.4."""


def version_text(version: int) -> str:
    """Format a CUDA version: 12040 becomes "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def forked() -> UnsupportedError:
    """The error for `NOT_STARTED`."""
    return UnsupportedError(
        "this process was forked from one that had used CUDA, which does not work in the child.",
        reasons=[STILL],
        hint='multiprocessing.get_context("spawn"), or fork before the first use of CUDA',
    )


# ---------------------------------------------------------------------------------------------- torch's own


def torch_stream(device: int) -> int:
    """Handle of torch's current stream of a device."""
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)


class Workspace:
    """Device memory of one call, returned to its pool with the last reference; see `run.Workspace`."""

    __slots__ = ("_owner", "pointer")

    def __init__(self, pointer: int, owner: Any) -> None:
        self.pointer = pointer
        self._owner = owner


def torch_workspace(nbytes: int, device: int) -> Workspace:
    """Allocate from torch's pool, for work on torch's current stream; the pool supports graph capture."""
    torch = sys.modules["torch"]
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    return Workspace(tensor.data_ptr(), tensor)


# ---------------------------------------------------------------------------------------------- loading

_Kernel = TypeVar("_Kernel")


class Loader(Generic[_Kernel]):
    """Loads each variant once per device, from any number of threads.

    `load` loads a variant into the driver, from its cubin and the cubin's bytes, on a device; `refusals`
    returns the exception types that the driver raises for a cubin that it cannot load.
    """

    def __init__(
        self,
        arch: Callable[[int], str],
        driver_version: Callable[[], int],
        load: Callable[[Variant, locate.Cubin, bytes, int], _Kernel],
        refusals: Callable[[], tuple[type[Exception], ...]],
    ) -> None:
        self.kernels: dict[tuple[str, int], _Kernel] = {}
        self._arch, self._driver_version, self._load, self._refusals = arch, driver_version, load, refusals
        self._loading = threading.Lock()

    def __call__(self, variant: Variant, device: int) -> _Kernel:
        """Return the kernel; the first call loads it, or raises CubinNotFoundError."""
        key = (variant.name, device)
        kernel = self.kernels.get(key)
        if kernel is None:
            with self._loading:
                kernel = self.kernels.get(key)
                if kernel is None:
                    kernel = self.kernels[key] = self._loaded(variant, device)
        return kernel

    def _loaded(self, variant: Variant, device: int) -> _Kernel:
        version = self._driver_version()
        cubin = on_demand.locate_or_compile(variant, self._arch(device), version)
        code = locate.code(cubin)
        start = time.perf_counter()
        try:
            kernel = self._load(variant, cubin, code, device)
        except self._refusals() as error:
            raise CubinNotFoundError(
                f"the driver (CUDA {version_text(version)}) does not load {cubin.path}: "
                f"{str(error).splitlines()[0].removesuffix('.')}.",
                hint="python -m cupy_flash info, and a newer driver",
            ) from error
        milliseconds = 1000 * (time.perf_counter() - start)
        LOG.info("loaded %s on cuda:%d in %.1f ms", cubin.path, device, milliseconds)
        return kernel
