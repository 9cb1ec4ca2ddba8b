"""attention_with_kv_cache on JAX arrays, which nothing writes; as a JAX function it returns new caches."""

from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.nn import dot_product_attention as jax_attention

import cupy_flash
import cupy_flash.jax as cf
from cupy_flash import (
    InvalidArgumentsError,
    LatentCache,
    QuantizedCache,
    RaggedMask,
    Rotary,
    Tuning,
    UnsupportedError,
)
from cupy_flash.merge import merge_parts
from tests.jax.x64 import enable_x64
from tests.public import cached, dequantized, int4_parts, nvfp4_parts

pytestmark = pytest.mark.jax


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, shape) for key, shape in
               zip(keys, ((2, 4, 1, 32), (2, 2, 48, 32), (2, 2, 48, 32)), strict=True))  # fmt: skip
    return q, k, v


def test_as_attention_over_the_keys_in_use():
    q, k, v = arrays()
    o, lse = cached(q, k, v, cache_seqlens=jnp.array([17, 48], jnp.int32), return_lse=True)
    assert isinstance(o, jax.Array)
    assert isinstance(lse, jax.Array)
    for b, length in enumerate((17, 48)):
        wanted = cupy_flash.attention(q[b], k[b, :, :length], v[b, :, :length])
        np.testing.assert_allclose(o[b], wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["heads", "batch", "packed", "prefix"])
def test_a_scale_for_each_head(kind):
    """Traced, as a number is; q times it, whatever comes first."""
    q, k, v = arrays()
    scale = jnp.linspace(-0.5, 1, q.shape[1])
    factor, more = scale[:, None, None], {}
    if kind == "batch":
        scale = jnp.stack([scale, 2 * scale])
        factor = scale[..., None, None]
    if kind == "packed":
        q, factor = q.swapaxes(1, 2).reshape(-1, *q.shape[1::2]), scale[:, None]
        more = {"cu_seqlens_q": jnp.array([0, 1, q.shape[0]], jnp.int32)}
    if kind == "prefix":
        more = {"prefix": (k[0, :, :9], v[0, :, :9])}
    call = jax.jit(partial(cf.attention_with_kv_cache, cache_seqlens=LENGTHS, **more))
    np.testing.assert_allclose(call(q, k, v, scale=scale), call(q * factor, k, v, scale=1.0), atol=1e-6)


def test_appending_is_refused_with_a_way_out():
    q, k, v = arrays()
    with pytest.raises(
        InvalidArgumentsError, match=r"JAX arrays cannot be written[\s\S]*Try: cupy_flash\.jax"
    ):
        cached(q, k, v, cache_seqlens=3, k=k[:, :, :1], v=v[:, :, :1])


LENGTHS = jnp.array([17, 47], jnp.int32)


def with_new(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 2)
    return [x.astype(dtype) for x in (*arrays(), *(jax.random.normal(key, (2, 2, 1, 32)) for key in keys))]


def step(q, k_cache, v_cache, k, v, lengths, **options):
    return cf.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, **options)


def by_jax(q, k_cache, v_cache, k, v, lengths):
    """What JAX users write: an update of the cache, and attention over the keys in use."""
    at = jax.vmap(lambda cache, new, n: jax.lax.dynamic_update_slice(cache, new, (0, n, 0)))
    k_cache, v_cache = at(k_cache, k, lengths), at(v_cache, v, lengths)
    heads_inside = (x.swapaxes(1, 2) for x in (q, k_cache, v_cache))
    o = jax_attention(*heads_inside, key_value_seq_lengths=lengths + q.shape[2]).swapaxes(1, 2)
    return o, k_cache, v_cache


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_compiled_step_is_what_jax_users_write(dtype):
    given = with_new(dtype)
    ours, wanted = jax.jit(step)(*given, LENGTHS), by_jax(*given, LENGTHS)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        *(x[0].astype(jnp.float32) for x in (ours, wanted)), rtol=8 * eps, atol=8 * eps
    )
    for a, b in zip(ours[1:], wanted[1:], strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b)
    for x, before in zip(given, with_new(dtype), strict=True):  # those of the caller stay as they were
        np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_donated_caches_are_written_where_they_are(dtype):
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(*with_new(dtype), LENGTHS).compile()
    q, k_cache, v_cache, k, v = with_new(dtype)
    memory, at = compiled.memory_analysis(), [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)]
    assert memory.alias_size_in_bytes == k_cache.nbytes + v_cache.nbytes
    assert memory.temp_size_in_bytes < k_cache.nbytes // 8
    for length in (17, 18):
        _, k_cache, v_cache = compiled(q, k_cache, v_cache, k, v, jnp.full(2, length, jnp.int32))
        assert [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)] == at
    np.testing.assert_array_equal(k_cache[:, :, 17:19], jnp.concatenate([k, k], 2))


