"""attention_fn, called as flax's modules call theirs, beside flax's rules written down.

flax itself is not needed: what it is held to is the contract of `flax.linen.dot_product_attention` and the
keywords that `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention` pass.
"""

import inspect

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError

pytestmark = pytest.mark.jax

# What flax 0.8 to 0.12 hand over by keyword.
LINEN = {"mask", "dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic", "dtype", "precision",
         "force_fp32_for_softmax", "module"}  # fmt: skip


def normal(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def by_flax(query, key, value, bias=None, mask=None):
    """The rules of flax, dropout apart."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query / jnp.sqrt(query.shape[-1]), key)
    scores = scores if bias is None else scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


def test_takes_what_flax_passes():
    parameters = inspect.signature(cf.attention_fn).parameters
    assert set(parameters) >= LINEN | {"bias"}
    assert list(parameters)[:5] == ["query", "key", "value", "bias", "mask"]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_equals_flax_over_any_batch(batch, shared):
    q, k, v = normal((*batch, 7, 4, 8), (*batch, 9, 4, 8), (*batch, 9, 4, 6))
    # flax's make_causal_mask gives floats, and one mask for all heads.
    mask = jnp.tril(jnp.ones((7, 9)), 2)[None]
    mask = mask if shared else jnp.broadcast_to(mask, (*batch, 4, 7, 9))
    (bias,) = normal((4, 7, 9) if shared else (*batch, 1, 7, 9))
    how = {"deterministic": True, "dropout_rate": 0.3, "dropout_rng": None, "module": None}
    for options in ({}, {"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        o = jax.jit(cf.attention_fn, static_argnames=("deterministic", "dropout_rate"))(
            q, k, v, **options, **how
        )
        np.testing.assert_allclose(o, by_flax(q, k, v, **options), rtol=1e-5, atol=2e-6)


def test_dtypes_promote_as_flaxs():
    q, k, v = normal((5, 2, 8), (5, 2, 8), (5, 2, 8))
    assert cf.attention_fn(q.astype(jnp.bfloat16), k, v).dtype == jnp.float32
    assert cf.attention_fn(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    for precision in (None, "default", "highest", jax.lax.Precision.HIGHEST, ("highest", "highest")):
        np.testing.assert_allclose(
            cf.attention_fn(q, k, v, precision=precision), by_flax(q, k, v), rtol=1e-5, atol=2e-6
        )


def test_dropout_is_by_the_key_and_ends_with_determinism():
    q, k, v = normal((2, 7, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
    traced = []

    @jax.jit
    def train(key):
        traced.append(key)
        return cf.attention_fn(q, k, v, dropout_rng=key, dropout_rate=0.5)

    runs = [train(jax.random.key(seed)) for seed in (1, 1, 2)]
    assert len(traced) == 1
    assert jnp.array_equal(runs[0], runs[1])
    assert not jnp.array_equal(runs[0], runs[2])
    kept = cf.attention_fn(q, k, v, dropout_rng=jax.random.key(1), dropout_rate=0.5, deterministic=True)
    np.testing.assert_allclose(kept, by_flax(q, k, v), rtol=1e-5, atol=2e-6)
    many = jax.vmap(train)(jax.random.split(jax.random.key(0), 400))
    np.testing.assert_allclose(many.mean(0), by_flax(q, k, v), atol=0.5)
    with pytest.raises(InvalidArgumentsError, match=r"no dropout_rng(.|\n)*Try: "):
        cf.attention_fn(q, k, v, dropout_rate=0.5)


def test_weights_cannot_be_sown():
    q, k, v = normal((7, 4, 8), (7, 4, 8), (7, 4, 8))
    with pytest.raises(UnsupportedError, match=r"none can be sown(.|\n)*sow_weights=False"):
        cf.attention_fn(q, k, v, module=object())
