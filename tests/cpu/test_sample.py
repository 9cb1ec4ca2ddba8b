"""The day's sample of large tables: as large as it says, another one each day, and every case comes up."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import drawn
from tests.paths import ROOT
from tests.virtual_gpu.mutants import MUTANTS, MUTANTS_ALONE, TURNS

CASES = [f"tests/test_x.py::test_features[case {n}]" for n in range(400)]


@pytest.mark.parametrize("part", [2, 4, 8])
def test_a_sample_is_one_in_so_many(part: int) -> None:
    for day in range(1, 29):
        assert 0.6 < part * sum(drawn(case, part, f"2026-11-{day:02}") for case in CASES) / len(CASES) < 1.4


def test_every_case_comes_up_within_two_months() -> None:
    days = [f"2027-{month:02}-{day:02}" for month in (1, 2) for day in range(1, 29)]
    assert all(any(drawn(case, 4, day) for day in days) for case in CASES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(30))
def test_what_is_not_drawn_is_slow(case: int, request: pytest.FixtureRequest) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow != drawn(request.node.nodeid, 3, request.config.option.sample)


_TABLES = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("case", range(200))
def test_slow(case): pass

@pytest.mark.parametrize("case", range(20))
def test_quick(case): pass

@pytest.mark.slow
def test_alone(): pass

@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("case", range(200))
def test_mutants(case): pass

@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", range(200))
def test_large(case): pass
"""


def _collected(folder: Path, *options: str) -> Counter[str]:
    """How many cases of each of those tests are left."""
    (folder / "test_tables.py").write_text(_TABLES)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "tests.conftest", *options]
    shown = subprocess.run(
        [*command, f"--rootdir={folder}", "-c", "/dev/null", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return Counter(re.findall(r"::(\w+)", shown))


def test_mutants_in_turn_and_everything_else(tmp_path: Path) -> None:
    sizes = {"test_slow": 200, "test_quick": 20, "test_alone": 1, "test_mutants": 200, "test_large": 200}
    assert _collected(tmp_path, "--sample", "a") == sizes
    turn = _collected(tmp_path, "--sample", "a", "--in-turn")
    assert 45 < turn.pop("test_mutants") < 90
    assert turn == {name: size for name, size in sizes.items() if name != "test_mutants"}
    sample = _collected(tmp_path, "--sample", "a", "-m", "not slow")
    assert sample.keys() == {"test_quick", "test_large"}
    assert 10 < sample["test_large"] < 45


def test_every_mutant_has_its_turn_within_24_pushes() -> None:
    """All of the virtual GPU, but in a few rows of 24 pushes out of a hundred."""
    names = [f"tests/virtual_gpu/test_mutants.py::test_is_caught[{m.name}]" for m in MUTANTS]
    names += [f"tests/virtual_gpu/test_alone.py::test_is_caught[{m.name}]" for m in MUTANTS_ALONE]
    rows = [[f"{row:04x}{push:04x}" for push in range(24)] for row in range(100)]
    whole = [all(any(drawn(name, TURNS, word) for word in row) for name in names) for row in rows]
    assert sum(whole) > 95