def test_a_loop_compiles_once_and_copies_no_cache():
    traced = []

    @partial(jax.jit, donate_argnums=0)
    def decode(caches, q, k, v, lengths):
        traced.append(1)

        def one(caches, n):
            o, *caches = step(q, *caches, k, v, lengths + n)
            return tuple(caches), o

        return jax.lax.scan(one, caches, jnp.arange(3))

    q, k_cache, v_cache, k, v = with_new()
    wanted = k_cache, v_cache
    memory = decode.lower((k_cache, v_cache), q, k, v, LENGTHS).compile().memory_analysis()
    assert memory.temp_size_in_bytes < k_cache.nbytes // 2
    for lengths in (jnp.array([3, 0], jnp.int32), jnp.array([40, 20], jnp.int32)):
        caches, o = decode(jax.tree.map(jnp.copy, wanted), q, k, v, lengths)
        expected = wanted
        for n in range(3):
            one, *expected = by_jax(q, *expected, k, v, lengths + n)
            np.testing.assert_allclose(o[n], one, atol=1e-5)
        np.testing.assert_array_equal(caches[0], expected[0])
    assert len(traced) == 1


def test_a_length_that_is_traced_and_one_for_all():
    q, k_cache, v_cache, *_ = with_new()
    compiled = jax.jit(lambda n: cf.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=n))
    for n in (5, 48):
        wanted = cupy_flash.attention(q, k_cache[:, :, :n], v_cache[:, :, :n])
        for given in (n, jnp.int32(n), jnp.full(2, n, jnp.int32)):
            np.testing.assert_allclose(compiled(given), wanted, atol=1e-6)


PAGED = {"block_table": np.array([[2, 0, 5], [1, 4, 3]], np.int32)}
TURNS = np.linspace(0, 3, 48 * 8, dtype=np.float32).reshape(48, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "bshd", "window": (6, 0), "causal": True},
        {**PAGED, "softcap": 3.0, "scale": 0.3, "sinks": np.arange(4, dtype=np.float32)},
        {"cache_batch_idx": np.array([1, 0], np.int32)},
        {"rotary_cos": np.cos(TURNS), "rotary_sin": np.sin(TURNS), "rotary_interleaved": True, "splits": 2},
        {"k_scale": np.full(2, 0.02, np.float32), "v_scale": np.full(2, 0.03, np.float32)},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_is_that_of_numpy(options):
    q, k_cache, v_cache, k, v = map(np.array, with_new())
    if "k_scale" in options:
        k_cache, v_cache = ((x * 40).clip(-127, 127).astype(np.int8) for x in (k_cache, v_cache))
    if "block_table" in options:
        k_cache, v_cache = (
            x.reshape(2, 2, 3, 16, 32).swapaxes(1, 2).reshape(6, 2, 16, 32).copy() for x in (k_cache, v_cache)
        )
    if "layout" in options:
        q, k_cache, v_cache, k, v = (x.swapaxes(1, 2).copy() for x in (q, k_cache, v_cache, k, v))
    given = {"cache_seqlens": np.asarray(LENGTHS), "k": k, "v": v, "return_lse": True, **options}
    traced = {n: jnp.asarray(x) for n, x in given.items() if isinstance(x, np.ndarray)}
    held = {n: x for n, x in given.items() if n not in traced}
    call = partial(cached, attend=cf.attention_with_kv_cache, **held)
    o, lse, *caches = jax.jit(call)(q, k_cache, v_cache, **traced)
    caches = [x.codes if isinstance(x, QuantizedCache) else x for x in caches]
    wanted, wanted_lse = cached(q, k_cache, v_cache, **given)
    np.testing.assert_allclose(o, wanted, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-6)
    for a, b in zip(caches, (k_cache, v_cache), strict=True):  # which NumPy's call wrote to
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("length", [3.0, True, np.float32(3), jnp.float32(3), 2**31, -(2**31) - 1])
def test_one_length_is_an_integer(length):
    """And no number that could be one, if it were rounded."""
    x = jnp.ones((2, 1, 4, 8))
    with pytest.raises(InvalidArgumentsError, match=r"cache_seqlens is (.|\n)*Try: "):
        cf.attention_with_kv_cache(x, x, x, cache_seqlens=length)


