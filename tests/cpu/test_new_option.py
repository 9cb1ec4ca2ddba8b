"""The recipe of CONTRIBUTING.md: an option that is declared is there, in every call and adapter."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import cupy_flash
from cupy_flash.call import options
from cupy_flash.call.problem import Problem
from cupy_flash.cpu.core import family
from tests.paths import ROOT

# A value: its declaration, and its meaning, which says what has reached a call.
VALUE = {
    "call/options.py": ["""class _Precision(TypedDict, total=False):
    shade: Annotated[float | None, Option(None, "float, optional", "A sentence on shades.")]
"""],
    "call/values.py": ["""def check_options(options: Options) -> None:
    print("shade", options.shade)
"""],
}  # fmt: skip
# An array of a number per head with a gradient. Its meaning, on NumPy's path: the gradient is the array.
ARRAY = {
    "call/options.py": [
        """class _Rows(TypedDict, total=False):
    tint: Annotated[Any, _array("array, optional", "A sentence on tints.", ("heads",), gradient=True)]
""",
        """class _Tangents(TypedDict, total=False):
    dtint: Annotated[Any, _array("array, optional", "Tangent of tint.")]
""",
    ],
    "cpu/backward.py": [
        """    p, acc = problem, np.dtype(problem.accumulator)
    if "tint" in arrays:
        arrays["dtint"][...] = arrays["tint"]
"""
    ],
    "cpu/hvp.py": [
        """    sums = [_Sums(scores, grouped_direction(p, direction)) for direction in directions]
    for direction in directions:
        if "dtint" in direction:
            direction["dtint"][...] = direction["tint_dot"]
"""
    ],
}

# An editable installation has a finder of its own, which would come before the copy in this folder.
COPY_FIRST = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
"""

PLAIN = """
import inspect
import numpy as np
import cupy_flash

def shown(function):
    assert inspect.signature(function).parameters["shade"].default is None
    assert "A sentence on shades." in function.__doc__ or "shade" in function.__doc__

x = np.ones((1, 2, 6, 4), np.float32)
rows, cuts = x[0].swapaxes(0, 1), np.array([0, 2, 6], np.int32)
for name in ("attention", "attention_backward", "attention_varlen", "attention_with_kv_cache", "explain"):
    shown(getattr(cupy_flash, name))
for name in ("jvp", "value_and_jvp", "hvp"):
    shown(getattr(cupy_flash.derivatives, name))
o, lse = cupy_flash.attention(x, x, x, shade=1, return_lse=True)
cupy_flash.attention_backward(x, x, x, x, o, lse, shade=2)
cupy_flash.attention_varlen(rows, rows, rows, cuts, cuts, shade=3)
cupy_flash.attention_with_kv_cache(x, x, x, cache_seqlens=6, shade=4)
flash = cupy_flash.FlashAttention(cupy_flash.AttentionConfig(4, shade=5))
flash(x, x, x)
cupy_flash.derivatives.jvp(x, x, x, o, lse, dq=x, shade=6)
cupy_flash.derivatives.value_and_jvp(x, x, x, dq=x, shade=7)
cupy_flash.derivatives.hvp(x, x, x, x, o, lse, dq=x, shade=8)
cupy_flash.derivatives.jvp(
    rows, rows, rows, *cupy_flash.attention_varlen(rows, rows, rows, cuts, cuts, return_lse=True, shade=3),
    cu_seqlens_q=cuts, cu_seqlens_k=cuts, dq=rows, shade=9)
"""

TORCH = """
import inspect
import torch
import cupy_flash.torch as cf
from torch.fx.experimental.proxy_tensor import make_fx

x = torch.ones(1, 2, 6, 4)
rows, cuts = x[0].transpose(0, 1), torch.tensor([0, 2, 6], dtype=torch.int32)
for name in ("attention", "attention_varlen", "attention_with_kv_cache", "ring_attention"):
    assert "shade" in inspect.signature(getattr(cf, name)).parameters
    assert "shade" in getattr(cf, name).__doc__
cf.attention(x, x, x, shade=1)
cf.attention_varlen(rows, rows, rows, cuts, cuts, shade=2)
cf.attention_with_kv_cache(x, x, x, cache_seqlens=6, shade=3)
torch.compile(lambda x: cf.attention(x, x, x, shade=4), backend="eager", fullgraph=True)(x)
traced = make_fx(lambda x: cf.attention_with_kv_cache(x, x, x, cache_seqlens=6, shade=5))(x)
"""

