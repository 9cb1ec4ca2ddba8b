"""JAX set to refuse promotion of dtypes and ranks: what the library adds up itself is its own affair."""

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp

import cupy_flash.jax as cf

pytestmark = pytest.mark.jax

Q, K, V = jax.random.normal(jax.random.key(0), (3, 2, 1, 8, 8)).astype(jnp.bfloat16)
PREFIX, LENGTHS = (K[0], V[0]), jnp.array([3, 4], jnp.int32)
OVER_CACHE = partial(cf.attention_with_kv_cache, cache_seqlens=LENGTHS, causal=True)


def ring(q, k, v, **options):
    """Gradients of a jitted call, which JAX traces after the call has returned."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    rows = jax.sharding.PartitionSpec(*((None, None, "rows") if q.ndim == 4 else ("rows",)))
    parts = partial(cf.ring_attention, axis_name="rows", causal=True, **options)
    attend = jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=rows, out_specs=rows))
    return jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)


def packed_ring(q, k, v):
    offsets = jnp.array([0, 2, 6], jnp.int32)
    return ring(*(x[:, 0] for x in (q, k, v)), cu_seqlens=offsets, schedule="ring")


CASES = {
    "dense": lambda q, k, v: cf.attention(q, k, v, scale=jnp.float32(0.2)),
    "shared prefix": lambda q, k, v: cf.attention_with_shared_prefix(q, k, v, *PREFIX),
    "cache and prefix": partial(OVER_CACHE, prefix=PREFIX),
    "indices": partial(OVER_CACHE, indices=jnp.zeros((2, 8, 3), jnp.int32)),
    "packed ring": packed_ring,
    "gather": partial(ring, schedule="allgather", dropout=0.5, seed=3, mask=jnp.ones((8, 8), bool)),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_do_not_depend_on_the_promotion_of_the_caller(name):
    wanted = jax.eval_shape(CASES[name], Q, K, V)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = jax.jit(CASES[name]).lower(Q, K, V).out_info
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
