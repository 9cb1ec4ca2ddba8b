"""cupy_flash.jax against JAX itself: its checker, its functions, its transforms."""

import doctest
import importlib
import inspect
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.nn import dot_product_attention as jax_attention
from jax.test_util import check_grads

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.call.adopt import adopt
from cupy_flash.call.adopt.jax import from_jax
from cupy_flash.jax import run
from tests.conftest import skip_without_core

pytestmark = pytest.mark.jax


def normal(*shapes, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def qkv(batch=2, heads=4, heads_k=2, seqlen=9, head_dim=8, **kwargs):
    rows = (batch, heads_k, seqlen, head_dim)
    return normal((batch, heads, seqlen, head_dim), rows, rows, **kwargs)


def causal_by_jax(q, k, v):
    return jax_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True).swapaxes(1, 2)


causal = partial(cf.attention, causal=True)
PREFIX = np.ones((2, 3, 8), np.float32)
CUTS = np.array([0, 2], np.int32)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def gradients(function, *arrays):
    return jax.grad(lambda *a: jnp.sin(function(*a)).sum(), argnums=(0, 1, 2))(*arrays)


def test_eager_jitted_and_their_gradients_equal_jax():
    arrays = qkv()
    close(causal(*arrays), causal_by_jax(*arrays))
    close(jax.jit(causal)(*arrays), causal_by_jax(*arrays))
    for function in (gradients, jax.jit(gradients, static_argnums=0)):
        for a, b in zip(function(causal, *arrays), gradients(causal_by_jax, *arrays), strict=True):
            close(a, b)


