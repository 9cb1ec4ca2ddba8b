"""A call prepared: described, planned and loaded once, for all calls whose arrays are of the same kinds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from .call import outputs
from .call.arrays import ArrayView, numpy_view
from .call.blocks import check_blocks
from .call.cache_kinds import lies_in
from .call.cache_problem import describe_cache
from .call.functions import check_integers, learned_of
from .call.given import Options
from .call.operands import lower_shape
from .call.options import DIFFERENTIABLE
from .call.outputs import check_out, check_overlap, workspace_address
from .call.problem import Problem, describe
from .call.progress import Tell, telling
from .call.spans import check_spans
from .call.tangents import tangent_operand
from .call.values import OF_NO_CALL, Moment
from .device.abi import LENGTH, SEED
from .device.run import Driver
from .plan.choose import choose
from .program.function import Program
from .ready import OnCore, OnCpu, OnDevice, chosen_by_environment, driver_of, load, ready

__all__ = ["Prepared", "computed_by", "forget", "kernels", "lifted", "prepared"]

Views = Mapping[str, ArrayView]


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
        return numpy_view(x, self.shape, self.byte_strides, self.dtype)


class Prepared:
    """All that the kinds of a call's arrays decide; what is left to a call is where they are.

    It keeps no array alive, never changes, and may be used in several threads.

    Attributes
    ----------
    problem : Problem
        But for the seed.
    """

    __slots__ = ("_addressed", "_extents", "_make", "_ready", "_results", "_seen", "problem")

    def __init__(
        self, problem: Problem, views: Views, raw: Views, layout: str, driver: Driver | None
    ) -> None:
        out = raw.get("out")
        made = _results(problem, views, raw, layout)
        if out is not None:
            check_out(problem, raw, made.pop("o").shape)
        written = made if out is None else {"o": out, **made}
        seen = {name: lifted(name, x, layout) for name, x in written.items()}
        if out is not None:
            problem = problem._replace(
                of_float8=problem.of_float8 and out.dtype,
                in_rows=problem.in_rows and seen["o"].in_rows(),
                aligned=problem.aligned and seen["o"].aligned(),
                boxes=problem.boxes and seen["o"].boxable(),
            )
        self.problem = problem
        self._make = outputs.zeros if problem.packed else outputs.empty  # rows of no sequence are 0
        self._results = tuple((name, x.shape, x.dtype) for name, x in made.items())
        self._ready = ready(problem, {**views, **seen}, driver)
        names = {name: name if name in raw else _SOURCES[name] for name in views}
        names |= {name: "out" if out is not None and name == "o" else name for name in seen}
        every = {**raw, **made}
        self._seen = tuple(
            _Seen(name, names[name], x.shape, x.byte_strides(), x.dtype, x[1:4] == every[names[name]][1:4])
            for name, x in {**views, **seen}.items()
        )
        self._addressed = tuple((x.name, x.array) for x in self._seen)
        self._extents = None if out is None else tuple(
            (n, x.extent()[0] - x.pointer, x.extent()[1] - x.pointer) for n, x in raw.items()
        )  # fmt: skip

    def run(
        self,
        raw: Views,
        moment: Moment = OF_NO_CALL,
        workspace: ArrayView | None = None,
        length: int | None = None,
        tell: Tell | None = None,
        results: dict[str, ArrayView] | None = None,
    ) -> dict[str, ArrayView]:
        """Allocate the results and compute them.

        Parameters
        ----------
        raw : mapping of str to ArrayView
            The caller's arrays, and ``out`` if it was given.
        moment : Moment
            The seed, and who is told of the progress.
        workspace : ArrayView, optional
            The caller's.
        length : int, optional
            Keys in use of every sequence in a cache, if no array says it.
        tell : callable, optional
            Gets the share that is done.
        results : dict of str to ArrayView, optional
            What `new_results` gave.

        Returns
        -------
        dict of str to ArrayView
            What was allocated, by name.
        """
        q, ready = raw["q"], self._ready
        if moment.progress is not None and not isinstance(ready, OnDevice):
            with telling(moment.progress) as tell:
                return self.run(raw, moment._replace(progress=None), workspace, length, tell, results)
        if self.problem.spans is not None:
            check_spans(self.problem.spans, raw)
        if self.problem.blocks is not None:
            check_blocks(self.problem.blocks, raw)
        if self.problem.function is not None and not isinstance(ready, OnDevice):
            check_integers(self.problem.function, self.problem.extents, ready.integer_bits, raw)
        if self._extents is not None:
            check_overlap(raw, self._extents)
        given = None
        if workspace is not None and isinstance(ready, OnDevice):
            given = workspace_address(workspace, q, ready.plan.workspace_bytes)
        if results is None:  # not by new_results: a function call is a hundredth of what a call costs
            results = {name: self._make(q, shape, dtype) for name, shape, dtype in self._results}
        every = {**raw, **results}
        if not isinstance(ready, OnCpu):
            numbers = {name: every[array].pointer for name, array in self._addressed}
            numbers[SEED] = moment.seed
            if isinstance(ready, OnCore):
                ready.run(numbers, every, q.library, length, tell)
            else:
                if length is not None:
                    # why no array: its memory would go to somebody else while a recorded graph reads it.
                    numbers[LENGTH] = max(length, 0)
                ready.run(numbers, q.library, workspace=given)
        else:
            seen = {seen.name: seen.numpy(every[seen.array]) for seen in self._seen}
            if length is not None:
                seen["cache_seqlens"] = np.full(self.problem.batch, length, np.int32)
            ready.run(seen, moment.seed, tell)
        return results

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes, by name."""
        return self._ready.kernels

    def new_results(self, q: ArrayView) -> dict[str, ArrayView]:
        """Allocate the results of a call with this q."""
        return {name: self._make(q, shape, dtype) for name, shape, dtype in self._results}


