"""reproducible= through JAX: under jit, with gradients, and what second order says."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash.jax as cf
from tests.conftest import skip_without_core

pytestmark = pytest.mark.jax


def outcome(q, k, v, mode="batch"):
    def loss(q, k, v):
        o = cf.attention(q, k, v, causal=True, reproducible=mode)
        return jnp.square(o).sum(), o

    (_, o), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return o, *gradients


def test_results_and_gradients_are_those_of_each_sequence_alone():
    """Of so many rows that without the promise gradients are cut by the batch."""
    skip_without_core()
    rng = np.random.default_rng(0)
    q, (k, v) = (
        rng.standard_normal((2, 4, 1100, 16), np.float32),
        rng.standard_normal((2, 2, 2, 1100, 16), np.float32),
    )
    both, alone = outcome(q, k, v), outcome(q[1:], k[1:], v[1:])
    for actual, expected in zip(both, alone, strict=True):
        assert np.array_equal(np.asarray(actual)[1:], np.asarray(expected))


def test_packed_sequences_and_tokens_over_a_cache():
    skip_without_core()
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 50, 16), np.float32)
    options = {"causal": True, "reproducible": "batch"}
    whole = np.asarray(cf.attention(q, k, v, **options))
    cuts = np.array([0, 9, 59], np.int32)
    rows = [np.concatenate([x[0, :, :9], x[0]], 1).swapaxes(0, 1) for x in (q, k, v)]
    packed = cf.attention_varlen(*rows, cuts, cuts, max_seqlen_q=50, max_seqlen_k=50, **options)
    assert np.array_equal(np.asarray(packed)[9:], whole[0].swapaxes(0, 1))
    token = cf.attention_with_kv_cache(
        *(np.repeat(x, 2, 0) for x in (q[:, :, 30:31], k, v)),
        cache_seqlens=np.full(2, 31, np.int32),
        **options,
    )
    assert all(np.array_equal(np.asarray(one), whole[0, :, 30:31]) for one in token)


def test_prefill_is_batch_where_prompts_have_one_kernel():
    skip_without_core()
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 600, 16), np.float32)
    for actual, expected in zip(outcome(q, k, v, "prefill"), outcome(q, k, v), strict=True):
        assert np.array_equal(np.asarray(actual), np.asarray(expected))


def test_the_mode_reaches_the_plan():
    skip_without_core()
    x = jnp.ones((1, 2, 5, 8))
    with pytest.raises(Exception, match="kept by the kernels of GPUs"):
        outcome(x, x, x, "device")


def test_tangents_are_refused():
    skip_without_core()
    x = jnp.ones((1, 2, 5, 8))
    with pytest.raises(Exception, match=r"not supported for derivatives\.jvp"):
        jax.jvp(lambda x: cf.attention(x, x, x, reproducible="batch"), (x,), (x,))