def test_a_repeated_call_looks_at_no_array(monkeypatch):
    """Views of the arrays were a quarter of what Python does for a short call of a compiled program."""
    skip_without_core()
    jitted, arrays = jax.jit(causal), qkv()
    first = np.asarray(jitted(*arrays))
    looks = []
    monkeypatch.setattr(run.ArrayView, "_replace", lambda view, **_: looks.append(view))
    np.testing.assert_array_equal(jitted(*arrays), first)
    assert not looks
    monkeypatch.undo()
    told = []
    with cupy_flash.progress(told.append):  # which it tells of, all the same
        np.testing.assert_array_equal(jitted(*arrays), first)
    assert told == [1.0]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_check_grads_of_every_gradient_there_is(layout):
    q, k, v = qkv() if layout == "bhsd" else (x.swapaxes(1, 2) for x in qkv())
    bias, sinks = normal((4, 1, 9), (4,), seed=1)
    mask = jax.random.bernoulli(jax.random.key(2), 0.8, (9, 9))

    def function(q, k, v, bias, sinks):
        return cf.attention(
            q, k, v, bias=bias, sinks=sinks, mask=mask, softcap=5.0, dropout=0.2, seed=3, layout=layout,
            causal=True, return_lse=True,
        )  # fmt: skip

    check_grads(function, (q, k, v, bias, sinks), order=1, modes=["rev"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_types_stay_what_they_are(dtype):
    arrays = [x.astype(dtype) for x in qkv()]
    o, lse = jax.jit(partial(causal, return_lse=True))(*arrays)
    assert (o.dtype, lse.dtype) == (dtype, jnp.float32)
    wide = causal_by_jax(*(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(o.astype(jnp.float32), wide, atol=0.02)
    assert gradients(causal, *arrays)[0].dtype == dtype


def test_vmap_scan_and_remat():
    arrays = qkv()
    close(jax.vmap(causal)(*arrays), causal_by_jax(*arrays))
    stacked = jnp.stack([arrays[0], 2 * arrays[0]])
    over_q = jax.vmap(lambda q: causal(q, *arrays[1:]))(stacked)
    close(over_q[1], causal_by_jax(stacked[1], *arrays[1:]))
    each = jax.vmap(jax.grad(lambda q: causal(q, *arrays[1:]).sum()))(stacked)
    close(each[0], jax.grad(lambda q: causal_by_jax(q, *arrays[1:]).sum())(arrays[0]))

    def twice(function, q):
        return jax.lax.scan(lambda q, _: (function(q, *arrays[1:]), None), q, None, length=2)[0]

    close(jax.jit(partial(twice, causal))(arrays[0]), twice(causal_by_jax, arrays[0]))
    remembered = jax.grad(jax.checkpoint(lambda q: causal(q, *arrays[1:]).sum()))(arrays[0])
    close(remembered, jax.grad(lambda q: causal_by_jax(q, *arrays[1:]).sum())(arrays[0]))


@pytest.mark.parametrize("function", ["attention", "ring_attention"])
def test_a_policy_of_checkpoint_saves_results_by_name(function):
    q, k, v = qkv()
    if function == "attention":
        attend = causal
    else:
        mesh, cut = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)), jax.sharding.PartitionSpec()
        parts = partial(cf.ring_attention, axis_name="rows", schedule="ring")
        attend = jax.shard_map(parts, mesh=mesh, in_specs=cut, out_specs=cut)
    saved = jax.checkpoint_policies.save_only_these_names("cupy_flash")
    for policy, passes in ((None, 2), (saved, 1)):
        kept = jax.checkpoint(lambda q: jnp.sin(attend(q, k, v)).sum(), policy=policy)
        assert str(jax.make_jaxpr(jax.grad(kept))(q)).count("cupy_flash_forward[") == passes


def test_shard_map_keeps_every_device_to_its_own():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    arrays = qkv(batch=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    spec = jax.sharding.PartitionSpec("batch")
    sharded = jax.jit(jax.shard_map(causal, mesh=mesh, in_specs=spec, out_specs=spec))
    close(sharded(*arrays), causal_by_jax(*arrays))
    for a, b in zip(gradients(sharded, *arrays), gradients(causal_by_jax, *arrays), strict=True):
        close(a, b)
    # One set of keys for all devices: their gradients add up.
    shared = jax.shard_map(causal, mesh=mesh, in_specs=(spec, None, None), out_specs=spec)
    q, k, v = arrays[0], arrays[1][:2], arrays[2][:2]
    repeated = [jnp.tile(x, (4, 1, 1, 1)) for x in (k, v)]
    wanted = gradients(
        lambda q, k, v: causal_by_jax(q, *(jnp.tile(x, (4, 1, 1, 1)) for x in (k, v))), q, k, v
    )
    close(shared(q, k, v), causal_by_jax(q, *repeated))
    for a, b in zip(gradients(shared, q, k, v), wanted, strict=True):
        close(a, b, atol=1e-5)


@pytest.mark.parametrize("axes", [("batch",), ()], ids=["sharded", "replicated"])
def test_arrays_on_several_devices_are_adopted(axes):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), placed)
    np.testing.assert_array_equal(adopt(x, "x").numpy(), np.asarray(x))


WITH_RESIDUAL = pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax_attention).parameters, reason="needs a later JAX"
)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"local_window_size": 3}, {"local_window_size": (4, 1)}, {"scale": 0.3},
     pytest.param({"return_residual": True}, marks=WITH_RESIDUAL)],
)  # fmt: skip
def test_dot_product_attention_is_jaxs(batched, options):
    q, k, v = (x.swapaxes(1, 2) for x in qkv())
    bias = normal((2, 4, 9, 9), seed=4)[0]
    if not batched:
        q, k, v, bias = q[0], k[0], v[0], bias[0]
    ours = cf.dot_product_attention(q, k, v, bias, **options)
    # why a mask: JAX 0.6 ignores a window alone.
    theirs = jax_attention(q, k, v, bias, jnp.ones_like(bias, bool), **options)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
        close(a, b)


def test_sequence_lengths_are_jaxs_where_jax_is_defined():
    q, k, v = (x.swapaxes(1, 2) for x in qkv())
    lengths = jnp.array([9, 4], jnp.int32), jnp.array([5, 9], jnp.int32)
    named = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True))
    ours, theirs = cf.dot_product_attention(q, k, v, **named), jax_attention(q, k, v, **named)
    close(ours[0], theirs[0])
    close(ours[1, :4], theirs[1, :4])
    assert not ours[1, 4:].any()


