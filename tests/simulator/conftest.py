"""The simulated GPUs that the functional tests run on."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from cupy_flash.device import host_build
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from tests.checks import Device


@pytest.fixture(autouse=True)
def compiler_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI a warning of g++ about our sources is an error; other versions of g++ may warn of more.

    Traced score functions may have constants that they do not use.
    """

    def refuse(text: str) -> None:
        assert not re.search(r"kernels_cu/\S+: warning: ", text), text

    if os.environ.get("CI"):
        monkeypatch.setattr(host_build, "show_warnings", refuse)


@pytest.fixture(params=["sm_61"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The kernels of one architecture, run on NumPy arrays by the simulator.

    By default one that has simple kernels only. Suites of other kernels name theirs:
    ``@pytest.mark.parametrize("device", ["sm_80"], indirect=True)``.
    """
    if shutil.which("g++") is None:
        pytest.skip("the simulator compiles kernels with g++, which is not installed")
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{request.param}")
    return Device(request.param, np)


@pytest.fixture
def tensor_cores_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a plan fail instead of falling back: for cases of the preferred families."""
    preferred = tuple(family for family in families.FAMILIES if family.NAME != "simple")
    monkeypatch.setattr(families, "FAMILIES", preferred)
    memo.forget()
    yield
    memo.forget()
