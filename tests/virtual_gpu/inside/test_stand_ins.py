"""The virtual GPU is as unforgiving as a GPU, and more."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from tests.gpu.calls import OPTIONS, arrays, check, on_device
from tests.virtual_gpu import install


def in_a_child(work: Callable[[], Any]) -> int:
    """Exit status of a copy of this process that does it: 0, 1 if it raised, or minus a signal."""
    child = os.fork()
    if not child:
        faulthandler.disable()  # what it would print looks like a failure of the tests
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_host_cannot_touch_device_memory(cupy: Any) -> None:
    (x,) = on_device(cupy, 0, arrays()[0])
    assert in_a_child(lambda: ctypes.string_at(x.data.ptr, 1)) == -signal.SIGSEGV


def test_nothing_runs_before_somebody_waits_for_it(cupy: Any) -> None:
    q, k, v, _ = on_device(cupy, 0, *arrays())
    before = install.library().virtual_gpu_simulated()
    o = cupy_flash.attention(q, k, v, **OPTIONS)
    assert install.library().virtual_gpu_simulated() == before
    on_host = o.get()
    assert install.library().virtual_gpu_simulated() == before + 1
    check({"o": on_host})


def test_a_stream_that_nobody_waits_for_lets_others_pass(cupy: Any) -> None:
    """Without an event between them the second sees nothing of what the first is to do."""
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(8, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    with first:
        x += 1
    assert x.get(stream=second)[0] == 0
    assert x.get(stream=first)[0] == 1


def test_memory_is_not_clean(cupy: Any) -> None:
    pointer = cupy.cuda.runtime.malloc(512)
    memory = cupy.cuda.UnownedMemory(pointer, 512, None)
    x = cupy.ndarray(128, np.float32, cupy.cuda.MemoryPointer(memory, 0))
    assert np.isnan(x.get()).all()
    cupy.cuda.runtime.free(pointer)


def test_copies_outside_of_what_was_allocated_are_refused(cupy: Any) -> None:
    pointer = cupy.cuda.runtime.malloc(512)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.runtime.memcpy(pointer, pointer + 500, 100, 3)
    cupy.cuda.runtime.free(pointer)


def test_a_function_that_is_not_there_says_so(cupy: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.runtime.ipcGetMemHandle(cupy.zeros(1).data.ptr)
    assert "cudaIpcGetMemHandle is not there" in capfd.readouterr().err


def test_a_runtime_that_is_not_redirected_says_so(cupy: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of thrust and cub, which are compiled for GPUs only; CuPy raises, or the process ends.

    Some find no device before they ask the driver for anything else, and thrust says that.
    """
    x = cupy.zeros(8, np.float32)
    assert in_a_child(lambda: cupy.sort(x)) != 0
    said = capfd.readouterr().err
    assert "not redirected" in said or "cudaErrorInvalidDevice: invalid device" in said


def test_a_kernel_that_fails_stays_failed(cupy: Any) -> None:
    """As on a GPU: every later call says so. Here the kernel reads where nothing is."""
    q, k, v, _ = on_device(cupy, 0, *arrays())
    nowhere = cupy.ndarray(
        q.shape, q.dtype, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, q.nbytes, None, 0), 0)
    )
    o = cupy_flash.attention(nowhere, k, v, **OPTIONS)
    for _ in range(2):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            cupy.cuda.runtime.deviceSynchronize()
    assert b"flash_forward" in install.library().virtual_gpu_failure()
    install.library().virtual_gpu_recover()
    del o
