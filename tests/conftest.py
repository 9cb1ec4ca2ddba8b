"""Profiles of hypothesis, samples of large tables of cases, and the device of the functional tests."""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checks import Device
from tests.counts import pytest_terminal_summary  # noqa: F401  (a hook)

try:
    from hypothesis import settings
except ImportError:
    pass  # why: a GPU's machine may lack it, and tests/gpu needs none of it
else:
    settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
    settings.register_profile("explore", deadline=None, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", metavar="WORD", help="draws the cases of large tables that are not slow; default: the day"
    )
    parser.addoption(
        "--in-turn",
        action="store_true",
        help="of tests marked in_turn run the cases that the same word draws",
    )
    parser.addoption("--write-passed", metavar="FILE", type=Path, help="write which tests passed")
    parser.addoption(
        "--without",
        metavar="FILE",
        type=Path,
        help="leave out what is in FILE, unless marked torch or jax",
    )


def pytest_configure(config: pytest.Config) -> None:
    # why here: worker processes take it from the first one, and midnight may lie between them.
    config.option.sample = config.option.sample or datetime.date.today().isoformat()


def pytest_report_header(config: pytest.Config) -> str:
    part = "; mutants in turn" if config.option.in_turn else ""
    return f'of large tables -m "not slow" runs the cases of --sample {config.option.sample}{part}'


def drawn(case: str, part: int, word: str) -> bool:
    """Whether a case is of a word's sample, which is one case in ``part``."""
    return zlib.crc32(f"{word} {case}".encode()) % part == 0


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked ``sampled(part)`` only the sample is quick; the other cases are marked slow.

    With ``--in-turn``, cases of tests marked ``in_turn(part)`` that are not of the sample are left out, with
    ``--without`` those that have passed before there were frameworks.
    """
    word, file = config.option.sample, config.option.without
    passed = set(file.read_text().splitlines()) if file else set()
    left_out = set()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not drawn(item.nodeid, mark.args[0], word):
            item.add_marker(pytest.mark.slow)
        turn = item.get_closest_marker("in_turn")
        if turn and config.option.in_turn and not drawn(item.nodeid, turn.args[0], word):
            left_out.add(item)
        if item.nodeid in passed and not {"torch", "jax"} & {mark.name for mark in item.iter_markers()}:
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def skip_without_core() -> None:
    """Skip a test of the compiled core where it is not built; one that is damaged is an error."""
    from cupy_flash.cpu import choose  # why here: a GPU's machine may lack what the CPU path imports

    found = choose.core()
    if isinstance(found, str):
        pytest.skip(f"the compiled core: {found}")


@pytest.fixture(scope="module", params=("core", "numpy"))
def cpu_family(request: pytest.FixtureRequest) -> Iterator[str]:
    """What computes on NumPy arrays: a test that asks for this runs on the compiled core and on NumPy."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("CUPY_FLASH_DRIVER", raising=False)
        environment.setenv("CUPY_FLASH_CPU", "" if request.param == "core" else "numpy")
        if request.param == "core":
            skip_without_core()
        yield request.param


@pytest.fixture
def device(cpu_family: str) -> Device:
    """The CPU path; tests/simulator and tests/gpu override this with theirs."""
    return Device("cpu", np)
