"""The recipe of CONTRIBUTING.md: an option that is declared is there, in every call and adapter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.paths import ROOT

DECLARED = """class _Precision(TypedDict, total=False):
    shade: Annotated[float | None, Option(None, "float, optional", "A sentence on shades.")]
"""
# Its meaning: says what has reached a call.
MEANT = """def check_options(options: Options) -> None:
    print("shade", options.shade)
"""

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


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more option, in its declaration and its meaning only."""
    folder = tmp_path_factory.mktemp("declared")
    shutil.copytree(
        ROOT / "cupy_flash", folder / "cupy_flash", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for name, line in (("options.py", DECLARED), ("values.py", MEANT)):
        module = folder / "cupy_flash" / "call" / name
        text, first = module.read_text(), line.splitlines()[0] + "\n"
        assert text.count(first) == 1
        module.write_text(text.replace(first, line))
    return folder


@pytest.mark.parametrize(
    ("library", "script", "seen"),
    [
        pytest.param("numpy", PLAIN, 9, id="numpy"),
        pytest.param("torch", TORCH, 5, id="torch", marks=[pytest.mark.torch, pytest.mark.slow]),
        pytest.param("jax", JAX, 1, id="jax", marks=[pytest.mark.jax, pytest.mark.slow]),
    ],
)
def test_an_option_needs_no_more_than_its_declaration(
    library: str, script: str, seen: int, package: Path
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", COPY_FIRST + script],
        cwd=package, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {float(line.split()[1]) for line in done.stdout.splitlines()} == set(range(1, seen + 1))
