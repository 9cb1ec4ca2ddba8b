"""Arrays on the virtual GPU where there is no CuPy: memory, streams, and tensors of torch that lie there.

To torch a tensor is one of the CPU, of memory that the host cannot touch, and it says that it is on a GPU.
What our code asks of torch on a GPU is asked of torch itself, but for the pool and the stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
import torch

from tests.virtual_gpu import install

TO_DEVICE, TO_HOST, BETWEEN = 1, 2, 3  # kinds of a copy
NON_BLOCKING, GLOBAL = 1, 0

streams: dict[int, int] = {}  # of torch, by device; the legacy one if there is none


def call(name: str, *arguments: Any) -> None:
    """Call the runtime, which only tests do."""
    status = getattr(install.library(), name)(*arguments)
    assert not status, f"{name} answers {status}"


@contextmanager
def on(ordinal: int) -> Iterator[None]:
    """A device that is current, as the runtime makes it; then what was before, which may be none."""
    before = c_void_p()
    call("cuCtxGetCurrent", byref(before))
    call("cudaSetDevice", c_int(ordinal))
    call("cudaFree", c_void_p(0))  # the first call of a thread gives it a context
    yield
    call("cuCtxSetCurrent", before)


def current() -> int | None:
    """The device of this thread's context; None if there is none."""
    context, ordinal = c_void_p(), c_int()
    call("cuCtxGetCurrent", byref(context))
    if context.value is None:
        return None
    call("cuCtxGetDevice", byref(ordinal))
    return ordinal.value


def memory(nbytes: int, ordinal: int) -> int:
    """Memory of a device, kept."""
    pointer = c_void_p()
    with on(ordinal):
        call("cudaMalloc", byref(pointer), c_size_t(nbytes))
    return pointer.value or 0


def stream(ordinal: int = 0) -> int:
    """A new stream that waits for no other."""
    handle = c_void_p()
    with on(ordinal):
        call("cudaStreamCreateWithFlags", byref(handle), c_int(NON_BLOCKING))
    return handle.value or 0


def copy(to: int, source: int, nbytes: int, kind: int, ordinal: int, handle: int = 0) -> None:
    """Enqueue a copy on a stream."""
    with on(ordinal):
        call("cudaMemcpyAsync", c_void_p(to), c_void_p(source), c_size_t(nbytes), kind, c_void_p(handle))


def synchronize(ordinal: int, handle: int) -> None:
    with on(ordinal):
        call("cudaStreamSynchronize", c_void_p(handle))


def put(x: np.ndarray, ordinal: int = 0) -> int:
    """A copy on a device, there when this returns."""
    x = np.ascontiguousarray(x)
    pointer = memory(x.nbytes, ordinal)
    copy(pointer, x.ctypes.data, x.nbytes, TO_DEVICE, ordinal)
    synchronize(ordinal, 0)
    return pointer


def get(pointer: int, shape: tuple[int, ...], dtype: Any, ordinal: int = 0, handle: int = 0) -> np.ndarray:
    """What a stream leaves there."""
    found = np.empty(shape, dtype)
    copy(found.ctypes.data, pointer, found.nbytes, TO_HOST, ordinal, handle)
    synchronize(ordinal, handle)
    return found


class Tensor(torch.Tensor):
    """A tensor on a virtual GPU."""

    ordinal: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.ordinal)

    def new_empty(self, shape: Any, dtype: Any = None, **_: Any) -> Tensor:
        return allocated(tuple(shape), dtype or self.dtype, self.ordinal)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Zero all of it on torch's stream, which is all that is asked of it."""
        assert (index, value) == (..., 0)
        nbytes, handle = self.numel() * self.itemsize, streams.get(self.ordinal, 0)
        with on(self.ordinal):
            call("cudaMemsetAsync", c_void_p(self.data_ptr()), 0, c_size_t(nbytes), c_void_p(handle))

    def numpy_of(self, handle: int | None = None) -> np.ndarray:
        """What torch's stream, or this one, leaves in it."""
        dtype = str(self.dtype).removeprefix("torch.")
        at = streams.get(self.ordinal, 0) if handle is None else handle
        return get(self.data_ptr(), tuple(self.shape), dtype, self.ordinal, at)


def seen(pointer: int, shape: tuple[int, ...], dtype: torch.dtype, ordinal: int) -> Tensor:
    """Memory of a device as a tensor of torch."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_char * nbytes).from_address(pointer)
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape).as_subclass(Tensor)
    tensor.ordinal = ordinal
    return tensor


def allocated(shape: tuple[int, ...], dtype: torch.dtype, ordinal: int) -> Tensor:
    """Memory of torch's pool: given back in the order of the stream that was current."""
    pointer, handle = c_void_p(), c_void_p(streams.get(ordinal, 0))
    with on(ordinal):
        call("cudaMallocAsync", byref(pointer), c_size_t(int(np.prod(shape)) * dtype.itemsize), handle)
    tensor = seen(pointer.value or 0, shape, dtype, ordinal)
    weakref.finalize(tensor, _release, ordinal, pointer, handle).atexit = False
    return tensor


def _release(ordinal: int, pointer: c_void_p, handle: c_void_p) -> None:
    with on(ordinal):
        call("cudaFreeAsync", pointer, handle)


def tensors(ordinal: int, *values: np.ndarray) -> list[Tensor]:
    """Copies as tensors, there when this returns."""
    return [seen(put(x, ordinal), x.shape, getattr(torch, x.dtype.name), ordinal) for x in values]


def late(sources: list[Tensor], handle: int) -> list[Tensor]:
    """Tensors of other numbers, that a stream has still to fill."""
    made = tensors(sources[0].ordinal, *(np.zeros(tuple(x.shape), np.float16) for x in sources))
    for to, x in zip(made, sources, strict=True):
        copy(to.data_ptr(), x.data_ptr(), x.numel() * x.itemsize, BETWEEN, x.ordinal, handle)
    return made
