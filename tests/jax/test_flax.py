"""attention_fn, called as flax's modules call theirs, beside flax's rules written down.

flax itself is needed only for its modules over a sequence in parts. All else is held to the contract of
`flax.linen.dot_product_attention` and the keywords that `flax.linen.MultiHeadDotProductAttention` and
`flax.nnx.MultiHeadAttention` pass.
"""

import inspect
from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.parallel import positions

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
    with pytest.raises(UnsupportedError, match=r"weights are never stored(.|\n)*sow_weights=False"):
        cf.attention_fn(q, k, v, module=object())


RANKS, ROWS = 4, 16
ORDER = np.concatenate([positions(rank, RANKS, ROWS, causal=True) for rank in range(RANKS)])


def in_parts(function, *, weights=False):
    """A function of arrays (..., rows, heads, features) or, with weights first, (batch, rows, features)."""
    if len(jax.devices()) < RANKS:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("rows",))
    axis = -2 if weights else -3
    held = jax.sharding.PartitionSpec(None, "rows")
    everywhere = (jax.sharding.PartitionSpec(),) * weights

    @jax.jit
    def run(*arrays):
        fixed, cut = arrays[:weights], [jnp.take(x, ORDER, axis) for x in arrays[weights:]]
        specs = (*everywhere, *(held for _ in cut))
        o = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=held)(*fixed, *cut)
        return jnp.take(o, np.argsort(ORDER), axis)

    return run


def test_parts_take_what_flax_passes():
    assert inspect.signature(cf.ring_attention_fn("rows")) == inspect.signature(cf.attention_fn)


def test_parts_give_what_one_device_gives():
    q, k, v = normal((2, 16, 8, 8), (2, 16, 4, 8), (2, 16, 4, 6))
    (kept,) = normal((2, 1, 16, 16))
    mask = (kept > -1) | jnp.eye(16, dtype=bool)  # of the whole, in its order
    said = {"deterministic": True, "dropout_rate": 0.3, "broadcast_dropout": True, "dtype": jnp.float32}
    for made, called, given in (
        ({"causal": True}, {}, {}),
        ({"schedule": "alltoall"}, {"is_causal": True}, {"mask": mask}),
    ):
        attend = cf.ring_attention_fn("rows", **made)
        ours = in_parts(
            lambda *x, attend=attend, called=called, given=given: attend(*x, **called, **given, **said)
        )(q, k, v)
        np.testing.assert_allclose(ours, cf.attention_fn(q, k, v, is_causal=True, **given), atol=1e-5)


def test_parts_drop_by_the_key():
    q, k, v = normal((1, 16, 4, 8), (1, 16, 4, 8), (1, 16, 4, 8))
    attend = cf.ring_attention_fn("rows", causal=True, schedule="ring")

    def part(q, k, v, key):
        return attend(q, k, v, dropout_rng=key, dropout_rate=0.5)

    first, again, other = (in_parts(partial(part, key=jax.random.key(n)))(q, k, v) for n in (1, 1, 2))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)
    assert not jnp.array_equal(first, in_parts(attend)(q, k, v))


def test_what_parts_refuse():
    q = jnp.ones((1, 16, 4, 8))
    for made, given, error, message in (
        (
            {},
            {"bias": jnp.ones((16, 16))},
            UnsupportedError,
            "bias is not supported over a sequence in parts",
        ),
        (
            {"schedule": "ring"},
            {"mask": jnp.ones((16, 16))},
            UnsupportedError,
            "mask is not supported for a ring",
        ),
        ({"schedule": "alltoall"}, {"mask": jnp.ones((4, 4))}, InvalidArgumentsError, "mask"),
        ({}, {"module": object()}, UnsupportedError, "sow_weights=False"),
        ({}, {"dropout_rate": 0.5}, InvalidArgumentsError, "no dropout_rng"),
        ({"colour": 1}, {}, InvalidArgumentsError, "no option .colour."),
    ):
        attend = partial(cf.ring_attention_fn("rows", **made), **given)
        with pytest.raises(error, match=message):
            in_parts(attend)(q, q, q)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_modules_in_parts(kind):
    """Results and gradients of the weights, of a module of one device and of the same one in parts."""
    pytest.importorskip("flax", reason="flax is not installed: pip install flax")
    from flax import linen, nnx

    (x,) = normal((2, ROWS, 32))
    ours, theirs = {"attention_fn": cf.ring_attention_fn("rows", causal=True)}, {}
    mask = jnp.tril(jnp.ones((ROWS, ROWS)))[None, None]
    if kind == "linen":
        modules = [linen.MultiHeadDotProductAttention(num_heads=4, **how) for how in (ours, theirs)]
        weights = modules[1].init(jax.random.key(0), x)
        applied = [module.apply for module in modules]
    else:
        how = {"num_heads": 4, "in_features": 32, "decode": False}
        split = [
            nnx.split(nnx.MultiHeadAttention(**how, **more, rngs=nnx.Rngs(0)), nnx.Param, ...)
            for more in (ours, theirs)
        ]
        weights = split[0][1]
        applied = [
            lambda weights, x, graph=graph, rest=rest, **more: nnx.merge(graph, weights, rest)(x, **more)
            for graph, _, rest in split
        ]
    parts, whole = in_parts(applied[0], weights=True), partial(applied[1], mask=mask)
    np.testing.assert_allclose(parts(weights, x), whole(weights, x), atol=1e-5)
    found, wanted = (jax.grad(lambda w, f=f: jnp.sin(f(w, x)).sum())(weights) for f in (parts, whole))
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), found, wanted)
