"""Which driver runs kernels for the arrays of a library, and why."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from ..errors import InvalidArgumentsError

if TYPE_CHECKING:
    from .gpu import GpuDriver
    from .run import Driver

__all__ = ["VARIABLE", "gpu_driver", "host_driver", "why_without_cupy"]

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


def host_driver() -> Driver | None:
    """The simulator, for arrays in main memory, if the environment asks for it; else nobody.

    Raises
    ------
    InvalidArgumentsError
        The environment asks for what there is not.
    """
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
    """Why arrays of torch and JAX do not go through CuPy; "" if they do."""
    if os.environ.get(VARIABLE) == "cuda":
        return f"{VARIABLE}=cuda"
    # why first: a module that is there need not have a spec.
    there = sys.modules["cupy"] if "cupy" in sys.modules else importlib.util.find_spec("cupy")
    return "CuPy is not installed" if there is None else ""
