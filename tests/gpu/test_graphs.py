"""CUDA graphs: what was recorded is right in every replay, and touches nothing but its own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import Spans, spans, testing
from tests.gpu.calls import OPTIONS, arrays, check, on_device
from tests.public import cached

pytestmark = pytest.mark.gpu
MARK = 0x7F


def others_memory(cupy: Any) -> list[Any]:
    """What somebody else allocates after the recording: of every size that a workspace may have."""
    return [cupy.full(512 * n, MARK, cupy.uint8) for n in range(1, 150)]


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_backward(mode: str, non_blocking: bool, cupy: Any) -> None:
    """The workspace is zeroed in every replay, and stays the graph's."""
    runtime = cupy.cuda.runtime
    q, k, v, do = on_device(cupy, 0, *arrays())
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **OPTIONS)
    cupy_flash.attention_backward(do, q, k, v, o, lse, **OPTIONS)  # loads the kernels
    runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=non_blocking)
    with stream:
        if mode != "Relaxed":  # else the pool may ask the driver for memory, which only this mode allows
            cupy_flash.attention_backward(do, q, k, v, o, lse, **OPTIONS)
        stream.begin_capture(getattr(runtime, f"streamCaptureMode{mode}"))
        try:
            gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **OPTIONS)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            others = others_memory(cupy)
            graph.launch(stream)
            stream.synchronize()
            check({"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv})
            assert all((x.get() == MARK).all() for x in others)
            del others


def test_replays_read_the_values_of_the_day(cupy: Any) -> None:
    q, k, v, _ = on_device(cupy, 0, *arrays())
    out = cupy.empty_like(q)
    cupy_flash.attention(q, k, v, out=out, **OPTIONS)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.synchronize()
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        cupy_flash.attention(q, k, v, out=out, **OPTIONS)
        graph = stream.end_capture()
        for seed in (1, 2):
            for x, value in zip((q, k, v), arrays(seed), strict=False):
                x.set(value, stream=stream)
            graph.launch(stream)
            check({"o": out.get(stream=stream)}, seed)


def test_replays_read_the_spans_of_the_day(cupy: Any) -> None:
    """Both passes are recorded with spans, which no host looks at; replays skip by new ones."""
    q, k, v, do = arrays()
    given = on_device(cupy, 0, q, k, v, do)
    of_the_day = [spans.documents(lengths).bounds for lengths in ([70], [30, 40], [1, 60, 9])]
    bounds = cupy.asarray(of_the_day[0])

    def both_passes() -> dict[str, Any]:
        o, lse = cupy_flash.attention(*given[:3], mask=Spans(bounds), return_lse=True, **OPTIONS)
        found = cupy_flash.attention_backward(given[3], *given[:3], o, lse, mask=Spans(bounds), **OPTIONS)
        return {"o": o, "lse": lse, "dq": found.dq, "dk": found.dk, "dv": found.dv}

    both_passes()  # loads the kernels
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        both_passes()
        stream.begin_capture()
        try:
            results = both_passes()
        finally:
            graph = stream.end_capture()
        for of_today in of_the_day[1:]:
            bounds.set(of_today, stream=stream)
            graph.launch(stream)
            found = {name: x.get(stream=stream) for name, x in results.items()}
            testing.assert_within_budget(found, q, k, v, do=do, mask=Spans(of_today), **OPTIONS)


def test_kv_cache_of_one_length(cupy: Any) -> None:
    """The length is a number of the call: no replay writes it where memory is somebody else's by then."""
    q, k, v, _ = arrays()
    given = on_device(cupy, 0, q[:, :, :1], k, v)
    expected = testing.reference_with_kv_cache(q[:, :, :1], k, v, cache_seqlens=np.array([33], np.int32)).o
    out = cupy.empty_like(given[0])
    cached(*given, cache_seqlens=33, out=out)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cached(*given, cache_seqlens=33, out=out)
        stream.begin_capture()
        cached(*given, cache_seqlens=33, out=out)
        graph = stream.end_capture()
        for _ in range(2):
            others = others_memory(cupy)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_allclose(out.get().astype(float), expected, atol=4e-3)
            assert all((x.get() == MARK).all() for x in others)
            del others
