"""Which driver runs kernels for the GPU arrays of a library, and why."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gpu import GpuDriver

__all__ = ["VARIABLE", "gpu_driver", "why_without_cupy"]

VARIABLE = "CUPY_FLASH_DRIVER"
# Those that say where their arrays and streams are without CuPy.
_DO_WITHOUT = ("torch", "jax")


@functools.cache
def gpu_driver(library: str) -> GpuDriver:
    """CuPy, or the driver's own library where arrays of torch and JAX have to do without.

    why cached: every call asks.
    """
    if library in _DO_WITHOUT and why_without_cupy():
        from . import cuda

        return cuda
    from . import driver

    return driver


def why_without_cupy() -> str:
    """Why arrays of torch and JAX do not go through CuPy; "" if they do."""
    if os.environ.get(VARIABLE) == "cuda":
        return f"{VARIABLE}=cuda"
    # why first: a module that is there need not have a spec.
    there = sys.modules["cupy"] if "cupy" in sys.modules else importlib.util.find_spec("cupy")
    return "CuPy is not installed" if there is None else ""
