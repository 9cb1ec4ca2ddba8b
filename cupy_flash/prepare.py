"""A call prepared: described, planned and loaded once, for all calls whose arrays are of the same kinds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .call import arrays
from .call.arrays import ArrayView
from .call.cache_problem import describe_cache
from .call.operands import RESULTS_OF_FLOAT8, lift, lower_shape, table_of
from .call.options import Options
from .call.problem import Problem, describe
from .device.abi import LENGTH, SEED
from .device.run import Driver, Kernel, Program
from .errors import InvalidArguments, Unsupported
from .plan.choose import Plan, choose

if TYPE_CHECKING:
    from .cpu.core.family import Core

__all__ = ["Prepared", "chosen_by_environment", "driver_of", "forget", "lifted", "prepared", "ready"]

Views = Mapping[str, ArrayView]


def driver_of(device: tuple[str, int]) -> Driver | None:
    """Who runs kernels on this device: the CUDA driver, the simulator, or nobody (the CPU path)."""
    if device[0] == "cuda":
        from .device import driver

        return driver
    chosen = os.environ.get("CUPY_FLASH_DRIVER", "")
    if not chosen:
        return None
    if chosen.partition(":")[0] != "simulator":
        raise InvalidArguments(
            f"the environment variable CUPY_FLASH_DRIVER is {chosen!r}.",
            hint="unset it, or simulator:sm_90a to simulate that architecture",
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


# ---------------------------------------------------------------------------------------------- ready to run


class OnCpu(NamedTuple):
    """A problem ready for the NumPy path."""

    problem: Problem
    path: Callable[[Problem, dict[str, np.ndarray[Any, Any]]], None]

    def run(self, inputs_and_outputs: dict[str, np.ndarray[Any, Any]], seed: int) -> None:
        """Compute; arrays by the names of abi.cuh."""
        self.path(self.problem._replace(seed=seed) if seed else self.problem, inputs_and_outputs)


class OnCore(NamedTuple):
    """A problem ready for the compiled core of the CPU."""

    core: Core

    def run(self, numbers: dict[str, int], keep: object, length: int | None = None) -> None:
        """Compute.

        Parameters
        ----------
        numbers : dict of str to int
            Addresses of inputs and outputs, by the names of abi.cuh, and `abi.SEED`.
        keep : object
            What keeps the arrays alive.
        length : int, optional
            Of all sequences in a cache, where no array gives them.
        """
        if length is None:
            self.core.run(numbers, numbers[SEED], keep)
        else:
            of_all = np.array([length], np.int32)
            addresses = {**numbers, "cache_seqlens": of_all.ctypes.data}
            self.core.run(addresses, numbers[SEED], (keep, of_all))


class OnDevice(NamedTuple):
    """A problem ready for kernels: planned, located and loaded."""

    plan: Plan
    program: Program
    driver: Driver
    device: int

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
        if problem.precision in ("tf32", "tf32x3"):
            raise Unsupported(
                f"precision={problem.precision!r} needs tensor cores; NumPy computes in IEEE float32.",
                hint='precision=None or precision="ieee"',
            )
        # why here: its thread pool would be a fifth of the time that the package takes to import
        from . import cpu
        from .cpu.choose import choose as choose_on_cpu

        core = choose_on_cpu(problem).library
        if core is not None:
            from .cpu.core.family import Core

            return OnCore(Core.of(problem, views, core))
        return OnCpu(problem, cpu.each_sequence if problem.packed else getattr(cpu, problem.direction))
    device = views["q"].device[1]
    plan = choose(problem, driver.arch(device), driver.multiprocessors(device))
    from .log import LOG

    LOG.debug("planned %s: %s", problem.summary(), ", ".join(x.variant.name for x in plan.launches))
    return OnDevice(plan, Program(plan, problem, _load(plan, driver, device), views), driver, device)


@lru_cache(maxsize=1024)
def _load(plan: Plan, driver: Driver, device: int) -> tuple[Kernel, ...]:
    """The kernels of a plan, loaded once per device."""
    return tuple(driver.load(launch.variant, device) for launch in plan.launches)


# ---------------------------------------------------------------------------------------------- calls


class _Seen(NamedTuple):
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
        return arrays.numpy_view(x, self.shape, self.byte_strides, self.dtype)


class Prepared:
    """All that the kinds of a call's arrays decide; what is left to a call is where they are.

    It keeps no array alive, never changes, and may be used in several threads.

    Attributes
    ----------
    problem : Problem
        But for the seed.
    """

    __slots__ = ("_addressed", "_ready", "_results", "_seen", "_spans", "problem")

    def __init__(
        self, problem: Problem, views: Views, raw: Views, layout: str, driver: Driver | None
    ) -> None:
        out = raw.get("out")
        made = _results(problem, views, raw, layout)
        if out is not None:
            _check_out(problem, raw, made.pop("o").shape)
        written = made if out is None else {"o": out, **made}
        outputs = {name: lifted(name, x, layout) for name, x in written.items()}
        if out is not None:
            problem = problem._replace(
                of_float8=problem.of_float8 and out.dtype,
                in_rows=problem.in_rows and outputs["o"].in_rows(),
                aligned=problem.aligned and outputs["o"].aligned(),
                boxes=problem.boxes and outputs["o"].boxable(),
            )
        self.problem = problem
        self._results = tuple((name, x.shape, x.dtype) for name, x in made.items())
        self._ready = ready(problem, {**views, **outputs}, driver)
        names = {name: name if name in raw else _SOURCES[name] for name in views}
        names |= {name: "out" if out is not None and name == "o" else name for name in outputs}
        every = {**raw, **made}
        self._seen = tuple(
            _Seen(name, names[name], x.shape, x.byte_strides(), x.dtype, x[1:4] == every[names[name]][1:4])
            for name, x in {**views, **outputs}.items()
        )
        self._addressed = tuple((seen.name, seen.array) for seen in self._seen)
        self._spans = None if out is None else tuple(
            (n, x.extent()[0] - x.pointer, x.extent()[1] - x.pointer) for n, x in raw.items()
        )  # fmt: skip

    def run(
        self, raw: Views, seed: int = 0, workspace: ArrayView | None = None, length: int | None = None
    ) -> dict[str, ArrayView]:
        """Allocate the results and compute them.

        Parameters
        ----------
        raw : mapping of str to ArrayView
            The caller's arrays, and ``out`` if it was given.
        seed : int
            Of the dropout.
        workspace : ArrayView, optional
            The caller's.
        length : int, optional
            Keys in use of every sequence in a cache, if no array says it.

        Returns
        -------
        dict of str to ArrayView
            What was allocated, by name.
        """
        q, ready = raw["q"], self._ready
        if self._spans is not None:
            _check_overlap(raw, self._spans)
        given = None
        if workspace is not None and isinstance(ready, OnDevice):
            given = _address_of(workspace, q, ready.plan.workspace_bytes)
        make = arrays.zeros if self.problem.packed else arrays.empty  # rows of no sequence are 0
        results = {name: make(q, shape, dtype) for name, shape, dtype in self._results}
        every = {**raw, **results}
        if not isinstance(ready, OnCpu):
            numbers = {name: every[array].pointer for name, array in self._addressed}
            numbers[SEED] = seed
            if isinstance(ready, OnCore):
                ready.run(numbers, every, length)
            else:
                if length is not None:
                    # why no array: its memory would go to somebody else while a recorded graph reads it.
                    numbers[LENGTH] = max(length, 0)
                ready.run(numbers, q.library, workspace=given)
        else:
            seen = {seen.name: seen.numpy(every[seen.array]) for seen in self._seen}
            if length is not None:
                seen["cache_seqlens"] = np.full(self.problem.batch, length, np.int32)
            ready.run(seen, seed)
        return results


# Views that a call's arrays have under another name.
_SOURCES = {"block_table": "cache_batch_idx"}


def _results(problem: Problem, views: Views, raw: Views, layout: str) -> dict[str, ArrayView]:
    """What a call allocates, as the caller will see it; at no address yet."""
    p, q = problem, raw["q"]
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    if p.direction == "backward":
        kinds |= {"d" + name: (raw[name].shape, p.dtype) for name in "qkv"}
        if p.want_dbias:
            kinds["dbias"] = raw["bias"].shape, raw["bias"].dtype
        if p.sinks:
            kinds["dsinks"] = raw["sinks"].shape, p.accumulator
    else:
        rank, rows = len(q.shape), views["q"].shape[:3]
        kinds["o"] = lower_shape((*rows, p.head_dim_v), layout, rank), p.result_dtype
        if p.want_lse:
            kinds["lse"] = rows[4 - rank :], p.accumulator
    return {
        name: ArrayView(
            0, shape, arrays.strides_of_new(shape, dtype), dtype, q.device, q.library, False, None
        )
        for name, (shape, dtype) in kinds.items()
    }


def lifted(name: str, x: ArrayView, layout: str) -> ArrayView:
    """A result as kernels see it."""
    if name in ("o", "dq", "dk", "dv"):
        return lift(x, layout, len(x.shape))
    return x if name == "dsinks" else x.lifted(4 if name == "dbias" else 3)


def _check_out(problem: Problem, raw: Views, shape: tuple[int, ...]) -> None:
    """Refuse an out that cannot hold the result."""
    q, out = raw["q"], raw["out"]
    table = table_of(raw)
    hint = f"out=None, or a new array of shape {shape}"
    if out.shape != shape:
        raise InvalidArguments(f"out has shape {out.shape}, the result {shape}.", table, hint=hint)
    dtypes = RESULTS_OF_FLOAT8 if problem.of_float8 else (q.dtype,)
    if out.dtype not in dtypes:
        result = " or ".join(dtypes)
        raise InvalidArguments(f"out has dtype {out.dtype}, the result {result}.", table, hint=hint)
    if (out.library, out.device) != (q.library, q.device):
        raise InvalidArguments(
            f"out is a {out.library} array on {arrays.device_name(out.device)}, "
            f"q a {q.library} array on {arrays.device_name(q.device)}.",
            table,
            hint=hint,
        )
    if out.readonly:
        raise InvalidArguments("out is read-only.", table, hint=hint)
    if arrays.overlaps_itself(out):
        raise InvalidArguments(f"out overlaps itself: strides {out.strides}.", table, hint=hint)


def _check_overlap(raw: Views, spans: tuple[tuple[str, int, int], ...]) -> None:
    """Refuse an out that shares memory with an input.

    spans: bytes from the address of each array to its lowest, and to the end of its highest element.
    """
    out = raw["out"]
    low, high = next((out.pointer + a, out.pointer + b) for name, a, b in spans if name == "out")
    for name, a, b in spans:
        x = raw[name]
        if x.pointer + a < high and low < x.pointer + b and name != "out" and arrays.overlap(out, x):
            hint = f"out=None, or a new array of shape {out.shape}"
            raise InvalidArguments(f"out overlaps {name} in memory.", table_of(raw), hint=hint)


def _address_of(workspace: ArrayView, q: ArrayView, nbytes: int) -> int:
    """Where the caller's workspace begins, on a boundary of 256 bytes."""
    low, high = workspace.extent()
    size = math.prod(workspace.shape) * workspace.item_bytes
    aligned = -(-low // 256) * 256
    table = [("workspace", workspace.describe())]
    if workspace.device != q.device or workspace.readonly:
        what = "read-only" if workspace.readonly else f"on {arrays.device_name(workspace.device)}"
        raise InvalidArguments(f"workspace is {what}.", table, hint="an array that can be written, beside q")
    if high - low != size:
        raise InvalidArguments("workspace is not contiguous.", table, hint="a new array of bytes")
    if high - aligned < nbytes:
        raise InvalidArguments(
            f"workspace has {size} bytes, the call needs {nbytes} from a boundary of 256 bytes on.",
            table,
            hint=f"{nbytes + 255} bytes, or workspace=None",
        )
    return aligned


# ---------------------------------------------------------------------------------------------- memory


def prepared(direction: str, raw: Views, options: Options, *flags: Hashable) -> Prepared:
    """What is remembered of calls like this one; where there is none, what is found out now.

    Parameters
    ----------
    direction : {"forward", "backward", "decode"}
    raw : mapping of str to ArrayView
        The caller's arrays; ``out`` if it was given.
    options : Options
        Without seed.
    *flags
        What `describe`, or for "decode" `describe_cache`, takes besides.

    Raises
    ------
    InvalidArguments, Unsupported, CubinNotFound
    """
    device = raw["q"].device
    driver = driver_of(device)
    kinds = [(x[1:_OWNER], x.pointer % 16) for x in raw.values()]
    # why types: 1 is True, and some options take only one of them.
    types = map(type, (*options, *flags))
    call = (direction, driver, chosen_by_environment(driver, device), flags, options, *types, *raw, *kinds)
    try:
        known = _KNOWN.get(call)
    except TypeError:  # an option that is no key of anything
        return _prepare(direction, raw, options, flags, driver)
    if known is None:
        known = _prepare(direction, raw, options, flags, driver)
        if all(map(_constant, (*options, *flags))):
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[call] = known
    return known


# Of a view everything behind the pointer and before this says of what kind it is.
_OWNER = ArrayView._fields.index("owner")
# why: programs repeat their calls, and a look at one is twenty times as long as remembering it.
_KNOWN: dict[tuple[Any, ...], Prepared] = {}
_MOST_KNOWN = 1024


def forget() -> None:
    """Look anew at every call and plan and load anew, after a change of what they are made from."""
    _KNOWN.clear()
    choose.cache_clear()
    _load.cache_clear()


def _constant(option: Any) -> bool:
    """Whether an option means the same for ever. A tensor that stands for a number does not."""
    if isinstance(option, tuple):
        return all(map(_constant, option))
    return option is None or isinstance(option, (bool, int, float, str, np.generic))


def _prepare(
    direction: str, raw: Views, options: Options, flags: tuple[Any, ...], driver: Driver | None
) -> Prepared:
    inputs = {name: x for name, x in raw.items() if name != "out"}
    if direction == "decode":
        problem, views = describe_cache(inputs, options, *flags)
    else:
        problem, views, _ = describe(direction, inputs, options, *flags)
    return Prepared(problem, views, raw, options.layout, driver)