@pytest.mark.parametrize("length", [2**32 + 3, -(2**33)])
@pytest.mark.parametrize("kind", ["cache", "statistics"])
def test_one_traced_length_of_64_bits_is_not_cut_to_32(kind, length):
    x = jnp.ones((2, 1, 4, 8))

    @jax.jit
    def call(n):
        if kind == "statistics":
            return cf.attention_statistics(x, x, cache_seqlens=n, want="entropy").entropy
        return cf.attention_with_kv_cache(x, x, x, cache_seqlens=n)

    with enable_x64(True):
        assert call(jnp.int64(4)).shape
        with pytest.raises(Exception, match=r"cache_seqlens(\[0\])? is (.|\n)*Try: "):
            jax.block_until_ready(call(jnp.int64(length)))


def test_vmap_has_caches_of_its_own_for_each():
    q, k_cache, v_cache, k, v = with_new()
    many = jnp.stack([k, 2 * k])
    o, caches, _ = jax.vmap(lambda k: step(q, k_cache, v_cache, k, v, LENGTHS))(many)
    for n in range(2):
        wanted, cache, _ = step(q, k_cache, v_cache, many[n], v, LENGTHS)
        np.testing.assert_array_equal(o[n], wanted)
        np.testing.assert_array_equal(caches[n], cache)


def test_shard_map_keeps_every_device_to_its_own():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    spec = jax.sharding.PartitionSpec("batch")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))
    for a, b in zip(sharded(*with_new(), LENGTHS), step(*with_new(), LENGTHS), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_no_gradient_is_lost():
    q, *rest = with_new()
    for function in (step, jax.jit(step)):
        with pytest.raises(UnsupportedError, match=r"has no gradient(.|\n)*Try: "):
            jax.grad(lambda q: function(q, *rest, LENGTHS)[0].sum())(q)  # noqa: B023
    fixed = jax.grad(lambda q: (q + step(jax.lax.stop_gradient(q), *rest, LENGTHS)[0]).sum())(q)
    np.testing.assert_array_equal(fixed, jnp.ones_like(q))


def test_refusals_while_tracing_and_when_the_program_runs():
    q, k_cache, v_cache, k, v = with_new()
    with pytest.raises(InvalidArgumentsError, match="k is given without v"):
        jax.jit(step)(q, k_cache, v_cache, k, None, LENGTHS)
    with pytest.raises(InvalidArgumentsError, match="cache_seqlens has dtype float32"):
        jax.jit(step)(q, k_cache, v_cache, k, v, LENGTHS.astype(jnp.float32))
    with pytest.raises(UnsupportedError, match="tuning has a workspace"):
        step(q, k_cache, v_cache, k, v, LENGTHS, tuning=Tuning(workspace=1))
    beyond = jnp.array([3, 48], jnp.int32)
    with pytest.raises(Exception, match=r"cache_seqlens\[1\] is 48 plus 1 new"):
        jax.block_until_ready(jax.jit(step)(q, k_cache, v_cache, k, v, beyond))
    # By the contract a key beyond the room is dropped.
    _, cut, _ = step(q, k_cache, v_cache, k, v, beyond, tuning=Tuning(check=False))
    np.testing.assert_array_equal(cut[1], k_cache[1])
    slots = jnp.array([0, 2], jnp.int32)
    with pytest.raises(Exception, match=r"block_table\[1\] is 2; the cache has 2 slots"):
        jax.block_until_ready(step(q, k_cache, v_cache, k, v, LENGTHS, block_table=slots))


# ---- a prefix that the batch shares


def prefixes(dim=32):
    return [jax.random.normal(key, (2, 21, dim)) for key in jax.random.split(jax.random.key(5), 2)]


def repeated(prefix, own):
    """The prefix before the keys of each sequence."""
    return jnp.concatenate([jnp.broadcast_to(prefix, (own.shape[0], *prefix.shape)), own], axis=2)


@pytest.mark.parametrize("options", [{}, {"window": (30, None)}], ids=str)
def test_a_shared_prefix_under_jit(options):
    q, k_cache, v_cache, k, v = with_new()
    prefix = prefixes()
    whole = [repeated(x, own) for x, own in zip(prefix, (k_cache, v_cache), strict=True)]
    wanted = step(q, *whole, k, v, LENGTHS + 21, return_lse=True, **options)
    call = jax.jit(lambda *arrays: step(
        *arrays[:6], prefix=arrays[6:8], return_lse=True, **options))  # fmt: skip
    o, lse, *caches = call(q, k_cache, v_cache, k, v, LENGTHS, *prefix)
    np.testing.assert_allclose(o, wanted[0], atol=1e-5)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-5)
    for found, x in zip(caches, wanted[2:], strict=True):
        np.testing.assert_array_equal(found, x[:, :, 21:])


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_rotation_of_queries_inside_a_shared_prefix(transform):
    """Queries that stand before their own keys, and see them."""
    _, k_cache, v_cache, k, v = with_new()
    q, prefix = jax.random.normal(jax.random.key(9), (2, 4, 9, 32)), prefixes()
    lengths, angles = jnp.array([3, 0], jnp.int32), jax.random.normal(jax.random.key(8), (21 + 48, 8))
    turns = {"rotary": Rotary(jnp.cos(angles), jnp.sin(angles))}
    whole = [repeated(x, own) for x, own in zip(prefix, (k_cache, v_cache), strict=True)]
    wanted = step(q, *whole, k, v, lengths + 21, return_lse=True, **turns)
    call = transform(lambda *arrays: step(
        *arrays[:6], prefix=arrays[6:8], return_lse=True, **turns))  # fmt: skip
    o, lse, *caches = call(q, k_cache, v_cache, k, v, lengths, *prefix)
    np.testing.assert_allclose(o, wanted[0], atol=1e-5)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-5)
    for found, x in zip(caches, wanted[2:], strict=True):
        np.testing.assert_allclose(found, x[:, :, 21:], atol=1e-6)
    short = {"rotary": Rotary(jnp.cos(angles)[:-1], jnp.sin(angles)[:-1])}
    with pytest.raises(InvalidArgumentsError, match="for a capacity of 48"):
        step(q, k_cache, v_cache, k, v, lengths, prefix=tuple(prefix), **short)


