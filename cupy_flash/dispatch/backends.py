"""Backends: choose what computes a problem, plan it, load its kernels, and run it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..call.arrays import ArrayView, numpy_view
from ..call.problem import Problem
from ..call.progress import reporting
from ..call.values import RunOptions
from ..device.abi import LENGTH, SEED
from ..device.choice import gpu_driver, host_driver
from ..device.run import Driver, Kernel, Program
from ..errors import UnsupportedError
from ..plan.choose import Plan, choose

if TYPE_CHECKING:
    from ..cpu.core.family import Core
    from ..cpu.core.repeat import Way

__all__ = [
    "VARIABLES",
    "Backend",
    "BackendView",
    "chosen_by_environment",
    "driver_of",
    "load",
    "prepare_backend",
    "raw_variable",
    "refuse_tensor_cores",
]

Views = Mapping[str, ArrayView]


def driver_of(device: tuple[str, int], library: str) -> Driver | None:
    """The driver that launches kernels on this device for arrays of this library.

    CuPy or the CUDA driver library on a GPU; on a CPU the simulator, or None for the CPU path.
    """
    if device[0] == "cuda":
        return gpu_driver(library)
    if not raw_variable(_DRIVER):  # first, because it is the common case of a short call
        return None
    return host_driver()


def chosen_by_environment(driver: Driver | None, device: tuple[str, int]) -> Hashable:
    """Environment settings that change a plan: the simulated architecture, or what computes on the CPU."""
    if driver is None:
        chosen: Hashable = raw_variable(_CPU)
        return chosen
    if device[0] == "cuda":
        return None
    return driver.arch(device[1]), driver.multiprocessors(device[1])


def environment() -> tuple[object, object]:
    """The raw values of the environment variables that choose the driver and the CPU path."""
    return raw_variable(_DRIVER), raw_variable(_CPU)


# why not os.environ.get: it encodes the name and catches errors, which takes a tenth of a short call.
raw_variable = vars(os.environ)["_data"].get
_DRIVER, _CPU = VARIABLES = tuple(map(os.environ.encodekey, ("CUPY_FLASH_DRIVER", "CUPY_FLASH_CPU")))


class BackendView(NamedTuple):
    """The view of one array of a call that a backend computes on."""

    name: str  # name of the view, as in abi.cuh
    array: str  # name of the call's array that it is a view of
    # As in `ArrayView`.
    shape: tuple[int, ...]
    byte_strides: tuple[int, ...]
    dtype: str
    # Whether shape, strides and dtype are known to be those of the array: a NumPy array is then used itself.
    unchanged: bool

    def numpy(self, x: ArrayView) -> np.ndarray[Any, Any]:
        """The NumPy array with this view's shape and strides, for the array `x` of a call."""
        if self.unchanged and type(x.owner) is np.ndarray:
            return x.owner
        return numpy_view(x, self.shape, self.byte_strides, self.dtype)


class Backend(ABC):
    """A planned and loaded problem, ready to run."""

    # Width of integers in score functions, if each call checks their arguments for overflow; else 0.
    integer_bits: ClassVar[int] = 0
    is_core: ClassVar[bool] = False
    # Pairs (name in abi.cuh, name of the call's array) of the addresses that `run_at` needs; empty if the
    # backend reads the arrays themselves.
    addressed: tuple[tuple[str, str], ...] = ()

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes needed of a caller's workspace; None if it takes none."""
        return None

    @property
    @abstractmethod
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that run."""

    @abstractmethod
    def run(
        self,
        arrays: Views,
        run_options: RunOptions,
        *,
        length: int | None = None,
        workspace: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Compute the results; on a GPU, launch the kernels.

        Parameters
        ----------
        arrays : mapping of str to ArrayView
            The call's inputs and outputs.
        run_options : RunOptions
        length : int, optional
            Keys in use of every sequence in a cache, if it is one integer for all.
        workspace : int, optional
            Address of the caller's workspace; default: allocated from the pool of the library.
        stream : int, optional
            CUDA stream handle; default: the library's current stream.
        """

    def run_at(self, numbers: dict[str, int], keep: object, library: str, stream: int | None = None) -> None:
        """Run a call that is known only by the addresses of `addressed` and `abi.SEED`.

        `keep` keeps its arrays, of this library, alive; `stream` is as in `run`.
        """
        raise NotImplementedError

    def repeating(self, owner: str, way: Way) -> Callable[..., Any] | None:  # noqa: ARG002
        """As `core.repeat.repeating`; None if this backend has no such function."""
        return None


@dataclass(frozen=True)
class NumpyBackend(Backend):
    """The NumPy path."""

    problem: Problem
    path: Callable[[Problem, dict[str, np.ndarray[Any, Any]]], None]
    seen: tuple[BackendView, ...]

    integer_bits = 64

    @property
    def kernels(self) -> tuple[str, ...]:
        """As in `Backend`."""
        return ("NumPy",)

    def run(
        self, arrays: Views, run_options: RunOptions, *, length: int | None = None, **_of_gpus: int | None
    ) -> None:
        """As in `Backend`."""
        from ..cpu.progress import Count, counting, pairs  # why here: see `prepare_backend`

        problem = self.problem._replace(seed=run_options.seed) if run_options.seed else self.problem
        seen = {x.name: x.numpy(arrays[x.array]) for x in self.seen}
        if length is not None:
            seen["cache_seqlens"] = np.full(problem.batch, length, np.int32)
        with (
            reporting(run_options.progress) as tell,
            counting(None if tell is None else Count(pairs(problem, seen), tell)),
        ):
            self.path(problem, seen)


