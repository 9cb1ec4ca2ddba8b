"""A BlockMask through JAX: jit, grad, vmap, second order, and tables refused when the program runs."""

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp

import cupy_flash.jax as cf
from cupy_flash import BlockMask, InvalidArgumentsError, block_mask
from tests.block_cases import as_mask, random_blocks

pytestmark = pytest.mark.jax

BLOCKS = random_blocks(np.random.default_rng(2), (1, 4), (40, 70), (16, 32))
MASK = as_mask(BLOCKS, 40, 70)
WHOLE = block_mask(lambda b, h, i, j: (i < 16) | (j < 32), None, None, 40, 70, block=(16, 32))
FORMS = pytest.mark.parametrize("blocks", [BLOCKS, WHOLE], ids=["in part", "whole"])


def qkv():
    keys, shapes = jax.random.split(jax.random.key(0), 3), ((4, 40, 8), (2, 70, 8), (2, 70, 8))
    return [jax.random.normal(key, (2, *shape)) for key, shape in zip(keys, shapes, strict=True)]


@FORMS
def test_gradients_are_those_of_the_mask(blocks):
    arrays, mask = qkv(), as_mask(blocks, 40, 70)

    def loss(how):
        return lambda *x: jnp.sin(cf.attention(*x, **how)).sum()

    ours = jax.jit(jax.grad(loss({"mask": blocks}), argnums=(0, 1, 2)))(*arrays)
    for x, y in zip(ours, jax.grad(loss({"mask": mask}), argnums=(0, 1, 2))(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)


def test_blocks_are_a_tree_that_may_be_traced_and_mapped():
    q, k, v = qkv()
    given = BlockMask(*map(jnp.asarray, BLOCKS))
    traced = jax.jit(lambda blocks: cf.attention(q, k, v, mask=blocks))
    np.testing.assert_array_equal(traced(given), cf.attention(q, k, v, mask=MASK))
    several = given._replace(table=jnp.stack([given.table, jnp.zeros_like(given.table)]))
    run = jax.jit(jax.vmap(traced, in_axes=(BlockMask(0, None),)))
    o = run(several)
    np.testing.assert_array_equal(o[0], cf.attention(q, k, v, mask=MASK))
    assert not o[1].any()
    with pytest.raises(Exception, match=r"mask\.table holds 7, and there are bits of 5"):
        jax.block_until_ready(run(several._replace(table=0 * several.table + 7)))


@FORMS
def test_second_order(blocks):
    arrays, mask = qkv(), as_mask(blocks, 40, 70)

    def product(how):
        def loss(q):
            return jnp.sin(cf.attention(q, *arrays[1:], **how)).sum()

        return jax.jvp(jax.grad(loss), (arrays[0],), (jnp.ones_like(arrays[0]),))[1]

    np.testing.assert_allclose(product({"mask": blocks}), product({"mask": mask}), rtol=1e-6, atol=1e-6)


def test_wrong_shapes_are_refused_while_tracing():
    wrong = BlockMask(jnp.zeros((1, 7), jnp.int32), jnp.asarray(BLOCKS.bits))
    with pytest.raises(InvalidArgumentsError, match=r"mask.table has shape \(1, 7\)(?s:.*)Try: ."):
        jax.eval_shape(lambda *x: cf.attention(*x, mask=wrong), *qkv())