@pytest.mark.parametrize("wrong", [None, "rows", [[1.0], [1.0, 2.0]]], ids=["none", "text", "ragged"])
def test_what_is_no_array_is_refused_by_its_name(wrong):
    q, k, v = qkv()
    for name, function in (
        ("q", lambda: cf.attention(wrong, k, v)),
        ("k", lambda: cf.attention(q, wrong, v)),
        ("cu_seqlens_q", lambda: cf.attention_varlen(q[0], k[0], v[0], wrong, CUTS)),
        ("prefix_k", lambda: cf.attention_with_shared_prefix(q, k, v, wrong, PREFIX)),
        ("key", lambda: cf.dot_product_attention(q, wrong, v)),
        ("cache_seqlens", lambda: cf.attention_with_kv_cache(q, k, v, cache_seqlens=wrong)),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentsError, match=rf"{name} is .*, not an array.\nTry: {name} as"):
            function()


def test_ranks_that_have_no_heads():
    q, k, v = (x.swapaxes(1, 2) for x in qkv())
    with pytest.raises(InvalidArgumentsError, match=r"key has rank 1.\nTry: "):
        cf.dot_product_attention(q, k[0, 0, 0], v, key_value_seq_lengths=jnp.array([1, 1]))
    with pytest.raises(InvalidArgumentsError, match=r"rank 2.\nTry: "):
        cf.attention_fn(q[0, 0], k[0, 0], v[0, 0])


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_are_one_per_sequence(name):
    """One length would be broadcast to the batch."""
    q, k, v = (x.swapaxes(1, 2) for x in qkv())
    for lengths, batch in ((jnp.array([4]), 2), (jnp.array(4), 2), (jnp.ones(2), 2), (jnp.array([4, 4]), 1)):
        arrays = (q, k, v) if batch == 2 else (q[0], k[0], v[0])
        with pytest.raises(
            InvalidArgumentsError, match=rf"{name} has(.|\n)*Try: integers of shape \({batch},\)"
        ):
            cf.dot_product_attention(*arrays, **{name: lengths})
    own = cf.dot_product_attention(q[0], k[0], v[0], **{name: jnp.array([4])})
    close(own, cf.dot_product_attention(q, k, v, **{name: jnp.array([4, 4])})[0])


def test_flags_are_refused_by_their_own_names():
    q, k, v = (x.swapaxes(1, 2) for x in qkv())
    for name in ("is_causal", "return_residual"):
        with pytest.raises(InvalidArgumentsError, match=f"Try: {name}=True"):
            cf.dot_product_attention(q, k, v, **{name: 1})
    with pytest.raises(InvalidArgumentsError, match="Try: is_causal=True"):
        cf.attention_fn(q, k, v, is_causal=1)


@WITH_RESIDUAL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_the_residual_is_jaxs(dtype, implementation):
    """Its shape, its dtype, and that no gradient goes through it; and what a row without keys has."""
    q, k, v = (x.swapaxes(1, 2).astype(dtype) for x in qkv())
    mask = jnp.ones((2, 1, 9, 9), bool).at[:, :, 3:].set(jax.random.bernoulli(jax.random.key(1), 0.5, (6, 9)))
    options = {"mask": mask, "scale": 0.7, "return_residual": True}
    o, residual = cf.dot_product_attention(q, k, v, implementation=implementation, **options)
    _, wanted = jax_attention(q, k, v, **options)
    assert (residual.shape, residual.dtype) == (wanted.shape, wanted.dtype) == ((2, 9, 4), dtype)
    close(residual.astype(float), wanted.astype(float), rtol=2 * float(jnp.finfo(dtype).eps))
    through = jax.grad(lambda q: cf.dot_product_attention(q, k, v, **options)[1].sum().astype(float))(q)
    assert not through.any()
    o, residual = cf.dot_product_attention(q, k, v, mask=mask.at[0, 0, 4].set(False), return_residual=True)
    assert not o[0, 4].any()
    assert (residual[0, 4] == -jnp.inf).all()
    assert jnp.isfinite(residual[1]).all()


