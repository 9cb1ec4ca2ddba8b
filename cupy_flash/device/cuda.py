"""load: cubins into the CUDA driver through libcuda, for arrays of torch and JAX without CuPy.

It has the same interface as `driver`, and uses the primary context of a device, as torch and XLA do.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from ..cubins import locate
from ..errors import UnsupportedError
from ..log import LOG
from ..plan.catalog import Variant
from . import gpu, tensor_map
from .gpu import Device, Workspace
from .libcuda import CudaError, check, failure, library, version
from .run import Dim3
from .tensor_map import TensorMap

__all__ = [
    "Kernel", "arch", "clear", "current_stream", "devices", "driver_version", "empty", "load",
    "multiprocessors", "read",
]  # fmt: skip

# CU_DEVICE_ATTRIBUTE_...
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NAME_BYTES = 256
_Params = c_char_p * 1


# ---------------------------------------------------------------------------------------------- GPUs


def driver_version() -> int:
    """The CUDA version of the driver, as CUDA counts: 12040 is 12.4."""
    return version()


@functools.cache
def devices() -> tuple[Device, ...]:
    """The GPUs of this machine, at least one."""
    cuda, count = library(), c_int()
    check(cuda.cuDeviceGetCount(byref(count)), "the number of GPUs")
    found = []
    for ordinal in range(count.value):
        name, memory = ctypes.create_string_buffer(_NAME_BYTES), c_size_t()
        handle = _handle(ordinal)
        check(cuda.cuDeviceGetName(name, _NAME_BYTES, handle), f"the name of cuda:{ordinal}")
        check(cuda.cuDeviceTotalMem_v2(byref(memory), handle), f"the memory of cuda:{ordinal}")
        major, minor, count_of_sms = (_attribute(handle, x) for x in (_MAJOR, _MINOR, _MULTIPROCESSORS))
        found.append(Device(ordinal, name.value.decode(), f"sm_{major}{minor}", count_of_sms, memory.value))
        LOG.info("found cuda:%d, %s, %s", ordinal, found[-1].name, found[-1].arch)
    return tuple(found)


def _handle(ordinal: int) -> int:
    handle = c_int()
    check(library().cuDeviceGet(byref(handle), ordinal), f"cuda:{ordinal}")
    return handle.value


def _attribute(handle: int, which: int) -> int:
    value = c_int()
    check(library().cuDeviceGetAttribute(byref(value), which, handle), f"attribute {which} of a GPU")
    return value.value


def arch(device: int) -> str:
    """Architecture of a device, such as "sm_90"."""
    return devices()[device].arch


def multiprocessors(device: int) -> int:
    """Number of multiprocessors of a device."""
    return devices()[device].multiprocessors


def current_stream(device: int, library: str = "torch") -> int:
    """Handle of torch's current stream; calls of `cupy_flash.jax` pass their stream themselves."""
    if library != "torch":
        raise UnsupportedError(
            f"an array of {library} on a GPU, in a call that is given no stream.",
            hint="cupy_flash.jax, whose calls run on XLA's stream" if library == "jax"
            else "pip install cupy-cuda13x (drivers of CUDA 13) or cupy-cuda12x (older drivers)",
        )  # fmt: skip
    return gpu.torch_stream(device)


# ---------------------------------------------------------------------------------------------- contexts


@functools.cache
def _context(device: int) -> int:
    """The primary context of a device, retained until the process ends."""
    context = c_void_p()
    check(
        library().cuDevicePrimaryCtxRetain(byref(context), _handle(device)), f"the context of cuda:{device}"
    )
    return context.value or 0


@contextmanager
def _on(device: int) -> Iterator[ctypes.CDLL]:
    """Make the context of a device current in the calling thread, and yield the library."""
    cuda, context, here = library(), _context(device), c_void_p()
    cuda.cuCtxGetCurrent(byref(here))
    if here.value == context:
        yield cuda
        return
    check(cuda.cuCtxPushCurrent_v2(context), f"the context of cuda:{device}")
    try:
        yield cuda
    finally:
        cuda.cuCtxPopCurrent_v2(byref(c_void_p()))


# ---------------------------------------------------------------------------------------------- memory


class _OnStream:
    """Memory of the driver's pool, freed in stream order with the last reference."""

    __slots__ = ("device", "pointer", "stream")

    def __init__(self, pointer: int, device: int, stream: int) -> None:
        self.pointer, self.device, self.stream = pointer, device, stream

    def __del__(self) -> None:
        # why: at interpreter exit the context is destroyed, and its memory with it.
        if not sys.is_finalizing():
            with _on(self.device) as cuda:
                cuda.cuMemFreeAsync(self.pointer, self.stream)


# Workspaces that captured graphs use, never freed.
_recorded: list[int] = []


