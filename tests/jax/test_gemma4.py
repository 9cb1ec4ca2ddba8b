"""A full layer of Gemma 4 in JAX, head dim 512, against eager: forward, gradients and generation."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash.jax as cf

pytestmark = pytest.mark.jax

BATCH, LENGTH, WIDTH, HEADS, HEAD_DIM = 2, 20, 32, 4, 512


def weights():
    """Of the projections to queries, and to keys of one head, which are the values too, and back."""
    shapes = ((WIDTH, HEADS * HEAD_DIM), (WIDTH, HEAD_DIM), (HEADS * HEAD_DIM, WIDTH))
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in zip(keys, shapes, strict=True)]


def normalised(x):
    """Rows of norm 1. why: those of Gemma have norm 22 and learned weights, which here would see one key."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def projected(x, of_q, of_k):
    """q, k and v as (batch, rows, heads, head_dim)."""
    q = (x @ of_q).reshape(*x.shape[:2], HEADS, HEAD_DIM)
    k = (x @ of_k).reshape(*x.shape[:2], 1, HEAD_DIM)
    return 3 * normalised(q), 3 * normalised(k), normalised(k)


def layer(parameters, x, attend):
    *to, back = parameters
    return x + attend(*projected(x, *to)).reshape(*x.shape[:2], -1) @ back


def ours(q, k, v):
    return cf.attention(q, k, v, causal=True, scale=1.0, layout="bshd")


def eager(q, k, v):
    scores = jnp.einsum("bihd,bjgd->bhij", q, k)
    hidden = jnp.arange(q.shape[1])[:, None] < jnp.arange(k.shape[1])
    return jnp.einsum("bhij,bjgd->bihd", jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores)), v)


def hidden_states():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))


def test_forward_and_gradients():
    def loss(parameters, x, attend):
        return jnp.sum(layer(parameters, x, attend) ** 3)

    arguments = weights(), hidden_states()
    found, wanted = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)(*arguments, attend)
        for attend in (ours, eager)
    )
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-5 * float(abs(right).max()))


def test_generation():
    """A prompt, then token after token over the cache of what came before."""
    parameters, x = weights(), hidden_states()
    wanted, prompt = layer(parameters, x, eager), 13
    empty = jnp.zeros((BATCH, LENGTH, 1, HEAD_DIM))
    caches = [empty, empty]
    for start, stop in ((0, prompt), *((n, n + 1) for n in range(prompt, LENGTH))):

        def attend(q, k, v, start=start):
            o, *caches[:] = cf.attention_with_kv_cache(
                q, *caches, k=k, v=v, cache_seqlens=start, causal=True, scale=1.0, layout="bshd"
            )
            return o

        np.testing.assert_allclose(
            layer(parameters, x[:, start:stop], attend), wanted[:, start:stop], atol=1e-5
        )
