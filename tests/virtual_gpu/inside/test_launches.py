"""What the driver refuses: cubins that are not for the device or damaged, launches beyond the limits."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cupy_flash
from cupy_flash import CubinNotFoundError
from cupy_flash.cubins import locate
from cupy_flash.device import driver
from cupy_flash.dispatch import backends, memo
from tests.gpu.calls import OPTIONS, arrays, both_passes, check, on_device
from tests.paths import ROOT
from tests.virtual_gpu import install

_REAL = locate.locate


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are located and loaded again, before the test and behind it."""
    monkeypatch.setattr(driver._loader, "kernels", {})
    _forget()
    yield
    _forget()


def _forget() -> None:
    memo.forget()
    backends.load.cache_clear()


def damaged(data: bytearray) -> None:
    """Not cut: the driver has to take the length of an image in memory from the image."""
    half = len(data) // 2
    data[half:] = bytes(len(data) - half)


def not_elf(data: bytearray) -> None:
    data[0] = 0


def for_another_gpu(data: bytearray) -> None:
    flags = slice(48, 52)  # e_flags: the architecture is in its lowest byte, or the second
    data[flags] = bytes(90 if byte == 80 else byte for byte in data[flags])


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("harm", [damaged, not_elf, for_another_gpu])
def test_cubin_is_refused(harm: Any, cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver: the manifest, which would have refused it before, is passed over here."""

    def harmed(*asked: Any) -> locate.Cubin:
        cubin = _REAL(*asked)
        data = bytearray(cubin.path.read_bytes())
        harm(data)
        (tmp_path / "cubins").mkdir(exist_ok=True)
        path = tmp_path / "cubins" / cubin.path.name
        path.write_bytes(data)
        return cubin._replace(path=path, sha256=hashlib.sha256(data).hexdigest())

    q, k, v, _ = on_device(cupy, 0, *arrays())
    with monkeypatch.context() as patch:
        patch.setattr(locate, "locate", harmed)
        with pytest.raises(CubinNotFoundError, match="does not load") as error:
            cupy_flash.attention(q, k, v, **OPTIONS)
    assert "Try:" in str(error.value)
    check({"o": cupy_flash.attention(q, k, v, **OPTIONS)})


def test_cubin_of_this_hopper_is_for_hopper_only(cupy: Any) -> None:
    (cubin,) = (ROOT / "build/cubins/cuda12/sm_90a").glob("flash_forward_sm90_f16_d64_any_*.cubin")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="NO_BINARY_FOR_GPU"):
        cupy.RawModule(path=str(cubin)).get_function(cubin.stem)


def forward_kernel(cupy: Any) -> driver.Kernel:
    both_passes(*on_device(cupy, 0, *arrays()))
    return next(
        kernel for (name, _), kernel in driver._loader.kernels.items() if name.startswith("flash_forward")
    )


def test_struct_of_another_size_is_noticed(cupy: Any) -> None:
    kernel = forward_kernel(cupy)
    right = install.launched[kernel.cubin.path.stem]
    for size in (right - 8, right + 8):
        with pytest.raises(AssertionError, match=f"is given {size} bytes"):
            kernel.launch((1, 1, 1), (128, 1, 1), 0, bytes(size), 0)


def test_structs_are_those_of_the_cubins(cupy: Any) -> None:
    """One parameter each, and the same by our reading as by the driver's."""
    both_passes(*on_device(cupy, 0, *arrays()))
    ours = install.library()
    for kernel in driver._loader.kernels.values():
        function = ctypes.c_void_p(kernel._function.ptr)
        assert ours.virtual_gpu_parameters(function) == 1
        assert ours.virtual_gpu_parameter_bytes(function) >= install.launched[kernel.cubin.path.stem]


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes"),
    [
        ((1, 1 << 16, 1), (128, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (128, 1, 1), 164 << 10),
    ],
)
def test_launch_is_refused(grid: Any, block: Any, shared_bytes: int, cupy: Any) -> None:
    kernel = forward_kernel(cupy)
    params = bytes(install.launched[kernel.cubin.path.stem])
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        kernel.launch(grid, block, shared_bytes, params, 0)


def test_streams_belong_to_their_device(cupy: Any) -> None:
    kernel = forward_kernel(cupy)
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
    params = bytes(install.launched[kernel.cubin.path.stem])
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        kernel.launch((1, 1, 1), (128, 1, 1), 0, params, stream.ptr)
