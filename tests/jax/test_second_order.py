"""Second order in JAX: its transforms, against the formula in JAX's own operations."""

from functools import partial
from unittest import mock

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
from jax.test_util import check_grads

import cupy_flash.jax as cf
from cupy_flash import UnsupportedError
from cupy_flash.derivatives import second_order
from cupy_flash.jax import directed
from tests.jax.x64 import enable_x64

pytestmark = pytest.mark.jax


@pytest.fixture(autouse=True)
def _in_float64():
    """In float32 second derivatives differ in their third digit."""
    with enable_x64(True):
        yield


def normal(*shapes, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape) for shape in shapes]


ROWS = ((1, 2, 5, 3),) * 3
POINT, DIRECTION = tuple(normal(*ROWS)), tuple(normal(*ROWS, seed=1))


def ours(q, k, v):
    return cf.attention(q, k, v, causal=True)


def theirs(q, k, v):
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    return jax.nn.softmax(jnp.where(jnp.tri(*s.shape[-2:], dtype=bool), s, -jnp.inf), -1) @ v


def loss_of(f):
    return lambda *x: (f(*x) ** 2).sum()


def penalty_of(f):
    """The square of a gradient."""
    return lambda *x: sum((g**2).sum() for g in jax.grad(loss_of(f), (0, 1, 2))(*x))


def twice(f):
    """Attention of attention, as a scan."""
    return lambda q, k, v: jax.lax.scan(lambda c, _: (f(c, k, v), None), jnp.asarray(q), None, length=2)[0]


def doubled(xs):
    return [jnp.stack([x, 2 * x]) for x in xs]


def penalty_over(f):
    """A penalty of two gradients by vmap, whose keys are the same."""
    gradients = jax.vmap(jax.grad(loss_of(f)), (0, None, 0))
    q, v = doubled((POINT[0], POINT[2]))
    return lambda k: (gradients(q, k, v) ** 2).sum()


WAYS = {
    "linearize": lambda f: jax.linearize(f, *POINT)[1](*DIRECTION),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1, 2))(*POINT),
    "hessian": lambda f: jax.jit(jax.hessian(loss_of(f), (0, 1, 2)))(*POINT),
    "grad of grad": lambda f: jax.grad(penalty_of(f), (0, 1, 2))(*POINT),
    "vmap of grad of grad": lambda f: jax.jit(jax.vmap(jax.grad(penalty_of(f))))(*doubled(POINT)),
    "grad of vmap of grad": lambda f: jax.grad(penalty_over(f))(POINT[1]),
    "grad of jvp": lambda f: jax.grad(lambda *x: (jax.jvp(f, x, DIRECTION)[1] ** 2).sum(), (0, 2))(*POINT),
    "scan": lambda f: jax.grad(penalty_of(twice(f)))(*POINT),
    "remat": lambda f: jax.grad(penalty_of(jax.checkpoint(f)))(*POINT),
}  # fmt: skip


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-9, rtol=1e-9)


SLOW = ("grad of vmap of grad", "scan", "remat")


@pytest.mark.parametrize("way", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in WAYS])
def test_every_way_gives_what_the_formula_gives(way):
    close(WAYS[way](ours), WAYS[way](theirs))


@pytest.mark.slow
def test_hessian_of_a_model_of_two_layers():
    def model(attention):
        def loss(weights):
            x = jnp.asarray(DIRECTION[0])
            for w in weights:
                x = x + attention(x @ w[0], x @ w[1], x @ w[2])
            return (x**2).sum()

        return jax.hessian(loss)

    (weights,) = normal((2, 3, 3, 3), seed=2)
    close(jax.jit(model(ours))(weights), model(theirs)(weights))


@pytest.mark.slow
def test_check_grads_of_every_option():
    arrays = normal((1, 4, 3, 3), (1, 2, 4, 3), (1, 2, 4, 2), (4, 3, 4), (4,))

    def every_option(q, k, v, bias, sinks):
        return cf.attention(
            q, k, v, bias=bias, sinks=sinks, causal=True, align="bottom_right", softcap=2.0, dropout=0.2,
            seed=1, return_lse=True,
        )  # fmt: skip

    check_grads(every_option, arrays, order=1, modes=("fwd", "rev"))
    check_grads(jax.grad(lambda *x: sum((y**2).sum() for y in every_option(*x))), arrays, order=1)


def test_packed_sequences_and_a_traced_scale():
    cut = jnp.array([0, 3, 5], jnp.int32)
    mask = jnp.array([[a == b for b in "xxxyy"] for a in "xxxyy"])
    q, k, v = normal((5, 2, 3), (5, 2, 3), (5, 2, 3))

    def packed(q, k, v, scale):
        return cf.attention_varlen(q, k, v, cut, cut, scale=scale)

    def whole(q, k, v, scale):
        s = jnp.einsum("ihd,jhd->hij", q, k) * scale
        return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1), v)

    def result(f):
        return jax.hessian(lambda q, scale: (f(q, k, v, scale) ** 2).sum(), (0, 1))(q, jnp.float64(0.5))

    close(result(packed), result(whole))


def test_16_bit_types_stay_what_they_are():
    x = [jnp.asarray(x, jnp.bfloat16) for x in POINT]
    o, tangent = jax.jvp(ours, x, x)
    assert o.dtype == tangent.dtype == jnp.bfloat16
    second = jax.jvp(jax.grad(loss_of(ours)), x, x)[1]
    assert second.dtype == jnp.bfloat16
    wide = [x.astype(jnp.float32) for x in x]
    np.testing.assert_allclose(tangent.astype(jnp.float32), jax.jvp(theirs, wide, wide)[1], atol=0.03)


