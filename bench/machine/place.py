"""Places for arrays and calls: NumPy on the CPU, or a GPU through torch or CuPy."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.check.places import as_tensor
from cupy_flash.plan.catalog import architecture

from ..work import FLOAT8
from . import timing
from .nvml import Nvml, State

FLUSH_BYTES = 2**30  # larger than any L2; takes at least 0.2 ms, in which Python enqueues the next call


class Cpu:
    """NumPy arrays, timed by the wall clock."""

    name = "cpu"
    library = "numpy"
    gpu = ""
    driver = ""
    dtypes = ("float32",)
    float8 = True
    multiprocessors = os.cpu_count() or 1

    def put(self, x: np.ndarray) -> Any:
        return x

    def inputs(self, case: Any) -> dict[str, Any]:
        return case.inputs()

    def stopwatch(self) -> timing.Stopwatch:
        return timing.by_clock

    def synchronize(self) -> None:
        pass

    def state(self) -> State:
        return State(free_bytes=_available_memory())

    def arch(self) -> str:
        return ""


def _available_memory() -> int | None:
    """Available memory in bytes on Linux; None elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return None


class TorchGpu:
    """torch tensors on the current GPU, timed by events on torch's stream."""

    name = "gpu"
    library = "torch"

    def __init__(self, torch: Any, device: str = "cuda") -> None:
        self.torch, self.device = torch, device
        properties = torch.cuda.get_device_properties(0)
        self.gpu = properties.name
        self.multiprocessors = properties.multi_processor_count
        self._capability = torch.cuda.get_device_capability(0)
        self.dtypes = ("bfloat16", "float16", "float32") if self.tf32 else ("float16", "float32")
        self.nvml = Nvml(_pci(properties))
        self.driver = self.nvml.driver()
        self._scratch: Any = None

    @property
    def float8(self) -> bool:
        """Whether kernels support 8-bit floats on this GPU, and torch has the dtype."""
        return bool({"hopper", "fp8"} & {*architecture(self.arch()).families}) and hasattr(self.torch, FLOAT8)

    @property
    def tf32(self) -> bool:
        """Whether tensor cores multiply float32 (as TF32) and bfloat16."""
        return bool(self._capability >= (8, 0))

    def put(self, x: np.ndarray) -> Any:
        return as_tensor(self.torch, np.ascontiguousarray(x)).to(self.device)

    def inputs(self, case: Any) -> dict[str, Any]:
        """Random inputs, generated on the GPU: for long sequences the host would take seconds."""
        generator = self.torch.Generator(self.device).manual_seed(0)
        dtype = getattr(self.torch, case.dtype)
        drawn = {
            name: self.torch.randn(shape, generator=generator, device=self.device).to(dtype)
            for name, shape in case.shapes().items()
        }
        return drawn | {name: self.put(x) for name, x in case.constants().items()}

    def stopwatch(self) -> timing.Stopwatch:
        return timing.by_events(self)

    def event(self) -> Any:
        return self.torch.cuda.Event(enable_timing=True)

    def elapsed(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def flush(self) -> None:
        if self._scratch is None:
            self._scratch = self.torch.empty(FLUSH_BYTES // 4, dtype=self.torch.int32, device=self.device)
        self._scratch.zero_()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def state(self) -> State:
        state = self.nvml.state()
        return state._replace(free_bytes=int(self.torch.cuda.mem_get_info()[0]))

    def arch(self) -> str:
        major, minor = self._capability
        return f"sm_{major}{minor}"


def _pci(properties: Any) -> str:
    numbers = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return "{:04X}:{:02X}:{:02X}.0".format(*numbers)


class CupyGpu:
    """CuPy arrays on the current GPU, for machines without torch; no bfloat16."""

    name = "gpu"
    library = "cupy"
    dtypes = ("float16", "float32")
    float8 = False

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.gpu = properties["name"].decode()
        self.multiprocessors = int(properties["multiProcessorCount"])
        self._arch = f"sm_{properties['major']}{properties['minor']}"
        self.nvml = Nvml(cupy.cuda.runtime.deviceGetPCIBusId(0))
        self.driver = self.nvml.driver()
        self._scratch: Any = None

    @property
    def tf32(self) -> bool:
        return False  # CuPy decides by an environment variable

    def put(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(x)

    def inputs(self, case: Any) -> dict[str, Any]:
        draw = self.cupy.random.RandomState(0)
        drawn = {
            name: draw.standard_normal(shape, dtype=np.float32).astype(case.dtype)
            for name, shape in case.shapes().items()
        }
        return drawn | {name: self.put(x) for name, x in case.constants().items()}

    def stopwatch(self) -> timing.Stopwatch:
        return timing.by_events(self)

    def event(self) -> Any:
        return self.cupy.cuda.Event()

    def elapsed(self, start: Any, end: Any) -> float:
        return float(self.cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def flush(self) -> None:
        if self._scratch is None:
            self._scratch = self.cupy.empty(FLUSH_BYTES // 4, np.int32)
        self._scratch.fill(0)

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def state(self) -> State:
        return self.nvml.state()._replace(free_bytes=int(self.cupy.cuda.runtime.memGetInfo()[0]))

    def arch(self) -> str:
        return self._arch


Place = Any  # Cpu, TorchGpu or CupyGpu, which have the same interface


def find(wanted: str = "auto") -> tuple[Place, list[str]]:
    """Find the place to measure; also return sentences about its state and about unusable devices."""
    if wanted == "cpu":
        return Cpu(), []
    for library, make in (("torch", _torch_gpu), ("cupy", _cupy_gpu)):
        try:
            place = make()
        except Exception as error:  # why any: a broken driver or package raises all kinds
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return Cpu(), [f"{library} failed at the GPU ({reason}): measuring NumPy arrays on the CPU."]
        if place is not None:
            return place, _neighbours(place)
    return Cpu(), ["No GPU that torch or CuPy can use: measuring NumPy arrays on the CPU."]


def _torch_gpu() -> Place | None:
    try:
        import torch
    except ImportError:
        return None
    return TorchGpu(torch) if torch.cuda.is_available() else None


def _cupy_gpu() -> Place | None:
    try:
        import cupy
    except ImportError:
        return None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return None
    return CupyGpu(cupy) if count else None


def _neighbours(place: Place) -> list[str]:
    """Sentences about other work on the GPU, from its utilisation before the start."""
    state = place.state()
    if state.busy_percent:
        return [f"The GPU is {state.busy_percent} % busy with others' work: expect noise."]
    return []
