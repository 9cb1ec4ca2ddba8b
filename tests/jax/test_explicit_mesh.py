"""Meshes with explicit axes: shardings are part of types, and results have those of their operands."""

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import cupy_flash
import cupy_flash.jax as cf

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(
        len(jax.devices()) < 2, reason="needs XLA_FLAGS=--xla_force_host_platform_device_count=2"
    ),
    pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs a later JAX, with jax.set_mesh"),
]

# Two devices do not divide 5 rows: an axis in the wrong place raises.
Q, K, V = np.random.default_rng(0).standard_normal((3, 4, 2, 5, 8), np.float32)
ROWS = tuple(x[0].swapaxes(0, 1) for x in (Q, K, V))
BSHD = tuple(x.swapaxes(1, 2) for x in (Q, K, V))
CUTS = np.array([0, 1, 5], np.int32)


def packed(library, q, k, v, **options):
    return library.attention_varlen(q, k, v, CUTS, CUTS, **options)


def batched(library, *arrays, **options):
    return library.attention(*arrays, causal=True, align="top_left", **options)


CASES = {
    "batch": (batched, (Q, K, V), ("x", None, None, None), ("x", None, None)),
    "heads": (batched, (Q, K, V), (None, "x", None, None), (None, "x", None)),
    "head dim": (batched, (Q, K, V), (None, None, None, "x"), (None, None, None)),
    "bshd": (partial(batched, layout="bshd"), BSHD, (None, None, "x", None), (None, "x", None)),
    "packed": (packed, ROWS, (None, "x", None), ("x", None)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_sharded_as_queries(name):
    """Also by a traced scale; head dims are whole in results, but not in gradients."""
    function, arrays, spec, spec_lse = CASES[name]
    wanted = function(cupy_flash, *arrays, scale=0.3, return_lse=True)

    def results(scale, *arrays):
        return function(cf, *arrays, scale=scale, return_lse=True)

    def loss(*args):
        o, lse = results(*args)
        return o.sum() + lse.sum()

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = np.float32(0.3), *(jax.device_put(x, jax.P(*spec)) for x in arrays)
        found = jax.jit(results)(*placed)
        gradient = jax.jit(jax.grad(loss, argnums=1))(*placed)
    for x, y, where in zip(found, wanted, ((*spec[:-1], None), spec_lse), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert jax.typeof(x).sharding.spec == jax.P(*where)
    assert jax.typeof(gradient).sharding.spec == jax.P(*spec)
    np.testing.assert_allclose(
        gradient, jax.jit(jax.grad(loss, argnums=1))(0.3, *arrays), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("spec", "of_cache", "of_lengths"),
    [(("x",), ("x",), ("x",)), ((None, "x"), (None, "x"), ()), (("x",), (), ("x",))],
    ids=["batch", "heads", "pages"],
)
def test_results_over_a_cache_are_sharded_as_queries_and_caches(spec, of_cache, of_lengths):
    """Lengths and tables, whose names come first, say nothing; two devices do not divide 3 pages."""
    pages = of_cache == ()
    batch = 2 if pages else 4
    caches = [x[: 3 if pages else 4].repeat(2, 2) for x in (K, V)]
    q, k, v = (x[:batch] for x in (Q, K[:, :, :1] + 1, V[:, :, :1] + 1))
    given = {"cache_seqlens": np.array([3, 5, 0, 0], np.int32)[:batch], "k": k, "v": v}
    if pages:
        given["block_table"] = np.array([[2], [0]], np.int32)

    def call(q, k, v, given):
        return cf.attention_with_kv_cache(q, k, v, **given, return_lse=True)

    wanted = jax.jit(call)(q, *caches, given)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        of = {"cache_seqlens": of_lengths, "block_table": of_lengths, "k": spec, "v": spec}
        placed = {name: jax.device_put(x, jax.P(*of[name])) for name, x in given.items()}
        arrays = [
            jax.device_put(x, jax.P(*s))
            for x, s in zip((q, *caches), (spec, of_cache, of_cache), strict=True)
        ]
        found = jax.jit(call)(*arrays, placed)
    for x, y, where in zip(found, wanted, (spec, spec, of_cache, of_cache), strict=True):
        np.testing.assert_array_equal(x, y)
        assert jax.typeof(x).sharding.spec == jax.P(*where, *(None,) * (x.ndim - len(where)))


def shared_keys(q, k, v):
    return jax.vmap(partial(batched, cf), in_axes=(0, None, None))(q, k[0], v[0])


def each_gradient(q, k, v):
    """Cotangents and tangents that are the same for all have the axis, too."""

    def loss(q, k, v):
        return sum(x.sum() for x in batched(cf, q, k, v, dropout=0.5, seed=3, return_lse=True))

    def results(q, k, v):
        of_ones = jax.jvp(partial(batched, cf, k=k, v=v), (q,), (np.ones_like(Q[0]),))[1]
        return *jax.grad(loss, argnums=(0, 1, 2))(q, k, v), of_ones

    return jax.vmap(results)(q, k, v)


def summed_gradient(q, k, v):
    return jax.grad(lambda *arrays: shared_keys(*arrays).sum(), argnums=(0, 1))(q, k, v)


def dropped_gradient(q, k, v):
    """The tangent of lse, which has fewer axes than q, and is dropped."""

    def loss(q):
        made = cf.attention_with_kv_cache(q, k, v, cache_seqlens=3, return_lse=True)
        return q.sum() + jax.lax.stop_gradient(made[1]).sum()

    return jax.grad(loss)(q)


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        (shared_keys, ("x",)), (each_gradient, ("x",)), (summed_gradient, ("x",)),
        (dropped_gradient, (None, None, None, "x")),
    ],
)  # fmt: skip
def test_axes_of_vmap_and_of_derivatives(function, spec):
    wanted = jax.jit(function)(Q, K, V)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x, jax.P(*spec)) for x in (Q, K, V))
        if function in (shared_keys, summed_gradient):
            k, v = K, V
        found = jax.jit(function)(q, k, v)
    first = jax.tree.leaves(found)[0]
    assert jax.typeof(first).sharding.spec == jax.P(*spec, *(None,) * (4 - len(spec)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
