"""docs/environment.md lists every environment variable that the package, and its build, read."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))


def is_environment(node: ast.AST) -> bool:
    """os.environ, by either name."""
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def read_in(path: Path) -> Iterator[str]:
    """Variables that a module reads, by a string or by a constant of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        name: ast.expr | None = None
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            name = node.slice
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            name = node.left
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            of_dict = node.func.attr in ("get", "pop", "setdefault") and is_environment(node.func.value)
            name = node.args[0] if of_dict or node.func.attr == "getenv" else None
        if isinstance(name, ast.Constant):
            yield str(name.value)
        elif isinstance(name, ast.Name):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield getattr(importlib.import_module(module), name.id)


def read_by_the_package() -> set[str]:
    return {name for path in (ROOT / "cupy_flash").rglob("*.py") for name in read_in(path)}


def read_by_the_build() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return set(re.findall(r"env(?:\.| = \")(CUPY_FLASH_\w+)", text))


def test_variables_are_listed() -> None:
    by_package, by_build = read_by_the_package(), read_by_the_build()
    assert {"CUPY_FLASH_CPU", "CUPY_FLASH_CUBIN_DIR"} < by_package
    assert {"CUPY_FLASH_CUBINS", "CUPY_FLASH_ARCHS", "CUPY_FLASH_RELEASE"} == by_build
    assert by_package | by_build == LISTED


def test_no_variable_is_read_by_c() -> None:
    """Kernels and the CPU core read none."""
    sources = [path for folder in ("kernels_cpu", "kernels_cu") for path in (ROOT / folder).rglob("*.*")]
    assert [path for path in sources if path.suffix in (".h", ".cpp", ".cu", ".cuh") and "getenv" in
            path.read_text(encoding="utf-8")] == []  # fmt: skip