def test_nothing_needs_ranks_to_be_promoted():
    """Lengths, masks of every rank, gradients, and packed sequences."""
    q, k, v = (x.swapaxes(1, 2) for x in qkv())
    lengths = jnp.array([9, 4], jnp.int32)

    def loss(q, bias):
        o = cf.dot_product_attention(q, k, v, bias, query_seq_lengths=lengths)
        packed = cf.attention_varlen(q[0], k[0], v[0], cuts, cuts, sinks=jnp.zeros(4))
        return o.sum() + packed.sum()

    cuts = jnp.array([0, 4, 9], jnp.int32)
    with jax.numpy_rank_promotion("raise"):
        for function in (loss, jax.jit(loss)):
            jax.grad(function, argnums=(0, 1))(q, jnp.zeros((9, 9)))
        for own in (jnp.ones((9, 9), bool), jnp.ones((4, 9, 9), bool), jnp.ones((2, 1, 9, 9), bool)):
            same = cf.dot_product_attention(q, k, v, mask=own, key_value_seq_lengths=lengths)
            close(same, cf.dot_product_attention(q, k, v, key_value_seq_lengths=lengths))


def test_nothing_needs_dtypes_to_be_promoted():
    """In 16 bits, with arrays of float32 among the options, and second order."""
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv())
    cuts, slopes = jnp.array([0, 4, 9], jnp.int32), jnp.linspace(0.1, 0.4, 4)
    bias = jnp.zeros((1, 4, 9, 9))

    def loss(q, scale):
        o = cf.attention(q, k, v, causal=True, bias=bias, sinks=slopes, alibi_slopes=slopes, scale=scale)
        rows = (x[0].swapaxes(0, 1) for x in (q, k, v))
        packed = cf.attention_varlen(*rows, cuts, cuts, scale=scale)
        cached = cf.attention_with_kv_cache(
            jax.lax.stop_gradient(q), k, v, cache_seqlens=9, scale=jax.lax.stop_gradient(scale)
        )
        return sum(x.astype(jnp.float32).sum() for x in (o, packed, cached))

    def squares(q):
        return (cf.attention(q, k, v, scale=0.3, softcap=5.0).astype(jnp.float32) ** 2).sum()

    with jax.numpy_dtype_promotion("strict"):
        for scale in (slopes, jnp.float32(0.3)):
            jax.grad(loss, argnums=(0, 1))(q, scale)
        jax.jvp(jax.grad(squares), (q,), (q,))


def scaled_by_jax(q, k, v, scale, softcap=None):
    scores = jnp.einsum("bhid,bhjd->bhij", q, jnp.repeat(k, 2, 1)) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores), jnp.repeat(v, 2, 1))


