"""cupy_flash.jax.attention_varlen: each sequence by itself, as JAX's own attention has it, and transforms."""

from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.nn import dot_product_attention as jax_attention
from jax.test_util import check_grads

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError
from tests.cpu.test_varlen import FEATURES, options_of

pytestmark = pytest.mark.jax

LENGTHS_Q, LENGTHS_K = (5, 0, 9, 1), (7, 4, 0, 12)
SPARE = 3  # rows past the last offset
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-6)


def cuts(*lengths):
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.array(lengths, jnp.int32))])


def rows(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, heads_k=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((sum(lengths_q), 4, 16), (sum(lengths_k), heads_k, 16), (sum(lengths_k), heads_k, 8))
    return [
        jax.random.normal(key, (n + SPARE, *rest), dtype)
        for key, (n, *rest) in zip(keys, shapes, strict=True)
    ]  # fmt: skip


def by_jax(q, k, v, lengths):
    """Causal attention within each sequence, by JAX, and zeros after them."""
    ends = np.cumsum(lengths)
    parts = [
        jax_attention(*(x[None, end - n : end] for x in (q, k, v)), is_causal=True)[0]
        for n, end in zip(lengths, ends, strict=True)
    ]
    return jnp.concatenate([*parts, jnp.zeros((len(q) - ends[-1], q.shape[1], v.shape[2]))])


def loss(function, *arrays):
    return jnp.sin(function(*arrays)).sum()


def test_eager_jitted_and_their_gradients_equal_jax():
    lengths = (5, 3, 9, 1)
    q, k, v = rows(lengths, lengths)
    v = jnp.concatenate([v, v], axis=-1)  # JAX's own attention has one head_dim
    cut = cuts(*lengths)
    wanted = by_jax(q, k, v, lengths)
    gradients = jax.grad(lambda *a: loss(lambda *b: by_jax(*b, lengths), *a), argnums=(0, 1, 2))(q, k, v)

    def ours(q, k, v, cut):
        return cf.attention_varlen(q, k, v, cut, cut, causal=True, max_seqlen_q=9, max_seqlen_k=9)

    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        function = transform(ours)
        close(function(q, k, v, cut), wanted)
        found = jax.grad(partial(loss, function), argnums=(0, 1, 2))(q, k, v, cut)
        for a, b in zip(found, gradients, strict=True):
            close(a, b)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_option_is_that_of_numpy(feature):
    q, k, v = rows()
    cut_q, cut_k = cuts(*LENGTHS_Q), cuts(*LENGTHS_K)
    options = {
        name: x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x
        for name, x in options_of(feature, LENGTHS_Q, LENGTHS_K).items()
    }
    traced = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in traced}
    longest = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}

    @jax.jit
    def run(arrays, traced, cut_q, cut_k):
        def function(arrays, traced):
            return cf.attention_varlen(
                *arrays, cut_q, cut_k, return_lse=True, **longest, **static, **traced
            )  # fmt: skip

        differentiable = {n: x for n, x in traced.items() if n in ("bias", "sinks")}
        results, pull = jax.vjp(lambda a, d: function(a, {**traced, **d}), arrays, differentiable)
        return results, pull(results)

    (o, lse), (grads, more) = run((q, k, v), traced, cut_q, cut_k)
    named = [np.asarray(x) for x in (q, k, v)]
    offsets = np.asarray(cut_q), np.asarray(cut_k)
    wanted, wanted_lse = cupy_flash.attention_varlen(*named, *offsets, return_lse=True, **longest, **options)
    finite = np.where(np.isneginf(wanted_lse), 0, wanted_lse)
    back = cupy_flash.attention_varlen_backward(
        wanted, *named, wanted, wanted_lse, *offsets, dlse=finite, **longest, **options
    )
    close(o, wanted)
    close(lse, wanted_lse)
    for name, found in {**dict(zip("qkv", grads, strict=True)), **more}.items():
        close(found, getattr(back, "d" + name))