JAX = """
import inspect
import jax, jax.numpy as jnp
import cupy_flash.jax as cf

x = jnp.ones((1, 2, 6, 4))
for name in ("attention", "attention_varlen", "ring_attention"):
    assert "shade" in inspect.signature(getattr(cf, name)).parameters
    assert "shade" in getattr(cf, name).__doc__
jax.block_until_ready(jax.jit(lambda x: cf.attention(x, x, x, shade=1))(x))
"""


PLAIN_ARRAY = """
import contextlib, inspect, io, typing
import numpy as np
import cupy_flash
from cupy_flash.__main__ import main

x = np.ones((1, 2, 6, 4), np.float32)
rows, cuts = x[0].swapaxes(0, 1), np.array([0, 2, 6], np.int32)
tint = np.array([3, 5], np.float32)

for name in ("attention", "attention_backward", "attention_varlen", "attention_varlen_backward",
             "attention_with_kv_cache", "explain", "naive_attention"):
    function = getattr(cupy_flash, name)
    assert inspect.signature(function).parameters["tint"].default is None
    assert "tint" in typing.get_type_hints(function)
    assert "A sentence on tints." in function.__doc__ or "tint" in function.__doc__
for name in ("jvp", "value_and_jvp", "hvp"):
    function = getattr(cupy_flash.derivatives, name)
    assert "dtint" in inspect.signature(function).parameters
    assert "dtint" in function.__doc__
assert "dtint" in cupy_flash.Gradients.__doc__

o, lse = cupy_flash.attention(x, x, x, tint=tint, return_lse=True)
assert (cupy_flash.attention_backward(x, x, x, x, o, lse, tint=tint).dtint == tint).all()
assert cupy_flash.attention_backward(x, x, x, x, o, lse).dtint is None
second = cupy_flash.derivatives.hvp(x, x, x, x, o, lse, tint=tint, dtint=np.stack([tint, 2 * tint]))
assert (second.dtint == [tint, 2 * tint]).all() and second.dsinks is None

# Sums of what packed sequences share.
o, lse = cupy_flash.attention_varlen(rows, rows, rows, cuts, cuts, tint=tint, return_lse=True)
packed = cupy_flash.attention_varlen_backward(rows, rows, rows, rows, o, lse, cuts, cuts, tint=tint)
assert (packed.dtint == 2 * tint).all()

of_cache = {"cache_seqlens": 3, "tint": tint}
assert "tint" in cupy_flash.explain(x, x, x, tint=tint)
assert "tint" in cupy_flash.explain(x, x, x, kv_cache=of_cache)
cupy_flash.attention_with_kv_cache(x, x, x, **of_cache)
for wrong in (
    lambda: cupy_flash.attention(x, x, x, tint=np.ones(3, np.float32)),
    lambda: cupy_flash.explain(x, x, x, kv_cache=of_cache | {"tint": np.ones(3, np.float32)}),
):
    try:
        wrong()
    except cupy_flash.InvalidArgumentsError as error:
        assert "tint has shape (3,), not (2,)." in str(error)
    else:
        raise AssertionError("a wrong shape was taken")
# Kernels that do not read it refuse it.
try:
    cupy_flash.explain(x, x, x, tint=tint, arch="sm_90a")
except cupy_flash.UnsupportedError as error:
    assert "no kernel reads tint." in str(error)
else:
    raise AssertionError("kernels ignore it")

said = io.StringIO()
with contextlib.redirect_stdout(said):
    assert not main(["explain", "--arch", "cpu", "--tint", "--seqlen", "64"])
assert "tint" in said.getvalue()
"""