@pytest.mark.parametrize("scale", [0.3, 0.0, -1.0, 1e-40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_traced_scale_and_its_gradient(scale, softcap):
    """Also where it is 0, which its gradient is not."""
    arrays = (*qkv(), jnp.float32(scale))

    def loss(function, *arrays):
        return jnp.sin(function(*arrays)).sum()

    def ours(q, k, v, scale):
        return cf.attention(q, k, v, scale=scale, softcap=softcap)

    wanted = jax.grad(partial(loss, partial(scaled_by_jax, softcap=softcap)), argnums=(0, 1, 2, 3))(*arrays)
    assert wanted[3] != 0
    gradient = jax.grad(partial(loss, ours), argnums=(0, 1, 2, 3))
    for function in (gradient, jax.jit(gradient)):
        for a, b in zip(function(*arrays), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["heads", "batch"])
def test_a_scale_for_each_head(shape, layout):
    """A temperature per head, also 0 and below, with its gradient and second derivative."""
    q, k, v = qkv()
    scale = jnp.linspace(-0.5, 1, 4 if shape == (4,) else 8).reshape(shape).at[..., 1].set(0)

    def ours(q, scale):
        if layout == "bhsd":
            return cf.attention(q, k, v, scale=scale)
        return cf.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), scale=scale, layout=layout).swapaxes(1, 2)

    def theirs(q, scale):
        return scaled_by_jax(q, k, v, scale[..., None, None])

    def loss(function, *arrays):
        return jnp.sin(function(*arrays)).sum()

    wanted = jax.grad(partial(loss, theirs), argnums=(0, 1))(q, scale)
    assert (wanted[1] != 0).all()
    for a, b in zip(jax.jit(jax.grad(partial(loss, ours), argnums=(0, 1)))(q, scale), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    ours_twice, theirs_twice = (jax.hessian(lambda s, f=f: loss(f, q, s))(scale) for f in (ours, theirs))
    np.testing.assert_allclose(ours_twice, theirs_twice, rtol=1e-3, atol=1e-4)
    each = jax.vmap(lambda s: ours(q, s))(jnp.stack([scale, 2 * scale]))
    np.testing.assert_allclose(each[1], theirs(q, 2 * scale), rtol=1e-4, atol=1e-5)
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    assert cf.attention(*half, scale=scale[..., :4]).dtype == jnp.bfloat16


def test_a_scale_for_each_head_of_packed_sequences():
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv())
    q, cuts = q.at[7:].set(jnp.nan), jnp.array([0, 3, 7], jnp.int32)  # these rows belong to no sequence
    scale = jnp.array([0.3, 0.0, -1.0, 0.7])

    def loss(scale):
        return jnp.sin(cf.attention_varlen(q, k, v, cuts, cuts, scale=scale)).sum()

    step = 1e-2 * jnp.eye(4)
    slope = jnp.stack([(loss(scale + s) - loss(scale - s)) / 2e-2 for s in step])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(scale), slope, rtol=1e-2, atol=1e-3)


def test_a_traced_scale_of_packed_sequences_and_of_a_batch():
    q, k, v = qkv()
    several = jnp.array([0.1, 0.5])
    each = jax.vmap(lambda scale: cf.attention(q, k, v, scale=scale))(several)
    close(each[1], scaled_by_jax(q, k, v, 0.5))
    q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
    # The last rows belong to no sequence, and hold what they hold.
    q = q.at[7:].set(jnp.nan)
    cuts = jnp.array([0, 3, 7], jnp.int32)

    def loss(scale):
        return jnp.sin(cf.attention_varlen(q, k, v, cuts, cuts, scale=scale)).sum()

    step = 1e-2
    slope = (loss(0.3 + step) - loss(0.3 - step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.3), slope, rtol=1e-2)


def test_a_traced_softcap_has_no_gradient_and_says_so():
    q, k, v = qkv()

    def capped(q, softcap):
        return cf.attention(q, k, v, scale=0.5, softcap=softcap).sum()

    close(jax.jit(capped)(q, 2.0), scaled_by_jax(q, k, v, 0.5, 2.0).sum(), rtol=1e-4)
    close(jax.jit(jax.grad(capped))(q, 2.0), jax.grad(capped)(q, 2.0))
    for function in (capped, jax.jit(capped)):
        with pytest.raises(UnsupportedError, match=r"softcap has no gradient(.|\n)*Try: "):
            jax.grad(function, argnums=1)(q, 2.0)


def test_numbers_that_are_none():
    q, k, v = qkv()
    with pytest.raises(InvalidArgumentsError, match=r"scale has shape \(3,\)(.|\n)*Try: .*\(heads_q,\)"):
        cf.attention(q, k, v, scale=jnp.ones(3))
    with pytest.raises(InvalidArgumentsError, match=r"scale is a JAX array of (.|\n)*Try: "):
        cf.attention(q, k, v, scale=jnp.array(True))
    assert jnp.isnan(jax.jit(lambda scale: cf.attention(q, k, v, scale=scale))(jnp.nan)).all()
    with pytest.raises(Exception, match=r"softcap is -2\.0, not above 0"):
        jax.block_until_ready(jax.jit(lambda cap: cf.attention(q, k, v, softcap=cap))(-2.0))


