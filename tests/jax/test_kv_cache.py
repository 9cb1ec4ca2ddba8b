"""attention_with_kv_cache on JAX arrays: read, never written."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash
from cupy_flash import InvalidArguments

pytestmark = pytest.mark.jax


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, shape) for key, shape in
               zip(keys, ((2, 4, 1, 32), (2, 2, 48, 32), (2, 2, 48, 32)), strict=True))  # fmt: skip
    return q, k, v


def test_as_attention_over_the_keys_in_use():
    q, k, v = arrays()
    o, lse = cupy_flash.attention_with_kv_cache(
        q, k, v, cache_seqlens=jnp.array([17, 48], jnp.int32), return_lse=True
    )
    assert isinstance(o, jax.Array)
    assert isinstance(lse, jax.Array)
    for b, length in enumerate((17, 48)):
        wanted = cupy_flash.attention(q[b], k[b, :, :length], v[b, :, :length])
        np.testing.assert_allclose(o[b], wanted, atol=1e-6)


def test_appending_is_refused_with_a_way_out():
    q, k, v = arrays()
    with pytest.raises(InvalidArguments, match=r"JAX arrays cannot be written[\s\S]*\.at\[\.\.\.\]\.set"):
        cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=3, k=k[:, :, :1], v=v[:, :, :1])
