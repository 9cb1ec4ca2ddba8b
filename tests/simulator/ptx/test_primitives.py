"""The primitives as they ship: the bodies of tests/primitives.py on the PTX of both NVRTCs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupy_flash.cubins import nvrtc
from cupy_flash.device import simulator
from tests.primitives import *  # noqa: F403  (its tests run here)
from tests.simulator.ptx.backend import kernels_from_ptx
from tests.simulator.test_primitives import SCHEDULED, Simulated
from tests.simulator.units import SIMULATED

pytestmark = [*SIMULATED, pytest.mark.sampled(10)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "machine" in metafunc.fixturenames:
        policies = ("late", "early", "random") if metafunc.function.__name__ in SCHEDULED else ("late",)
        machines = [(cuda, policy) for cuda in nvrtc.TOOLKITS for policy in policies]
        ids = [f"cuda{cuda}-{policy}" for cuda, policy in machines]
        metafunc.parametrize("machine", machines, ids=ids, indirect=True)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    cuda, policy = request.param
    if not nvrtc.installed(cuda):
        pytest.skip(f"the NVRTC wheel of CUDA {cuda} is not installed")
    target = "sm_120f" if "scaled" in request.function.__name__ else "sm_90a"
    with kernels_from_ptx(cuda, target), simulator.schedule(policy, seed=3):
        yield Simulated()
