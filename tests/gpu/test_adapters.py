"""cupy_flash.torch and cupy_flash.jax on a GPU: bfloat16, the frameworks' own streams, memory and graphs."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from cupy_flash import testing
from tests.cases import Case

pytestmark = pytest.mark.gpu

# JAX would take three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

CAUSAL: dict[str, Any] = {"causal": True, "align": "top_left", "dlse": True}
CASES = [
    Case(dtype="bfloat16", heads=(4, 2), lengths=(300, 300), head_dims=(128, 128), **CAUSAL),
    Case(dtype="float16", heads=(4, 4), lengths=(200, 333), head_dims=(64, 64), layout="bshd"),
    Case(dtype="bfloat16", heads=(3, 1), lengths=(65, 127), head_dims=(96, 96), bias="hq1", sinks=True),
    Case(dtype="float32", heads=(2, 2), lengths=(130, 70), head_dims=(80, 80), softcap=5.0),
    Case(dtype="bfloat16", heads=(2, 2), lengths=(127, 127), head_dims=(256, 256), **CAUSAL),
]
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def compare(results: dict[str, Any], inputs: dict[str, np.ndarray], case: Case) -> None:
    testing.assert_within_budget(
        {name: testing.to_numpy(x) for name, x in results.items()},
        *(inputs[name] for name in "qkv"),
        do=inputs["do"],
        dlse=inputs.get("dlse"),
        precision="tf32x3" if case.dtype == "float32" else None,
        **case.options(inputs),
    )


# ---- torch


@pytest.fixture(scope="module")
def torch(cupy: object) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    return torch


def tensors(torch: Any, inputs: dict[str, np.ndarray], device: str = "cuda") -> dict[str, Any]:
    def tensor(x: np.ndarray) -> Any:
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(x))

    return {name: tensor(x).to(device) for name, x in inputs.items()}


def through_autograd(torch: Any, case: Case, device: str = "cuda") -> None:
    """Results and gradients of a case within the budget."""
    import cupy_flash.torch as cf

    inputs = case.inputs()
    given = tensors(torch, inputs, device)
    leaves = {name: given[name].requires_grad_() for name in _DIFFERENTIABLE if name in given}
    o, lse = cf.attention(*(given[name] for name in "qkv"), return_lse=True, **case.options(given))
    heads, cotangents = [o], [given["do"]]
    if case.dlse:
        heads.append(lse)
        cotangents.append(given["dlse"])
    gradients = torch.autograd.grad(heads, list(leaves.values()), cotangents)
    named = {"d" + name: x for name, x in zip(leaves, gradients, strict=True)}
    compare({"o": o, "lse": lse, **named}, inputs, case)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case: Case, torch: Any) -> None:
    through_autograd(torch, case)


@pytest.mark.torch
def test_torch_in_a_thread_of_its_own(torch: Any) -> None:
    """Whose first CUDA call may be ours."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            through_autograd(torch, CASES[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def drawn(torch: Any, length: int, head_dim: int = 128) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(length)
    shape = (1, 24, length, head_dim)
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(3)]


@pytest.mark.torch
def test_torch_on_a_stream_that_is_busy(torch: Any) -> None:
    """Inputs are made, used and overwritten on one stream, and nobody waits for it in between."""
    import cupy_flash.torch as cf

    q, k, v = drawn(torch, 1000)
    expected = [cf.attention(q * factor, k, v, causal=True) for factor in (1.0, 2.0, 3.0)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = []
        for factor in (1.0, 2.0, 3.0):
            torch.cuda._sleep(20_000_000)
            scaled = q * factor
            results.append(cf.attention(scaled, k, v, causal=True))
            scaled.zero_()
            del scaled
    stream.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.torch
def test_torch_cuda_graph(torch: Any) -> None:
    """Recorded once, replayed with other values: the counter of tiles begins at 0 in each replay."""
    import cupy_flash.torch as cf

    q, k, v = drawn(torch, 1500)
    cf.attention(q, k, v, causal=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cf.attention(q, k, v, causal=True)
    for factor in (1, -2, 3):
        k.mul_(factor)
        graph.replay()
        replayed = out.clone()
        torch.testing.assert_close(replayed, cf.attention(q, k, v, causal=True), rtol=0, atol=0)


# ---- JAX


@pytest.fixture(scope="module")
def jax(cupy: object) -> Any:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip(f"this JAX sees no GPU, only {jax.default_backend()}")
    return jax


def through_vjp(jax: Any, case: Case) -> None:
    """Results and gradients of a case in one compiled program, within the budget."""
    import cupy_flash.jax as cf

    inputs = case.inputs()
    given = {name: jax.numpy.asarray(x) for name, x in inputs.items()}
    leaves = [name for name in _DIFFERENTIABLE if name in given]

    def attend(*values: Any) -> Any:
        arrays = {**given, **dict(zip(leaves, values, strict=True))}
        return cf.attention(*(arrays[name] for name in "qkv"), return_lse=True, **case.options(arrays))

    @jax.jit
    def both_passes(values: Any, do: Any) -> Any:
        (o, lse), back = jax.vjp(attend, *values)
        return o, lse, back((do, given["dlse"] if case.dlse else jax.numpy.zeros_like(lse)))

    o, lse, gradients = both_passes([given[name] for name in leaves], given["do"])
    named = {"d" + name: x for name, x in zip(leaves, gradients, strict=True)}
    compare({name: np.asarray(x) for name, x in {"o": o, "lse": lse, **named}.items()}, inputs, case)


@pytest.mark.jax
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax(case: Case, jax: Any) -> None:
    through_vjp(jax, case)


@pytest.mark.jax
def test_jax_calls_that_wait_for_each_other(jax: Any) -> None:
    """Sixteen calls in one program, each on the result of the one before, beside the same one by one."""
    import cupy_flash.jax as cf

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 24, 1000, 128)) for key in keys)

    def step(q: Any) -> Any:
        return cf.attention(q, k, v, causal=True) + q

    def chain(q: Any) -> Any:
        for _ in range(16):
            q = step(q)
        return q

    one_by_one, compiled, whole = q, jax.jit(step), jax.jit(chain)
    for _ in range(16):
        one_by_one = compiled(one_by_one).block_until_ready()
    for _ in range(3):
        np.testing.assert_allclose(np.asarray(whole(q)), np.asarray(one_by_one), rtol=1e-4, atol=1e-4)
