"""Places for the arrays of a check: CuPy or torch on a GPU, NumPy on the CPU or a simulated GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..call.arrays import CPU
from ..call.operands import FLOAT8
from ..device import choice
from ..device.gpu import Device
from ..dispatch.backends import driver_of

__all__ = ["Place", "as_tensor", "find", "first_line", "torch_gpu", "torch_module"]

ROWS, MOST_CALLS = 5, 200  # timed runs, and the most calls of a run
# Dtypes of ml_dtypes, which torch cannot convert itself -> integers of their bits.
_BITS = {"bfloat16": np.int16, FLOAT8: np.int8}


class Place(NamedTuple):
    """Arrays of one library on one device."""

    library: str
    title: str  # short description of the device for messages
    on_gpu: bool  # whether CUDA kernels compute: on a GPU, or in the simulator
    array: Callable[[np.ndarray], Any]  # copies a NumPy array to the device
    synchronize: Callable[[], None]  # waits until all enqueued work is done
    ordinal: int | None = None  # CUDA device number; None without a GPU

    def put(self, x: Any) -> Any:
        """Copy arrays to the device, also in tuples and mappings; return other values unchanged."""
        if isinstance(x, np.ndarray):
            # why bits: not every library has 8-bit floats
            return self.array(x.view(np.uint8) if x.dtype.name == FLOAT8 else x)
        if isinstance(x, Mapping):
            return {name: self.put(part) for name, part in x.items()}
        if isinstance(x, tuple):
            parts = map(self.put, x)
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x

    def seconds(self, call: Callable[[], Any], at_least: float) -> float:
        """Seconds per call of back-to-back calls, the median of up to five runs."""
        call()
        self.synchronize()
        begun = start = time.perf_counter()
        call()
        self.synchronize()
        count = int(at_least / ROWS / max(time.perf_counter() - start, 1e-6))
        count = min(max(count, 1), MOST_CALLS)
        rows: list[float] = []
        # why a limit: on a busy machine a run may take far longer than the first call predicts
        while not rows or (len(rows) < ROWS and time.perf_counter() - begun < 2 * at_least):
            start = time.perf_counter()
            for _ in range(count):
                call()
            self.synchronize()
            rows.append((time.perf_counter() - start) / count)
        return sorted(rows)[len(rows) // 2]


def find(wanted: str = "auto") -> tuple[list[Place], list[str]]:
    """Find the places to check, and say why others cannot be used.

    Parameters
    ----------
    wanted : {"auto", "gpu", "cpu"}

    Returns
    -------
    list of Place
        A case runs at the first place that can hold its arrays. Empty if a GPU is wanted, but no library can
        use one.
    list of str
        Reasons why a library cannot use a GPU.
    """
    said: list[str] = []
    found: list[Place] = []
    simulated = os.environ.get(choice.VARIABLE, "").startswith("simulator")
    if wanted != "cpu" and not simulated:
        for make in (_cupy, _torch):
            try:
                place = make()
            except Exception as error:  # why any: a broken driver or package raises all kinds
                name = make.__name__.strip("_")
                said.append(f"{name} does not reach a GPU: {type(error).__name__}: {first_line(error)}")
                continue
            found += [] if place is None else [place]
    return found or ([] if wanted == "gpu" else [_numpy()]), said


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without reasons and hints."""
    return str(error).partition("\n")[0]


def _numpy() -> Place:
    simulator = driver_of(CPU, "numpy")
    title = "the CPU" if simulator is None else f"a simulated {simulator.arch(0)}"
    return Place("numpy", title, simulator is not None, np.copy, lambda: None)


def _cupy() -> Place | None:
    if choice.why_without_cupy():
        return None
    import cupy

    ordinal = int(cupy.cuda.Device().id)
    found = _device(ordinal, "cupy")
    # why synchronise the device: a failed kernel raises here, and not in a later call
    return Place("cupy", f"{found.name} ({found.arch})", True, cupy.asarray,
                 cupy.cuda.runtime.deviceSynchronize, ordinal)  # fmt: skip


def _torch() -> Place | None:
    torch = torch_gpu()
    if torch is None:
        return None
    ordinal = int(torch.cuda.current_device())
    found = _device(ordinal, "torch")

    def array(x: np.ndarray) -> Any:
        return as_tensor(torch, x).to(f"cuda:{ordinal}")

    return Place("torch", f"{found.name} ({found.arch})", True, array, torch.cuda.synchronize, ordinal)


def _device(ordinal: int, library: str) -> Device:
    return next(x for x in choice.gpu_driver(library).devices() if x.ordinal == ordinal)


def as_tensor(torch: Any, x: np.ndarray) -> Any:
    """View a NumPy array as a tensor."""
    name = x.dtype.name
    if name in _BITS:
        return torch.from_numpy(x.view(_BITS[name])).view(getattr(torch, name))
    return torch.from_numpy(x)


def torch_module() -> Any:
    """Import torch; return None if it does not import."""
    try:
        import torch
    except Exception:  # why any: a broken torch raises all kinds, and is not a fault of this installation
        return None
    return torch


def torch_gpu() -> Any:
    """The module torch if it can use a GPU, or None."""
    torch = torch_module()
    return torch if torch is not None and torch.cuda.is_available() else None
