"""Programs that leave the process: jax.export of every function, run again, also by another process."""

import dataclasses
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np
from jax import export

import cupy_flash.jax as cf
from cupy_flash import UnsupportedError

pytestmark = pytest.mark.jax

Q, K, V = (jax.random.normal(key, (2, 4, 16, 8)) for key in jax.random.split(jax.random.key(0), 3))
CUTS = jnp.array([0, 5, 12], jnp.int32)


def exported(function, *arguments):
    known = export.DisabledSafetyCheck.custom_call(cf.export_target())
    return export.export(jax.jit(function), disabled_checks=[known])(*arguments)


def loss(q, k, v, key):
    """With every way to say a number, and what is static."""
    o = cf.attention(
        q, k, v, causal=True, window=(np.int64(6), None), align="top_left", scale=0.3, dropout=0.25, seed=key
    )
    return jnp.sin(o).sum()


def packed(q, k, v, cuts):
    rows = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    return cf.attention_varlen(*rows, cuts, cuts, return_lse=True)


def cached(q, k, v, lengths):
    caches = jnp.zeros((2, 2, 4, 32, 8), q.dtype)
    return cf.attention_with_kv_cache(q, *caches, cache_seqlens=lengths, k=k, v=v, return_lse=True)


CASES = {
    "gradients": (jax.value_and_grad(loss, argnums=(0, 1, 2)), (Q, K, V, jax.random.key(7))),
    "packed": (packed, (Q, K, V, CUTS)),
    "cache": (cached, (Q, K, V, jnp.array([3, 0], jnp.int32))),
    "bfloat16": (partial(cf.attention, causal=True), [x.astype(jnp.bfloat16) for x in (Q, K, V)]),
    "vmap": (jax.vmap(cf.attention, in_axes=(0, None, 0)), (jnp.stack([Q, -Q]), K, jnp.stack([V, 2 * V]))),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_program_is_the_same(name):
    function, arguments = CASES[name]
    wanted = jax.jit(function)(*arguments)
    program = exported(function, *arguments)
    assert f"@{cf.export_target()}(" in program.mlir_module()
    for a, b in zip(*map(jax.tree.leaves, (program.call(*arguments), wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
    # What is compiled here goes its own way, before and after.
    assert "cupy_flash" not in jax.jit(function).lower(*arguments).as_text().replace("cupy_flash_", "")


def test_shapes_may_be_for_several_platforms_but_not_without_the_check():
    with pytest.raises(ValueError, match="cupy_flash"):
        export.export(jax.jit(cf.attention))(Q, K, V)
    known = export.DisabledSafetyCheck.custom_call(cf.export_target())
    program = export.export(jax.jit(cf.attention), platforms=["cpu", "cuda"], disabled_checks=[known])(
        Q, K, V
    )
    np.testing.assert_array_equal(program.call(Q, K, V), cf.attention(Q, K, V))


def test_what_is_wrong_when_it_runs_is_said():
    program = exported(cached, Q, K, V, jnp.array([3, 0], jnp.int32))
    with pytest.raises(Exception, match=r"InvalidArgumentsError: cache_seqlens\[1\] is 20 plus 16 new"):
        jax.block_until_ready(program.call(Q, K, V, jnp.array([3, 20], jnp.int32)))


def test_second_order_is_not_exported():
    second = jax.grad(lambda q: jax.grad(lambda q: loss(q, K, V, jax.random.key(0)))(q).sum())
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be exported.*Try: jax.grad, once"):
        exported(second, Q)


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap], ids=["", "vmap"])
def test_statistics_are_not_exported(transform):
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be exported.*Try: the program without"):
        exported(transform(cf.attention_statistics), Q, K)


def over_tokens(q, k, v, cuts):
    return cf.attention_varlen(q, k, v, cuts, cuts, causal=True, max_seqlen_q=16, max_seqlen_k=16)


ROWS = [x[0].swapaxes(0, 1) for x in (Q, K, V)]
BATCH = ("b, 4, s, 8",) * 3
PACKED = ("t, 4, 8",) * 3
SYMBOLIC = {
    "gradients": (jax.value_and_grad(loss), (*BATCH, ""), (Q, K, V, jax.random.key(7))),
    "lengths": (
        lambda q, k, v, n: cf.dot_product_attention(q, k, v, key_value_seq_lengths=n),
        (*BATCH, "b"),
        (Q, K, V, jnp.array([2, 3], jnp.int32)),
    ),
    "packed": (over_tokens, (*PACKED, "n"), (*ROWS, CUTS)),
    "cache": (cached, (*BATCH, "b"), (Q, K, V, jnp.array([3, 0], jnp.int32))),
}


def for_many_sizes(function, sizes, arguments):
    scope = export.SymbolicScope()
    kinds = [
        jax.ShapeDtypeStruct(export.symbolic_shape(size, scope=scope), x.dtype)
        for size, x in zip(sizes, arguments, strict=True)
    ]
    return exported(function, *kinds)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_sizes_may_be_symbolic(name):
    function, sizes, arguments = SYMBOLIC[name]
    program = for_many_sizes(function, sizes, arguments)
    jax.tree.map(np.testing.assert_array_equal, program.call(*arguments), jax.jit(function)(*arguments))


def test_what_symbolic_sizes_leave_unknown():
    """What the program must know is refused by name; what is wrong about sizes raises when it runs."""
    for fixed, sizes, named in (
        ({}, (*PACKED, "3"), "max_seqlen_q="),
        ({"max_seqlen_q": 16}, (*PACKED, "3"), "max_seqlen_k="),
    ):
        with pytest.raises(UnsupportedError, match=f"(?s)is t, symbolic.*Try: {named}"):
            for_many_sizes(
                lambda q, k, v, c, fixed=fixed: cf.attention_varlen(q, k, v, c, c, **fixed),
                sizes, (*ROWS, CUTS),
            )  # fmt: skip
    for size, named in (("3", "max_seqlen_q="), ("n", "a fixed number of sequences")):
        with pytest.raises(UnsupportedError, match=f"(?s)symbolic.*Try: {named}"):
            for_many_sizes(
                lambda q, k, v, c: cf.attention_with_kv_cache(
                    q, k[None], v[None], cache_seqlens=3, cu_seqlens_q=c, layout="bshd"
                ),
                (*PACKED, size), (*ROWS, CUTS),
            )  # fmt: skip
    program = for_many_sizes(cf.attention, ("b, h, s, 8", "b, g, s, 8", "b, g, s, 8"), (Q, K, V))
    with pytest.raises(Exception, match=r"InvalidArgumentsError: .*heads"):
        jax.block_until_ready(program.call(Q, K[:, :3], V[:, :3]))


@pytest.mark.parametrize("schedule", ["ring", "alltoall", "allgather"])
def test_sequences_in_parts_are_exported(schedule):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    spec = jax.sharding.PartitionSpec(None, None, "rows")
    parts = partial(cf.ring_attention, axis_name="rows", schedule=schedule)
    function = jax.shard_map(parts, mesh=mesh, in_specs=spec, out_specs=spec)
    placed = jax.device_put((Q, K, V), jax.sharding.NamedSharding(mesh, spec))
    program = exported(function, *placed)
    np.testing.assert_allclose(jax.jit(program.call)(*placed), cf.attention(Q, K, V), rtol=1e-5, atol=1e-6)


ANOTHER = """
import pickle, sys, numpy as np, jax, cupy_flash.jax
cupy_flash.jax.export_target()
program = pickle.load(open(sys.argv[1], "rb"))
np.save(sys.argv[2], program.call(*np.load(sys.argv[3])))
"""


@pytest.mark.slow
def test_another_process_runs_it(tmp_path):
    """Handed over by pickle; serialize() of JAX does the same, and needs flatbuffers."""
    files = [tmp_path / name for name in ("program", "result.npy", "arrays.npy")]
    program = dataclasses.replace(exported(cf.attention, Q, K, V), _get_vjp=None)
    Path(files[0]).write_bytes(pickle.dumps(program))
    np.save(files[2], np.stack([Q, K, V]))
    subprocess.run([sys.executable, "-c", ANOTHER, *map(str, files)], check=True)
    np.testing.assert_array_equal(np.load(files[1]), cf.attention(Q, K, V))
