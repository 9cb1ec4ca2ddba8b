"""Which driver runs the kernels for arrays of a library, and why."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from ..errors import InvalidArgumentsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .gpu import GpuDriver
    from .run import Driver

__all__ = ["VARIABLE", "build_targets", "gpu_driver", "host_driver", "why_without_cupy"]

VARIABLE = "CUPY_FLASH_DRIVER"
# Libraries that give addresses and streams of their arrays without CuPy.
_DO_WITHOUT = ("torch", "jax")


@functools.cache
def gpu_driver(library: str) -> GpuDriver:
    """Return `driver`, or `cuda` for arrays of torch and JAX without CuPy.

    why cached: every call needs it.
    """
    if library in _DO_WITHOUT and why_without_cupy():
        from . import cuda

        return cuda
    from . import driver

    return driver


def build_targets(archs: Sequence[str] | None, cuda: int | None) -> tuple[Sequence[str], tuple[int, ...]]:
    """Architectures to compile for, and acceptable CUDA majors, best first; None: what this machine has."""
    from ..cubins.locate import usable_sets  # not needed by calls on a CPU

    cudas = usable_sets(None)
    if archs is None:
        driver = gpu_driver("torch")
        try:
            archs = sorted({device.arch for device in driver.devices()})
        except UnsupportedError as error:
            raise UnsupportedError(
                "there is no GPU here to compile kernels for.",
                reasons=str(error).splitlines()[:1],
                hint='archs=["sm_90a"], or in a shell --arch sm_90a, for the GPU of another machine',
            ) from error
        cudas = usable_sets(driver.driver_version())
    return archs, cudas if cuda is None else (cuda,)


def host_driver() -> Driver | None:
    """Return the simulator, for arrays in main memory, if CUPY_FLASH_DRIVER selects it; else None."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen in ("", "cuda"):
        return None
    if chosen.partition(":")[0] != "simulator":
        raise InvalidArgumentsError(
            f"the environment variable {VARIABLE} is {chosen!r}.",
            hint="unset it, or simulator:sm_90a to simulate that architecture, or cuda to do without CuPy",
        )
    from . import simulator

    return simulator


def why_without_cupy() -> str:
    """Why arrays of torch and JAX do not use CuPy; "" if they do."""
    if os.environ.get(VARIABLE) == "cuda":
        return f"{VARIABLE}=cuda"
    # why sys.modules first: an imported module need not have a spec, and find_spec raises without one.
    there = sys.modules["cupy"] if "cupy" in sys.modules else importlib.util.find_spec("cupy")
    return "CuPy is not installed" if there is None else ""
