"""A problem made ready to run: who computes it, planned and loaded, and refused if it has to be."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .call.arrays import ArrayView
from .call.problem import Problem
from .call.progress import Tell
from .device.abi import SEED
from .device.choice import gpu_driver
from .device.run import Driver, Kernel, Program
from .errors import InvalidArgumentsError, UnsupportedError
from .plan.choose import Plan, choose

if TYPE_CHECKING:
    from .cpu.core.family import Core

__all__ = ["OnCore", "OnCpu", "OnDevice", "chosen_by_environment", "driver_of", "load", "ready",
           "refuse_tensor_cores"]  # fmt: skip

Views = Mapping[str, ArrayView]


def driver_of(device: tuple[str, int], library: str) -> Driver | None:
    """Who runs kernels on this device for arrays of this library.

    CuPy or the CUDA driver's own library, the simulator, or nobody (the CPU path).
    """
    if device[0] == "cuda":
        return gpu_driver(library)
    chosen = os.environ.get("CUPY_FLASH_DRIVER", "")
    if chosen in ("", "cuda"):
        return None
    if chosen.partition(":")[0] != "simulator":
        raise InvalidArgumentsError(
            f"the environment variable CUPY_FLASH_DRIVER is {chosen!r}.",
            hint="unset it, or simulator:sm_90a to simulate that architecture, or cuda to do without CuPy",
        )
    from .device import simulator

    return simulator


def chosen_by_environment(driver: Driver | None, device: tuple[str, int]) -> Hashable:
    """What a plan takes from the environment: a simulated architecture, or what computes on the CPU."""
    if driver is None:
        return os.environ.get("CUPY_FLASH_CPU", "")
    if device[0] == "cuda":
        return None
    return driver.arch(device[1]), driver.multiprocessors(device[1])


class OnCpu(NamedTuple):
    """A problem ready for the NumPy path."""

    problem: Problem
    path: Callable[[Problem, dict[str, np.ndarray[Any, Any]]], None]

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes, by name."""
        return ("NumPy",)

    @property
    def integer_bits(self) -> int:
        """Of integers in score functions."""
        return 64

    def run(
        self, inputs_and_outputs: dict[str, np.ndarray[Any, Any]], seed: int, tell: Tell | None = None
    ) -> None:
        """Compute, and tell how much is done; arrays by the names of abi.cuh."""
        problem = self.problem._replace(seed=seed) if seed else self.problem
        if tell is None:
            self.path(problem, inputs_and_outputs)
            return
        from .cpu.progress import Count, counting, pairs

        with counting(Count(pairs(problem, inputs_and_outputs), tell)):
            self.path(problem, inputs_and_outputs)


class OnCore(NamedTuple):
    """A problem ready for the compiled core of the CPU."""

    core: Core

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes, by name."""
        return tuple(f"core {name}" for name in self.core.names)

    @property
    def integer_bits(self) -> int:
        """Of integers in score functions."""
        return 32

    def run(
        self,
        numbers: dict[str, int],
        keep: object,
        library: str,
        length: int | None = None,
        tell: Tell | None = None,
    ) -> None:
        """Compute.

        Parameters
        ----------
        numbers : dict of str to int
            Addresses of inputs and outputs, by the names of abi.cuh, and `abi.SEED`.
        keep : object
            What keeps the arrays alive.
        library : str
            Whose arrays they are.
        length : int, optional
            Of all sequences in a cache, where no array gives them.
        tell : callable, optional
            Gets the share that is done.
        """
        if length is None:
            self.core.run(numbers, numbers[SEED], keep, tell, library)
        else:
            of_all = np.array([length], np.int32)
            addresses = {**numbers, "cache_seqlens": of_all.ctypes.data}
            self.core.run(addresses, numbers[SEED], (keep, of_all), tell, library)


class OnDevice(NamedTuple):
    """A problem ready for kernels: planned, located and loaded."""

    plan: Plan
    program: Program
    driver: Driver
    device: int

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes, by name."""
        return tuple(launch.variant.name for launch in self.plan.launches)

    def run(
        self,
        numbers: dict[str, int],
        library: str,
        stream: int | None = None,
        workspace: int | None = None,
    ) -> None:
        """Launch.

        Parameters
        ----------
        numbers : dict of str to int
            Addresses of inputs and outputs, by the names of abi.cuh, `abi.SEED` and `abi.LENGTH`; those of
            the workspace are added.
        library : str
            Whose arrays they are.
        stream : int, optional
            CUDA stream handle; default is the current one of the library.
        workspace : int, optional
            Address of the caller's; default is one from the pool of the library.
        """
        if stream is None:
            stream = self.driver.current_stream(self.device, library)
        if workspace is not None or not self.plan.workspace_bytes:
            self.program.run(numbers, workspace or 0, stream)
            return
        own = self.driver.empty(self.plan.workspace_bytes, self.device, library, stream)
        self.program.run(numbers, own.pointer, stream)


def ready(problem: Problem, views: Views, driver: Driver | None) -> OnCpu | OnCore | OnDevice:
    """Choose, locate and load: everything that can refuse a described problem.

    Parameters
    ----------
    problem : Problem
    views : mapping of str to ArrayView
        Inputs and outputs by the names of abi.cuh; their addresses do not matter.
    driver : Driver or None
        Who runs kernels there.
    """
    problem = problem._replace(seed=0)
    if driver is None:
        refuse_tensor_cores(problem)
        # why here: the CPU path is a fifth of what the package takes to import
        from . import cpu
        from .cpu.choose import choose as choose_on_cpu

        chosen = choose_on_cpu(problem)
        if chosen.library is not None:
            from .cpu.core.family import Core

            return OnCore(Core.of(problem, views, chosen.library, functions=chosen.functions))
        return OnCpu(problem, cpu.each_sequence if problem.packed else getattr(cpu, problem.direction))
    device = views["q"].device[1]
    plan = choose(problem, driver.arch(device), driver.multiprocessors(device))
    from .log import LOG

    LOG.debug("planned %s: %s", problem.summary(), ", ".join(x.variant.name for x in plan.launches))
    return OnDevice(plan, Program(plan, problem, load(plan, driver, device), views), driver, device)


def refuse_tensor_cores(problem: Problem) -> None:
    """Refuse, on the CPU, precisions that it does not have."""
    if problem.precision in ("tf32", "tf32x3"):
        raise UnsupportedError(
            f"precision={problem.precision!r} needs tensor cores; NumPy computes in IEEE float32.",
            hint='precision=None or precision="ieee"',
        )


@lru_cache(maxsize=1024)
def load(plan: Plan, driver: Driver, device: int) -> tuple[Kernel, ...]:
    """The kernels of a plan, loaded once per device."""
    return tuple(driver.load(launch.variant, device) for launch in plan.launches)
