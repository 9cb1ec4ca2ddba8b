"""load: cubins into the CUDA driver through CuPy, which is imported only inside functions."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from typing import Any

import numpy as np

from ..cubins import locate
from ..errors import UnsupportedError
from ..log import LOG
from ..plan.catalog import Variant
from . import gpu, tensor_map
from .gpu import NOT_STARTED, STILL, Device, Workspace, forked, version_text
from .run import Dim3
from .tensor_map import TensorMap

__all__ = [
    "CUPYS", "Device", "Kernel", "Workspace", "arch", "clear", "current_stream", "devices", "driver_version",
    "empty", "installed_cupys", "is_installed", "load", "multiprocessors", "read",
]  # fmt: skip

CUPYS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
_WITHOUT = "torch and JAX arrays also run without CuPy: CUPY_FLASH_DRIVER=cuda"


def is_installed() -> bool:
    """Whether this machine has an NVIDIA driver, without which no GPU can be used."""
    try:
        ctypes.CDLL(tensor_map.LIBRARY)
    except OSError:
        return False
    return True


def installed_cupys() -> tuple[str, ...]:
    """Installed distributions that provide cupy; two of them break each other."""

    def present(name: str) -> bool:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    return tuple(name for name in CUPYS if present(name))


@functools.cache
def _cupy() -> Any:
    """Import cupy, and check that it can run kernels here; each problem has an error of its own."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        raise UnsupportedError(
            "GPU arrays that are neither torch's nor JAX's need CuPy, which is not installed.",
            reasons=[STILL],
            hint="pip install cupy-cuda13x (drivers of CUDA 13) or cupy-cuda12x (older drivers)",
        ) from error
    except ImportError as error:
        packages = " and ".join(installed_cupys()) or "of unknown origin"
        raise UnsupportedError(
            f"CuPy ({packages}) does not import: {str(error).strip().splitlines()[-1].strip()}",
            reasons=[_WITHOUT, STILL],
            hint="pip uninstall " + " ".join(installed_cupys()) + ", then install one of them again",
        ) from error
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        raise UnsupportedError(
            "this CuPy is built for ROCm; the kernels are for NVIDIA GPUs.", reasons=[_WITHOUT, STILL],
            hint="pip install cupy-cuda12x",
        )  # fmt: skip
    driver, built_for = _call(runtime.driverGetVersion), runtime.runtimeGetVersion()
    if not driver:
        raise UnsupportedError(
            "there is no NVIDIA driver on this machine.",
            reasons=[STILL],
            hint="nvidia-smi, which shows the driver if there is one",
        )
    if built_for // 1000 < 12 or built_for // 1000 > driver // 1000:
        fitting = "cupy-cuda13x" if driver >= 13000 else "cupy-cuda12x"
        remove = " ".join(installed_cupys()) or "cupy"
        raise UnsupportedError(
            f"CuPy is built for CUDA {version_text(built_for)}, "
            f"the driver is for CUDA {version_text(driver)}.",
            reasons=["the kernels are compiled for CUDA 12 and 13, and a driver runs its own CUDA and older",
                     *([_WITHOUT] if driver >= 12000 else []), STILL],
            hint=f"pip uninstall {remove} && pip install {fitting}" if driver >= 12000
            else "a driver of version 525 or newer",
        )  # fmt: skip
    if not _call(runtime.getDeviceCount):
        raise UnsupportedError(
            "CUDA sees no GPU on this machine.",
            reasons=[STILL],
            hint="nvidia-smi; and unset CUDA_VISIBLE_DEVICES, which hides GPUs",
        )
    return cupy


def _call(function: Any) -> int:
    """Return the result of a CUDA query, or 0 if it fails, as it does without a driver or GPU."""
    try:
        return int(function())
    except RuntimeError as error:
        if getattr(error, "status", 0) == NOT_STARTED:
            raise forked() from error
        return 0


# ---------------------------------------------------------------------------------------------- GPUs


def driver_version() -> int:
    """The CUDA version of the driver, as CUDA counts: 12040 is 12.4."""
    return int(_cupy().cuda.runtime.driverGetVersion())


@functools.cache
def devices() -> tuple[Device, ...]:
    """The GPUs of this machine, at least one."""
    runtime = _cupy().cuda.runtime
    found = []
    for ordinal in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(ordinal)
        found.append(
            Device(
                ordinal,
                properties["name"].decode(),
                f"sm_{properties['major']}{properties['minor']}",
                properties["multiProcessorCount"],
                properties["totalGlobalMem"],
            )
        )
        LOG.info("found cuda:%d, %s, %s", ordinal, found[-1].name, found[-1].arch)
    return tuple(found)


def arch(device: int) -> str:
    """Architecture of a device, such as "sm_90"."""
    return devices()[device].arch


def multiprocessors(device: int) -> int:
    """Number of multiprocessors of a device."""
    return devices()[device].multiprocessors


def current_stream(device: int, library: str = "cupy") -> int:
    """Handle of the current stream of the caller's library: torch's for torch, CuPy's for all others."""
    if library == "torch":
        return gpu.torch_stream(device)
    return int(_cupy().cuda.get_current_stream(device).ptr)


# ---------------------------------------------------------------------------------------------- workspace


