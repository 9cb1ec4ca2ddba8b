"""Derivatives in JAX on a GPU: buffers that say they lie on one, and the simulator as its driver."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash.derivatives import second_order
from cupy_flash.device import simulator
from cupy_flash.jax import call, directed, run
from tests.jax import test_second_order as on_cpu
from tests.jax.x64 import enable_x64

pytestmark = [
    pytest.mark.jax,
    pytest.mark.simulator,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator compiles kernels with g++"),
]

STREAM, DEVICE = 77, 1


class Buffer:
    """Host memory that is handed over as XLA hands over that of a GPU."""

    def __init__(self, x):
        self.shape, self._x = x.shape, x
        self.__cuda_array_interface__ = {"data": (x.ctypes.data, False)}

    def __dlpack_device__(self):
        return 2, DEVICE


class Gpu:
    """The simulator, which holds its caller to a device and a stream."""

    def __init__(self):
        self.launched, self.cleared = [], 0

    def arch(self, device):
        assert device == DEVICE
        return "sm_80"

    def multiprocessors(self, device):
        assert device == DEVICE
        return 108

    def current_stream(self, *_):
        raise AssertionError("the stream is XLA's")

    def empty(self, nbytes, device, library, stream):
        assert (device, library, stream) == (DEVICE, "jax", STREAM)
        return simulator.empty(nbytes)

    def read(self, pointer, nbytes, device, stream):
        assert (device, stream) == (DEVICE, STREAM)
        return simulator.read(pointer, nbytes)

    def clear(self, pointer, nbytes, device, stream):
        assert (device, stream) == (DEVICE, STREAM)
        self.cleared += 1
        simulator.clear(pointer, nbytes)

    def load(self, variant, device):
        assert device == DEVICE
        kernel = simulator.load(variant)

        def launch(grid, block, shared_bytes, params, stream):
            assert stream == STREAM
            self.launched.append(variant.kernel)
            kernel.launch(grid, block, shared_bytes, params, 0)

        return SimpleNamespace(launch=launch, clear=kernel.clear, encode_tensor_map=kernel.encode_tensor_map)


def on_gpu(callback, wire, vmap_method, input_output_aliases=()):
    """What stands for `buffer_callback`: the same memory, seen as a GPU's."""
    assert not input_output_aliases

    def host(*args):
        # why of old: XLA's memory is not set.
        outs = [np.full(x.shape, 7, x.dtype) for x in wire_of(args)]
        ins = [np.ascontiguousarray(x) for x in args]
        callback(SimpleNamespace(stream=STREAM), [*map(Buffer, outs)], *map(Buffer, ins))
        return tuple(outs)

    def wire_of(args):
        # Axes of vmap come first, the same for all.
        lead = np.shape(args[-1])[: np.ndim(args[-1]) - ranks[-1]]
        return [jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype) for x in wire]

    def call(*args):
        ranks[:] = [x.ndim for x in args]
        return jax.pure_callback(host, wire, *args, vmap_method=vmap_method)

    ranks = []
    return call


@pytest.fixture
def gpu():
    fake = Gpu()

    def driver_of(device, _library):
        return fake if device == ("cuda", DEVICE) else None

    places = [mock.patch.object(module, "driver_of", driver_of) for module in (second_order, directed)]
    with places[0], places[1], mock.patch.object(directed, "buffer_callback", on_gpu):
        jax.clear_caches()
        yield fake
    jax.clear_caches()


def rounded(shapes, seed=0):
    """What 16 bits hold, so that JAX's formula sees the same."""
    return [jnp.asarray(x, jnp.float16) for x in on_cpu.normal(*shapes, seed=seed)]


SHAPES = ((1, 2, 20, 16),) * 3
WAYS = {
    "jvp": lambda f, x, d: jax.jvp(f, x, d)[1],
    "linearize": lambda f, x, d: jax.linearize(f, *x)[1](*d),
    "hvp": lambda f, x, d: jax.jvp(jax.grad(on_cpu.loss_of(f), (0, 1, 2)), x, d)[1],
    "grad of grad": lambda f, x, _: jax.grad(on_cpu.penalty_of(f), (0, 1, 2))(*x),
    "vmap of jvp": lambda f, x, d: jax.vmap(lambda t: jax.jvp(f, x, (t, *d[1:]))[1])(jnp.stack([d[0], d[1]])),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_what_the_formula_gives(gpu, way):
    x, d = tuple(rounded(SHAPES)), tuple(rounded(SHAPES, seed=1))
    ours = jax.jit(lambda x, d: WAYS[way](on_cpu.ours, x, d))(x, d)
    with enable_x64(True):
        exact = [tuple(jnp.asarray(y, jnp.float64) for y in some) for some in (x, d)]
        theirs = WAYS[way](on_cpu.theirs, *exact)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        wide = np.asarray(a, np.float64)
        np.testing.assert_allclose(wide, b, atol=6e-3 * max(1, np.abs(b).max()))
    hessian = {"hvp", "grad of grad"} & {way}
    assert ("flash_hessian_dkv_dot" if hessian else "flash_tangent") in gpu.launched


def test_packed_sequences_and_numbers_that_the_host_reads(gpu):
    """Rows of no sequence are 0; a traced scale is read on the stream."""
    cut = jnp.array([0, 3, 5], jnp.int32)
    q, k, v, d = rounded(((7, 2, 16),) * 4)

    def tangent(scale):
        return jax.jvp(lambda q: cf.attention_varlen(q, k, v, cut, cut, scale=scale), (q,), (d,))[1]

    found = np.asarray(jax.jit(tangent)(jnp.float32(0.5)), np.float64)
    assert gpu.cleared == 2
    assert not found[5:].any()
    for rows in (slice(0, 3), slice(3, 5)):
        one = [jnp.asarray(x[rows].swapaxes(0, 1)[None], jnp.float32) for x in (q, k, v, d)]

        def f(q, k=one[1], v=one[2]):
            return jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.5, -1) @ v

        wanted = jax.jvp(f, one[:1], one[3:])[1][0].swapaxes(0, 1)
        np.testing.assert_allclose(found[rows], wanted, atol=5e-3)


@pytest.mark.slow
def test_what_a_function_learns_has_gradients(gpu):
    """Not on CPUs alone: by the kernels of the gradients of arguments."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in on_cpu.normal(*[(1, 2, 20, 16)] * 3, seed=0))
    slope = jnp.float32([0.5, -0.25])
    tempered = cupy_flash.score(lambda s, b, h, i, j, slope: s * slope[h] - 0.1 * (i - j), learned=("slope",))

    def loss(q, slope):
        return jnp.sin(cf.attention(q, k, v, score=tempered(slope), precision="ieee")).sum()

    def formula(q, slope):
        i, j = np.ogrid[:20, :20]
        scores = q @ k.swapaxes(-1, -2) / 4 * slope[:, None, None] - 0.1 * (i - j)
        return jnp.sin(jax.nn.softmax(scores, -1) @ v).sum()

    callbacks = mock.patch.object(call, "buffer_callback", on_gpu)
    driver = mock.patch.object(run, "driver_of", second_order.driver_of)
    with callbacks, driver:
        ours = jax.jit(jax.grad(loss, (0, 1)))(q, slope)
    for x, y in zip(ours, jax.grad(formula, (0, 1))(q, slope), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert "simple_backward_args_sum" in gpu.launched