def test_directions_of_a_jacobian_share_one_call():
    with mock.patch.object(directed, "jvp_into", side_effect=second_order.jvp_into) as calls:
        jax.block_until_ready(jax.jacfwd(lambda q: ours(q, *POINT[1:]))(POINT[0]))
    assert calls.call_count == 1


def test_what_is_not_there_raises():
    with pytest.raises(UnsupportedError, match="of its forward-mode derivative"):
        jax.jacfwd(jax.jacfwd(loss_of(ours)))(*POINT)
    with pytest.raises(UnsupportedError, match="attention has no third derivative"):
        jax.grad(lambda *x: jax.hessian(loss_of(ours))(*x).sum())(*POINT)
    slopes = jnp.ones(2)
    with pytest.raises(UnsupportedError, match="alibi_slopes has no gradient"):
        jax.grad(lambda x: cf.attention(*POINT, alibi_slopes=x).sum())(slopes)


# Scalars that have second derivatives in them; what follows asks for their derivative, and then does not.
def along_a_gradient(f):
    return lambda *x: sum(g.sum() for g in jax.jvp(jax.grad(loss_of(f), (0, 1, 2)), x, DIRECTION)[1])


def gradient_of_a_tangent(f):
    return lambda *x: jax.grad(lambda *y: jax.jvp(loss_of(f), y, DIRECTION)[1])(*x).sum()


def laplacian(f):
    """Over some directions, one after the other."""

    def total(*x):
        _, push = jax.linearize(jax.grad(loss_of(f)), *x)
        return jax.lax.fori_loop(0, 2, lambda n, s: s + push(*(n * d for d in DIRECTION)).sum(), 0.0)

    return total


def rematerialised(f):
    return lambda *x: jax.grad(jax.checkpoint(penalty_of(f)))(*x).sum()


SECOND = {x.__name__: x for x in (along_a_gradient, gradient_of_a_tangent, laplacian, rematerialised)}
ASKED = {
    "jit of grad": lambda g: jax.jit(jax.grad(g, (0, 1, 2)))(*POINT),
    "grad": lambda g: jax.grad(g, (0, 1, 2))(*POINT),
    "vmap of grad": lambda g: jax.vmap(jax.grad(g))(*doubled(POINT)),
    "linearize": lambda g: jax.linearize(g, *POINT)[1](*DIRECTION),
    "jit of jvp": lambda g: jax.jit(lambda *x: jax.jvp(g, x, DIRECTION))(*POINT),
    "vjp": lambda g: jax.vjp(g, *POINT)[1](1.0),
    "jit of hessian": lambda g: jax.jit(jax.hessian(g))(*POINT),
}


@pytest.mark.parametrize(
    ("second", "way"),
    [
        ("laplacian", "jit of grad"),
        *(pytest.param("laplacian", way, marks=pytest.mark.slow) for way in ASKED if way != "jit of grad"),
        *(pytest.param(x, "jit of grad", marks=pytest.mark.slow) for x in SECOND if x != "laplacian"),
    ],
)
def test_a_third_derivative_raises_only_where_something_comes_of_it(second, way):
    def weighted(f):
        return lambda *x: jax.lax.stop_gradient(SECOND[second](f)(*x)) * loss_of(f)(*x)

    close(ASKED[way](weighted(ours)), ASKED[way](weighted(theirs)))
    with pytest.raises(
        UnsupportedError, match=r"attention has no (third|forward-mode) derivative[\s\S]*Try: "
    ):
        ASKED[way](SECOND[second](ours))


def test_a_cache_raises_only_where_its_gradient_is_used():
    """A score from generated text weighs the gradient of something else."""

    def generated(q):
        return cf.attention_with_kv_cache(q, *POINT[1:], cache_seqlens=4).sum()

    def weighted(q):
        return jax.lax.stop_gradient(generated(q)) * (q**2).sum()

    for transform in (lambda f: f, jax.jit):
        close(transform(jax.grad(weighted))(POINT[0]), 2 * POINT[0] * generated(POINT[0]))
        with pytest.raises(UnsupportedError, match="attention over a cache"):
            transform(jax.grad(generated))(POINT[0])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_attention_is_linear_in_values(transform):
    q, k, v, do = jax.random.normal(jax.random.key(5), (4, 2, 1, 2, 6, 4))

    def ours(v, return_lse=False):
        options = {"causal": True, "dropout": 0.3, "seed": 7, "return_lse": return_lse}
        return transform(partial(cf.attention, **options))(q, k, v)

    if transform is not jax.vmap:
        q, k, v, do = (x[0] for x in (q, k, v, do))
    wanted = jax.vjp(ours, v)[1](do)[0]
    np.testing.assert_allclose(jax.linear_transpose(ours, v)(do)[0], wanted, rtol=1e-5, atol=1e-6)
    both = jax.linear_transpose(partial(ours, return_lse=True), v)  # lse is constant
    np.testing.assert_allclose(both((do, do[..., 0]))[0], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(both((0 * do, do[..., 0]))[0], 0 * v)


def test_what_is_not_linear_says_so():
    q, k, v = jax.random.normal(jax.random.key(5), (3, 1, 2, 6, 4))
    with pytest.raises(UnsupportedError, match=r"(?s)not linear in q, v.*Try: jax.vjp"):
        jax.linear_transpose(lambda q, v: cf.attention(q, k, v), q, v)(q)
    with pytest.raises(UnsupportedError, match=r"(?s)over a cache.*Try: .*cupy_flash.jax.attention"):
        jax.linear_transpose(lambda v: cf.attention_with_kv_cache(q, k, v, cache_seqlens=3), v)(q)