@pytest.mark.parametrize(
    "flags", [(False, False), (True, False), (False, True), (False, False, True)], ids=str
)
def test_a_rotation_may_be_an_argument(flags):
    given, angles = with_new(), jax.random.normal(jax.random.key(8), (48, 8))
    rotary = Rotary(jnp.cos(angles), jnp.sin(angles), None, *flags)
    call = jax.jit(lambda rotary: step(*given, LENGTHS, rotary=rotary))
    for found, wanted in zip(call(rotary), step(*given, LENGTHS, rotary=rotary), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_gradients_through_a_shared_prefix():
    q, k, v = (jax.random.normal(key, (3, 2, 7, 16)) for key in jax.random.split(jax.random.key(6), 3))
    given = (q, k, v, *prefixes(16))

    def ours(*arrays):
        o, lse = cf.attention_with_shared_prefix(*arrays, causal=True, return_lse=True)
        return (o**2).sum() + jnp.sin(lse).sum()

    def theirs(q, k, v, *prefix):
        keys = [repeated(x, own) for x, own in zip(prefix, (k, v), strict=True)]
        o, lse = cf.attention(q, *keys, causal=True, align=21, return_lse=True)
        return (o**2).sum() + jnp.sin(lse).sum()

    found, wanted = (jax.jit(jax.grad(f, argnums=range(5)))(*given) for f in (ours, theirs))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_union_reads_nothing_of_a_part_without_weight(transform, garbage):
    """The union that shared prefixes and rings use: what an empty part holds has no gradient either."""
    keys = jax.random.split(jax.random.key(7), 4)
    o_a, o_b = (jax.random.normal(key, (2, 3, 5)) for key in keys[:2])
    lse_a, lse_b = (jax.random.normal(key, (2, 3)) for key in keys[2:])
    lse_a, lse_b = lse_a.at[0, 0].set(-jnp.inf), lse_b.at[:, 1].set(-jnp.inf)
    lse_a, lse_b = lse_a.at[1, 1].set(-jnp.inf), lse_b.at[0, 0].set(-jnp.inf)

    def loss(o_a, lse_a, o_b, lse_b):
        o, lse = merge_parts(jnp, ((o_a, lse_a), (o_b, lse_b)))
        return (o**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    def result(fill):
        unwritten = [jnp.where(jnp.isneginf(x)[..., None], fill, o) for o, x in ((o_a, lse_a), (o_b, lse_b))]
        return transform(jax.value_and_grad(loss, range(4)))(unwritten[0], lse_a, unwritten[1], lse_b)

    value, grads = result(garbage)
    wanted, wanted_grads = result(0.0)
    np.testing.assert_array_equal(value, wanted)
    for x, y in zip(grads, wanted_grads, strict=True):
        np.testing.assert_array_equal(x, y)
        assert jnp.isfinite(x).all()
    assert not grads[0][jnp.isneginf(lse_a)].any()
    assert not grads[3][jnp.isneginf(lse_b)].any()


def test_gradients_through_a_prefix_without_keys():
    q, k, v = (jax.random.normal(key, (3, 2, 7, 16)) for key in jax.random.split(jax.random.key(6), 3))

    def loss(attend, *prefix):
        return lambda q, k, v: (attend(q, k, v, *prefix) ** 2).sum()

    none = [x[:, :0] for x in prefixes(16)]
    found = jax.grad(loss(cf.attention_with_shared_prefix, *none), range(3))(q, k, v)
    for x, y in zip(found, jax.grad(loss(cf.attention), range(3))(q, k, v), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def packed_over_pages():
    """Three sequences with 3, 0 and 5 queries over pages of 5 keys, two rows to spare."""
    rng = np.random.default_rng(4)
    cut = np.array([0, 3, 3, 8], np.int32)
    q = rng.standard_normal((10, 4, 16)).astype(np.float32)
    pages = [rng.standard_normal((9, 5, 2, 16)).astype(np.float32) for _ in "kv"]
    table = rng.permutation(9).astype(np.int32).reshape(3, 3)
    return q, *pages, cut, table, np.array([7, 0, 15], np.int32)


def test_packed_queries_over_pages_compile_once_whatever_they_are():
    q, k, v, cut, table, lengths = packed_over_pages()
    traces = 0

    @jax.jit
    def call(q, k, v, cut, table, lengths):
        nonlocal traces
        traces += 1
        return cf.attention_varlen(
            q, k, v, cut, None, block_table=table, seqused_k=lengths, causal=True, align="bottom_right",
            return_lse=True,
        )  # fmt: skip

    others = (np.array([0, 1, 6, 6], np.int32), table[::-1].copy(), np.array([4, 11, 2], np.int32))
    for at, pages, used in ((cut, table, lengths), others):
        o, lse = call(q, k, v, at, pages, used)
        wanted, wanted_lse = cupy_flash.attention_varlen(
            q, k, v, at, None, block_table=pages, seqused_k=used, causal=True, align="bottom_right",
            return_lse=True,
        )  # fmt: skip
        np.testing.assert_allclose(o, wanted, atol=1e-6)
        np.testing.assert_allclose(lse, wanted_lse, atol=1e-6)
        assert not np.any(o[at[-1] :])
    assert traces == 1
    cut_k = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    by_cuts = cf.attention_varlen(q, k, v, cut, cut_k, block_table=table, causal=True, align="bottom_right")
    np.testing.assert_allclose(by_cuts, call(q, k, v, cut, table, lengths)[0], atol=1e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_packed_queries_and_new_keys_over_a_cache(layout):
    q, k, v, cut, table, lengths = packed_over_pages()
    if layout == "bhsd":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    rng = np.random.default_rng(5)
    new = {"k": rng.standard_normal((6, 2, 16)).astype(np.float32)}
    new |= {"v": new["k"] + 1, "cu_seqlens_k_new": np.array([0, 3, 3, 4], np.int32)}
    angles = rng.random((15, 4)).astype(np.float32)
    options = {"block_table": table, "cu_seqlens_q": cut, "layout": layout, "causal": True, **new,
               "rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}  # fmt: skip
    lengths = np.array([7, 2, 14], np.int32)
    own = [k.copy(), v.copy()]
    wanted, wanted_lse = cached(q, *own, cache_seqlens=lengths, **options, return_lse=True)
    static = {"layout": layout, "causal": True, "return_lse": True, "max_seqlen_q": 5}
    arrays = {n: x for n, x in options.items() if n not in static}
    call = jax.jit(
        lambda q, k, v, n, arrays: cached(
            q, k, v, cache_seqlens=n, attend=cf.attention_with_kv_cache, **arrays, **static
        )
    )
    o, lse, *after = call(q, k, v, lengths, arrays)
    np.testing.assert_allclose(o, wanted, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-6)
    for x, y in zip(after, own, strict=True):
        np.testing.assert_array_equal(x, y)


def test_packed_calls_refused_by_name():
    q, k, v, cut, table, lengths = packed_over_pages()
    call = partial(cf.attention_with_kv_cache, q, k, v, layout="bshd", block_table=table)
    more = {"cache_seqlens": lengths, "cu_seqlens_q": cut}
    with pytest.raises(UnsupportedError, match="the size of a RaggedMask depends on lengths"):
        call(**more, mask=RaggedMask(np.ones(8, bool)))
    with pytest.raises(InvalidArgumentsError, match="max_seqlen_q is given without cu_seqlens_q"):
        call(cache_seqlens=lengths, max_seqlen_q=3)
    with pytest.raises(InvalidArgumentsError, match="cu_seqlens_q has shape"):
        call(cache_seqlens=lengths, cu_seqlens_q=cut.astype(np.float32))
    with pytest.raises(InvalidArgumentsError, match=r"max_seqlen_q is 2\.5"):
        call(**more, max_seqlen_q=2.5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must begin with 0, never fall"):
        jax.block_until_ready(call(cache_seqlens=lengths, cu_seqlens_q=cut[::-1].copy()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="longest length of cu_seqlens_q is 5, not 4"):
        jax.block_until_ready(call(**more, max_seqlen_q=4))
    with pytest.raises(UnsupportedError, match="bias is not supported over pages"):
        cf.attention_varlen(
            q, k, v, cut, None, block_table=table, seqused_k=lengths, bias=np.ones((3, 4, 5, 15))
        )
    with pytest.raises(UnsupportedError, match="has no gradient"):
        jax.grad(
            lambda q: cf.attention_varlen(q, k, v, cut, None, block_table=table, seqused_k=lengths).sum()
        )(q)


def test_a_cache_of_4_bits():
    q, k, v = arrays()
    (keys, k_scale, k_zero), (values, v_scale, v_zero) = (int4_parts(x, group=32) for x in (k, v))
    codes = {"k_scale": k_scale, "k_zero": k_zero, "v_scale": v_scale, "v_zero": v_zero}
    wide = dequantized(keys, k_scale, k_zero), dequantized(values, v_scale, v_zero)
    wanted = cf.attention_with_kv_cache(q, *wide, cache_seqlens=LENGTHS)
    call = jax.jit(partial(cached, attend=cf.attention_with_kv_cache, cache_seqlens=LENGTHS, **codes))
    np.testing.assert_allclose(call(q, keys, values), wanted, atol=1e-5)


def test_what_4_bits_cannot_hold_is_stored_as_from_numpy():
    """NaN, infinities and too large numbers among others."""
    x = np.linspace(3, -3, 64, dtype=np.float32)
    for wrong in ((np.nan, np.nan, 1.0), (np.inf, -np.inf, np.nan), (1e30, -1e30, 7e4)):
        x[[0, 9, 40]] = wrong
        given = jnp.asarray(x)
        of_jax = (*nvfp4_parts(given), *int4_parts(given, group=32))
        for made, wanted in zip(of_jax, (*nvfp4_parts(x), *int4_parts(x, group=32)), strict=True):
            np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_cache_of_nvfp4(scaled):
    q, k, v = arrays()
    (keys, of_keys), (values, of_values) = (nvfp4_parts(x) for x in (k, v))
    codes = {"k_block_scale": of_keys, "v_block_scale": of_values}
    wide = dequantized(keys, of_keys), dequantized(values, of_values)
    own = {"k_scale": jnp.full(2, 0.5), "v_scale": jnp.full(2, 3.0)} if scaled else {}
    wide = (wide[0] / 2, wide[1] * 3) if scaled else wide
    wanted = cf.attention_with_kv_cache(q, *wide, cache_seqlens=LENGTHS)
    as_float8 = {n: jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn) for n, x in codes.items()}
    for given in (codes, as_float8):
        call = jax.jit(
            partial(cached, attend=cf.attention_with_kv_cache, cache_seqlens=LENGTHS, **given, **own)
        )
        np.testing.assert_allclose(call(q, keys, values), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
@pytest.mark.parametrize("pages", [False, True])
def test_appending_codes_of_4_bits(pages, kind):
    """What codes stand for are results too, and donated ones are written where they are."""
    q, k_cache, v_cache, k, v = with_new()
    lengths, table = LENGTHS, {}
    if pages:
        k_cache, v_cache = (
            x.reshape(2, 2, 3, 16, 32).swapaxes(1, 2).reshape(6, 2, 16, 32) for x in (k_cache, v_cache)
        )
        table = {name: jnp.asarray(x) for name, x in PAGED.items()}
    names = ("k_cache", "v_cache", "k_scale", "k_zero", "v_scale", "v_zero")
    parts = [int4_parts(x, group=32) for x in (k_cache, v_cache)]
    if kind == "nvfp4":
        names = ("k_cache", "v_cache", "k_block_scale", "v_block_scale")
        parts = [nvfp4_parts(x) for x in (k_cache, v_cache)]
    stored = dict(zip(names, (parts[0][0], parts[1][0], *parts[0][1:], *parts[1][1:]), strict=True))
    own = {n: np.array(x) for n, x in stored.items()}
    new = {"k": np.asarray(k), "v": np.asarray(v), **{n: np.asarray(x) for n, x in table.items()}}
    wanted = cached(np.asarray(q), **own, cache_seqlens=np.asarray(lengths), **new)

    def call(stored, q, k, v, lengths, table):
        return cached(
            q, **stored, cache_seqlens=lengths, k=k, v=v, attend=cf.attention_with_kv_cache, **table
        )

    compiled = jax.jit(call, donate_argnums=0)
    memory = compiled.lower(stored, q, k, v, lengths, table).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in stored.values())
    o, *after = compiled(stored, q, k, v, lengths, table)
    np.testing.assert_allclose(o, wanted, atol=1e-6)
    for letter, cache in zip("kv", after, strict=True):
        found = {
            f"{letter}_cache" if part == "codes" else f"{letter}_{part}": x
            for part, x in cache._asdict().items()
        }
        for name in [name for name in names if name.startswith(letter)]:
            np.testing.assert_array_equal(found[name], own[name])


def test_donated_pages_are_written_where_they_are():
    """Through a table that is traced, so that another one compiles nothing."""
    q, k_cache, v_cache, k, v = with_new()
    pool = [x.reshape(2, 2, 3, 16, 32).swapaxes(1, 2).reshape(6, 2, 16, 32) for x in (k_cache, v_cache)]
    table = jnp.asarray(PAGED["block_table"])
    compiled = (
        jax.jit(lambda q, *rest: step(q, *rest[:-1], block_table=rest[-1]), donate_argnums=(1, 2))
        .lower(q, *pool, k, v, LENGTHS, table)
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in pool)
    for pages in (table, table[::-1]):
        mine = [np.array(x) for x in pool]
        wanted = cached(
            np.asarray(q), *mine, cache_seqlens=np.asarray(LENGTHS), k=np.asarray(k), v=np.asarray(v),
            block_table=np.asarray(pages),
        )  # fmt: skip
        at = [x.unsafe_buffer_pointer() for x in pool]
        o, *pool = compiled(q, *pool, k, v, LENGTHS, pages)
        assert [x.unsafe_buffer_pointer() for x in pool] == at
        np.testing.assert_allclose(o, wanted, atol=1e-6)
        for a, b in zip(pool, mine, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("turns", [False, True])
def test_latents_come_back_as_they_were_given(turns):
    """Under jit, with a prefix and without; values are seen in the latents, of which there is one buffer."""
    rng = np.random.default_rng(0)
    q, kv, new = (rng.standard_normal(s, np.float32) for s in ((2, 4, 1, 20), (2, 1, 16, 20), (2, 1, 1, 20)))
    prefix = kv[0, :, :5], kv[0, :, :5, :12]
    angles = 6 * rng.random((21, 4), np.float32)
    rotary = {"rotary": Rotary(np.cos(angles), np.sin(angles), last=True)} if turns else {}

    @partial(jax.jit, static_argnums=2)
    def step(cache, length, has_prefix):
        more = rotary | ({"prefix": prefix} if has_prefix else {})
        return cf.attention_with_kv_cache(q, LatentCache(cache, 12), cache_seqlens=length, k=new, **more)

    for has_prefix in (False, True):
        wanted = kv.copy()
        more = rotary | ({"prefix": prefix} if has_prefix else {})
        expected = cupy_flash.attention_with_kv_cache(
            q, LatentCache(wanted, 12), cache_seqlens=7, k=new, **more
        )
        o, cache = step(kv, 7, has_prefix)
        np.testing.assert_allclose(o, expected, atol=1e-6)
        assert type(cache) is LatentCache
        assert cache.head_dim_v == 12
        np.testing.assert_array_equal(cache.latents, wanted)


def test_latents_of_8_bits_come_back_as_they_were_given():
    """Their one scale is that of keys and of values, also of those that a program stores."""
    rng = np.random.default_rng(0)
    q, kv, new = (rng.standard_normal(s, np.float32) for s in ((2, 4, 1, 20), (2, 1, 16, 20), (2, 1, 1, 20)))
    codes, scale = np.rint(kv * 30).clip(-127, 127).astype(np.int8), np.float32([1 / 30])

    @jax.jit
    def step(codes, scale):
        cache = LatentCache(QuantizedCache(codes, scale), 12)
        return cf.attention_with_kv_cache(q, cache, cache_seqlens=7, k=new)

    o, cache = step(codes, scale)
    wanted = LatentCache(QuantizedCache(codes, scale), 12)
    expected = cupy_flash.attention_with_kv_cache(q, wanted, cache_seqlens=7, k=new)
    np.testing.assert_allclose(o, expected, atol=1e-6)
    assert type(cache) is LatentCache
    assert type(cache.latents) is QuantizedCache
    np.testing.assert_array_equal(cache.latents.codes, codes)


def test_selected_keys_are_those_of_numpy():
    """Plain, compiled, and with an axis of vmap; of latents, of heads before keys, and of pages, packed."""
    rng = np.random.default_rng(0)
    q, kv, k = (rng.standard_normal(s, np.float32) for s in ((2, 4, 3, 20), (2, 1, 48, 20), (2, 2, 48, 20)))
    indices = np.array([[rng.permutation(n)[:7] for _ in range(3)] for n in (17, 47)], np.int32)
    indices[:, :, 3] = -1
    rows, pages = q.swapaxes(1, 2).reshape(6, 4, 20), k.reshape(2, 2, 3, 16, 20).swapaxes(1, 2)
    packed = {
        "cu_seqlens_q": np.int32([0, 2, 6]), "indices": indices.reshape(6, 7) % 16,
        "block_table": np.int32([[0, 1, 2], [3, 4, 5]]), "layout": "bhsd",
    }  # fmt: skip
    for caches, queries, options in (
        ((LatentCache(kv, 12),), q, {"indices": indices}),
        ((k, k), q, {"indices": indices, "causal": True}),
        ((pages.reshape(6, 2, 16, 20),) * 2, rows, packed),
    ):
        given = {"cache_seqlens": np.array([17, 47], np.int32), "return_lse": True, **options}
        expected = cupy_flash.attention_with_kv_cache(queries, *caches, **given)
        traced = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
        held = {n: x for n, x in given.items() if n not in traced}

        def call(q, arrays, caches=caches, held=held):
            return cf.attention_with_kv_cache(q, *caches, **arrays, **held)

        found = [jax.jit(call)(queries, traced)]
        if "causal" in options:
            twice = jax.jit(jax.vmap(call, (0, None)))(jnp.stack([queries, 0 * queries]), traced)
            found += [[x[0] for x in twice], call(queries, traced)]
        for results in found:
            for x, wanted in zip(results, expected, strict=True):
                np.testing.assert_allclose(x, wanted, atol=1e-6)
    with pytest.raises(UnsupportedError, match="check is True together with indices"):
        cf.attention_with_kv_cache(q, k, k, cache_seqlens=17, indices=indices, tuning=Tuning(check=True))
