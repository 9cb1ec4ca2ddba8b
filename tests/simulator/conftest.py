"""The simulated GPUs that the functional tests run on."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.checks import Device

# The oldest architecture that the simple kernels serve; the functional cases are the same for any.
ARCHS = ("sm_61",)


@pytest.fixture(params=ARCHS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The kernels of one architecture, run on NumPy arrays by the simulator."""
    if shutil.which("g++") is None:
        pytest.skip("the simulator compiles kernels with g++, which is not installed")
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{request.param}")
    return Device(request.param, np)
