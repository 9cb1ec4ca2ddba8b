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

import cupy_flash.jax as cf

pytestmark = pytest.mark.jax

Q, K, V = (jax.random.normal(key, (2, 4, 16, 8)) for key in jax.random.split(jax.random.key(0), 3))
CUTS = jnp.array([0, 5, 12], jnp.int32)


def exported(function, *arguments):
    known = jax.export.DisabledSafetyCheck.custom_call(cf.export_target())
    return jax.export.export(jax.jit(function), disabled_checks=[known])(*arguments)


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
        jax.export.export(jax.jit(cf.attention))(Q, K, V)
    known = jax.export.DisabledSafetyCheck.custom_call(cf.export_target())
    program = jax.export.export(jax.jit(cf.attention), platforms=["cpu", "cuda"], disabled_checks=[known])(
        Q, K, V
    )
    np.testing.assert_array_equal(program.call(Q, K, V), cf.attention(Q, K, V))


def test_what_is_wrong_when_it_runs_is_said():
    program = exported(cached, Q, K, V, jnp.array([3, 0], jnp.int32))
    with pytest.raises(Exception, match=r"InvalidArgumentsError: cache_seqlens\[1\] is 20 plus 16 new"):
        jax.block_until_ready(program.call(Q, K, V, jnp.array([3, 20], jnp.int32)))


def test_second_order_is_not_exported():
    second = jax.grad(lambda q: jax.grad(lambda q: loss(q, K, V, jax.random.key(0)))(q).sum())
    with pytest.raises(NotImplementedError):
        exported(second, Q)


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