def test_check_grads_of_every_gradient_there_is():
    q, k, v = rows()
    bias = jax.random.normal(jax.random.key(1), (len(LENGTHS_Q), 4, 1, 12))
    sinks = jnp.linspace(-1, 1, 4)

    def function(q, k, v, bias, sinks):
        return cf.attention_varlen(
            q, k, v, cuts(*LENGTHS_Q), cuts(*LENGTHS_K), max_seqlen_q=9, max_seqlen_k=12, bias=bias,
            sinks=sinks, softcap=5.0, dropout=0.2, seed=3, return_lse=True,
        )  # fmt: skip

    check_grads(function, (q, k, v, bias, sinks), order=1, modes=["rev"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_lengths_change_without_compiling_and_rows_past_them_are_zero(dtype):
    compiled = []

    @jax.jit
    def run(arrays, cut_q, cut_k, used):
        compiled.append(1)
        options = {"seqused_k": used, "causal": True, "align": "bottom_right", "return_lse": True}
        (o, lse), pull = jax.vjp(lambda *a: cf.attention_varlen(*a, cut_q, cut_k, **options), *arrays)
        return o, lse, *pull((jnp.ones_like(o), jnp.zeros_like(lse)))

    for lengths_q, lengths_k, used in (
        ((5, 0, 9, 1), (7, 4, 0, 12), (7, 2, 0, 11)),
        ((2, 3, 1, 4), (8, 4, 1, 3), (0, 4, 1, 1)),
        ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    ):
        q, k, v = rows(dtype=dtype)
        # Whatever stands after the last offset is neither read nor copied.
        end_q, end_k = sum(lengths_q), sum(lengths_k)
        q, k, v = q.at[end_q:].set(jnp.nan), k.at[end_k:].set(jnp.nan), v.at[end_k:].set(jnp.nan)
        o, lse, dq, dk, dv = run((q, k, v), cuts(*lengths_q), cuts(*lengths_k), jnp.array(used, jnp.int32))
        assert (o.dtype, lse.dtype, dk.dtype) == (dtype, jnp.float32, dtype)
        for x, end in ((o, end_q), (lse.T, end_q), (dq, end_q), (dk, end_k), (dv, end_k)):
            assert not np.asarray(x[end:]).any()
            assert not jnp.isnan(x[:end]).any()
        starts_q, starts_k = np.cumsum((0, *lengths_q)), np.cumsum((0, *lengths_k))
        for b, n in enumerate(used):
            i = slice(starts_q[b], starts_q[b + 1])
            j = slice(starts_k[b], starts_k[b] + n)
            alone = cf.attention(q[i], k[j], v[j], layout="bshd", causal=True, align="bottom_right")
            # why not the same bits: a call of few queries alone goes other ways through the compiled core.
            ulp = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(o[i].astype(float), alone.astype(float), rtol=4 * ulp, atol=4 * ulp)
            assert not np.asarray(dk[starts_k[b] + n : starts_k[b + 1]]).any()
    assert len(compiled) == 1


def test_vmap_runs_one_call_per_index():
    q, k, v = rows()
    batches_q = jnp.stack([cuts(*LENGTHS_Q), cuts(1, 2, 3, 4)])
    queries = jnp.stack([q, 2 * q])

    def function(q, cut_q):
        return cf.attention_varlen(q, k, v, cut_q, cuts(*LENGTHS_K))

    for transform in (jax.vmap, lambda f: jax.jit(jax.vmap(f))):
        together = transform(function)(queries, batches_q)
        gradients = transform(jax.grad(lambda q, c: loss(function, q, c)))(queries, batches_q)
        for one in range(2):
            np.testing.assert_array_equal(together[one], function(queries[one], batches_q[one]))
            alone = jax.grad(lambda q, c: loss(function, q, c))(queries[one], batches_q[one])
            close(gradients[one], alone)


def test_shard_map_keeps_every_device_to_its_own_sequences():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    lengths = (5, 3, 9, 1)
    q, k, v = rows(lengths, lengths)
    v = jnp.concatenate([v, v], axis=-1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    function = jax.shard_map(
        lambda q, k, v, cut: cf.attention_varlen(q, k, v, cut, cut, causal=True),
        mesh=mesh, in_specs=spec, out_specs=spec,
    )  # fmt: skip
    owns = [[jnp.roll(x, n, axis=0) for x in (q, k, v)] for n in range(4)]
    stacked = [jnp.concatenate(parts) for parts in zip(*owns, strict=True)]
    cut = jnp.tile(cuts(*lengths), 4)
    together = jax.jit(function)(*stacked, cut)
    gradient = jax.grad(lambda q: loss(function, q, *stacked[1:], cut))(stacked[0])
    for n, own in enumerate(owns):
        here = slice(n * len(q), (n + 1) * len(q))
        close(together[here], by_jax(*own, lengths))
        close(gradient[here], jax.grad(lambda *a: jnp.sin(by_jax(*a, lengths)).sum())(*own))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cut_q": jnp.array([0.0, 6.0])}, "cu_seqlens_q is .* float32, not .* int32"),
        ({"cut_q": jnp.array([0, 4, 6, 6], jnp.int32)}, "cuts 3 sequences, cu_seqlens_k 2"),
        ({"causal": True}, "ambiguous"),
        ({"max_seqlen_q": -1}, "the longest length of cu_seqlens_q is -1"),
        ({"max_seqlen_k": 2.5}, "the longest length of cu_seqlens_k is 2.5"),
        ({"seqused_k": jnp.array([4], jnp.int32)}, r"seqused_k is \(1,\)"),
        ({"mask": jnp.ones((2, 1, 5, 4), bool), "max_seqlen_q": 4}, "does not broadcast"),
        ({"layout": "bshd"}, "has no option 'layout'"),
    ],
)
def test_refusals_come_while_tracing(change, message):
    q, k, v = rows((4, 2), (4, 2))
    cut_q = change.pop("cut_q", cuts(4, 2))
    with pytest.raises(InvalidArgumentsError, match=message):
        jax.eval_shape(partial(cf.attention_varlen, **change), q, k, v, cut_q, cuts(4, 2))


@pytest.mark.parametrize(
    ("cut_q", "used", "message"),
    [
        ([0, 4, 2], [0, 0], "never fall"),
        ([1, 4, 6], [0, 0], "begin with 0"),
        ([0, 4, 600], [0, 0], "end at"),
        ([0, 0, 6], [0, 0], "the longest length of cu_seqlens_q is 6, not 5"),
        ([0, 4, 6], [5, 0], r"seqused_k\[0\] is 5; the sequence has 4 keys"),
    ],
)
def test_wrong_values_raise_when_the_program_runs(cut_q, used, message):
    q, k, v = rows((4, 2), (4, 2))
    run = jax.jit(partial(cf.attention_varlen, q, k, v, cu_seqlens_k=cuts(4, 2), max_seqlen_q=5))
    offsets, keys = (jnp.array(x, jnp.int32) for x in (cut_q, used))
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(run(cu_seqlens_q=offsets, seqused_k=keys))
