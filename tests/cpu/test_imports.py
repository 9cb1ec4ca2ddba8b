"""Importing the library imports no framework, and its modules import downwards only."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "cupy_flash"
FRAMEWORKS = ("cupy", "torch", "jax", "transformers", "ml_dtypes", "matplotlib")

# The rooms of the house from the ground up: a folder, or a module on top. A room imports from lines above its
# own; rooms of one line do not import each other, so that adapters stay siblings.
LAYERS = (
    ("errors", "log", "namespace", "version"),
    ("manifest", "program", "trust"),
    ("store",),  # over trust
    ("call",),
    ("plan", "cpu"),
    ("cubins",),
    ("device",),
    ("naive", "merge", "info", "dispatch"),
    ("quantized", "shared_prefix"),
    ("api",),
    ("blocks", "config", "explain_cli", "functions", "kv_cache", "report", "spans"),
    ("varlen",),  # over kv_cache
    ("parallel", "statistics"),
    ("derivatives",),
    ("__init__",),
    ("testing", "torch", "jax"),
    ("check", "transformers", "flash_attn"),  # over testing; over cupy_flash.torch
    ("flash_attn_3", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Who may import a framework, inside functions: driver launches through CuPy; protocols makes CuPy's arrays of
# others; outputs makes results in the caller's library; naive_attention computes with it.
MAY_IMPORT = {
    "cupy": {"device.driver", "call.adopt.protocols", "call.outputs", "naive", "parallel.mpi", "check"},
    "torch": {"call.untraced", "torch", "testing", "flash_attn", "flash_attn_3", "transformers", "check"},
    "jax": {"call.outputs", "jax"},
    "transformers": {"transformers"},
    "ml_dtypes": {"call.arrays", "testing"},
}


def name_of(path: Path) -> str:
    """Dotted name of a file within the package; of an __init__.py that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Import(NamedTuple):
    """Something that a file imports."""

    name: str  # a module of ours, dotted from the package down, or the first name of a foreign one
    ours: bool
    line: int


@functools.cache
def imports_of(path: Path) -> list[Import]:
    """List what a file imports."""
    found: list[Import] = []

    def ours(base: list[str], alias: str, line: int) -> None:
        deeper = ".".join([*base, alias])
        name = deeper if deeper in FILES else ".".join(base) or "__init__"
        found.append(Import(name, True, line))

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "cupy_flash":
                    ours(rest[:-1], rest[-1] if rest else "__init__", node.lineno)
                else:
                    found.append(Import(first, False, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if node.level:
                folder = path.relative_to(PACKAGE).parent.parts
                parts = [*folder[: len(folder) - node.level + 1], *parts]
            elif parts[0] == "cupy_flash":
                del parts[0]
            else:
                found.append(Import(parts[0], False, node.lineno))
                return
            for alias in node.names:
                ours(parts, alias.name, node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(), str(path)))
    return found


def room_of(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("name", FILES)
def test_imports_are_relative(name: str) -> None:
    """A copy of the package under another name must not import the one that is called cupy_flash."""
    text = FILES[name].read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        absolute = [x.name for x in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            absolute = [node.module or ""]
        called = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
        if called and isinstance(node.args[0], (ast.Constant, ast.JoinedStr)):
            absolute = [ast.unparse(node.args[0]).strip("f'")]
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            absolute = [ast.unparse(node.slice).strip("'")]
        ours = [x for x in absolute if x.split(".")[0] == "cupy_flash"]
        assert not ours, f"{FILES[name]}:{node.lineno} imports {ours[0]} by its own name"


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name: str) -> None:
    room = room_of(name)
    assert room in LEVEL, f"{room} has no place in LAYERS"
    for imported in imports_of(FILES[name]):
        where = f"{FILES[name]}:{imported.line}"
        below = room_of(imported.name)
        if imported.ours and below != room:
            assert below in LEVEL, f"{where} imports {below}, which has no place in LAYERS"
            assert LEVEL[below] < LEVEL[room], f"{where}: {room} imports {imported.name} above it"
        if not imported.ours and imported.name in MAY_IMPORT:
            assert {name, room} & MAY_IMPORT[imported.name], f"{where}: {name} imports {imported.name}"


def test_no_module_goes_in_a_circle() -> None:
    """Modules have an order within a folder too, whether they import at once, late, or for types only."""
    needs = {
        name: {i.name for i in imports_of(path) if i.ours and i.name in FILES} - {name}
        for name, path in FILES.items()
        if name != "__init__"
    }
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError with the circle


def test_imports_are_seen() -> None:
    seen = {room_of(i.name) for i in imports_of(PACKAGE / "dispatch/backends.py") if i.ours}
    assert seen == {"call", "cpu", "device", "errors", "log", "plan"}
    seen = {i.name for i in imports_of(PACKAGE / "device/simulator.py") if i.ours}
    assert seen >= {"plan.catalog", "cubins.sources", "device.host_build"}


def test_layers_name_only_rooms_that_are_there() -> None:
    assert set(LEVEL) == {room_of(name) for name in FILES}


def test_the_reference_is_independent() -> None:
    for path in (PACKAGE / "testing").glob("*.py"):
        if path.stem == "same_bits":  # which compares the library with itself
            continue
        ours = {i.name for i in imports_of(path) if i.ours and room_of(i.name) != "testing"}
        # It is no arithmetic of ours how many threads the BLAS has.
        assert ours <= {"errors", "cpu.threads"}, f"{path.name} imports {ours} of the library that it judges"


def test_the_cpu_path_knows_nothing_of_kernels() -> None:
    """It gets a Problem, whose score function is a program, arrays, and knows options, codes and blocks."""
    for path in (PACKAGE / "cpu").glob("*.py"):
        ours = {i.name for i in imports_of(path) if i.ours and room_of(i.name) not in ("cpu", "program")}
        assert ours <= {"call.problem", "call.options", "call.codes", "call.blocks", "errors"}, (
            f"cpu/{path.name} imports {ours}"
        )


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


# What neither an import nor a first call on NumPy arrays needs: tables of kernels, what only GPUs take,
# and the readers of e-mail and of archives that importlib.metadata comes with.
NOT_NEEDED = (
    "cupy_flash.plan.families", "cupy_flash.cubins", "cupy_flash.device.driver", "cupy_flash.device.cuda",
    "cupy_flash.device.simulator", "cupy_flash.parallel", "cupy_flash.info", "cupy_flash.testing",
    "email", "importlib.metadata", "random", "subprocess", "zipfile",
)  # fmt: skip
IMPORT, FIRST_CALL = "import cupy_flash", "cupy_flash.attention(q, q, q)"
# Modules that each brings with it, those of Python included; 95 and 43 in Python 3.11.
MOST_MODULES = {IMPORT: 110, FIRST_CALL: 55}


def modules_of(step: str) -> set[str]:
    """Names of the modules that a step of a fresh process brings, which NumPy and the step before did not."""
    code = f"""
import sys, numpy as np
q = np.ones((1, 2, 8, 4), np.float32)
for step in {list(MOST_MODULES)!r}:
    before = set(sys.modules)
    exec(step)
    if step == {step!r}:
        print(*sys.modules.keys() - before)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("step", MOST_MODULES)
def test_what_is_not_needed_is_not_imported(step: str) -> None:
    """Milliseconds depend on the machine; which modules are read and how many does not."""
    found = modules_of(step)
    assert found & {"cupy_flash.api", "cupy_flash.cpu.forward"}
    assert not found & set(NOT_NEEDED)
    assert len(found) <= MOST_MODULES[step], sorted(found)


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
