"""libcuda, the CUDA driver library, through ctypes: its functions, and exceptions for its errors."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p

from ..errors import UnsupportedError
from . import tensor_map
from .gpu import NOT_STARTED, STILL, forked, version_text

__all__ = ["CudaError", "check", "failure", "library", "version"]

# Argument types of the functions used here, which all return a CUresult. A handle is an address.
_ADDRESS = c_size_t  # CUdeviceptr; why not c_void_p: the driver's type is an integer
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    # function; grid; block; shared bytes, stream; addresses of parameters, and `extra`, which is null here.
    # `cuda.Kernel` calls it without the prototype.
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 3, *(c_uint,) * 3, c_uint, c_void_p, c_void_p, c_void_p),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, c_void_p),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemAllocAsync": (POINTER(_ADDRESS), c_size_t, c_void_p),
    "cuMemFreeAsync": (_ADDRESS, c_void_p),
}
_OLDEST = 12000  # oldest CUDA version with cubins
_NEWER = "an NVIDIA driver of version 525 or newer"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# Hints by the name of an error, without CUDA_ERROR_.
_HINTS = {
    "OUT_OF_MEMORY": "a smaller batch, or less memory that other work keeps on this GPU",
    "ILLEGAL_ADDRESS": "CUDA_LAUNCH_BLOCKING=1, which shows the call that failed; it may be an earlier one",
    "LAUNCH_FAILED": "CUDA_LAUNCH_BLOCKING=1, which shows the call that failed; it may be an earlier one",
    "STREAM_CAPTURE_UNSUPPORTED": "a call outside of the graph, as a warm-up, before it is captured",
    "NOT_SUPPORTED": "a newer NVIDIA driver, or CuPy, whose memory pool needs less of it",
}
_started_in = 0  # process id at cuInit


class CudaError(RuntimeError):
    """A call of the CUDA driver failed; `name` is such as "CUDA_ERROR_OUT_OF_MEMORY"."""

    def __init__(self, name: str, headline: str, hint: str) -> None:
        super().__init__(f"{headline}\nTry: {hint}")
        self.name = name


@functools.cache
def library() -> ctypes.CDLL:
    """Load libcuda and initialise it; each reason why that fails has an error of its own."""
    global _started_in
    try:
        found = ctypes.CDLL(tensor_map.LIBRARY)
    except OSError as error:
        raise UnsupportedError(
            f"the CUDA driver does not load: {error}.", reasons=[STILL], hint=_NEWER
        ) from error
    number = _version(found)
    missing = [name for name in _PROTOTYPES if not hasattr(found, name)]
    if number < _OLDEST or missing:
        without = f"; it has no {missing[0]}" if missing and number >= _OLDEST else ""
        raise UnsupportedError(
            f"the NVIDIA driver is for CUDA {version_text(number)}{without}.",
            reasons=["the kernels are compiled for CUDA 12 and 13, and a driver runs its own CUDA and older",
                     STILL],
            hint=_NEWER,
        )  # fmt: skip
    for name, kinds in _PROTOTYPES.items():
        getattr(found, name).argtypes = kinds
    if status := found.cuInit(0):
        raise _not_started(found, status)
    _started_in = os.getpid()
    return found


def _version(found: ctypes.CDLL) -> int:
    number = c_int()
    return 0 if found.cuDriverGetVersion(ctypes.byref(number)) else number.value


def version() -> int:
    """The CUDA version of the driver, as CUDA counts: 12040 is 12.4."""
    return _version(library())


def _not_started(found: ctypes.CDLL, status: int) -> UnsupportedError:
    """The error for a failed cuInit."""
    if status == NOT_STARTED:
        return forked()
    if status == _NO_DEVICE:
        return UnsupportedError(
            "CUDA sees no GPU on this machine.",
            reasons=[STILL],
            hint="nvidia-smi; and unset CUDA_VISIBLE_DEVICES, which hides GPUs",
        )
    name, text = _words(found, status)
    return UnsupportedError(
        f"the NVIDIA driver (CUDA {version_text(_version(found))}) does not start: {name}, {text}.",
        reasons=[STILL],
        hint="nvidia-smi, which says more; after an update of the driver, restart the machine",
    )


def _words(found: ctypes.CDLL, status: int) -> tuple[str, str]:
    """Name and text of an error; its number if the driver has no name for it."""
    words = []
    for function in (found.cuGetErrorName, found.cuGetErrorString):
        text = c_char_p()
        function(status, ctypes.byref(text))
        words.append((text.value or b"").decode())
    return words[0] or f"CUDA error {status}", words[1] or "unknown"


def check(status: int, what: str) -> None:
    """Raise an exception if the status is an error; `what` says what was attempted."""
    if status:
        raise failure(status, what)


def failure(status: int, what: str) -> Exception:
    """The exception for a status that is not 0."""
    if _started_in and os.getpid() != _started_in:
        return forked()
    found = library()
    name, text = _words(found, status)
    hint = _HINTS.get(name.removeprefix("CUDA_ERROR_"), "python -m cupy_flash info")
    return CudaError(name, f"{what}: {name}, {text} (driver of CUDA {version_text(_version(found))}).", hint)
