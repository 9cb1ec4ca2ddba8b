"""Profiles of hypothesis, and the device that the functional tests run on."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.checks import Device

try:
    from hypothesis import settings
except ImportError:
    pass  # why: a GPU's machine may lack it, and tests/gpu needs none of it
else:
    settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
    settings.register_profile("explore", deadline=None, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The CPU path; tests/simulator and tests/gpu override this with theirs."""
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    return Device("cpu", np)
