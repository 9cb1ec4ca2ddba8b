"""alone/, tests of torch and JAX arrays without CuPy, on virtual GPUs; and that mistakes are noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.virtual_gpu.mutants import MUTANTS_ALONE, TURNS, Mutant, checkout
from tests.virtual_gpu.process import Outcome
from tests.virtual_gpu.test_mutants import assert_caught

pytestmark = [pytest.mark.slow, pytest.mark.simulator]
ALONE = "tests/virtual_gpu/alone"


@pytest.mark.parametrize("devices", ["sm_80,sm_80,sm_110", "sm_90,sm_90,sm_110"])
def test_suite(devices: str, on_virtual_gpu_alone: Callable[..., Outcome]) -> None:
    outcome = on_virtual_gpu_alone(ALONE, devices=devices)
    assert outcome.status == 0, outcome.output[-6000:]
    assert outcome.report["cupy"] == ""
    assert outcome.report["simulated"] > 0
    assert not {why for why in outcome.report["skipped"].values() if "jax" not in why}


@pytest.mark.in_turn(TURNS)
@pytest.mark.parametrize("mutant", MUTANTS_ALONE, ids=lambda mutant: mutant.name)
def test_is_caught(
    mutant: Mutant,
    on_virtual_gpu_alone: Callable[..., Outcome],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with checkout(mutant, tmp_path) as tree:
        outcome = on_virtual_gpu_alone("-x", *mutant.tests, devices=mutant.devices, tree=tree)
    assert_caught(outcome)
    record_property("virtual_gpu_mutant", mutant.name)
