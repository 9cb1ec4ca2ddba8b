"""Importing the library imports no framework, and its modules import downwards only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "cupy_flash"
FRAMEWORKS = ("cupy", "torch", "jax", "transformers", "ml_dtypes", "matplotlib")

# From the bottom up; a module imports from lines above its own. A folder counts as one module, and
# modules of one line do not import each other, so that adapters stay siblings.
LAYERS = (
    ("errors", "signature", "version"),
    ("checks",),
    ("arrays", "masks", "catalog", "nvrtc", "sass", "tensor_map"),
    ("operands", "options", "sources"),
    ("problem",),
    ("abi", "launch", "cache_problem", "compile", "cpu", "host_build"),
    ("families",),
    ("plan",),
    ("cubins", "run", "simulator"),
    ("driver", "naive", "merge"),
    ("build", "info", "prepare"),
    ("api",),
    ("config", "kv_cache", "report", "ring", "varlen"),
    ("__init__",),
    ("testing", "torch", "jax", "mpi", "__main__"),
    ("transformers", "flash_attn"),  # over cupy_flash.torch
)
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

# Who may import a framework, inside functions: driver launches through CuPy; arrays makes results in
# the caller's library; merge and naive_attention compute with the caller's library.
MAY_IMPORT = {
    "cupy": {"driver", "arrays", "naive", "mpi"},
    "torch": {"arrays", "torch", "testing", "flash_attn", "transformers"},
    "jax": {"arrays", "merge", "jax"},
    "transformers": {"transformers"},
    "ml_dtypes": {"arrays", "testing"},
}


def module_of(path: Path) -> str:
    """Name of a file's module in LAYERS."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, bool, int]]:
    """List what a file imports: our module or a foreign package, whether ours, and the line."""
    inside_folder = len(path.relative_to(PACKAGE).parts) > 1
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                ours = first == "cupy_flash"
                found.append(((rest or ["__init__"])[0] if ours else first, ours, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            ours = node.level > 0 or parts[:1] == ["cupy_flash"]
            if node.level == 1 and inside_folder:
                continue  # within the folder
            if not ours:
                found.append((parts[0], False, node.lineno))
                continue
            if not node.level:
                parts = parts[1:]
            for alias in node.names:
                name = parts[0] if parts else alias.name if alias.name in LEVEL else "__init__"
                found.append((name, True, node.lineno))
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    module = module_of(path)
    assert module in LEVEL, f"{module} has no place in LAYERS"
    for imported, ours, line in imports_of(path):
        if ours and imported != module:
            assert imported in LEVEL, f"{path}:{line} imports {imported}, which has no place in LAYERS"
            assert LEVEL[imported] < LEVEL[module], f"{path}:{line}: {module} imports {imported} above it"
        if not ours and imported in MAY_IMPORT:
            assert module in MAY_IMPORT[imported], f"{path}:{line}: {module} imports {imported}"


def test_imports_are_seen() -> None:
    seen = {imported for imported, ours, _ in imports_of(PACKAGE / "prepare.py") if ours}
    assert seen >= {"plan", "run", "cpu", "driver", "simulator", "arrays"}


def test_layers_name_only_modules_that_are_there() -> None:
    assert set(LEVEL) <= {module_of(path) for path in FILES}


def test_the_reference_is_independent() -> None:
    for path in (PACKAGE / "testing").glob("*.py"):
        ours = {imported for imported, is_ours, _ in imports_of(path) if is_ours}
        assert ours <= {"errors"}, f"{path.name} imports {ours} of the library that it judges"


def test_the_cpu_path_knows_nothing_of_kernels() -> None:
    """It gets a Problem and arrays; the import of the type is for checkers only."""
    for path in (PACKAGE / "cpu").glob("*.py"):
        ours = {imported for imported, is_ours, _ in imports_of(path) if is_ours}
        assert ours <= {"problem", "errors"}, f"cpu/{path.name} imports {ours}"


@pytest.fixture
def decoys(tmp_path: Path) -> dict[str, str]:
    """Make an environment in which every framework can be imported, and says so."""
    for name in FRAMEWORKS:
        if name != "ml_dtypes":
            (tmp_path / f"{name}.py").write_text(f"print('imported {name}')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def loaded_after(code: str, environment: dict[str, str]) -> tuple[str, list[str]]:
    """Run code in a fresh interpreter; return what it printed and which frameworks are loaded."""
    report = f"\nimport sys; print('loaded', *[m for m in {FRAMEWORKS!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + report],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    return "\n".join(printed), last.split()[1:]


def test_import_loads_no_framework(decoys: dict[str, str]) -> None:
    assert loaded_after("import cupy_flash", decoys) == ("", [])


def test_the_decoys_would_be_noticed(decoys: dict[str, str]) -> None:
    printed, loaded = loaded_after("import cupy_flash, torch, cupy", decoys)
    assert printed == "imported torch\nimported cupy"
    assert loaded == ["cupy", "torch"]


def test_numpy_calls_load_no_framework(decoys: dict[str, str]) -> None:
    code = """
import numpy as np, cupy_flash
q = np.ones((1, 2, 8, 4), np.float32)
o, lse = cupy_flash.attention(q, q, q, causal=True, return_lse=True)
cupy_flash.attention_backward(q, q, q, q, o, lse, causal=True)
cupy_flash.merge(o, lse, o, lse)
cupy_flash.naive_attention(q, q, q)
assert cupy_flash.explain(q, q, q)
"""
    assert loaded_after(code, decoys) == ("", [])


def test_public_names_are_there_and_documented() -> None:
    import cupy_flash

    for name in cupy_flash.__all__:
        value = getattr(cupy_flash, name)
        if name != "__version__":
            assert value.__doc__, f"{name} has no docstring"
            assert not value.__doc__.startswith(f"{name}("), f"{name} has a generated docstring"
    for name in ("attention", "attention_backward", "merge", "naive_attention", "memory_report", "explain"):
        doc = getattr(cupy_flash, name).__doc__
        assert all(heading in doc for heading in ("Parameters\n", "Returns\n")), name