TORCH_ARRAY = """
import inspect
import torch
import cupy_flash.torch as cf
from cupy_flash.torch.call import TENSORS
from cupy_flash.torch.sharding import Partial, Replicate, Shard, _Split

x = torch.ones(1, 2, 6, 4)
rows, cuts = x[0].transpose(0, 1), torch.tensor([0, 2, 6], dtype=torch.int32)
for name in ("attention", "attention_varlen", "attention_with_kv_cache"):
    assert "tint" in inspect.signature(getattr(cf, name)).parameters

def gradient(attend, dtype=torch.float32):
    tint = torch.tensor([3, 5], dtype=dtype, requires_grad=True)
    attend(tint).sum().backward()
    assert tint.grad.dtype == dtype
    return tint.grad.tolist()

plain = lambda tint: cf.attention(x, x, x, tint=tint)
assert gradient(plain) == gradient(plain, torch.bfloat16) == [3, 5]
assert gradient(torch.compile(plain, backend="aot_eager", fullgraph=True)) == [3, 5]
assert gradient(lambda tint: cf.attention_varlen(rows, rows, rows, cuts, cuts, tint=tint)) == [6, 10]
tints = torch.tensor([[3.0, 5.0], [7.0, 9.0]])
each = torch.vmap(torch.func.grad(lambda tint: plain(tint).sum()))(tints)
assert each.tolist() == tints.tolist()
cf.attention_with_kv_cache(x, x, x, cache_seqlens=6, tint=tints[0].bfloat16())

specs = dict.fromkeys(TENSORS) | {"q": x, "k": x, "v": x, "tint": tints[0]}
ways = {kind: _Split(kind, specs) for kind in ("batch", "heads", "nothing")}
assert [way.of("tint") for way in ways.values()] == [Replicate(), Shard(0), Replicate()]
assert [way.of_gradient("tint") for way in ways.values()] == [Partial(), Shard(0), Replicate()]
"""

JAX_ARRAY = """
import inspect
import jax, jax.numpy as jnp
import cupy_flash.jax as cf

x = jnp.ones((1, 2, 6, 4))
for name in ("attention", "attention_varlen", "attention_with_kv_cache"):
    assert "tint" in inspect.signature(getattr(cf, name)).parameters
plain = lambda tint: cf.attention(x, x, x, tint=tint).sum()
tints = jnp.array([[3.0, 5.0], [7.0, 9.0]])
assert (jax.jit(jax.grad(plain))(tints[0]) == tints[0]).all()
assert (jax.vmap(jax.grad(plain))(tints) == tints).all()
# The derivative of the gradient in a direction.
assert (jax.jvp(jax.grad(plain), (tints[0],), (tints[1],))[1] == tints[1]).all()
"""


def copied(folder: Path, changes: dict[str, list[str]]) -> Path:
    """A copy of the package in which lines follow others: each change is a line that is there, and more."""
    shutil.copytree(ROOT / "cupy_flash", folder / "cupy_flash", ignore=shutil.ignore_patterns("*.so"))
    for name, texts in changes.items():
        module = folder / "cupy_flash" / name
        for text in texts:
            first = text.splitlines()[0] + "\n"
            before = module.read_text()
            assert before.count(first) == 1
            module.write_text(before.replace(first, text))
    return folder


@pytest.fixture(scope="module")
def with_both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with two more options: a value, and an array that has a gradient."""
    changes = {name: VALUE.get(name, []) + ARRAY.get(name, []) for name in VALUE | ARRAY}
    return copied(tmp_path_factory.mktemp("both"), changes)


def said(package: Path, library: str, script: str) -> str:
    """What a script prints that takes the copy for the package."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", COPY_FIRST + script],
        cwd=package, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


LIBRARIES = [
    pytest.param("numpy", id="numpy"),
    pytest.param("torch", id="torch", marks=[pytest.mark.torch, pytest.mark.slow]),
    pytest.param("jax", id="jax", marks=[pytest.mark.jax, pytest.mark.slow]),
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_options_need_no_more_than_their_declaration(library: str, with_both: Path) -> None:
    of_value, seen, of_array = {
        "numpy": (PLAIN, 9, PLAIN_ARRAY), "torch": (TORCH, 5, TORCH_ARRAY), "jax": (JAX, 1, JAX_ARRAY),
    }[library]  # fmt: skip
    lines = said(with_both, library, of_value + "print(flush=True)\n" + of_array).split("\n\n")[0]
    assert {float(line.split()[1]) for line in lines.splitlines()} == set(range(1, seen + 1))


def test_what_checkers_of_types_read_has_every_gradient() -> None:
    """`Gradients` stands twice in api.py; and tangents are declared beside what they belong to."""
    tree = ast.parse((ROOT / "cupy_flash/api.py").read_text())
    listed = next(x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == "Gradients")
    fields = [
        x.target.id for x in listed.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    ]
    assert tuple(fields) == cupy_flash.Gradients._fields
    assert set(options.DERIVATIVES) <= set(options.declared(options.TangentOptions))


def test_the_core_refuses_what_it_does_not_read() -> None:
    problem = Problem("forward", "float32", None, 1, 2, 2, 8, 8, 16, 16, 0.25, per_head=("sinks", "tint"))
    assert family.refusals(problem) == ["does not read tint"]
