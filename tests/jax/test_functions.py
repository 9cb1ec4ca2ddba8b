"""score= through JAX: jit, grad with what is learned, vmap, packed sequences, and what is refused by name."""

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
from jax import export

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from tests.function_cases import MADE, FunctionCase
from tests.public import with_function

pytestmark = pytest.mark.jax

RELATIVE = cupy_flash.score(
    lambda s, b, h, i, j, table, slope: s * slope[h] + table[h, i - j + 10], learned=("table",)
)


def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((2, 4, 7, 8), (2, 2, 11, 8), (2, 2, 11, 8), (4, 17), (4,))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def by_bias(q, k, v, table, slope, **how):
    """The same without a function."""
    i, j = np.ogrid[:7, :11]
    scaled = q * slope[None, :, None, None]
    return cf.attention(scaled, k, v, bias=table[:, i - j + 10][None], **how)


@pytest.mark.parametrize("name", [*MADE])
def test_results_and_gradients_are_those_of_numpy(name):
    case = FunctionCase(name)
    given = case.inputs()
    do, q, k, v = (given[n] for n in ("do", "q", "k", "v"))
    exact = [x.astype(np.float32) if x.dtype == np.float64 else x for x in case.arguments()]
    how = with_function({}, MADE[name][0], exact)
    learned = MADE[name][0].learned

    def loss(q, k, v, *floats):
        own = list(map(jnp.asarray, exact))
        for number, x in zip(learned, floats, strict=True):
            own[number] = x
        return jnp.vdot(cf.attention(q, k, v, **with_function({}, MADE[name][0], own)), do)

    every = tuple(range(3 + len(learned)))
    ours = jax.jit(jax.grad(loss, argnums=every))(q, k, v, *(exact[n] for n in learned))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **how)
    np.testing.assert_allclose(cf.attention(q, k, v, **how), o, atol=1e-6)
    expected = [*grads[:3], *((grads.dscore[n] for n in learned) if learned else ())]
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_vmap_of_arguments():
    q, k, v, table, slope = arrays()
    tables = jnp.stack([table, -table, 0 * table])

    def loss(of):
        def one(q, table):
            return jnp.sin(of(q, k, v, table, slope)).sum()

        return jax.jit(jax.vmap(jax.grad(one, argnums=(0, 1)), in_axes=(None, 0)))

    ours = loss(lambda q, k, v, *given: cf.attention(q, k, v, score=RELATIVE(*given)))(q, tables)
    for x, y in zip(ours, loss(by_bias)(q, tables), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_forward_mode_and_second_derivatives():
    """Those of a bias and of a soft cap, which say the same; under jit and vmap too."""
    q, k, v, table, _ = arrays()
    i, j = np.ogrid[:7, :11]
    bias = table[:, i - j + 10][None]
    own = cupy_flash.score(lambda s, b, h, i, j, table: 2.0 * np.tanh(s / 2.0) + table[h, i - j + 10])
    both = (
        lambda q, k: cf.attention(q, k, v, score=own(table)),
        lambda q, k: cf.attention(q, k, v, bias=bias, softcap=2.0),
    )
    results = []
    for attend in both:

        def loss(q, k, attend=attend):
            return jnp.sin(attend(q, k)).sum()

        def along(direction, loss=loss):
            return jax.jvp(jax.grad(loss, argnums=(0, 1)), (q, k), (direction, k))[1]

        moved = jax.jvp(attend, (q, k), (jnp.cos(q), k))[1]
        twice = jax.grad(lambda q, k, loss=loss: jnp.sin(jax.grad(loss)(q, k)).sum(), argnums=(0, 1))(q, k)
        mapped = jax.jit(jax.vmap(along))(jnp.stack([q, jnp.cos(q)]))
        results.append((moved, *twice, *mapped))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_packed_sequences():
    q, k, v, table, slope = arrays()
    rows, keys = q.swapaxes(1, 2).reshape(14, 4, 8), [x.swapaxes(1, 2).reshape(22, 2, 8) for x in (k, v)]
    cuts = [jnp.array([0, n, 2 * n], jnp.int32) for n in (7, 11)]

    def packed(table):
        o = cf.attention_varlen(rows, *keys, *cuts, score=RELATIVE(table, slope))
        return jnp.sin(o).sum()

    def whole(table):
        return jnp.sin(cf.attention(q, k, v, score=RELATIVE(table, slope))).sum()

    for x, y in zip(jax.value_and_grad(packed)(table), jax.value_and_grad(whole)(table), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_function_is_compiled_once():
    q, k, v, table, slope = arrays()
    run = jax.jit(lambda table: cf.attention(q, k, v, score=RELATIVE(table, slope)))
    for n in range(3):
        run(table * n)
    assert run._cache_size() == 1


def test_a_function_with_its_arrays_may_be_an_argument():
    """Its arrays are traced, have gradients and are mapped; the function itself is static."""
    q, k, v, table, _ = arrays()

    @jax.jit
    def loss(score):
        return jnp.sin(cf.attention(q, k, v, score=score)).sum()

    given = cupy_flash.score(lambda s, b, h, i, j, table: s + table[h, i - j + 10], learned=("table",))
    wanted = jax.grad(lambda table: loss(given(table)))(table)
    np.testing.assert_allclose(jax.grad(loss)(given(table)).arguments[0], wanted, atol=1e-6)
    several = jnp.stack([table, 2 * table])
    expected = [loss(given(x)) for x in several]
    assert loss._cache_size() == 1
    np.testing.assert_allclose(jax.vmap(loss)(given(several)), expected, rtol=1e-5)
    blocked = jax.jit(lambda mask: cf.attention(q, k, v, mask=mask))
    of_rows = cupy_flash.mask(lambda b, h, i, j, rows: j < rows[i])
    rows = jnp.arange(1, q.shape[2] + 1)
    by_mask = cupy_flash.attention(q, k, v, mask=jnp.arange(k.shape[2]) < rows[:, None])
    np.testing.assert_allclose(blocked(of_rows(rows)), by_mask, atol=1e-6)


def test_what_is_refused_by_name():
    q, k, v, table, slope = arrays()

    def loss(q=q, table=table, slope=slope, score=RELATIVE):
        return jnp.sin(cf.attention(q, k, v, score=score(table, slope))).sum()

    with pytest.raises(UnsupportedError, match=r"bound\[1\] has no gradient here.\n(?s:.*)learned=\(...\)"):
        jax.grad(lambda x: loss(slope=x))(slope)
    with pytest.raises(UnsupportedError, match=r"learns has neither forward-mode nor second(?s:.*)Try: ."):
        jax.jvp(lambda x: loss(table=x), (table,), (table,))
    with pytest.raises(UnsupportedError, match="neither forward-mode nor second derivatives"):
        jax.grad(lambda q: jnp.sin(jax.grad(lambda x: loss(q=x))(q)).sum())(q)
    with pytest.raises(UnsupportedError, match="neither forward-mode nor second derivatives"):
        jax.hessian(lambda x: loss(table=x))(table)
    with pytest.raises(InvalidArgumentsError, match="score is a function"):
        cf.attention(q, k, v, score=lambda *_: 0)
    with pytest.raises(InvalidArgumentsError, match="takes 2 arguments behind j"):
        cf.attention(q, k, v, score=RELATIVE(table))
    with pytest.raises(Exception, match=r"reads element -?[0-9]+ of axis 1"):
        jax.block_until_ready(jax.jit(lambda x: loss(table=x))(table[:, :12]))
    target = export.DisabledSafetyCheck.custom_call(cf.export_target())
    with pytest.raises(UnsupportedError, match="with a score function cannot be exported"):
        export.export(jax.jit(lambda x: loss(q=x)), disabled_checks=[target])(q)


def test_integers_do_not_wrap():
    """By the lengths of a program NumPy computes it; what arguments hold is looked at when it runs."""
    length = 50_000
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (1, 1, n, 8)) for key, n in zip(keys, (2, length, length), strict=True))
    squares = cupy_flash.mask(lambda b, h, i, j: (j * j) % 11 < 6)
    keep = jnp.asarray(np.arange(length) ** 2 % 11 < 6)[None, None, None]
    expected = cf.attention(q, k, v, mask=keep)
    for attend in (cf.attention, jax.jit(cf.attention, static_argnames="mask")):
        np.testing.assert_allclose(attend(q, k, v, mask=squares), expected, atol=1e-6)
    product = cupy_flash.mask(lambda b, h, i, j, of: of[i] * of[j] % 7 < 3)
    attend = jax.jit(lambda of: cf.attention(q, k[:, :, :2], v[:, :, :2], mask=product(of)))
    small, large = (np.array([3, n], np.int32) for n in (46340, 2**30))
    keep = small[:, None].astype(np.int64) * small % 7 < 3
    by_mask = cf.attention(q, k[:, :, :2], v[:, :, :2], mask=jnp.asarray(keep))
    np.testing.assert_allclose(attend(small), by_mask, atol=1e-6)
    if "family    core" in cupy_flash.explain(q, q, q, mask=product(jnp.asarray(small))):
        with pytest.raises(Exception, match=r"arguments\[0\]\[i\] \* arguments\[0\]\[j\] can be"):
            jax.block_until_ready(attend(large))
