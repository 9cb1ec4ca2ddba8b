"""Put the virtual GPU under CuPy: `install` before cupy is imported. Or under no CuPy: `install_alone`."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cupy_flash import CubinNotFoundError
from cupy_flash.cubins import locate
from cupy_flash.cubins.build import targets
from cupy_flash.device import choice, cuda, driver, host_build
from cupy_flash.plan import catalog, families
from tests.paths import ROOT
from tests.virtual_gpu.build import build
from tests.virtual_gpu.redirect import redirect

_RUNTIME = "cupy_backends.cuda.api.runtime"
_RESOLVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
_FAMILIES = families.FAMILIES  # why: tests narrow them, and a cubin of any may be loaded then
_kept: list[object] = []


@functools.cache
def library() -> ctypes.CDLL:
    """Our libcuda, which has the runtime's functions too."""
    ours = ctypes.CDLL(str(build(cuda_major()) / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    for name in ("launched", "simulated"):
        getattr(ours, f"virtual_gpu_{name}").restype = ctypes.c_uint64
    ours.virtual_gpu_failure.restype = ctypes.c_char_p
    ours.virtual_gpu_schedule.argtypes = [ctypes.c_int, ctypes.c_uint64]
    return ours


def cuda_major() -> int:
    """CUDA major of the CuPy that is on the path; 12 without one."""
    return next((cuda for cuda in (12, 13) if has_cupy(cuda)), 12)


def has_cupy(*cudas: int) -> bool:
    """Whether a CuPy of one of these CUDA majors is on the path."""
    return any(any(importlib.metadata.distributions(name=f"cupy-cuda{cuda}x")) for cuda in cudas)


def install(*archs: str) -> None:
    """Make CuPy see a virtual GPU of each of these architectures, such as "sm_80".

    Raises
    ------
    CannotRedirect
        CuPy's wheel is built in another way than those that this was made for.
    """
    if "cupy" in sys.modules:
        raise RuntimeError("cupy is imported already")
    if not has_cupy(12, 13):
        raise RuntimeError("neither cupy-cuda12x nor cupy-cuda13x is on the path")
    stand_ins = build(cuda_major())
    os.environ["CUPY_CACHE_DIR"] = str(stand_ins / "kernels")
    os.environ["CUPY_ACCELERATORS"] = ""  # why: cub is compiled for GPUs only
    ours = library()
    _kept.append(ctypes.CDLL(str(stand_ins / f"libnvrtc.so.{cuda_major()}"), ctypes.RTLD_GLOBAL))
    _make_gpu(ours, archs)
    runtime = importlib.import_module(_RUNTIME)
    redirect(Path(str(runtime.__file__)).resolve(), ours, stand_ins / "libcuda.so.1")
    _compare_launches(driver.Kernel, lambda kernel: kernel._function.ptr)


def install_alone(*archs: str) -> None:
    """Make the driver's library see a virtual GPU of each of these architectures; there is no CuPy."""
    os.environ[choice.VARIABLE] = "cuda"  # why: there may be a CuPy, which is not redirected
    _make_gpu(library(), archs)
    _compare_launches(cuda.Kernel, lambda kernel: kernel._function.value)


def _make_gpu(ours: ctypes.CDLL, archs: Iterable[str]) -> None:
    _make_devices(ours, archs)
    _take_schedule(ours)
    _compile_what_is_missing()
    _kept.append(_RESOLVE(_resolve))
    ours.virtual_gpu_resolver(_kept[-1])


def _make_devices(ours: ctypes.CDLL, archs: Iterable[str]) -> None:
    capabilities = [int(arch.removeprefix("sm_")) for arch in archs]
    if not ours.virtual_gpu_devices((ctypes.c_int * len(capabilities))(*capabilities), len(capabilities)):
        raise ValueError(f"no virtual GPU is like one of {', '.join(archs)}")


def _take_schedule(ours: ctypes.CDLL) -> None:
    """The schedule inside launches, from the simulator's own variable."""
    policy, _, seed = os.environ.get("CUPY_FLASH_SIMULATOR_POLICY", "late").partition(":")
    ours.virtual_gpu_schedule(("early", "late", "random").index(policy), int(seed or 1))


# ---- cubins


def _compile_what_is_missing() -> None:
    """Compile what a call asks for and the checkout lacks: of all kernels tests launch a few."""
    found = locate.locate

    def located(variant: catalog.Variant, arch: str, driver_version: int | None = None) -> locate.Cubin:
        try:
            return found(variant, arch, driver_version)
        except CubinNotFoundError:
            released = {locate.capability(target) for target in targets(12)}
            if variant.function or locate.OVERRIDE in os.environ or locate.capability(arch) not in released:
                raise
        script = [sys.executable, "-S", ROOT / "scripts" / "build_cubins.py"]
        done = subprocess.run(
            [*script, "--arch", arch, "--only", variant.name], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return found(variant, arch, driver_version)

    locate.locate = located


# ---- what runs for a cubin


def _resolve(path: bytes, kernel: bytes, library: int, symbol: int) -> int:
    """Tell modules.cpp where the simulator's kernel of a cubin is."""
    try:
        built, entry = _simulated(Path(path.decode()), kernel.decode())
    except Exception as error:  # why: it cannot pass through C; the stand-in refuses the module
        print(f"virtual GPU: {kernel.decode()}: {error!r}", file=sys.stderr)
        return 0
    for text, place in ((str(built), library), (entry, symbol)):
        ctypes.memmove(place, text.encode() + b"\0", len(text) + 1)
    return 1


def _simulated(cubin: Path, kernel: str) -> tuple[Path, str]:
    """The simulator's library of a cubin, compiled if it is not there, and its symbol."""
    variant = _variants(cubin.parent.name).get(kernel)
    if variant is not None:
        return host_build.build(variant), "simulate_" + variant.defines().get("CF_ENTRY", "kernel")
    from tests.simulator.units import unit  # the kernels of tests/gpu/test_primitives.py

    return host_build.build(unit(cubin.name.rsplit("-", 1)[0])), f"simulate_{kernel}"


@functools.cache
def _variants(target: str) -> dict[str, host_build.Buildable]:
    narrowed, families.FAMILIES = families.FAMILIES, _FAMILIES
    try:
        # why all of the GPU: the header of a cubin does not tell sm_120f from sm_120
        targets = catalog.architecture(target).targets
        return {variant.name: variant for each in targets for variant in families.names(each)}
    finally:
        families.FAMILIES = narrowed


# ---- what a launch passes

launched: dict[str, int] = {}  # kernels of cupy_flash that were launched, and bytes of the struct of each


def _compare_launches(kernels: Any, handle: Callable[[Any], int]) -> None:
    """Compare the struct of every launch with the table of parameters in the cubin.

    why here: the driver sees an address, and copies as many bytes as the table says from there.

    Parameters
    ----------
    kernels : type
        The class that launches.
    handle : callable
        Its function, as the driver knows it.
    """
    ours, launch = library(), kernels.launch

    def compared(
        self: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        stream: int,
    ) -> None:
        function = ctypes.c_void_p(handle(self))
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        ours.cuFuncGetParamInfo(function, ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size))
        count, whole = ours.virtual_gpu_parameters(function), ours.virtual_gpu_parameter_bytes(function)
        # An offset is what brings a struct with tensor maps to a multiple of 64 in the constant bank.
        passed = (1, len(params), offset.value + len(params))
        assert passed == (count, size.value, whole), (
            f"{self.cubin.path.stem} is given {len(params)} bytes; its cubin has {count} parameters, the "
            f"first of {size.value} bytes at {offset.value}, {whole} in all"
        )
        launched[self.cubin.path.stem] = len(params)
        launch(self, grid, block, shared_bytes, params, stream)

    kernels.launch = compared
