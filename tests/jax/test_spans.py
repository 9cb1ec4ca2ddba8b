"""Spans through JAX: jit, grad, vmap, second order, and bounds that are refused when the program runs."""

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp

import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, Spans, spans
from tests.span_cases import as_mask

pytestmark = pytest.mark.jax

TREE = spans.tree([-1, 0, 1, 1, 3, 0, 5], prefix=4)
BY_QUERY = spans.from_mask(np.indices((7, 11))[1] // 3 == np.indices((7, 11))[0] // 2)
FORMS = pytest.mark.parametrize("bounds", [TREE, BY_QUERY], ids=["by key", "by query"])


def qkv():
    keys, shapes = jax.random.split(jax.random.key(0), 3), ((4, 7, 8), (2, 11, 8), (2, 11, 8))
    return [jax.random.normal(key, (2, *shape)) for key, shape in zip(keys, shapes, strict=True)]


@FORMS
def test_gradients_are_those_of_the_mask(bounds):
    arrays, mask = qkv(), as_mask(bounds, 7, 11)

    def loss(how):
        return lambda *x: jnp.sin(cf.attention(*x, **how)).sum()

    ours = jax.jit(jax.grad(loss({"mask": bounds}), argnums=(0, 1, 2)))(*arrays)
    for x, y in zip(ours, jax.grad(loss({"mask": mask}), argnums=(0, 1, 2))(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)


def test_bounds_may_be_traced_and_mapped():
    q, k, v = qkv()
    several = jnp.stack([jnp.asarray(TREE.bounds), jnp.zeros_like(TREE.bounds)])
    run = jax.jit(jax.vmap(lambda bounds: cf.attention(q, k, v, mask=Spans(bounds))))
    o = run(several)
    np.testing.assert_array_equal(o[0], cf.attention(q, k, v, mask=as_mask(TREE, 7, 11)))
    assert not o[1].any()
    with pytest.raises(Exception, match=r"mask\.bounds holds 8; its bounds are of 7 queries"):
        jax.block_until_ready(run(several + 1))


@FORMS
def test_second_order(bounds):
    arrays, mask = qkv(), as_mask(bounds, 7, 11)

    def product(how):
        def loss(q):
            return jnp.sin(cf.attention(q, *arrays[1:], **how)).sum()

        return jax.jvp(jax.grad(loss), (arrays[0],), (jnp.ones_like(arrays[0]),))[1]

    np.testing.assert_allclose(product({"mask": bounds}), product({"mask": mask}), rtol=1e-6, atol=1e-6)


def test_wrong_shapes_are_refused_while_tracing():
    with pytest.raises(InvalidArgumentsError, match=r"mask.bounds has shape \(1, 7, 2\)(?s:.*)Try: ."):
        jax.eval_shape(lambda *x: cf.attention(*x, mask=Spans(jnp.zeros((1, 7, 2), jnp.int32))), *qkv())
