"""Seeds of a dropout that a program gets when it runs: integers and keys, as any random function takes."""

from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError
from cupy_flash.jax.attend import attend
from tests.jax.x64 import enable_x64

pytestmark = pytest.mark.jax

Q, K, V = (jax.random.normal(key, (2, 2, 17, 8)) for key in jax.random.split(jax.random.key(0), 3))
dropped = partial(cf.attention, Q, K, V, dropout=0.5)
SEEDS = [0, 1, 7, 2**31 - 1]


def by_numpy(seed):
    return cupy_flash.attention(*map(np.asarray, (Q, K, V)), dropout=0.5, seed=seed)


def test_twenty_seeds_are_one_compilation():
    traced = []

    @jax.jit
    def step(q, seed):
        traced.append(seed)
        return jax.value_and_grad(lambda q: cf.attention(q, K, V, dropout=0.5, seed=seed).sum())(q)

    keys = jax.random.split(jax.random.key(1), 20)
    for seeds in (range(20), keys):
        traced.clear()
        step.clear_cache()
        sums = {float(step(Q, seed)[0]) for seed in seeds}
        assert len(traced) == step._cache_size() == 1
        assert len(sums) == 20
    before = attend._cache_size()
    assert len({float(dropped(seed=seed).sum()) for seed in (*range(20), *keys)}) == 40
    assert attend._cache_size() - before <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_an_integer_gives_the_set_that_it_gives_everywhere(seed):
    for given in (seed, np.uint64(seed), jnp.int32(seed), jnp.uint32(seed)):
        np.testing.assert_allclose(dropped(seed=given), by_numpy(seed), atol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda s: dropped(seed=s))(given), by_numpy(seed), atol=1e-6)


def test_all_64_bits_count():
    for seed in (2**32, 2**63 + 5, 2**64 - 1):
        np.testing.assert_allclose(dropped(seed=seed), by_numpy(seed), atol=1e-6)
    np.testing.assert_allclose(dropped(seed=jnp.int32(-1)), by_numpy(2**64 - 1), atol=1e-6)
    np.testing.assert_allclose(dropped(seed=jnp.int8(-3)), by_numpy(2**64 - 3), atol=1e-6)
    with enable_x64(True):
        for seed in (jnp.int64(-2), jnp.int64(2**40 + 1), jnp.uint64(2**63)):
            np.testing.assert_allclose(dropped(seed=seed), by_numpy(int(seed) % 2**64), atol=1e-6)


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.key(3, impl="rbg"), jax.random.PRNGKey(3)])
def test_keys_of_every_kind(key):
    once, again = dropped(seed=key), jax.jit(lambda key: dropped(seed=key))(key)
    np.testing.assert_array_equal(once, again)
    assert not jnp.array_equal(once, dropped(seed=jax.random.split(key)[0]))


def test_forward_and_backward_draw_the_same_set():
    """With values all one, dv is the transpose of what was kept: its sum is that of o."""
    key = jax.random.key(5)

    def kept(v):
        return cf.attention(Q, K, v, dropout=0.5, seed=key).sum()

    ones = jnp.ones_like(V)
    np.testing.assert_allclose(jax.jit(jax.grad(kept))(ones).sum(), kept(ones), rtol=1e-5)
    _, along = jax.jvp(kept, (V,), (ones,))
    np.testing.assert_allclose(along, kept(ones), rtol=1e-5)


def test_vmap_and_scan_over_keys():
    keys = jax.random.split(jax.random.key(6), 3)
    each = jnp.stack([dropped(seed=key) for key in keys])
    np.testing.assert_array_equal(jax.vmap(lambda key: dropped(seed=key))(keys), each)
    _, scanned = jax.lax.scan(lambda carry, key: (carry, dropped(seed=key)), 0, keys)
    np.testing.assert_array_equal(scanned, each)


def test_packed_sequences_take_keys():
    rows = [x[0].swapaxes(0, 1) for x in (Q, K, V)]
    cuts = jnp.array([0, 5, 17], jnp.int32)
    o = cf.attention_varlen(*rows, cuts, cuts, dropout=0.5, seed=jnp.int32(4))
    wanted = cupy_flash.attention_varlen(*map(np.asarray, (*rows, cuts, cuts)), dropout=0.5, seed=4)
    np.testing.assert_allclose(o, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (-1, "seed is -1"),
        (2**64, "seed is 18446744073709551616"),
        (0.5, "seed is 0.5"),
        (jnp.float32(1), r"seed is a JAX array of float32 of shape \(\)"),
        (jnp.zeros(3, jnp.int32), r"seed is a JAX array of int32 of shape \(3,\)"),
        (jax.random.split(jax.random.key(0)), r"of shape \(2,\)"),
        (jax.random.PRNGKey(0, impl="rbg"), r"uint32 of shape \(4,\)"),  # the default has 2 words
        (None, "there is no seed"),
    ],
)
def test_what_is_no_seed(seed, message):
    with pytest.raises(InvalidArgumentsError, match=message + r"(.|\n)*Try: "):
        dropped(seed=seed)


def test_a_position_may_be_traced_too():
    """One compilation serves every position of the first query, in all derivatives."""
    slopes, traced = jnp.linspace(0.1, 0.4, 2), []

    def results(q, align):
        traced.append(align)
        attend = partial(cf.attention, q[:, :, :5], K, causal=True, align=align, alibi_slopes=slopes)
        o, pull = jax.vjp(attend, V)
        return o, *pull(o), jax.jvp(attend, (V,), (V,))[1]

    in_program = jax.jit(results)
    found = [in_program(Q, jnp.int32(align)) for align in (0, 3, 12)]
    assert len(traced) == 1
    for ours, align in zip(found, (0, 3, 12), strict=True):
        for a, b in zip(ours, results(Q, align), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(InvalidArgumentsError, match="align is a JAX array of float32"):
        results(Q, jnp.float32(1))
    with enable_x64(True):  # every key is visible, and of 32 bits the number is 3
        every = cf.attention(Q, K, V, causal=True, align=jnp.int64(2**32 + 3))
    np.testing.assert_allclose(every, cf.attention(Q, K, V), atol=1e-6)