def test_a_bfloat16_array_on_a_gpu_is_seen():
    """As JAX shows one: its array interface has no such type, and raises."""

    class Gpu(NamedTuple):
        platform: str = "gpu"
        local_hardware_id: int = 1

    class OnGpu:
        shape, dtype = (2, 3), jnp.dtype(jnp.bfloat16)

        def devices(self):
            return {Gpu()}

        def unsafe_buffer_pointer(self):
            return 4096

        @property
        def __cuda_array_interface__(self):
            raise AttributeError("__cuda_array_interface__ is not supported for BF16 buffers.")

    view = from_jax(OnGpu())
    assert view[:6] == (4096, (2, 3), (3, 1), "bfloat16", ("cuda", 1), "jax")


def test_refusals_come_while_tracing():
    q, k, v = qkv()
    with pytest.raises(InvalidArgumentsError, match="k has 5 keys, v has 9"):
        jax.jit(cf.attention)(q, k[:, :, :5], v)
    with pytest.raises(InvalidArgumentsError, match="has no option 'softmax_scale'"):
        cf.attention(q, k, v, softmax_scale=1.0)
    with pytest.raises(InvalidArgumentsError, match="implementation is 'flash'"):
        cf.dot_product_attention(q, k, v, implementation="flash")
    with pytest.raises(InvalidArgumentsError, match="traced JAX array"):
        jax.jit(cupy_flash.attention)(q, k, v)


@pytest.mark.parametrize("given", [{"causal": True}, {"dropout": 0.1, "seed": 1}, {"window": (9, 0)}])
def test_an_option_that_selects_a_kernel_is_static(given):
    """The compiled function says so, and a call that follows its hint runs."""
    q, k, v = qkv()
    name = next(iter(given))
    call = partial(cf.attention, q, k, v)
    hint = rf"{name} is traced, and .*\nTry: jax.jit\(\.\.\., static_argnames='{name}'\)"
    with pytest.raises(InvalidArgumentsError, match=hint):
        jax.jit(call)(**given)
    jax.jit(call, static_argnames=name)(**given)


@pytest.mark.parametrize(
    "function",
    [cf.attention, partial(cf.attention_with_shared_prefix, prefix_k=PREFIX, prefix_v=PREFIX)],
    ids=["attention", "prefix"],
)
def test_what_is_returned_is_no_guess(function):
    for wanted in (1, "no", None):
        with pytest.raises(InvalidArgumentsError, match=r"return_lse is .*\nTry: return_lse=True"):
            function(*qkv(), return_lse=wanted)
    with pytest.raises(InvalidArgumentsError, match="Try: return_lse=True"):
        jax.jit(lambda wanted: function(*qkv(), return_lse=wanted))(True)


@pytest.mark.parametrize("module", ["", ".ffi", ".flax", ".kv_cache"])
def test_examples_in_docstrings(module):
    tested = doctest.testmod(importlib.import_module("cupy_flash.jax" + module))
    assert tested.attempted
    assert not tested.failed


def test_the_package_does_not_import_jax():
    code = "import sys, cupy_flash; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min)])
def test_rows_that_a_finite_mask_hides_have_the_derivatives_of_a_mean(low):
    """Masks of (1 - m) * low hide every key of some rows, whose weights are then 1 / n."""
    bias = jnp.broadcast_to(jnp.where(jnp.arange(9)[:, None] % 2, 0, jnp.float32(low)), (9, 9))
    ours = partial(cf.attention, bias=bias)

    def textbook(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + bias, -1) @ v

    x, along = qkv(1, 2, 2), qkv(1, 2, 2, seed=1)
    for function in (lambda f: f, lambda f: partial(gradients, f)):
        both = (jax.tree.leaves(jax.jvp(function(f), x, along)) for f in (ours, textbook))
        for a, b in zip(*both, strict=True):
            close(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["dense", "packed", "over a cache"])