@dataclass(frozen=True)
class CoreBackend(Backend):
    """The compiled CPU core."""

    core: Core
    addressed: tuple[tuple[str, str], ...] = ()

    integer_bits = 32
    is_core = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """As in `Backend`."""
        return tuple(f"core {name}" for name in self.core.names)

    def run(
        self, arrays: Views, run_options: RunOptions, *, length: int | None = None, **_of_gpus: int | None
    ) -> None:
        """As in `Backend`."""
        numbers = {name: arrays[array].pointer for name, array in self.addressed}
        keep: object = arrays
        if length is not None:
            of_all = np.array([length], np.int32)
            numbers["cache_seqlens"], keep = of_all.ctypes.data, (arrays, of_all)
        library = arrays["q"].library
        if run_options.progress is None:  # why: a context manager costs 1 % of a short call
            self.core.run(numbers, run_options.seed, keep, None, library)
            return
        with reporting(run_options.progress) as tell:
            self.core.run(numbers, run_options.seed, keep, tell, library)

    def run_at(
        self,
        numbers: dict[str, int],
        keep: object,
        library: str,
        stream: int | None = None,  # noqa: ARG002
    ) -> None:
        """As in `Backend`."""
        self.core.run(numbers, numbers[SEED], keep, None, library)

    def repeating(self, owner: str, way: Way) -> Callable[..., Any] | None:
        """As in `Backend`."""
        from ..cpu.core.repeat import repeating

        return repeating(self.core, owner, way)


@dataclass(frozen=True)
class KernelBackend(Backend):
    """CUDA kernels: planned, located and loaded."""

    plan: Plan
    program: Program
    driver: Driver
    device: int
    addressed: tuple[tuple[str, str], ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """As in `Backend`."""
        return tuple(launch.variant.name for launch in self.plan.launches)

    @property
    def workspace_bytes(self) -> int:
        """As in `Backend`."""
        return self.plan.workspace_bytes

    def run(
        self,
        arrays: Views,
        run_options: RunOptions,
        *,
        length: int | None = None,
        workspace: int | None = None,
        stream: int | None = None,
    ) -> None:
        """As in `Backend`; a launch does not report progress."""
        numbers = {name: arrays[array].pointer for name, array in self.addressed}
        numbers[SEED] = run_options.seed
        if length is not None:
            # why no array: a captured CUDA graph would still read its memory after the pool has reused it.
            numbers[LENGTH] = max(length, 0)
        self._launch(numbers, arrays["q"].library, workspace, stream)

    def run_at(
        self,
        numbers: dict[str, int],
        keep: object,  # noqa: ARG002
        library: str,
        stream: int | None = None,
    ) -> None:
        """As in `Backend`; `keep` is not needed, because libraries reuse freed memory in stream order."""
        self._launch(numbers, library, None, stream)

    def _launch(
        self, numbers: dict[str, int], library: str, workspace: int | None, stream: int | None
    ) -> None:
        if stream is None:
            stream = self.driver.current_stream(self.device, library)
        if workspace is not None or not self.plan.workspace_bytes:
            self.program.run(numbers, workspace or 0, stream)
            return
        own = self.driver.empty(self.plan.workspace_bytes, self.device, library, stream)
        self.program.run(numbers, own.pointer, stream)


def prepare_backend(
    problem: Problem, views: Views, driver: Driver | None, seen: tuple[BackendView, ...] | None = None
) -> Backend:
    """Choose, locate and load the kernels of a problem; every refusal of a backend happens here.

    Views are inputs and outputs by the names of abi.cuh; addresses are not used. `seen` says how they derive
    from the call's arrays; by default both are the same.
    """
    problem = problem._replace(seed=0)
    if seen is None:
        seen = tuple(BackendView(n, n, x.shape, x.byte_strides(), x.dtype, False) for n, x in views.items())
    addressed = tuple((x.name, x.array) for x in seen)
    if driver is None:
        refuse_tensor_cores(problem)
        # why here: the CPU path takes a fifth of the package's import time.
        from .. import cpu
        from ..cpu.choose import choose as choose_on_cpu

        chosen = choose_on_cpu(problem)
        if chosen.library is not None:
            from ..cpu.core.family import Core

            return CoreBackend(Core.of(problem, views, chosen.library, functions=chosen.functions), addressed)
        path = cpu.each_sequence if problem.packed else getattr(cpu, problem.direction)
        return NumpyBackend(problem, path, seen)
    device = views["q"].device[1]
    plan = choose(problem, driver.arch(device), driver.multiprocessors(device))
    from ..log import LOG

    LOG.debug("planned %s: %s", problem.summary(), ", ".join(x.variant.name for x in plan.launches))
    program = Program(plan, problem, load(plan, driver, device), views)
    return KernelBackend(plan, program, driver, device, addressed)


def refuse_tensor_cores(problem: Problem) -> None:
    """Refuse precisions that the CPU path does not support."""
    if problem.precision in ("tf32", "tf32x3"):
        raise UnsupportedError(
            f"precision={problem.precision!r} needs tensor cores; NumPy computes in IEEE float32.",
            hint='precision=None or precision="ieee"',
        )


@lru_cache(maxsize=1024)
def load(plan: Plan, driver: Driver, device: int) -> tuple[Kernel, ...]:
    """The kernels of a plan, loaded once per device."""
    return tuple(driver.load(launch.variant, device) for launch in plan.launches)
