"""Two GPUs: arrays on one that is not current, whose results and work are there too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, testing
from tests.gpu.calls import OPTIONS, arrays, both_passes, check, on_device
from tests.gpu.test_streams import late_copies

pytestmark = pytest.mark.gpu
OTHER = 1


@pytest.fixture(autouse=True)
def two(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this GPU is the only one")
    assert cupy.cuda.runtime.getDevice() == 0


def test_results_are_where_the_arrays_are(cupy: Any) -> None:
    results = both_passes(*on_device(cupy, OTHER, *arrays()))
    assert cupy.cuda.runtime.getDevice() == 0
    assert {x.device.id for x in results.values()} == {OTHER}
    check(results)


def test_stream_of_the_other_device(cupy: Any) -> None:
    given = on_device(cupy, OTHER, *arrays())
    with cupy.cuda.Device(OTHER):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            results = both_passes(*given)
        stream.synchronize()
    check(results)


def test_current_stream_of_a_device_that_is_not_current(cupy: Any) -> None:
    sources = on_device(cupy, OTHER, *arrays())
    with cupy.cuda.Device(OTHER):
        stream = cupy.cuda.Stream(non_blocking=True)
        given = late_copies(cupy, stream, sources)
        stream.use()
    try:
        results = both_passes(*given)
        assert cupy.cuda.runtime.getDevice() == 0
    finally:
        with cupy.cuda.Device(OTHER):
            cupy.cuda.Stream.null.use()
    with cupy.cuda.Device(OTHER):
        check({name: x.get(stream=stream) for name, x in results.items()})


def test_out(cupy: Any) -> None:
    q, k, v, _ = on_device(cupy, OTHER, *arrays())
    with cupy.cuda.Device(OTHER):
        out = cupy.empty_like(q)
    cupy_flash.attention(q, k, v, out=out, **OPTIONS)
    check({"o": out})


def test_arrays_on_two_devices_are_refused(cupy: Any) -> None:
    q, k, _, _ = on_device(cupy, 0, *arrays())
    (v,) = on_device(cupy, OTHER, arrays()[2])
    with pytest.raises(InvalidArgumentsError, match="cuda:1"):
        cupy_flash.attention(q, k, v, **OPTIONS)


def packed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[0].swapaxes(0, 1))


@pytest.mark.parametrize("lengths_known", [False, True])
@pytest.mark.parametrize("ordinal", [0, OTHER])
def test_packed_sequences(ordinal: int, lengths_known: bool, cupy: Any) -> None:
    """Results that begin as zeros are zeroed before the kernels run, lengths read when they are there."""
    host = [packed(x) for x in arrays()[:3]]
    bounds = np.array([0, 30, 70], np.int32)
    q, k, v, late = on_device(cupy, ordinal, *host, bounds)
    with cupy.cuda.Device(ordinal):
        given = cupy.zeros_like(late)
        cupy.cuda.runtime.deviceSynchronize()
        cupy.cuda.runtime.memcpyAsync(given.data.ptr, late.data.ptr, late.nbytes, 3, 0)
    known = {"max_seqlen_q": 40, "max_seqlen_k": 40} if lengths_known else {}
    o = cupy_flash.attention_varlen(q, k, v, given, given, **known, **OPTIONS)
    cupy.cuda.runtime.deviceSynchronize()  # work on the wrong device would be done now
    with cupy.cuda.Device(ordinal):
        found = o.get()
    expected = cupy_flash.attention_varlen(*host, bounds, bounds, **OPTIONS)
    np.testing.assert_allclose(found.astype(float), expected.astype(float), atol=4e-3)


@pytest.mark.parametrize("ordinal", [0, OTHER])
@pytest.mark.parametrize("as_number", [False, True])
def test_kv_cache(ordinal: int, as_number: bool, cupy: Any) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((1, 2, 128, 64)).astype(np.float16) for _ in range(2))
    q = arrays()[0][:, :, :1]
    given = on_device(cupy, ordinal, q, k, v, np.array([77], np.int32))
    lengths = 77 if as_number else given.pop(3)
    o = cupy_flash.attention_with_kv_cache(*given[:3], cache_seqlens=lengths)
    with cupy.cuda.Device(ordinal):
        found = o.get()
    expected = testing.reference_with_kv_cache(q, k, v, cache_seqlens=np.array([77], np.int32)).o
    np.testing.assert_allclose(found.astype(float), expected, atol=4e-3)