# Views that a call's arrays have under another name.
_SOURCES = {
    "block_table": "cache_batch_idx", "v": "k",
    "q_scale": "q.scale", "k_scale": "k.scale", "v_scale": "v.scale",
}  # fmt: skip


def _results(problem: Problem, views: Views, raw: Views, layout: str) -> dict[str, ArrayView]:
    """What a call allocates, as the caller will see it; at no address yet."""
    p, q = problem, raw["q"]
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    if p.direction == "backward":
        kinds |= {"d" + name: (raw[name].shape, p.dtype) for name in "qkv"}
        for name in (*DIFFERENTIABLE, *learned_of(p.function)):
            if name in raw:
                kinds["d" + name] = raw[name].shape, raw[name].dtype
    else:
        rank, rows = len(q.shape), views["q"].shape[:3]
        kinds["o"] = lower_shape((*rows, p.head_dim_v), layout, rank), p.result_dtype
        if p.want_lse:
            kinds["lse"] = rows[4 - rank :], p.accumulator
    return {
        name: ArrayView(
            0, shape, outputs.strides_of_new(shape, dtype), dtype, q.device, q.library, False, None
        )
        for name, (shape, dtype) in kinds.items()
    }


def lifted(name: str, x: ArrayView, layout: str) -> ArrayView:
    """A result as kernels see it."""
    return x if "[" in name else tangent_operand(name, x, layout, len(x.shape))


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
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
    """
    device = raw["q"].device
    driver = driver_of(device, raw["q"].library)
    kinds = [(x[1:_OWNER], x.pointer % 16) for x in raw.values()]
    # why types: 1 is True, and some options take only one of them.
    types = map(type, (*options, *flags))
    # why: arrays of these kinds are two, or latents and their first columns.
    latents: Any = direction == "decode" and raw["v_cache"].pointer == raw["k_cache"].pointer
    if latents:
        latents = lies_in(raw, "v_cache", "k_cache"), lies_in(raw, "v", "k")
    chosen = chosen_by_environment(driver, device)
    call = (direction, driver, chosen, latents, flags, options, *types, *raw, *kinds)
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
# What computed calls that are not remembered, those of second order, by name.
_COMPUTED: dict[str, None] = {}


def forget() -> None:
    """Look anew at every call and plan and load anew, after a change of what they are made from."""
    _KNOWN.clear()
    _COMPUTED.clear()
    choose.cache_clear()
    load.cache_clear()


def computed_by(names: Iterable[str]) -> None:
    """Say what computes a call that is not remembered."""
    _COMPUTED.update(dict.fromkeys(names))


def kernels() -> tuple[str, ...]:
    """What has computed calls since `forget`, by name, each once."""
    names = chain.from_iterable(call.kernels for call in _KNOWN.values())
    return tuple(dict.fromkeys(chain(names, _COMPUTED)))


def _constant(option: Any) -> bool:
    """Whether an option means the same for ever. A tensor that stands for a number does not."""
    if isinstance(option, tuple):
        return all(map(_constant, option))
    return option is None or isinstance(option, (bool, int, float, str, np.generic, Program))


def _prepare(
    direction: str, raw: Views, options: Options, flags: tuple[Any, ...], driver: Driver | None
) -> Prepared:
    inputs = {name: x for name, x in raw.items() if name != "out"}
    if direction == "decode":
        problem, views = describe_cache(inputs, options, *flags)
    else:
        problem, views, _ = describe(direction, inputs, options, *flags)
    # Packed queries are (rows, heads, head_dim), however a cache lies.
    return Prepared(problem, views, raw, "bshd" if problem.packed else options.layout, driver)
