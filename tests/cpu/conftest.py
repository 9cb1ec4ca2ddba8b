"""Fixtures: one thread of BLAS; and a GPU without one, for tests that look at what CuPy is asked for."""

import hashlib
import sys

import pytest
from threadpoolctl import threadpool_limits

from cupy_flash import prepare
from cupy_flash.cubins import locate
from tests.cpu.fake_cupy import FakeCuda, forget


@pytest.fixture
def one_blas_thread():
    """For small products: threads that spin between them cost ten times what they give."""
    with threadpool_limits(1):
        yield


@pytest.fixture
def cuda(monkeypatch):
    """Two GPUs that record, of which nothing is known yet."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake.module())
    forget()
    prepare.forget()
    yield fake
    forget()
    prepare.forget()


@pytest.fixture
def located(monkeypatch, tmp_path):
    """locate finds every variant, and counts."""
    calls = []

    def find(variant, arch, driver_version):
        calls.append((variant.name, arch, driver_version))
        path = tmp_path / f"{variant.name}.cubin"
        return locate.Cubin(path, hashlib.sha256().hexdigest(), 40, 0, 0, 1, "cuda12", "test", arch)

    monkeypatch.setattr(locate, "locate", find)
    return calls
