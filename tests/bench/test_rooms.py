"""The rooms of bench import downwards only."""

from __future__ import annotations

import re

from tests.paths import ROOT

BENCH = ROOT / "bench"
LAYERS = ("work", "machine", "model", "measure", "commands", "__main__")  # from the ground up


def test_rooms_import_downwards() -> None:
    seen = set()
    for path in BENCH.rglob("*.py"):
        room = path.relative_to(BENCH).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        beyond = r"^ *from \.(\w+)" if path.parent == BENCH else r"^ *from \.\.(\w+)"
        for other in re.findall(beyond, path.read_text(), re.MULTILINE):
            assert LAYERS.index(other) < LAYERS.index(room), f"{path} imports {other}"
            seen.add((room, other))
    assert {("measure", "machine"), ("commands", "measure"), ("__main__", "commands")} <= seen


def test_every_command_is_a_module() -> None:
    """`lengths` is two of them, forward and backward."""
    from bench.__main__ import COMMANDS

    modules = {path.stem for path in (BENCH / "commands").glob("*.py")} - {"__init__"}
    assert modules == set(COMMANDS) - {"all", "forward", "backward"} | {"lengths"}