# Workspaces that captured graphs use, never freed.
_recorded: list[Any] = []


def empty(nbytes: int, device: int, library: str = "cupy", stream: int | None = None) -> Workspace:
    """Allocate workspace for work on a stream of a library; by default on CuPy's current one.

    why from its library's pool: a pool reuses memory in the order of its own library's stream, so that work
    on torch's stream must use torch's pool.
    """
    if not nbytes:
        return Workspace(0, None)
    if library == "torch":
        return gpu.torch_workspace(nbytes, device)
    cupy = _cupy()
    with cupy.cuda.Device(device):
        if stream is None or stream == cupy.cuda.get_current_stream().ptr:
            memory = cupy.cuda.alloc(nbytes)
        else:
            with _as_cupy_stream(cupy, stream):
                memory = cupy.cuda.alloc(nbytes)
        handle = cupy.cuda.get_current_stream(device).ptr if stream is None else stream
        if cupy.cuda.runtime.streamIsCapturing(handle):
            # why: every replay of the graph uses this memory, and the pool would hand it to other work.
            # (torch's pool supports graph capture.)
            _recorded.append(memory)
    return Workspace(int(memory.ptr), memory)


def read(pointer: int, nbytes: int, device: int, stream: int) -> bytes:
    """Read device memory after all work on the stream has finished; the host waits."""
    cuda, held = _cupy().cuda, np.empty(nbytes, np.uint8)
    with cuda.Device(device):
        cuda.runtime.memcpyAsync(held.ctypes.data, pointer, nbytes, cuda.runtime.memcpyDeviceToHost, stream)
        cuda.runtime.streamSynchronize(stream)
    return held.tobytes()


def clear(pointer: int, nbytes: int, device: int, stream: int) -> None:
    """Enqueue setting memory to zero."""
    cuda = _cupy().cuda
    with cuda.Device(device):
        cuda.runtime.memsetAsync(pointer, 0, nbytes, stream)


def _as_cupy_stream(cupy: Any, handle: int) -> Any:
    """Wrap a stream of another library for CuPy, so that CuPy's pool reuses memory in its order."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Stream(handle))
    return cupy.cuda.ExternalStream(handle)


# ---------------------------------------------------------------------------------------------- kernels


class _Stream:
    """A stream handle for CuPy's launch, which reads only `ptr`.

    why not CuPy's own: cupy.cuda.ExternalStream is deprecated, and its successor takes 5 us.
    """

    __slots__ = ("ptr",)

    def __init__(self, handle: int) -> None:
        self.ptr = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the handle."""
        return 0, self.ptr


@functools.lru_cache(maxsize=64)
def _void(nbytes: int) -> np.dtype[Any]:
    return np.dtype(f"V{nbytes}")


class Kernel:
    """A loaded entry point on one device. `launch` may be called from several threads."""

    __slots__ = ("_cupy", "_function", "cubin", "device")

    def __init__(self, cubin: locate.Cubin, function: Any, device: int) -> None:
        self.cubin = cubin
        self.device = device
        self._function = function
        self._cupy = _cupy()

    def encode_tensor_map(self, tensor: TensorMap, pointer: int) -> bytes:
        """Encode a tensor map for bulk copies on this device; errors as in `tensor_map.encode`."""
        cuda = self._cupy.cuda
        if cuda.runtime.getDevice() == self.device and tensor_map.has_context():
            return tensor_map.encode(tensor, pointer)
        with cuda.Device(self.device):
            # why: a thread gets its context from its first runtime call, and this may be the first.
            cuda.runtime.memGetInfo()
            return tensor_map.encode(tensor, pointer)

    def clear(self, pointer: int, nbytes: int, stream: int) -> None:
        """Enqueue setting memory to zero."""
        clear(pointer, nbytes, self.device, stream)

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, stream: int) -> None:
        """Enqueue the kernel; parameters as in `run.Kernel`."""
        if 0 in grid:
            return  # why: CuPy would launch one block for a zero
        # why an array: CuPy passes a NumPy array of size one by value, whatever its dtype.
        struct = np.frombuffer(params, _void(len(params)))
        cuda = self._cupy.cuda
        if cuda.runtime.getDevice() == self.device:
            self._function(grid, block, (struct,), shared_bytes, _Stream(stream))
        else:
            with cuda.Device(self.device):
                self._function(grid, block, (struct,), shared_bytes, _Stream(stream))


def _load(variant: Variant, cubin: locate.Cubin, code: bytes, device: int) -> Kernel:
    cupy = _cupy()
    with cupy.cuda.Device(device):
        module = cupy.cuda.Module()
        module.load(code)
        function = module.get_function(variant.name)
        if variant.shared_bytes > gpu.SHARED_BYTES_BY_DEFAULT:
            cupy.cuda.driver.funcSetAttribute(function.ptr, gpu.MAX_SHARED_BYTES, variant.shared_bytes)
        return Kernel(cubin, function, device)


def _refusals() -> tuple[type[Exception], ...]:
    cuda = _cupy().cuda
    return cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError


_loader = gpu.Loader(arch, driver_version, _load, _refusals)


def load(variant: Variant, device: int) -> Kernel:
    """Locate and load a variant, once per device; later calls only look it up."""
    return _loader(variant, device)
