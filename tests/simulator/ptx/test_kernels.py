"""Every kernel in every dtype, and every kernel as it ships for every architecture family.

Under every schedule. On a push each kind of call runs in every dtype for the first family that has it, for
the others in one dtype, others each day, and for one of Blackwell's two; with the plugin in every dtype for
all. why this loses little: no source asks for a dtype and for an architecture at once, nor which Blackwell it
is, so what waits for its day is a fault of NVRTC alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import pytest

from cupy_flash.device import simulator
from tests.simulator.ptx import plugin
from tests.simulator.ptx.backend import Build, kernels_from_ptx
from tests.simulator.ptx.calls import Call, calls, kernels_of
from tests.simulator.ptx.conftest import need
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED

# A compiler for each architecture, in turn; the warpgroup kernels are made by both, and products of doubles.
BUILDS = {"sm_80": 12, "sm_90a": 13, "sm_75": 13, "sm_100": 12, "sm_120": 13}
BLACKWELL = ("sm_100", "sm_120")
EVERY = [(Build(target, cuda), call) for target, cuda in BUILDS.items() for call in calls(target)]
EVERY += [
    (Build("sm_90a", 12), call)
    for call in calls("sm_90a")
    if call.name.startswith(("hopper", "tensor-cores"))
]


def kind(call: Call) -> str:
    """Its name without the dtype."""
    return re.sub(r"-(b?f16|f32|f64|ieee32|ieee64)\b", "", call.name)


def in_turn(word: str) -> list[tuple[Build, Call]]:
    """A kind in every dtype with its first build, and with each other one in a dtype that the word gives.

    Of kinds that both Blackwells have, every other one runs on the first, the rest on the second.
    """
    first = zlib.crc32(word.encode())
    dtypes: dict[tuple[Build, str], list[Call]] = {}
    for one, call in EVERY:
        dtypes.setdefault((one, kind(call)), []).append(call)
    seen: set[str] = set()
    chosen = []
    of_both = sorted(set.intersection(*({kind(call) for call in calls(target)} for target in BLACKWELL)))
    left_out = {(BLACKWELL[((first >> 8) + n) % 2], name) for n, name in enumerate(of_both)}
    for k, ((one, name), each) in enumerate(dtypes.items()):
        if (one.target, name) in left_out:
            continue
        chosen += [(one, call) for call in (each[(first + k) % len(each)],) if name in seen]
        chosen += [(one, call) for call in each if name not in seen]
        seen.add(name)
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "call" in metafunc.fixturenames:
        config = metafunc.config
        everything = config.pluginmanager.has_plugin(plugin.NAME)
        rows = EVERY if everything else in_turn(config.option.sample)
        metafunc.parametrize(("one", "call"), rows, ids=[f"{one}-{call.name}" for one, call in rows])


@pytest.mark.parametrize("target", BUILDS)
def test_calls_reach_every_kernel(target: str) -> None:
    assert frozenset().union(*(call.kernels for call in calls(target))) == kernels_of(target)


def family(one: Build) -> tuple[str, ...]:
    """The targets that stand for it in turn."""
    return BLACKWELL if one.target in BLACKWELL else (str(one),)


def test_every_call_has_its_turn() -> None:
    rows = in_turn("today")
    assert {call.name for _, call in rows} == {call.name for _, call in EVERY}
    of_today, of_all = ({(family(one), kind(call)) for one, call in each} for each in (rows, EVERY))
    assert of_today == of_all
    days = [row for day in range(100) for row in in_turn(f"day {day}")]
    assert {(one, call.name) for one, call in days} == {(one, call.name) for one, call in EVERY}


@pytest.mark.sampled(96)
def test_within_the_budget(
    one: Build, call: Call, monkeypatch: pytest.MonkeyPatch, count: Callable[[str, object], None]
) -> None:
    need(one.cuda)
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{one.target}")
    with kernels_from_ptx(one.cuda) as used:
        for policy in ("late", "early", "random"):
            with simulator.schedule(policy, seed=7):
                call.run()
    assert {(v.source, v.step, v.dtype) for v, _ in used} == call.kernels
    for variant, build in used:
        count("variants run from their PTX", f"{variant.name} {build}")
