"""Memory that CuPy may be told to use: its own pools, the driver's, what the host sees too, no pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu.calls import arrays, both_passes, check, on_device

pytestmark = pytest.mark.gpu

ALLOCATORS: dict[str, Callable[[Any], Any]] = {
    "another pool": lambda cupy: cupy.cuda.MemoryPool().malloc,
    "pool of the driver": lambda cupy: cupy.cuda.MemoryAsyncPool().malloc,
    "managed": lambda cupy: cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc,
    "no pool": lambda _: None,
}


@pytest.fixture(params=ALLOCATORS)
def allocator(cupy: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(ALLOCATORS[request.param](cupy))
    yield
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.set_allocator(before)


@pytest.mark.filterwarnings("ignore:cupy.cuda.MemoryAsyncPool is experimental:FutureWarning")
@pytest.mark.usefixtures("allocator")
def test_arrays_and_workspace(cupy: Any) -> None:
    given = on_device(cupy, 0, *arrays())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        both_passes(*given)
        results = both_passes(*given)  # in memory given back on the same stream
    stream.synchronize()
    check(results)


def test_a_pool_with_too_little_memory(cupy: Any) -> None:
    """CuPy's own error passes, and the next call works."""
    given = on_device(cupy, 0, *arrays())
    expected = both_passes(*given)
    pool, before = cupy.cuda.MemoryPool(), cupy.cuda.get_allocator()
    pool.set_limit(512)
    cupy.cuda.set_allocator(pool.malloc)
    try:
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            both_passes(*given)
    finally:
        cupy.cuda.set_allocator(before)
    check(expected)
    check(both_passes(*given))
