"""A problem made ready to run: who computes it, planned and loaded, and refused if it has to be."""

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
from ..call.progress import telling
from ..call.values import Moment
from ..device.abi import LENGTH, SEED
from ..device.choice import gpu_driver, host_driver
from ..device.run import Driver, Kernel, Program
from ..errors import UnsupportedError
from ..plan.choose import Plan, choose

if TYPE_CHECKING:
    from ..cpu.core.family import Core

__all__ = ["Backend", "Seen", "chosen_by_environment", "driver_of", "load", "ready", "refuse_tensor_cores"]

Views = Mapping[str, ArrayView]


def driver_of(device: tuple[str, int], library: str) -> Driver | None:
    """Who runs kernels on this device for arrays of this library.

    CuPy or the CUDA driver's own library, the simulator, or nobody (the CPU path).
    """
    if device[0] == "cuda":
        return gpu_driver(library)
    if not _variable(_DRIVER):  # before all else, as a short call finds it so
        return None
    return host_driver()


def chosen_by_environment(driver: Driver | None, device: tuple[str, int]) -> Hashable:
    """What a plan takes from the environment: a simulated architecture, or what computes on the CPU."""
    if driver is None:
        chosen: Hashable = _variable(_CPU)
        return chosen
    if device[0] == "cuda":
        return None
    return driver.arch(device[1]), driver.multiprocessors(device[1])


def environment() -> tuple[object, object]:
    """The variables of the environment that decide who computes, as they are."""
    return _variable(_DRIVER), _variable(_CPU)


# why not os.environ.get: it encodes the name and catches errors, for a tenth of the time of a short call.
_variable = vars(os.environ)["_data"].get
_DRIVER, _CPU = map(os.environ.encodekey, ("CUPY_FLASH_DRIVER", "CUPY_FLASH_CPU"))


class Seen(NamedTuple):
    """How an array of a call is seen where it is computed on.

    Attributes
    ----------
    name : str
        As in abi.cuh.
    array : str
        Which of the call's arrays it is.
    shape, byte_strides, dtype
        As of `ArrayView`.
    as_it_is : bool
        Whether these are those of the array.
    """

    name: str
    array: str
    shape: tuple[int, ...]
    byte_strides: tuple[int, ...]
    dtype: str
    as_it_is: bool

    def numpy(self, x: ArrayView) -> np.ndarray[Any, Any]:
        """The array of one call, as NumPy's."""
        if self.as_it_is and type(x.owner) is np.ndarray:
            return x.owner
        return numpy_view(x, self.shape, self.byte_strides, self.dtype)


