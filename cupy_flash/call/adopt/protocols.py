"""Adopt any other array, by the CUDA array interface or DLPack."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import InvalidArgumentsError, UnsupportedError
from ..arrays import ArrayView
from ..checks import of_integers
from ..public_names import public_name, type_phrase
from .numpy_cupy import foreign_order, from_cupy, from_numpy, refuse_rules

__all__ = ["from_protocol"]


def from_protocol(x: Any, name: str) -> ArrayView:
    """View an array through a protocol; errors name the argument."""
    try:
        return _from_protocol(x, name)
    except (InvalidArgumentsError, UnsupportedError):
        raise
    except ImportError:
        raise UnsupportedError(
            f"{public_name(name)} is {type_phrase(x)} on a GPU, and arrays there that are neither torch's "
            "nor JAX's need CuPy, which is not installed.",
            hint="pip install cupy-cuda13x (drivers of CUDA 13) or cupy-cuda12x (older drivers)",
        ) from None
    except Exception as error:
        # why Exception: the failing code is another library's
        raise InvalidArgumentsError(
            f"{public_name(name)} is {type_phrase(x)} whose array protocol fails: "
            f"{type(error).__name__}: {error}.",
            hint="a NumPy, CuPy, torch or JAX array",
        ) from error


def _from_protocol(x: Any, name: str) -> ArrayView:
    """View an array through the CUDA array interface or DLPack."""
    face = getattr(x, "__cuda_array_interface__", None)
    if face is not None:
        return _from_interface(face, x, name)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind, ordinal = x.__dlpack_device__()
        if kind == _DLPACK_CPU:
            return from_numpy(np.from_dlpack(x), name)._replace(library="dlpack")
        if kind in _DLPACK_CUDA:
            import cupy

            return from_cupy(cupy.from_dlpack(x), name)._replace(library="dlpack")
        raise InvalidArgumentsError(
            f"{public_name(name)} is on DLPack device type {kind}:{ordinal}.",
            hint="an array in main memory or on a CUDA GPU",
        )
    name = public_name(name)
    raise InvalidArgumentsError(f"{name} is {type_phrase(x)}, not an array.", hint=_array_inside(x, name))


def _array_inside(x: Any, name: str) -> str:
    """The hint for an object that is not an array: how to get one from it."""
    if name == "mask" and callable(x):
        return "mask=cupy_flash.mask(f), made once, where f is your function"
    if x is None and name in ("o", "lse"):
        return "o, lse = attention(..., return_lse=True)"
    # why on the type: reading `values` of a lazy object would compute them, and of a dict it is a method
    if not callable(getattr(type(x), "values", len)):
        return f"{name}.values, the array without its labels"
    if isinstance(x, (list, tuple)):
        return f"numpy.asarray({name}{', numpy.int32' * of_integers(x)})"
    if hasattr(x, "toarray"):  # of scipy.sparse
        return f"{name}.toarray()"
    if isinstance(x, memoryview) or hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return f"numpy.asarray({name})"
    return "a NumPy, CuPy, torch or JAX array, or anything with __dlpack__"


_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # device memory and managed memory
_LEGACY_STREAM = 1  # in the CUDA array interface, where 0 would be ambiguous


def _from_interface(face: dict[str, Any], x: Any, name: str) -> ArrayView:
    """View an array by its CUDA array interface, version 3 or older.

    CuPy finds the GPU by the address. CuPy's current stream waits for work on the producer's stream.
    """
    import cupy

    stream = face.get("stream")
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream <= 0):
        raise InvalidArgumentsError(
            f"the __cuda_array_interface__ of {public_name(name)} has the stream {stream!r}, "
            "which is not a valid stream.",
            hint="None if there is nothing to wait for, 1 or 2 for a default stream, or a handle",
        )
    if face.get("mask") is not None:
        return refuse_rules(x, name)
    dtype = np.dtype(face["typestr"])
    if not dtype.isnative:
        raise foreign_order(dtype, name)
    pointer, shape = face["data"][0], tuple(face["shape"])
    # why not cupy.asarray: it copies arrays of other GPUs, and blocks the host until the stream is done.
    memory = cupy.cuda.UnownedMemory(pointer, math.prod(shape) * dtype.itemsize, x)
    if memory.device_id < 0:
        raise InvalidArgumentsError(
            f"the __cuda_array_interface__ of {public_name(name)} has the address {pointer:#x}, "
            "which is on no GPU.",
            hint=f"numpy.asarray({public_name(name)}) if it is in main memory",
        )
    array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), face.get("strides"))
    if stream is not None:
        _wait_for(stream, memory.device_id)
    return from_cupy(array, name)._replace(library="dlpack", readonly=bool(face["data"][1]))


def _wait_for(stream: int, device: int) -> None:
    """Make CuPy's current stream of a GPU wait for the work enqueued on another one."""
    import cupy

    own = cupy.cuda.get_current_stream(device).ptr
    # why not always: during capture, a stream must not wait for work outside the captured graph.
    if (own or _LEGACY_STREAM) == stream:
        return
    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
        cupy.cuda.runtime.streamWaitEvent(own, event.ptr)
