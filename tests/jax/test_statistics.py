"""attention_statistics as a JAX function: under jit, vmap and scan, with traced lengths; no gradients."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, QuantizedCache, Rotary, Spans
from tests.public import int4_parts

pytestmark = pytest.mark.jax


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return [jax.random.normal(key, (2, n, 40, 32)).astype(dtype) for key, n in zip(keys, (4, 2), strict=True)]


def assert_equal(made, wanted):
    for name, x, y in zip(made._fields, made, wanted, strict=True):
        if y is None:
            assert x is None
            continue
        assert isinstance(x, jax.Array)
        np.testing.assert_array_equal(x, np.asarray(y), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
def test_under_jit(dtype, known):
    q, k = arrays(dtype)
    lse = cf.attention(q, k, k, causal=True, return_lse=True)[1] if known else None
    call = jax.jit(lambda q, k, lse: cf.attention_statistics(q, k, lse, causal=True, top_k=3))
    mine = None if lse is None else np.asarray(lse)
    wanted = cupy_flash.attention_statistics(np.asarray(q), np.asarray(k), mine, causal=True, top_k=3)
    assert_equal(call(q, k, lse), wanted)
    assert_equal(cf.attention_statistics(q, k, lse, causal=True, top_k=3), wanted)
    assert_equal(cupy_flash.attention_statistics(q, k, lse, causal=True, top_k=3), wanted)


def test_only_what_is_wanted():
    q, k = arrays()
    made = jax.jit(lambda q, k: cf.attention_statistics(q, k, want=["top_k", "key_max"]))(q, k)
    wanted = cupy_flash.attention_statistics(np.asarray(q), np.asarray(k), want=["top_k", "key_max"])
    assert_equal(made, wanted)


def test_vmap_and_scan():
    q, k = arrays()

    def one(q, k):
        return cf.attention_statistics(q, k, causal=True)

    wanted = cupy_flash.attention_statistics(np.asarray(q), np.asarray(k), causal=True)
    assert_equal(jax.vmap(one)(q, k), wanted)
    assert_equal(jax.lax.scan(lambda carry, x: (carry, one(*x)), 0, (q, k))[1], wanted)
    shared = jax.vmap(one, in_axes=(0, None))(q, k[0])
    assert_equal(shared, cupy_flash.attention_statistics(np.asarray(q), np.stack([k[0], k[0]]), causal=True))


def test_other_numbers_do_not_recompile():
    """Lengths, offsets and scales are traced: one program serves all."""
    compiled = []

    @jax.jit
    def call(q, k, length, scale):
        compiled.append(True)
        return cf.attention_statistics(q, k, cache_seqlens=length, scale=scale)

    q, k = arrays()
    for length in (3, 40):
        made = call(q, k, length, 0.01 * length)
        wanted = cupy_flash.attention_statistics(
            np.asarray(q), np.asarray(k), cache_seqlens=length, scale=np.float32(0.01 * length)
        )
        assert_equal(made, wanted)
    assert len(compiled) == 1


def test_gradients_are_stopped():
    q, k = arrays()

    def loss(q, scale):
        made = cf.attention_statistics(q, k, scale=scale)
        return (q * q).sum() + made.entropy.sum() + made.key_sum.max()

    dq, dscale = jax.grad(loss, argnums=(0, 1))(q, jnp.linspace(0.1, 0.4, 4))
    np.testing.assert_array_equal(dq, 2 * q)
    assert not dscale.any()


@pytest.mark.parametrize("kind", ["spans", "scale", "traced scale", "sinks and bias"])
def test_arrays_among_the_options(kind):
    q, k = arrays()
    options = {
        "spans": {"mask": Spans(jnp.full((1, 1, 1, 40, 2), jnp.array([3, 30]), jnp.int32))},
        "scale": {"scale": jnp.linspace(0.1, 0.4, 4)},
        "traced scale": {"scale": jnp.float32(0.3)},
        "sinks and bias": {"sinks": jnp.ones(4), "bias": jnp.linspace(-1, 1, 40)},
    }[kind]
    wanted = cupy_flash.attention_statistics(
        np.asarray(q), np.asarray(k), **jax.tree.map(np.asarray, options)
    )
    assert_equal(
        jax.jit(lambda q, k, options: cf.attention_statistics(q, k, **options))(q, k, options), wanted
    )


def test_packed():
    q, k = (x[0].swapaxes(0, 1) for x in arrays())
    call = jax.jit(
        lambda q, k, cut: cf.attention_statistics(q, k, cu_seqlens_q=cut, cu_seqlens_k=cut, causal=True)
    )
    for cut in ([0, 9, 40], [0, 30, 38]):
        cut = np.array(cut, np.int32)
        wanted = cupy_flash.attention_statistics(
            np.asarray(q), np.asarray(k), cu_seqlens_q=cut, cu_seqlens_k=cut, causal=True
        )
        assert_equal(call(q, k, cut), wanted)


@pytest.mark.parametrize("kind", ["pages", "one length", "codes", "packed queries", "rotary"])
def test_over_a_cache(kind):
    q, _ = arrays()
    q, options = q[:, :, :3], {"causal": True, "cache_seqlens": np.array([33, 48], np.int32)}
    cache = np.asarray(jax.random.normal(jax.random.key(1), (6, 2, 16, 32)))
    table = np.array([[3, 1, 0], [5, 2, 4]], np.int32)
    if kind in ("pages", "packed queries", "rotary"):
        options["block_table"] = table
    else:
        cache = cache.reshape(2, 2, 48, 32)
    if kind == "one length":
        options["cache_seqlens"] = np.int32(21)
    if kind == "codes":
        codes, scale, zero = int4_parts(cache, group=32)
        cache = QuantizedCache(codes, scale, zero)
    if kind == "packed queries":
        q = np.asarray(q).swapaxes(1, 2).reshape(6, 4, 32)
        options["cu_seqlens_q"] = np.array([0, 1, 6], np.int32)
    if kind == "rotary":
        angles = np.random.default_rng(0).random((48, 8)).astype(np.float32)
        options["rotary"] = Rotary(np.cos(angles), np.sin(angles), interleaved=True, last=True)
    alone = dict(options)
    if kind == "one length":
        alone["cache_seqlens"] = 21
    wanted = cupy_flash.attention_statistics(np.asarray(q), cache, **alone)
    flags = {"causal": options.pop("causal")}
    made = jax.jit(lambda q, k, options: cf.attention_statistics(q, k, **flags, **options))(q, cache, options)
    assert_equal(made, wanted)


def test_refusals():
    q, k = arrays()
    with pytest.raises(InvalidArgumentsError, match="want has 'mean'"):
        jax.jit(lambda q: cf.attention_statistics(q, k, want="mean"))(q)
    with pytest.raises(Exception, match="3 heads of q are not a multiple of 2"):
        jax.block_until_ready(cf.attention_statistics(q[:, :3], k))
    pages, table = jax.numpy.zeros((6, 2, 16, 32)), jax.numpy.array([[3, 1], [5, 6]])
    with pytest.raises(Exception, match=r"block_table\[1, 1\] is 6; the cache has 6 pages"):
        jax.block_until_ready(cf.attention_statistics(q, pages, cache_seqlens=32, block_table=table))
    with pytest.raises(InvalidArgumentsError, match="k is a list"):
        cf.attention_statistics(q, [1.0])
    with pytest.raises(InvalidArgumentsError, match="less than 4 axes"):
        cf.attention_statistics(q, k[0], cache_seqlens=3)
    with pytest.raises(InvalidArgumentsError, match="top_k is 0"):
        cf.attention_statistics(q, k, top_k=0)
