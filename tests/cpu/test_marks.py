"""Quick tests of the simulator that need a framework say so: else CI runs them nowhere.

Its first command has no frameworks, and its second one leaves out what is marked ``simulator`` alone. What a
fixture imports is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.paths import ROOT

FRAMEWORKS = {"torch", "jax", "flax", "equinox", "transformers"}
# How tests name lists of marks.
LISTS = {"SIMULATED": "simulator"}


def imported(nodes: Sequence[ast.AST]) -> set[str]:
    """Frameworks that statements import, or ask pytest for."""
    names = set()
    for node in (inner for one in nodes for inner in ast.walk(one)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            names |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return {part for name in names for part in name.split(".")} & FRAMEWORKS


def marks(nodes: Sequence[ast.AST]) -> set[str]:
    """What follows pytest.mark in them."""
    inner = [node for one in nodes for node in ast.walk(one)]
    named = {LISTS.get(node.id, "") for node in inner if isinstance(node, ast.Name)}
    return named | {node.attr for node in inner if isinstance(node, ast.Attribute)}


def unmarked(text: str) -> Iterator[str]:
    """Tests of the simulator that import a framework and are neither slow nor marked with it."""
    body = ast.parse(text).body
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    rest = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    of_all = marks([node for node in rest if isinstance(node, ast.Assign) and "pytestmark" in marked(node)])
    for test in tests:
        own = of_all | marks(test.decorator_list)
        asks = {"jax" if name in ("flax", "equinox") else "torch" if name == "transformers" else name
                for name in imported([*rest, test])}  # fmt: skip
        if "simulator" in own and "slow" not in own and not asks <= own:
            yield test.name


def marked(node: ast.Assign) -> set[str]:
    """What an assignment names."""
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def test_frameworks_are_marked() -> None:
    found = {file: [*unmarked(file.read_text())] for file in (ROOT / "tests").rglob("test_*.py")}
    assert len(found) > 100
    assert {file: names for file, names in found.items() if names} == {}


SIMULATOR = "pytestmark = SIMULATED\ndef test_one():\n    {}\n"
TORCH = "import torch\npytestmark = [pytest.mark.torch]\n@pytest.mark.simulator\n{}\ndef test_one(): pass\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SIMULATOR.format("import torch"), ["test_one"]),
        (SIMULATOR.format("from cupy_flash.jax import attention"), ["test_one"]),
        (SIMULATOR.format('pytest.importorskip("flax.linen")'), ["test_one"]),
        (SIMULATOR.format("pass"), []),
        (f"import torch\n{SIMULATOR.format('pass')}", ["test_one"]),
        (TORCH.format(""), []),
        (TORCH.format("@pytest.mark.slow").replace("torch]", "gpu]"), []),
        (TORCH.format("").replace("torch]", "jax]"), ["test_one"]),
        (TORCH.format("").replace("simulator", "gpu").replace("torch]", "jax]"), []),
    ],
)
def test_a_framework_that_is_not_marked_is_found(text: str, found: list[str]) -> None:
    assert [*unmarked(text)] == found
