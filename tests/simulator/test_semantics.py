"""The rules at the edges, as tests/cpu states them, on simulated kernels."""

from __future__ import annotations

import pytest

from tests.cpu.test_semantics import *  # noqa: F403  the same tests, under this folder's device

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("device")]