def test_what_one_call_takes_is_refused_of_another_type_in_the_next(name):
    q, rows = jnp.ones((1, 2, 5, 8)), jnp.ones((5, 2, 8))
    cut, lengths = jnp.array([0, 5], jnp.int32), jnp.array([5], jnp.int32)
    calls = {
        "dense": partial(cf.attention, q, q, q),
        "packed": partial(cf.attention_varlen, rows, rows, rows, cut, cut),
        "over a cache": partial(cf.attention_with_kv_cache, q, q, q, cache_seqlens=lengths),
    }
    call = calls[name]
    good = {"causal": True, "window": (1, 0)} | ({"max_seqlen_q": 5} if name == "packed" else {})
    call(**good)
    for option, wrong, words in (
        ("causal", 1, "causal is 1"),
        ("window", (1.0, 0), "left bound is 1.0"),
        ("window", (True, 0), "left bound is True"),
        ("max_seqlen_q", 5.0, "longest length of cu_seqlens_q is 5.0"),
    ):
        if option in good:
            with pytest.raises(InvalidArgumentsError, match=words):
                call(**good | {option: wrong})


VALUES = {
    "causal": np.bool_(True), "softcap": np.float32(3), "scale": np.float64(0.3), "layout": np.str_("bhsd"),
    "window": (np.int64(2), jnp.int32(0)), "reproducible": np.str_("run"), "dropout": np.array(0.5),
    "max_seqlen_k": np.int64(5), "max_seqlen_q": jnp.int32(5), "splits": jnp.int32(2),
}  # fmt: skip
NONE = {"window": {1, 0}, "causal": jnp.bool_(True), "precision": [], "max_seqlen_k": [], "splits": {}}


def calls_with(option, value):
    """Calls of JAX that take an option, with this value."""
    q, rows = normal((1, 2, 5, 8), (5, 2, 8))
    cut, lengths = jnp.array([0, 5], jnp.int32), jnp.array([5], jnp.int32)
    calls = {
        cf.attention: partial(cf.attention, q, q, q),
        cf.attention_varlen: partial(cf.attention_varlen, rows, rows, rows, cut, cut),
        cf.attention_with_kv_cache: partial(cf.attention_with_kv_cache, q, q, q, cache_seqlens=lengths),
        cf.attention_statistics: partial(
            cf.attention_statistics, q, q, want="entropy", cache_seqlens=lengths
        ),
    }
    given = {"tuning": cupy_flash.Tuning(splits=value)} if option == "splits" else {option: value}
    given |= {"seed": 1} if option == "dropout" else {}
    if option == "max_seqlen_q":  # the others take it with offsets only
        calls = {cf.attention_varlen: calls[cf.attention_varlen]}
    taken = [name for name in calls if {*given} <= {*inspect.signature(name).parameters}]
    return [partial(calls[name], **given) for name in taken]


@pytest.mark.parametrize("option", VALUES)
def test_numbers_of_numpy_and_arrays_of_one_number_are_what_they_hold(option):
    value = VALUES[option]
    plain = tuple(map(int, value)) if isinstance(value, tuple) else value.item()
    for ours, wanted in zip(calls_with(option, value), calls_with(option, plain), strict=True):
        for a, b in zip(jax.tree.leaves(ours()), jax.tree.leaves(wanted()), strict=True):
            assert jnp.array_equal(a, b), ours.func


@pytest.mark.parametrize("option", NONE)
def test_what_is_no_value_of_an_option_is_refused_by_name(option):
    for call in calls_with(option, NONE[option]):
        if call.func is not cf.attention_statistics:  # which raises when its program runs
            with pytest.raises(InvalidArgumentsError, match=option if option[0] != "m" else "max|longest"):
                call()


def test_lists_are_arrays_where_jaxs_own_function_takes_them():
    q, k, v = (x.swapaxes(1, 2) for x in qkv(heads_k=4))
    options = {"mask": jnp.tri(9, dtype=bool)[None, None], "key_value_seq_lengths": jnp.array([3, 9])}
    lists = {name: x.tolist() for name, x in options.items()}
    found = cf.dot_product_attention(q.tolist(), k.tolist(), v.tolist(), **lists)
    close(found, jax_attention(q, k, v, **options))
