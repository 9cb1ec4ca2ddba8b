"""cupy-flash check on a simulated GPU: kernels answer, and are named."""

from __future__ import annotations

import pytest

from cupy_flash.check import check
from cupy_flash.check.cached import Cached
from cupy_flash.check.cases import Dense
from tests.checks import Device

# The first compiles three of Hopper's kernels, which takes g++ more than 5 s.
pytestmark = [pytest.mark.simulator, pytest.mark.slow]

SMALL = (
    Dense(lengths=(70, 70), options={"causal": True}),
    Cached(room=96, lengths=(0, 37, 94)),
    Dense(dtype="float8_e4m3fn", lengths=(70, 70)),
)


@pytest.mark.parametrize("device", ["sm_90a"], indirect=True)
def test_kernels_answer(device: Device) -> None:
    found = check(cases=SMALL, with_speed=False)
    assert found.where == f"a simulated {device.name}; arrays of numpy"
    assert [x.state for x in found.outcomes] == ["right"] * len(SMALL), found.screen()
    dense, cached, float8 = (x.kernels for x in found.outcomes)
    assert any(name.startswith("flash_forward_sm90_f16_d64") for name in dense)
    assert any("decode" in name for name in cached)
    assert any("fp8" in name for name in float8)
