"""Every mistake of `mutants` makes a test fail on the virtual GPU, and without one they pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.virtual_gpu.mutants import DEVICES, GRAPHS, MEMORY, MUTANTS, STREAMS, TURNS, Mutant, checkout
from tests.virtual_gpu.process import Outcome
from tests.virtual_gpu.wheels import WHEELS

pytestmark = [pytest.mark.slow, pytest.mark.simulator]
NEWEST = next(w for w in reversed(WHEELS) if w.cuda == 12)


def assert_caught(outcome: Outcome) -> None:
    """One test has failed, and not because the mistake is no program."""
    assert outcome.status == 1, outcome.output[-4000:]
    assert outcome.report["outcomes"]["failed"] == 1
    broken = re.search(r"^E +(Name|Import|Syntax|Attribute)Error", outcome.output, re.MULTILINE)
    assert not broken, outcome.output[-4000:]


@pytest.mark.in_turn(TURNS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_caught(
    mutant: Mutant,
    on_virtual_gpu: Callable[..., Outcome],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with checkout(mutant, tmp_path) as tree:
        outcome = on_virtual_gpu(NEWEST, "-x", *mutant.tests, devices=mutant.devices, tree=tree)
    assert_caught(outcome)
    record_property("virtual_gpu_mutant", mutant.name)


@pytest.mark.parametrize("devices", ["sm_80,sm_80", "sm_90,sm_90"])
def test_passes_without(devices: str, on_virtual_gpu: Callable[..., Outcome], tmp_path: Path) -> None:
    """In the same copy of the checkout."""
    with checkout(None, tmp_path) as tree:
        tests = (STREAMS, DEVICES, GRAPHS, MEMORY)
        outcome = on_virtual_gpu(NEWEST, *tests, devices=devices, tree=tree)
    assert outcome.status == 0, outcome.output[-4000:]
