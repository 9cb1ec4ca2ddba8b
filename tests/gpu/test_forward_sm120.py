"""The forward kernel of sm_120 with warp roles, on such a GPU.

It is compiled here: no set of cubins has this candidate of bench tune.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cupy_flash.cubins import build, nvrtc
from cupy_flash.device import driver
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import flash
from tests.checks import Device, check_forward, only
from tests.simulator.test_forward_sm120 import CASES, CELLS, by_roles

pytestmark = pytest.mark.gpu


def compiled(folder: Path, cuda: int) -> None:
    """Compile the kernel for every class of head dims into a folder of cubins."""
    arch = architecture("sm_120")
    kernels = tuple(flash._forward("f16", classes, "band", arch) for classes in CELLS)
    with mock.patch.object(families, "variants", return_value=kernels):
        build.build(cuda, [arch.name], folder, progress=False)


@pytest.fixture(autouse=True)
def roles_only(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan with these kernels, and find them."""
    if architecture(driver.arch(0)).target != "sm_120":
        pytest.skip(f"this GPU is {driver.arch(0)}; the kernel is for sm_120 and sm_121")
    cuda = next((cuda for cuda in (13, 12) if nvrtc.installed(cuda)), None)
    if cuda is None:
        pytest.skip("no NVRTC to compile it")
    with by_roles(), only(flash):
        compiled(tmp_path, cuda)
        monkeypatch.setenv("CUPY_FLASH_CUBIN_DIR", str(tmp_path))
        yield


# CuPy has no bfloat16.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float16"])
def test_cases_of_the_simulator(name: str, device: Device) -> None:
    check_forward(CASES[name], device)
