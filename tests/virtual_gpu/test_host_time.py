"""A launch by the driver's own library takes the host no longer than one by CuPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.virtual_gpu import host_time
from tests.virtual_gpu.wheels import WHEELS, Wheel

pytestmark = [pytest.mark.slow, pytest.mark.simulator]


def test_a_launch_takes_no_longer_than_cupys(site: Callable[[Wheel], Path], cubins: None) -> None:
    """The best of averages of 1 ms, of processor time: 0.7 of CuPy's; what interrupts hits both."""
    wheel = WHEELS[1]
    site(wheel)
    us = host_time.measure(wheel, rounds=100)
    ours, cupys = us[host_time.LAUNCH, host_time.LIBRARY], us[host_time.LAUNCH, host_time.CUPY]
    assert ours <= cupys, us
    assert us[host_time.CALL, host_time.LIBRARY] > ours


def test_a_first_call_is_timed(cubins: None) -> None:
    """In a process of its own, without CuPy."""
    us = host_time.first_call(repeat=1)
    assert 500 < us < 1e6  # 7,500; a call that repeats another takes 21
