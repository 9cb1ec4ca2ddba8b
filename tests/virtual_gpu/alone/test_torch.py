"""torch's tensors through the driver's own library: streams, devices, threads, graphs, workspace."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash.check.places import Place
from cupy_flash.check.primitives import primitives_of
from cupy_flash.device import choice, cuda, libcuda
from cupy_flash.parallel import partial
from tests.gpu.calls import arrays, both_passes, check
from tests.statistic_checks import SUMS, assert_close
from tests.virtual_gpu import install
from tests.virtual_gpu.alone import gpu


def on_host(results: dict[str, Any], handle: int | None = None) -> dict[str, np.ndarray]:
    return {name: x.numpy_of(handle) for name, x in results.items()}


@pytest.mark.parametrize("ordinal", [0, 1])
def test_results(ordinal: int) -> None:
    """On the device where the arrays are, whose context no caller has made current."""
    results = both_passes(*gpu.tensors(ordinal, *arrays()))
    assert {type(x) for x in results.values()} == {gpu.Tensor}
    assert {x.ordinal for x in results.values()} == {ordinal}
    check(on_host(results))
    assert len(install.launched) >= 3


@pytest.mark.parametrize("head_dim", [64, 192])
def test_partial_results_are_not_rounded(head_dim: int) -> None:
    """Rounded they are those of a whole call."""
    rng = np.random.default_rng(0)
    q, k, v, do = gpu.tensors(
        0, *(rng.standard_normal((1, 1, 70, head_dim)).astype(np.float16) for _ in range(4))
    )
    options: dict[str, Any] = {"reproducible": "run"}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    part = partial.attention_backward(do, q, k, v, o, lse, **options)
    pairs = [(partial.attention(q, k, v, **options)[0], o)]
    pairs += [(getattr(part, name), getattr(gradients, name)) for name in ("dq", "dk", "dv")]
    for unrounded, rounded in pairs:
        found, expected = unrounded.numpy_of(None), rounded.numpy_of(None)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.astype(np.float16), expected)
        assert np.any(found != expected), "they are rounded"


def test_primitives_of_the_check() -> None:
    """From their cubin, and those of sm_90 through a tensor map of the driver."""
    place = Place("torch", "a virtual GPU", True, lambda x: gpu.tensors(0, x)[0], lambda: None, 0)
    chosen = primitives_of([place])
    assert len(chosen) == {"sm_80": 14, "sm_90": 22}[cuda.arch(0)]
    for primitive in chosen:
        host = primitive.inputs(np.random.default_rng(0))
        results = on_host(primitive.run(place.put(host)))
        (verdict,) = primitive.judge(host, results, place)
        assert verdict.within, f"{primitive}: {verdict}"
    assert "check_primitives" in install.launched


def test_where_there_is_no_cupy_nothing_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE)
    monkeypatch.setitem(sys.modules, "cupy", None)
    choice.gpu_driver.cache_clear()
    check(on_host(both_passes(*gpu.tensors(0, *arrays()))))
    assert choice.gpu_driver("torch") is cuda


@pytest.mark.parametrize("current", [None, 0, 1])
def test_the_callers_context_is_left_as_it_was(current: int | None) -> None:
    given = gpu.tensors(1, *arrays())
    with contextlib.nullcontext() if current is None else gpu.on(current):
        results = both_passes(*given)
        assert gpu.current() == current
    check(on_host(results))


@pytest.mark.parametrize("is_current", [False, True])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_work_waits_for_what_torchs_stream_has_to_do(ordinal: int, is_current: bool) -> None:
    """Kernels, workspace and its zeros belong to that stream, whether or not the device is current."""
    sources = gpu.tensors(ordinal, *arrays())
    gpu.streams[ordinal] = gpu.stream(ordinal)
    given = gpu.late(sources, gpu.streams[ordinal])
    with gpu.on(ordinal) if is_current else contextlib.nullcontext():
        results = both_passes(*given)
    check(on_host(results))


def test_workspace_is_kept_while_it_is_used() -> None:
    first = cuda.empty(4096, 0, "torch", 0)
    address = first.pointer
    gpu.synchronize(0, 0)
    assert cuda.empty(4096, 0, "torch", 0).pointer != address
    del first
    gpu.synchronize(0, 0)
    assert cuda.empty(4096, 0, "torch", 0).pointer == address


def test_streams_side_by_side() -> None:
    seeds = range(3)
    inputs = [gpu.tensors(0, *arrays(seed)) for seed in seeds]
    handles = [gpu.stream() for _ in seeds]
    results = []
    for handle, given in zip(handles, inputs, strict=True):
        gpu.streams[0] = handle
        results.append(both_passes(*given))
    for seed in reversed(seeds):  # the last enqueued is waited for first
        check(on_host(results[seed], handles[seed]), seed)


def test_threads_whose_first_call_is_ours() -> None:
    given = [gpu.tensors(i % 2, *arrays(i)) for i in range(4)]
    results: list[Any] = [None] * 4

    def work(i: int) -> None:
        results[i] = both_passes(*given[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in enumerate(results):
        check(on_host(found), i)


def test_many_threads_launch_one_kernel() -> None:
    """The struct of a launch is that of its own thread."""
    given = [gpu.tensors(0, *arrays(i)) for i in range(4)]
    both_passes(*given[0])
    results: list[Any] = [None] * 4
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(3):
            results[i] = both_passes(*given[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in enumerate(results):
        check(on_host(found), i)


def test_a_refused_launch_has_a_name() -> None:
    both_passes(*gpu.tensors(0, *arrays()))
    kernel = next(x for (name, on), x in cuda._loader.kernels.items() if "flash_forward" in name and on == 0)
    params = bytes(install.launched[kernel.cubin.path.stem])
    with pytest.raises(
        libcuda.CudaError, match=r"launch of .*: CUDA_ERROR_INVALID_VALUE, .*\nTry: "
    ) as caught:
        kernel.launch((1, 1, 1), (1025, 1, 1), 0, params, 0)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(libcuda.CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        kernel.launch((1, 1, 1), (128, 1, 1), 0, params, gpu.stream(1))


def test_kv_cache() -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((1, 2, 128, 64)).astype(np.float16) for _ in range(2))
    q = arrays()[0][:, :, :1]
    given = gpu.tensors(1, q, k, v, np.array([77], np.int32))
    o = cupy_flash.attention_with_kv_cache(*given[:3], cache_seqlens=given[3])
    expected = cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=np.array([77], np.int32))
    np.testing.assert_allclose(o.numpy_of().astype(float), expected.astype(float), atol=4e-3)


@pytest.mark.parametrize(
    ("dtype", "known"), [("float16", False), (ml_dtypes.bfloat16, True)], ids=["float16", "bfloat16 with lse"]
)
def test_statistics(dtype: Any, known: bool) -> None:
    """Also of bfloat16, which CuPy has not."""
    q, k = (x.astype(dtype) for x in arrays()[:2])
    lse = cupy_flash.attention(q, k, k, causal=True, return_lse=True)[1]
    *given, of_rows = gpu.tensors(1, q, k, lse)
    made = cupy_flash.attention_statistics(*given, of_rows if known else None, want=SUMS, causal=True)
    assert_close(made._replace(**on_host({name: getattr(made, name) for name in SUMS})), q, k, 1, causal=True)
