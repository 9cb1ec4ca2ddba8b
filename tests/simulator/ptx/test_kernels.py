"""Every kernel in every dtype, as it ships for every architecture family, under every schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupy_flash.device import simulator
from tests.simulator.ptx.backend import kernels_from_ptx
from tests.simulator.ptx.calls import Call, calls, kernels_of
from tests.simulator.ptx.conftest import need
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED

# A compiler for each architecture, in turn; the warpgroup kernels are made by both.
BUILDS = {"sm_75": 13, "sm_80": 12, "sm_90a": 13, "sm_100": 12, "sm_120": 13}
ROWS = [(target, cuda, call) for target, cuda in BUILDS.items() for call in calls(target)]
ROWS += [("sm_90a", 12, call) for call in calls("sm_90a") if call.name.startswith("hopper")]


@pytest.mark.parametrize("target", BUILDS)
def test_calls_reach_every_kernel(target: str) -> None:
    assert frozenset().union(*(call.kernels for call in calls(target))) == kernels_of(target)


@pytest.mark.sampled(96)
@pytest.mark.parametrize(
    ("target", "cuda", "call"), ROWS, ids=[f"{target}-cuda{cuda}-{call.name}" for target, cuda, call in ROWS]
)
def test_within_the_budget(
    target: str,
    cuda: int,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[str, object], None],
) -> None:
    need(cuda)
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{target}")
    with kernels_from_ptx(cuda) as used:
        for policy in ("late", "early", "random"):
            with simulator.schedule(policy, seed=7):
                call.run()
    assert {(v.source, v.step, v.dtype) for v, _ in used} == call.kernels
    for variant, build in used:
        count("variants run from their PTX", f"{variant.name} {build}")
