"""What a call of torch's tensors says where the driver, the cubins or the process do not fit.

Each goes through the public functions, and computes once what it complains of has been mended.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import CubinNotFoundError, UnsupportedError
from cupy_flash.cubins import locate
from cupy_flash.device import choice, cuda, driver, libcuda, tensor_map
from cupy_flash.dispatch import memo
from cupy_flash.plan.catalog import architecture
from tests.gpu.calls import OPTIONS, arrays, check
from tests.paths import ROOT
from tests.virtual_gpu import install
from tests.virtual_gpu.alone import gpu

OF_NO_KERNEL = 2  # the device of sm_110
LSE = arrays()[0][..., 0].astype(np.float32)


def forget() -> None:
    """As in a process that has not called the library."""
    for cached in (libcuda.library, cuda.devices, choice.gpu_driver, driver._cupy):
        cached.cache_clear()
    cuda._loader.kernels.clear()
    memo.forget()


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def driver_of() -> Iterator[Callable[[int], None]]:
    """Make the driver one of another CUDA, as CUDA counts."""
    set_version = install.library().virtual_gpu_driver_version
    before = set_version(12080)
    yield lambda version: (set_version(version), forget())[1]
    set_version(before)


def attend(ordinal: int = 0) -> dict[str, Any]:
    o, lse = cupy_flash.attention(*gpu.tensors(ordinal, *arrays()[:3]), return_lse=True, **OPTIONS)
    return {"o": o.numpy_of(), "lse": lse.numpy_of()}


def said(kind: type[Exception], ordinal: int = 0) -> str:
    """The error of both public calls, which enqueue nothing."""
    launched = install.library().virtual_gpu_launched()
    q, k, v, do = gpu.tensors(ordinal, *arrays())
    texts = []
    for call in (
        lambda: cupy_flash.attention(q, k, v, **OPTIONS),
        lambda: cupy_flash.attention_backward(do, q, k, v, q, gpu.tensors(ordinal, LSE)[0], **OPTIONS),
    ):
        with pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))
    assert all(text.splitlines()[-1].startswith("Try: ") for text in texts)
    assert install.library().virtual_gpu_launched() == launched
    return texts[0]


def test_no_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(tensor_map, "LIBRARY", "libcuda.so.none")
        text = said(UnsupportedError)
    assert "the CUDA driver does not load: libcuda.so.none" in text
    assert text.endswith("Try: an NVIDIA driver of version 525 or newer")
    check(attend())


def test_a_driver_that_is_too_old(driver_of: Callable[[int], None]) -> None:
    driver_of(11080)
    text = said(UnsupportedError)
    assert "the NVIDIA driver is for CUDA 11.8." in text
    assert text.endswith("Try: an NVIDIA driver of version 525 or newer")
    driver_of(12000)
    check(attend())


def test_a_device_that_no_kernel_is_compiled_for() -> None:
    text = said(UnsupportedError, OF_NO_KERNEL)
    assert "no kernel is compiled for 'sm_110'." in text
    check(attend(0))


# ------------------------------------------------------------------------------------------ cubins


@pytest.fixture
def cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for cubins, empty."""
    folder = tmp_path / "cubins"
    folder.mkdir()
    monkeypatch.setenv(locate.OVERRIDE, str(folder))
    real = locate._origins
    monkeypatch.setattr(locate, "_origins", lambda: [x for x in real() if x.name == locate.OVERRIDE])
    return folder


def put(folder: Path, major: int) -> None:
    """The CUDA 12 cubins of device 0, as a set of a CUDA major: the stand-ins do not tell its code apart."""
    target = architecture(cuda.arch(0)).target
    source, to = ROOT / "build" / "cubins" / "cuda12" / target, folder / f"cuda{major}" / target
    to.mkdir(parents=True)
    for path in source.glob("*_f16_d64_*.cubin"):
        shutil.copy(path, to)
    held = json.loads((source / locate.MANIFEST).read_text())
    (to / locate.MANIFEST).write_text(json.dumps(held | {"cuda": major}))


def test_a_device_without_cubins(cubins: Path) -> None:
    text = said(CubinNotFoundError)
    assert "no cubin of flash_forward" in text
    assert f"for {cuda.arch(0)}." in text
    assert f"no cubins in {cubins}" in text
    assert f"python -m cupy_flash build --arch {cuda.arch(0)}" in text
    put(cubins, 12)
    check(attend())


def test_cubins_of_the_other_major(cubins: Path, driver_of: Callable[[int], None]) -> None:
    put(cubins, 13)
    text = said(CubinNotFoundError)
    assert "CUDA 12.8, which loads no cubins of the CUDA 13 set" in text
    assert "cupy-flash-cuda12x" in text
    driver_of(13000)
    check(attend())


@pytest.mark.parametrize("version", [12080, 13000])
def test_cubins_of_both_majors(version: int, cubins: Path, driver_of: Callable[[int], None]) -> None:
    """A driver takes those of its own CUDA."""
    driver_of(version)
    put(cubins, 12)
    put(cubins, 13)
    check(attend())
    assert {kernel.cubin.set for kernel in cuda._loader.kernels.values()} == {f"cuda{version // 1000}"}


def test_two_cupys_that_broke_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        folder = tmp_path / f"{name.replace('-', '_')}-14.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so.12: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(choice.VARIABLE)
    text = said(UnsupportedError)
    assert "CuPy (cupy-cuda12x and cupy-cuda13x) does not import: libcudart.so.12: not found" in text
    assert "torch and JAX arrays also run without CuPy: CUPY_FLASH_DRIVER=cuda" in text
    assert "Try: pip uninstall cupy-cuda12x cupy-cuda13x" in text
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    forget()
    check(attend())


# ------------------------------------------------------------------------------------------ processes


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("used", ["ours", "another library"])
def test_a_process_that_forked_after_cuda_began(used: str) -> None:
    """Memory that is there already, because torch refuses to allocate in such a process by itself."""
    q, k, v, out = gpu.tensors(0, *arrays())
    if used == "ours":
        cupy_flash.attention(q, k, v, out=out, **OPTIONS)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        text = "it computes"
        try:
            cupy_flash.attention(q, k, v, out=out, **OPTIONS)
        except Exception as error:  # whatever it is, the parent looks at it
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(child, 0)
    assert text.startswith("UnsupportedError: this process was forked from one that had used CUDA")
    assert text.endswith('Try: multiprocessing.get_context("spawn"), or fork before the first use of CUDA')
    check(attend())
