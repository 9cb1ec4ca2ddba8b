"""Fixtures: one thread of BLAS; the compiled core; and a GPU that records, without one."""

import hashlib
import sys

import pytest
from threadpoolctl import threadpool_limits

from cupy_flash.cpu import choose
from cupy_flash.cpu.core import isa, sources
from cupy_flash.cpu.core import locate as core_locate
from cupy_flash.cubins import locate
from cupy_flash.dispatch import memo
from tests.conftest import skip_without_core
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
    memo.forget()
    yield fake
    forget()
    memo.forget()


@pytest.fixture
def located(monkeypatch, tmp_path):
    """locate finds every variant, and counts."""
    calls = []

    def find(variant, arch, driver_version):
        calls.append((variant.name, arch, driver_version))
        path = tmp_path / f"{variant.name}.cubin"
        path.touch()
        return locate.Cubin(path, hashlib.sha256().hexdigest(), 40, 0, 0, "cuda12", "test", arch)

    monkeypatch.setattr(locate, "locate", find)
    return calls


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> core_locate.Library:
    """The library that this CPU runs."""
    monkeypatch.delenv("CUPY_FLASH_CPU", raising=False)
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    skip_without_core()
    found = choose.core()
    assert not isinstance(found, str)
    return found[1]


@pytest.fixture(params=[*sources.choices(isa.runnable()), "numpy"])
def every_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes on NumPy arrays: each library of the core that this machine runs, and NumPy."""
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    monkeypatch.setenv(isa.OVERRIDE, request.param)
    if (
        request.param != "numpy"
        and core_locate.locate(next(x for x in isa.ISAS if x.name == isa.name_of(request.param))) is None
    ):
        pytest.skip(f"the library {request.param} is not built")
    return str(request.param)
