"""Mistakes in the PTX of the primitives are caught: a few of them tried each day, all with the plugin."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupy_flash.device import host_build
from tests.conftest import drawn
from tests.simulator import mutate
from tests.simulator.ptx import plugin
from tests.simulator.ptx.conftest import need
from tests.simulator.ptx.mutants import EDITS
from tests.simulator.units import SIMULATED

pytestmark = [*SIMULATED, pytest.mark.slow]
SUBJECT = mutate.SUBJECTS[mutate.DEVICE_HALF]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mistake" not in metafunc.fixturenames:
        return
    config = metafunc.config
    everything = config.pluginmanager.has_plugin(plugin.NAME)
    names = [e.name for e in EDITS if everything or drawn(e.name, 8, config.option.sample)]
    metafunc.parametrize("mistake", names or [EDITS[0].name])


def test_mistakes_are_caught(mistake: str, count: Callable[[str, object], None]) -> None:
    need(12), need(13)
    (mutant,) = (m for m in mutate.mutants(SUBJECT) if m.call == mistake)
    cache = host_build.cache_folder().parents[1]  # why: the runtime is there
    assert mutate.verdict(mutant, SUBJECT, cache) == "fails (PTX)"
    count("mistakes in PTX that are caught", mistake)
