"""What XLA hands over runs through the driver's own library: addresses, a stream, and no current context."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p
from typing import Any

import numpy as np
import pytest

from cupy_flash import UnsupportedError
from cupy_flash.call.given import Options
from cupy_flash.device import cuda
from tests.gpu.calls import OPTIONS, arrays, check
from tests.virtual_gpu.alone import gpu

run = pytest.importorskip("cupy_flash.jax.run", reason="jax is not installed")
SHAPE, ROWS = (1, 2, 70, 64), (1, 2, 70)


def config(direction: str, names: tuple[str, ...], results: dict[str, str]) -> Any:
    kinds = {"lse": "float32", "dlse": "float32"}
    return run.Config(
        direction,
        Options()._replace(**OPTIONS),
        names,
        tuple(kinds.get(name, "float16") for name in names),
        tuple(3 if name in kinds else 4 for name in names),
        tuple((name, 3 if name in kinds else 4, dtype) for name, dtype in results.items()),
    )


def passes(given: list[int], ordinal: int, stream: int) -> dict[str, np.ndarray]:
    """Forward and backward of arrays at these addresses."""
    q, k, v, do = given
    o, lse, dq, dk, dv = (gpu.memory(int(np.prod(s)) * n, ordinal) for s, n in
                          ((SHAPE, 2), (ROWS, 4), (SHAPE, 2), (SHAPE, 2), (SHAPE, 2)))  # fmt: skip
    place = ("cuda", ordinal), stream
    forward = config("forward", ("q", "k", "v"), {"o": "float16", "lse": "float32"})
    run.run(forward, [SHAPE] * 4 + [ROWS], [q, k, v, o, lse], *place)
    names = ("q", "k", "v", "o", "lse", "do")
    backward = config("backward", names, {"dq": "float16", "dk": "float16", "dv": "float16"})
    shapes = [ROWS if name == "lse" else SHAPE for name in names] + [SHAPE] * 3
    run.run(backward, shapes, [q, k, v, o, lse, do, dq, dk, dv], *place)
    found = {"o": o, "dq": dq, "dk": dk, "dv": dv}
    on_host = {name: gpu.get(p, SHAPE, np.float16, ordinal, stream) for name, p in found.items()}
    return on_host | {"lse": gpu.get(lse, ROWS, np.float32, ordinal, stream)}


@pytest.mark.parametrize("ordinal", [0, 1])
def test_work_is_on_xlas_stream(ordinal: int) -> None:
    sources, stream = [gpu.put(x, ordinal) for x in arrays()], gpu.stream(ordinal)
    given = [gpu.put(np.zeros(SHAPE, np.float16), ordinal) for _ in sources]
    for to, source in zip(given, sources, strict=True):
        gpu.copy(to, source, int(np.prod(SHAPE)) * 2, gpu.BETWEEN, ordinal, stream)
    check(passes(given, ordinal, stream))


def test_reading_waits_for_the_stream() -> None:
    stream, numbers = gpu.stream(1), np.arange(8, dtype=np.float32)
    source, to = gpu.put(numbers, 1), gpu.put(np.zeros_like(numbers), 1)
    gpu.copy(to, source, numbers.nbytes, gpu.BETWEEN, 1, stream)
    assert cuda.read(to, numbers.nbytes, 1, stream) == numbers.tobytes()
    cuda.clear(to, 16, 1, stream)
    assert np.frombuffer(cuda.read(to, 32, 1, stream), np.float32).tolist() == [0, 0, 0, 0, 4, 5, 6, 7]


def test_workspace_is_given_back_behind_the_work() -> None:
    """To the driver's pool, in the order of the stream: until then nobody else gets it."""
    stream = gpu.stream()
    first = cuda.empty(4096, 0, "jax", stream)
    address = first.pointer
    gpu.synchronize(0, stream)
    assert cuda.empty(4096, 0, "jax", stream).pointer != address, "it is still in use"
    cuda.clear(address, 4096, 0, stream)
    del first
    gpu.synchronize(0, 0)
    assert cuda.empty(4096, 0, "jax", stream).pointer != address, "its stream may still use it"
    gpu.synchronize(0, stream)
    assert cuda.empty(4096, 0, "jax", stream).pointer == address


def test_a_recorded_graph_keeps_its_workspace() -> None:
    stream, to = gpu.stream(), gpu.memory(4096, 0)
    with gpu.on(0):
        gpu.call("cudaStreamBeginCapture", c_void_p(stream), c_int(gpu.GLOBAL))
    own = cuda.empty(4096, 0, "jax", stream)
    cuda.clear(own.pointer, 4096, 0, stream)
    gpu.copy(to, own.pointer, 4096, gpu.BETWEEN, 0, stream)
    del own
    graph, executable = c_void_p(), c_void_p()
    with gpu.on(0):
        gpu.call("cudaStreamEndCapture", c_void_p(stream), byref(graph))
        gpu.call("cudaGraphInstantiate", byref(executable), graph, 0)
        gpu.call("cudaGraphLaunch", executable, c_void_p(stream))
    assert not gpu.get(to, (4096,), np.uint8, 0, stream).any()
    assert cuda._recorded


def test_a_call_without_a_stream_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"array of jax.*\nTry: cupy_flash\.jax"):
        cuda.current_stream(0, "jax")
