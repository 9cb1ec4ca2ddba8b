"""Arrays on a GPU that speak a protocol only: __cuda_array_interface__ and DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.gpu.calls import OPTIONS, arrays, both_passes, check, on_device
from tests.gpu.test_streams import late_copies
from tests.public import cached

pytestmark = pytest.mark.gpu


class Interface:
    """An array as __cuda_array_interface__ alone; with a stream, that of version 3."""

    def __init__(self, x: Any, stream: int | None = None) -> None:
        self.x, self.stream = x, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.x.__cuda_array_interface__, "version": 3, "stream": self.stream}


class DLPack:
    """An array as DLPack alone, which remembers what was asked of it."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        return self.x.__dlpack__(**options)


def test_cuda_array_interface(cupy: Any) -> None:
    check(both_passes(*map(Interface, on_device(cupy, 0, *arrays())), given_back=Interface))


def test_stream_of_the_interface_is_waited_for(cupy: Any) -> None:
    sources = on_device(cupy, 0, *arrays())
    stream = cupy.cuda.Stream(non_blocking=True)
    given = late_copies(cupy, stream, sources)
    check(both_passes(*(Interface(x, stream.ptr) for x in given), given_back=Interface))


def test_interface_on_the_other_device(cupy: Any) -> None:
    """It does not say where it is: its address does."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this GPU is the only one")
    results = both_passes(*map(Interface, on_device(cupy, 1, *arrays())), given_back=Interface)
    assert {x.device.id for x in results.values()} == {1}
    check(results)


def test_out_as_an_interface(cupy: Any) -> None:
    q, k, v, _ = on_device(cupy, 0, *arrays())
    out = cupy.empty_like(q)
    cupy_flash.attention(*map(Interface, (q, k, v)), out=Interface(out), **OPTIONS)
    check({"o": out})


@pytest.mark.parametrize("ordinal", [0, 1])
def test_dlpack(ordinal: int, cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() <= ordinal:
        pytest.skip("this GPU is the only one")
    given = [DLPack(x) for x in on_device(cupy, ordinal, *arrays())]
    results = both_passes(*given, given_back=DLPack)
    assert all(x.asked for x in given)
    assert {x.device.id for x in results.values()} == {ordinal}
    check(results)


def test_dlpack_of_managed_memory(cupy: Any) -> None:
    """Device type 13, which CuPy calls its managed arrays."""
    # why named: CuPy 13 frees what is in use with the last reference to a pool.
    pool, before = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed), cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(pool.malloc)
    try:
        given = [DLPack(x) for x in on_device(cupy, 0, *arrays())]
    finally:
        cupy.cuda.set_allocator(before)
    check(both_passes(*given, given_back=DLPack))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("as_number", [False, True])
def test_kv_cache_of_interfaces(as_number: bool, checked: bool, cupy: Any) -> None:
    q, k, v, _ = arrays()
    lengths = np.array([50], np.int32)
    expected = testing.reference_with_kv_cache(q[:, :, :1], k, v, cache_seqlens=lengths).o
    *given, on_gpu = map(Interface, on_device(cupy, 0, np.ascontiguousarray(q[:, :, :1]), k, v, lengths))
    o = cached(*given, cache_seqlens=50 if as_number else on_gpu, check=checked)
    np.testing.assert_allclose(testing.to_numpy(o).astype(float), expected, atol=4e-3)