def empty(nbytes: int, device: int, library: str = "torch", stream: int | None = None) -> Workspace:
    """Allocate workspace as `driver.empty` does, from torch's pool for torch and from CUDA's otherwise."""
    if not nbytes:
        return Workspace(0, None)
    if library == "torch":
        return gpu.torch_workspace(nbytes, device)
    stream = current_stream(device, library) if stream is None else stream
    pointer, what = c_size_t(), f"{nbytes} bytes of workspace on cuda:{device}"
    with _on(device) as cuda:
        if _captures(cuda, stream):
            # why: every replay of the graph uses this memory, and a free would be captured, too.
            mode = c_int(_RELAXED)
            cuda.cuThreadExchangeStreamCaptureMode(byref(mode))
            status = cuda.cuMemAlloc_v2(byref(pointer), nbytes)
            cuda.cuThreadExchangeStreamCaptureMode(byref(mode))
            check(status, what)
            _recorded.append(pointer.value)
            return Workspace(pointer.value, None)
        check(cuda.cuMemAllocAsync(byref(pointer), nbytes, stream), what)
    return Workspace(pointer.value, _OnStream(pointer.value, device, stream))


def _captures(cuda: ctypes.CDLL, stream: int) -> bool:
    """Whether the stream is being captured into a graph."""
    status = c_int()
    check(cuda.cuStreamIsCapturing(stream, byref(status)), "the capture of a stream")
    return status.value != 0


def read(pointer: int, nbytes: int, device: int, stream: int) -> bytes:
    """Read device memory after all work on the stream has finished; the host waits."""
    held = ctypes.create_string_buffer(nbytes)
    with _on(device) as cuda:
        check(cuda.cuMemcpyDtoHAsync_v2(held, pointer, nbytes, stream), f"reading {nbytes} bytes")
        check(cuda.cuStreamSynchronize(stream), "waiting for a stream")
    return held.raw


def clear(pointer: int, nbytes: int, device: int, stream: int) -> None:
    """Enqueue setting memory to zero."""
    with _on(device) as cuda:
        check(cuda.cuMemsetD8Async(pointer, 0, nbytes, stream), f"setting {nbytes} bytes to zero")


# ---------------------------------------------------------------------------------------------- kernels


class Kernel:
    """A loaded CUfunction on one device. `launch` may be called from several threads."""

    __slots__ = ("_context", "_current", "_function", "_launch", "cubin", "device")

    def __init__(self, cubin: locate.Cubin, function: int, device: int) -> None:
        self.cubin = cubin
        self.device = device
        self._function = c_void_p(function)
        self._context = _context(device)
        # why by key: a function looked up by key has no prototype, and checking arguments against one doubles
        # the time of a call. An int is passed as a C int, so a handle has to be a c_void_p.
        self._current, self._launch = library()["cuCtxGetCurrent"], library()["cuLaunchKernel"]

    def encode_tensor_map(self, tensor: TensorMap, pointer: int) -> bytes:
        """Encode a tensor map for bulk copies on this device; errors as in `tensor_map.encode`."""
        with _on(self.device):
            return tensor_map.encode(tensor, pointer)

    def clear(self, pointer: int, nbytes: int, stream: int) -> None:
        """Enqueue setting memory to zero."""
        if status := self._call(library().cuMemsetD8Async, pointer, 0, nbytes, stream):
            raise failure(status, f"setting {nbytes} bytes to zero")

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, stream: int) -> None:
        """Enqueue the kernel; parameters as in `run.Kernel`."""
        if 0 in grid:
            return
        # why no buffer: the driver copies the struct from the bytes object before it returns.
        held = _Params(params)
        if status := self._call(
            self._launch, self._function, *grid, *block, shared_bytes, c_void_p(stream), held, None
        ):
            raise failure(status, f"the launch of {self.cubin.path.stem}")

    def _call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Call a driver function in the context of the device. why not `_on`: it takes five times as long."""
        here = c_void_p()
        self._current(byref(here))
        if here.value == self._context:
            return function(*arguments)
        with _on(self.device):
            return function(*arguments)


def _load(variant: Variant, cubin: locate.Cubin, code: bytes, device: int) -> Kernel:
    module, function = c_void_p(), c_void_p()
    with _on(device) as cuda:
        check(cuda.cuModuleLoadData(byref(module), code), "cuModuleLoadData")
        check(cuda.cuModuleGetFunction(byref(function), module, variant.name.encode()), "cuModuleGetFunction")
        if variant.shared_bytes > gpu.SHARED_BYTES_BY_DEFAULT:
            status = cuda.cuFuncSetAttribute(function, gpu.MAX_SHARED_BYTES, variant.shared_bytes)
            check(status, f"{variant.shared_bytes} bytes of shared memory")
    return Kernel(cubin, function.value or 0, device)


def _refusals() -> tuple[type[Exception], ...]:
    return (CudaError,)


_loader = gpu.Loader(arch, driver_version, _load, _refusals)


def load(variant: Variant, device: int) -> Kernel:
    """Locate and load a variant, once per device; later calls only look it up."""
    return _loader(variant, device)
