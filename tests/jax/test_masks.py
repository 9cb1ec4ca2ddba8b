"""Spans and a BlockMask through JAX: jit, grad, vmap, second order, and numbers refused when it runs."""

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp

import cupy_flash.jax as cf
from cupy_flash import BlockMask, InvalidArgumentsError, Spans, block_mask, spans
from tests import block_cases, span_cases

pytestmark = pytest.mark.jax

TREE = spans.tree([-1, 0, 1, 1, 3, 0, 5], prefix=4)
BY_QUERY = spans.from_mask(np.indices((7, 11))[1] // 3 == np.indices((7, 11))[0] // 2)
BLOCKS = block_cases.random_blocks(np.random.default_rng(2), (1, 4), (40, 70), (16, 32))
WHOLE = block_mask(lambda b, h, i, j: (i < 16) | (j < 32), None, None, 40, 70, block=(16, 32))
FORMS = pytest.mark.parametrize(
    ("mask", "dense"),
    [
        (TREE, span_cases.as_mask(TREE, 7, 11)),
        (BY_QUERY, span_cases.as_mask(BY_QUERY, 7, 11)),
        (BLOCKS, block_cases.as_mask(BLOCKS, 40, 70)),
        (WHOLE, block_cases.as_mask(WHOLE, 40, 70)),
    ],
    ids=["spans by key", "spans by query", "blocks in part", "whole blocks"],
)


def qkv(dense):
    queries, keys = dense.shape[-2:]
    shapes = (4, queries, 8), (2, keys, 8), (2, keys, 8)
    return [jax.random.normal(jax.random.key(n), (2, *shape)) for n, shape in enumerate(shapes)]


@FORMS
def test_gradients_are_those_of_the_dense_mask(mask, dense):
    def gradients(mask):
        return jax.grad(lambda *x: jnp.sin(cf.attention(*x, mask=mask)).sum(), argnums=(0, 1, 2))

    arrays = qkv(dense)
    for x, y in zip(jax.jit(gradients(mask))(*arrays), gradients(dense)(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)


@FORMS
def test_second_order(mask, dense):
    q, k, v = qkv(dense)

    def product(mask):
        gradient = jax.grad(lambda q: jnp.sin(cf.attention(q, k, v, mask=mask)).sum())
        return jax.jvp(gradient, (q,), (jnp.ones_like(q),))[1]

    np.testing.assert_allclose(product(mask), product(dense), rtol=1e-6, atol=1e-6)


def test_bounds_may_be_traced_and_mapped():
    dense = span_cases.as_mask(TREE, 7, 11)
    q, k, v = qkv(dense)
    several = jnp.stack([jnp.asarray(TREE.bounds), jnp.zeros_like(TREE.bounds)])
    run = jax.jit(jax.vmap(lambda bounds: cf.attention(q, k, v, mask=Spans(bounds))))
    o = run(several)
    np.testing.assert_array_equal(o[0], cf.attention(q, k, v, mask=dense))
    assert not o[1].any()
    with pytest.raises(Exception, match=r"mask\.bounds holds 8; its bounds are of 7 queries"):
        jax.block_until_ready(run(several + 1))


def test_blocks_are_a_tree_that_may_be_traced_and_mapped():
    dense = block_cases.as_mask(BLOCKS, 40, 70)
    q, k, v = qkv(dense)
    given = BlockMask(*map(jnp.asarray, BLOCKS))
    traced = jax.jit(lambda blocks: cf.attention(q, k, v, mask=blocks))
    np.testing.assert_array_equal(traced(given), cf.attention(q, k, v, mask=dense))
    several = given._replace(table=jnp.stack([given.table, jnp.zeros_like(given.table)]))
    run = jax.jit(jax.vmap(traced, in_axes=(BlockMask(0, None),)))
    o = run(several)
    np.testing.assert_array_equal(o[0], cf.attention(q, k, v, mask=dense))
    assert not o[1].any()
    with pytest.raises(Exception, match=r"mask\.table holds 7, and there are bits of 5"):
        jax.block_until_ready(run(several._replace(table=0 * several.table + 7)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Spans(np.zeros((1, 7, 2), np.int32)), r"mask.bounds has shape \(1, 7, 2\)"),
        (BlockMask(np.zeros((1, 7), np.int32), BLOCKS.bits), r"mask.table has shape \(1, 7\)"),
    ],
    ids=["spans", "blocks"],
)
def test_wrong_shapes_are_refused_while_tracing(wrong, says):
    wrong = type(wrong)(*map(jnp.asarray, wrong))
    with pytest.raises(InvalidArgumentsError, match=rf"{says}(?s:.*)Try: ."):
        jax.eval_shape(lambda *x: cf.attention(*x, mask=wrong), *qkv(np.ones((7, 11))))
