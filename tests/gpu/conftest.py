"""The real GPU that the functional tests run on."""

from __future__ import annotations

import pytest

from tests.checks import Device


@pytest.fixture(scope="session")
def cupy() -> object:
    """The cupy module, if it is there and sees a GPU."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA GPU: {error}")
    if not count:
        pytest.skip("no CUDA GPU")
    return cupy


@pytest.fixture
def device(cupy: object, monkeypatch: pytest.MonkeyPatch) -> Device:
    """CuPy arrays on the current GPU."""
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    return Device("gpu", cupy, float32_precision="tf32x3")
