"""Where the arrays of a check live: CuPy's or torch's on a GPU, or NumPy's on the CPU or a simulated GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..device import choice
from ..device.gpu import Device
from ..dispatch.backends import driver_of

__all__ = ["Place", "as_tensor", "find", "first_line", "torch_gpu", "torch_module"]

CPU = ("cpu", 0)
ROWS, MOST_CALLS = 5, 200  # rows of calls that are timed, and calls of a row
FLOAT8 = "float8_e4m3fn"  # uint8 stands for its bits, in every library


class Place(NamedTuple):
    """Arrays of one library on one device.

    Attributes
    ----------
    library : str
    title : str
        The device, for people.
    on_gpu : bool
        Whether kernels run there: on a GPU, or in the simulator.
    array : callable
        Puts a NumPy array there.
    synchronize : callable
        Waits until everything enqueued is done.
    ordinal : int, optional
        Of the GPU.
    """

    library: str
    title: str
    on_gpu: bool
    array: Callable[[np.ndarray], Any]
    synchronize: Callable[[], None]
    ordinal: int | None = None

    def put(self, x: Any) -> Any:
        """The same with arrays there: an array, a tuple of them, or a mapping; the rest as it is."""
        if isinstance(x, np.ndarray):
            return self.array(x.view(np.uint8) if x.dtype.name == FLOAT8 else x)
        if isinstance(x, Mapping):
            return {name: self.put(part) for name, part in x.items()}
        if isinstance(x, tuple):
            parts = map(self.put, x)
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x

    def seconds(self, call: Callable[[], Any], at_least: float) -> float:
        """Seconds of a call among others in a row, the median of up to five rows."""
        call()
        self.synchronize()
        begun = start = time.perf_counter()
        call()
        self.synchronize()
        count = int(at_least / ROWS / max(time.perf_counter() - start, 1e-6))
        count = min(max(count, 1), MOST_CALLS)
        rows: list[float] = []
        # why a limit: a busy machine may take far longer than that one call has
        while not rows or (len(rows) < ROWS and time.perf_counter() - begun < 2 * at_least):
            start = time.perf_counter()
            for _ in range(count):
                call()
            self.synchronize()
            rows.append((time.perf_counter() - start) / count)
        return sorted(rows)[len(rows) // 2]


def find(wanted: str = "auto") -> tuple[list[Place], list[str]]:
    """The places to check, and sentences about those that could not be taken.

    Parameters
    ----------
    wanted : {"auto", "gpu", "cpu"}

    Returns
    -------
    list of Place
        A case runs at the first that holds its arrays. Empty if a GPU is wanted, and no library reaches one.
    list of str
    """
    said: list[str] = []
    found: list[Place] = []
    simulated = os.environ.get(choice.VARIABLE, "").startswith("simulator")
    if wanted != "cpu" and not simulated:
        for make in (_cupy, _torch):
            try:
                place = make()
            except Exception as error:  # why any: a broken driver or package shows in many ways
                name = make.__name__.strip("_")
                said.append(f"{name} does not reach a GPU: {type(error).__name__}: {first_line(error)}")
                continue
            found += [] if place is None else [place]
    return found or ([] if wanted == "gpu" else [_numpy()]), said


def first_line(error: BaseException) -> str:
    """What an error says, without its hints."""
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
    # why: a kernel that fails does so here, not in what comes after
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
    """A tensor over a NumPy array; torch does not know the dtypes that ml_dtypes adds to NumPy."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def torch_module() -> Any:
    """The module torch, or None."""
    try:
        import torch
    except Exception:  # why any: a broken installation is no matter of ours, and shows in many ways
        return None
    return torch


def torch_gpu() -> Any:
    """The module torch if it has CUDA and sees a GPU, or None."""
    torch = torch_module()
    return torch if torch is not None and torch.cuda.is_available() else None