class Backend(ABC):
    """A problem ready to run, on any backend.

    Attributes
    ----------
    integer_bits : int
        Of integers in score functions, if their arguments are looked at in each call; else 0.
    addressed : tuple of (str, str)
        What it has to know the address of, by the names of abi.cuh, and which array of the call that is; none
        if it looks at the arrays themselves.
    """

    integer_bits: ClassVar[int] = 0
    addressed: tuple[tuple[str, str], ...] = ()

    @property
    def workspace_bytes(self) -> int | None:
        """What it asks of a caller's workspace; None if it takes none."""
        return None

    @property
    @abstractmethod
    def kernels(self) -> tuple[str, ...]:
        """What computes, by name."""

    @abstractmethod
    def run(
        self,
        arrays: Views,
        moment: Moment,
        *,
        length: int | None = None,
        workspace: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Compute; on a GPU launch.

        Parameters
        ----------
        arrays : mapping of str to ArrayView
            The call's inputs and outputs.
        moment : Moment
        length : int, optional
            Keys in use of every sequence in a cache, if no array says it.
        workspace : int, optional
            Address of the caller's; default is one from the pool of the library.
        stream : int, optional
            CUDA stream handle; default is the current one of the library.
        """

    def run_at(self, numbers: dict[str, int], keep: object, library: str, stream: int | None = None) -> None:
        """`run` a call of which nothing is known but addresses, of what is `addressed`, and `abi.SEED`.

        Parameters
        ----------
        numbers : dict of str to int
        keep : object
            What keeps the arrays alive.
        library : str
            Whose arrays they are.
        stream : int, optional
            As of `run`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OnCpu(Backend):
    """A problem ready for the NumPy path."""

    problem: Problem
    path: Callable[[Problem, dict[str, np.ndarray[Any, Any]]], None]
    seen: tuple[Seen, ...]

    integer_bits = 64

    @property
    def kernels(self) -> tuple[str, ...]:
        """As of `Backend`."""
        return ("NumPy",)

    def run(
        self, arrays: Views, moment: Moment, *, length: int | None = None, **_of_gpus: int | None
    ) -> None:
        """As of `Backend`."""
        problem = self.problem._replace(seed=moment.seed) if moment.seed else self.problem
        seen = {x.name: x.numpy(arrays[x.array]) for x in self.seen}
        if length is not None:
            seen["cache_seqlens"] = np.full(problem.batch, length, np.int32)
        with telling(moment.progress) as tell:
            if tell is None:
                self.path(problem, seen)
                return
            from ..cpu.progress import Count, counting, pairs

            with counting(Count(pairs(problem, seen), tell)):
                self.path(problem, seen)


@dataclass(frozen=True)
class OnCore(Backend):
    """A problem ready for the compiled core of the CPU."""

    core: Core
    addressed: tuple[tuple[str, str], ...] = ()

    integer_bits = 32

    @property
    def kernels(self) -> tuple[str, ...]:
        """As of `Backend`."""
        return tuple(f"core {name}" for name in self.core.names)

    def run(
        self, arrays: Views, moment: Moment, *, length: int | None = None, **_of_gpus: int | None
    ) -> None:
        """As of `Backend`."""
        numbers = {name: arrays[array].pointer for name, array in self.addressed}
        keep: object = arrays
        if length is not None:
            of_all = np.array([length], np.int32)
            numbers["cache_seqlens"], keep = of_all.ctypes.data, (arrays, of_all)
        library = arrays["q"].library
        if moment.progress is None:  # a context manager costs a hundredth of a short call
            self.core.run(numbers, moment.seed, keep, None, library)
            return
        with telling(moment.progress) as tell:
            self.core.run(numbers, moment.seed, keep, tell, library)

    def run_at(
        self,
        numbers: dict[str, int],
        keep: object,
        library: str,
        stream: int | None = None,  # noqa: ARG002
    ) -> None:
        """As of `Backend`."""
        self.core.run(numbers, numbers[SEED], keep, None, library)


@dataclass(frozen=True)
class OnDevice(Backend):
    """A problem ready for kernels: planned, located and loaded."""

    plan: Plan
    program: Program
    driver: Driver
    device: int
    addressed: tuple[tuple[str, str], ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """As of `Backend`."""
        return tuple(launch.variant.name for launch in self.plan.launches)

    @property
    def workspace_bytes(self) -> int:
        """As of `Backend`."""
        return self.plan.workspace_bytes

    def run(
        self,
        arrays: Views,
        moment: Moment,
        *,
        length: int | None = None,
        workspace: int | None = None,
        stream: int | None = None,
    ) -> None:
        """As of `Backend`; a launch tells nobody of its progress."""
        numbers = {name: arrays[array].pointer for name, array in self.addressed}
        numbers[SEED] = moment.seed
        if length is not None:
            # why no array: its memory would go to somebody else while a recorded graph reads it.
            numbers[LENGTH] = max(length, 0)
        self._launch(numbers, arrays["q"].library, workspace, stream)

    def run_at(
        self,
        numbers: dict[str, int],
        keep: object,  # noqa: ARG002
        library: str,
        stream: int | None = None,
    ) -> None:
        """As of `Backend`; memory that goes back to a library is used in the order of the stream."""
        self._launch(numbers, library, stream=stream)

    def _launch(
        self, numbers: dict[str, int], library: str, workspace: int | None = None, stream: int | None = None
    ) -> None:
        if stream is None:
            stream = self.driver.current_stream(self.device, library)
        if workspace is not None or not self.plan.workspace_bytes:
            self.program.run(numbers, workspace or 0, stream)
            return
        own = self.driver.empty(self.plan.workspace_bytes, self.device, library, stream)
        self.program.run(numbers, own.pointer, stream)


def ready(
    problem: Problem, views: Views, driver: Driver | None, seen: tuple[Seen, ...] | None = None
) -> Backend:
    """Choose, locate and load: everything that can refuse a described problem.

    Parameters
    ----------
    problem : Problem
    views : mapping of str to ArrayView
        Inputs and outputs by the names of abi.cuh; their addresses do not matter.
    driver : Driver or None
        Who runs kernels there.
    seen : tuple of Seen, optional
        How a call's own arrays are these views; default: they are.
    """
    problem = problem._replace(seed=0)
    if seen is None:
        seen = tuple(Seen(n, n, x.shape, x.byte_strides(), x.dtype, True) for n, x in views.items())
    addressed = tuple((x.name, x.array) for x in seen)
    if driver is None:
        refuse_tensor_cores(problem)
        # why here: the CPU path is a fifth of what the package takes to import
        from .. import cpu
        from ..cpu.choose import choose as choose_on_cpu

        chosen = choose_on_cpu(problem)
        if chosen.library is not None:
            from ..cpu.core.family import Core

            return OnCore(Core.of(problem, views, chosen.library, functions=chosen.functions), addressed)
        path = cpu.each_sequence if problem.packed else getattr(cpu, problem.direction)
        return OnCpu(problem, path, seen)
    device = views["q"].device[1]
    plan = choose(problem, driver.arch(device), driver.multiprocessors(device))
    from ..log import LOG

    LOG.debug("planned %s: %s", problem.summary(), ", ".join(x.variant.name for x in plan.launches))
    program = Program(plan, problem, load(plan, driver, device), views)
    return OnDevice(plan, program, driver, device, addressed)


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
