"""Streams: kernels run on the one that is current, after what was enqueued there before."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash.device import driver
from tests.gpu.calls import OPTIONS, arrays, both_passes, check, on_device

pytestmark = pytest.mark.gpu
BETWEEN_DEVICES = 3  # kind of a copy


def late_copies(cupy: Any, stream: Any, sources: list[Any]) -> list[Any]:
    """Arrays of zeros that a stream has still to fill."""
    copies = [cupy.zeros_like(x) for x in sources]
    cupy.cuda.runtime.deviceSynchronize()
    for to, x in zip(copies, sources, strict=True):
        cupy.cuda.runtime.memcpyAsync(to.data.ptr, x.data.ptr, x.nbytes, BETWEEN_DEVICES, stream.ptr)
    return copies


def test_work_waits_for_what_its_stream_has_to_do(cupy: Any) -> None:
    sources = on_device(cupy, 0, *arrays())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        results = both_passes(*late_copies(cupy, stream, sources))
        on_host = {name: x.get(stream=stream) for name, x in results.items()}
    stream.synchronize()
    check(on_host)


@pytest.mark.parametrize("of_thread", [False, True])
def test_default_streams(of_thread: bool, cupy: Any) -> None:
    sources = on_device(cupy, 0, *arrays())
    with cupy.cuda.Stream.ptds if of_thread else cupy.cuda.Stream.null as stream:
        check(both_passes(*late_copies(cupy, stream, sources)))


def test_one_stream_waits_for_another_by_an_event(cupy: Any) -> None:
    q, k, v, do = on_device(cupy, 0, *arrays())
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with first:
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **OPTIONS)
        done = first.record()
    with second:
        second.wait_event(done)
        gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **OPTIONS)
    second.synchronize()
    check({"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv})


def test_inputs_may_be_overwritten_behind_a_call(cupy: Any) -> None:
    """And results given back, on the same stream: whoever gets their memory comes later."""
    sources = on_device(cupy, 0, *arrays())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v, do = late_copies(cupy, stream, sources)
        results = both_passes(q, k, v, do)
        for x in (q, k, v, do):
            x[...] = np.nan
        both_passes(q, k, v, do)
        kept = [cupy.full(nbytes, 0xFF, cupy.uint8) for nbytes in (1024, 17920, 35840, 66560)]
    stream.synchronize()
    check(results)
    del kept


def test_streams_side_by_side(cupy: Any) -> None:
    """Each call has a workspace of its own."""
    seeds = range(4)
    inputs = [on_device(cupy, 0, *arrays(seed)) for seed in seeds]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in seeds]
    results = []
    for stream, given in zip(streams, inputs, strict=True):
        with stream:
            results.append(both_passes(*given))
    for seed in reversed(seeds):  # the last enqueued is waited for first
        streams[seed].synchronize()
        check(results[seed], seed)


def test_threads_whose_first_call_is_ours(cupy: Any) -> None:
    given = on_device(cupy, 0, *arrays())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            check(both_passes(*given))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_workspace_of_a_foreign_stream_is_kept_for_it(cupy: Any) -> None:
    """CuPy's pool hands memory on in the order of a stream, here of one that CuPy did not make."""
    handle = cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking)
    nbytes = 12_345_678  # no other test has left a piece of this size
    try:
        first = driver.empty(nbytes, 0, "jax", handle)
        address = first.pointer
        del first
        mine = cupy.empty(nbytes, cupy.uint8)
        assert mine.data.ptr != address, "the other stream may still use it"
        assert driver.empty(nbytes, 0, "cupy").pointer != address
        assert driver.empty(nbytes, 0, "jax", handle).pointer == address
        assert cupy.cuda.get_current_stream().ptr != handle
    finally:
        cupy.cuda.runtime.streamSynchronize(handle)


def test_stream_of_another_library(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, workspace and its zeros belong to the stream of the call, whatever CuPy's own is."""
    sources = on_device(cupy, 0, *arrays())
    theirs = cupy.cuda.Stream(non_blocking=True)
    given = late_copies(cupy, theirs, sources)
    monkeypatch.setattr(driver, "current_stream", lambda *_: theirs.ptr)
    with cupy.cuda.Stream(non_blocking=True):
        results = both_passes(*given)
    check({name: x.get(stream=theirs) for name, x in results.items()})
