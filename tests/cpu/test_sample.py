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

@pytest.mark.slow(always=True)
@pytest.mark.parametrize("case", range(10))
def test_always(case): pass

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


def test_one_slow_case_in_so_many_and_everything_else(tmp_path: Path) -> None:
    every = _collected(tmp_path, "--sample", "a")
    sizes = {"test_slow": 200, "test_quick": 20, "test_alone": 1, "test_always": 10, "test_large": 200}
    assert every == sizes
    third = _collected(tmp_path, "--sample", "a", "--one-in", "3")
    assert (third["test_quick"], third["test_alone"], third["test_always"]) == (20, 1, 10)
    assert 45 < third["test_slow"] < 90
    sample = _collected(tmp_path, "--sample", "a", "-m", "not slow")
    assert sample.keys() == {"test_quick", "test_large"}
    assert 45 < third["test_large"] - sample["test_large"] < 80
    assert sample["test_large"] > 10
