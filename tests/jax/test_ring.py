"""Ring attention inside shard_map: four devices that hold parts, beside one that holds the whole."""

from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

import cupy_flash.jax as cf
from cupy_flash import InvalidArguments
from cupy_flash.ring import positions

pytestmark = pytest.mark.jax
RANKS = 4


@pytest.fixture
def mesh():
    if len(jax.devices()) < RANKS:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    return jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("rows",))


def qkv(seqlen=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, heads, seqlen, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    "case",
    [
        {"causal": False},
        {"causal": True, "softcap": 3.0, "scale": 0.4, "layout": "bshd", "deterministic": True},
        {"causal": True, "dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_devices_agree_with_one(mesh, case):
    options = dict(case)
    dtype = options.pop("dtype", jnp.float32)
    arrays, axis = qkv(dtype=dtype), 2
    if options.get("layout") == "bshd":
        arrays, axis = [x.swapaxes(1, 2) for x in arrays], 1
    order = np.concatenate([positions(rank, RANKS, 16, options["causal"]) for rank in range(RANKS)])
    cut = jax.sharding.PartitionSpec(*[None] * axis, "rows")
    lse_cut = jax.sharding.PartitionSpec(None, None, "rows")
    ring = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", return_lse=True, **options),
        mesh=mesh, in_specs=(cut,) * 3, out_specs=(cut, lse_cut),
    )  # fmt: skip

    def in_parts(*arrays):
        o, lse = ring(*(jnp.take(x, order, axis) for x in arrays))
        home = np.argsort(order)
        return jnp.take(o, home, axis), jnp.take(lse, home, 2)

    def loss(function, *arrays):
        o, lse = function(*arrays)
        return jnp.sin(o.astype(jnp.float32)).sum() + jnp.cos(lse).sum()

    whole = partial(cf.attention, return_lse=True, **options)
    close = partial(np.testing.assert_allclose, rtol=0, atol=0.1 if dtype == jnp.bfloat16 else 5e-6)
    for ours, wanted in zip(jax.jit(in_parts)(*arrays), whole(*arrays), strict=True):
        assert ours.dtype == wanted.dtype
        close(np.asarray(ours, np.float32), np.asarray(wanted, np.float32))
    ours = jax.jit(jax.grad(partial(loss, in_parts), argnums=(0, 1, 2)))(*arrays)
    wanted = jax.grad(partial(loss, whole), argnums=(0, 1, 2))(*arrays)
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == dtype
        close(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_parts_that_cannot_be_halved_are_refused(mesh):
    cut = jax.sharding.PartitionSpec(None, None, "rows")
    ring = jax.shard_map(
        partial(cf.ring_attention, axis_name="rows", causal=True), mesh=mesh, in_specs=cut, out_specs=cut
    )
    with pytest.raises(InvalidArguments, match="holds 3 rows"):
        ring(*qkv(seqlen=12))
