"""The primitives of cupy-flash check: right in the simulator; one that has a mistake is found and named."""

from __future__ import annotations

import dataclasses
import re

import pytest

from cupy_flash.check import Found, check
from cupy_flash.check.places import find
from cupy_flash.check.primitives import PRIMITIVES, of_driver, primitives_of
from cupy_flash.check.run import RIGHT, WRONG
from cupy_flash.device import simulator
from cupy_flash.plan.families import primitives
from tests.simulator.units import KERNELS, SIMULATED

pytestmark = SIMULATED


@pytest.fixture
def simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{request.param}")
    return request.param


def found() -> Found:
    return check(cases=of_driver(simulator, 0), with_speed=False)


def check_all(count: int) -> None:
    """Every primitive of the simulated GPU, so many, is right."""
    made = found()
    expected = [(str(x), RIGHT) for x in of_driver(simulator, 0)]
    assert [(x.case, x.state) for x in made.outcomes] == expected, made.screen()
    assert len(made.outcomes) == count
    assert {x.kernels for x in made.outcomes} == {(primitives.KERNEL,)}
    assert made.status == 0


# Between them every primitive but those of e4m3, which the PTX of sm_120 runs.
@pytest.mark.parametrize(
    ("simulated", "count"), [("sm_70", 6), ("sm_80", 14), ("sm_90", 22)], indirect=["simulated"]
)
def test_every_one_is_right(simulated: str, count: int) -> None:
    check_all(count)


@pytest.mark.parametrize("simulated", ["sm_90"], indirect=True)
@pytest.mark.parametrize("policy", ["early", "random"])
def test_under_other_schedules(simulated: str, policy: str) -> None:
    with simulator.schedule(policy, seed=5):
        check_all(22)


@pytest.mark.parametrize(
    ("simulated", "mistake"),
    [("sm_80", 0), ("sm_120", 1), ("sm_90", 0), ("sm_90", 1)],
    indirect=["simulated"],
)
def test_every_mistake_is_found(simulated: str, mistake: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistakes of mistaken_primitives.cu, of which each primitive has one."""
    real = primitives.variant

    def mistaken(target: str) -> object:
        right = real(target)
        source = str(KERNELS / "mistaken_primitives.cu")
        macros = (*right.macros, ("MISTAKE", str(mistake)))
        return dataclasses.replace(right, source=source, macros=macros)

    monkeypatch.setattr(primitives, "variant", mistaken)
    made = found()
    assert [x.case for x in made.outcomes if x.state != WRONG] == []
    assert made.status == 1
    said = made.screen()
    for x in made.outcomes:
        assert f"primitive {x.case}: wrong\n" in said
    # why either: what a primitive waits for may not be there, which the simulator reports
    told = (
        r"words are wrong, the first of thread \d+, word \d+: 0x[0-9a-f]{8} for 0x|largest error|KernelFailed"
    )
    assert [x.says for x in made.outcomes if not re.search(told, x.says)] == []
    assert "report    a primitive is wrong" in said


def test_which_ones_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the GPU that is there; on a CPU, and on a GPU without kernels, none."""
    assert len({x.number for x in PRIMITIVES}) == len(PRIMITIVES) - 1  # two products of doubles
    counts = {}
    for name in ("sm_75", "sm_86", "sm_87", "sm_89", "sm_103", "sm_121", "sm_110"):
        monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{name}")
        counts[name] = len(of_driver(simulator, 0))
    assert counts == {
        "sm_75": 8,
        "sm_86": 13,
        "sm_87": 14,
        "sm_89": 15,
        "sm_103": 13,
        "sm_121": 16,
        "sm_110": 0,
    }
    monkeypatch.delenv("CUPY_FLASH_DRIVER")
    assert primitives_of(find("cpu")[0]) == ()
