"""The cache of prepared calls: a call is described, planned and loaded once for all arrays of its kinds."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..call import outputs
from ..call.arrays import ArrayView
from ..call.blocks import check_blocks
from ..call.cache.describe import describe_cache
from ..call.cache.kinds import check_two_arrays, is_first_columns, same_memory, written_caches
from ..call.describe import describe
from ..call.functions import check_integers, learned_of
from ..call.given import CacheCall, Options, Packing
from ..call.offsets import with_own_tables
from ..call.operands import lower_shape
from ..call.options import DIFFERENTIABLE
from ..call.outputs import check_out, check_overlap, to_be_apart, workspace_address
from ..call.problem import Problem
from ..call.spans import check_spans
from ..call.tangents import tangent_operand
from ..call.values import NO_RUN_OPTIONS, RunOptions
from ..device.abi import SEED
from ..device.run import Driver
from ..plan.choose import choose
from ..program.function import Program
from .backends import BackendView, chosen_by_environment, driver_of, load, prepare_backend

if TYPE_CHECKING:
    from ..cpu.core.repeat import Way

__all__ = ["REPEATED", "Prepared", "computed_by", "forget", "kernels", "lifted", "prepared"]

Views = Mapping[str, ArrayView]


class Prepared:
    """All that options and the kinds of arrays decide about a call; only addresses are left to each call.

    It keeps no array alive, is immutable, and may be used in several threads. `problem` has no seed;
    `results` are name, shape and dtype of each array that a call allocates. `only_addresses_differ` is
    whether such calls differ only in addresses of q, k, v, o, lse and gradients, as `run_at` needs, and
    `may_repeat_in_core` whether only in the addresses of q, k, v, o, mask and bias, and the core computes it.
    """

    __slots__ = (
        "_apart", "_backend", "_make", "_written", "may_repeat_in_core", "only_addresses_differ", "problem",
        "results",
    )  # fmt: skip

    def __init__(
        self, problem: Problem, views: Views, raw: Views, layout: str, driver: Driver | None
    ) -> None:
        out = raw.get("out")
        made = _results(problem, views, raw, layout)
        if out is not None:
            check_out(bool(problem.of_float8), raw, made.pop("o").shape)
        written = made if out is None else {"o": out, **made}
        seen = {name: lifted(name, x, layout) for name, x in written.items()}
        if out is not None:
            problem = problem._replace(
                of_float8=problem.of_float8 and out.dtype,
                in_rows=problem.in_rows and seen["o"].in_rows(),
                aligned=problem.aligned and seen["o"].aligned(),
                boxes=problem.boxes and seen["o"].has_tma_strides(),
            )
        self.problem = problem
        self._make = outputs.zeros if problem.packed else outputs.empty  # rows of no sequence are 0
        self.results = tuple((name, x.shape, x.dtype) for name, x in made.items())
        names = {name: name if name in raw else _SOURCES[name] for name in views}
        names |= {name: "out" if out is not None and name == "o" else name for name in seen}
        every = {**raw, **made}
        table = tuple(
            BackendView(
                name, names[name], x.shape, x.byte_strides(), x.dtype, x[1:4] == every[names[name]][1:4]
            )
            for name, x in {**views, **seen}.items()
        )
        self._backend = prepare_backend(problem, {**views, **seen}, driver, table)
        self._written = (*([] if out is None else ["out"]), *written_caches(raw))
        self._apart = to_be_apart(raw, self._written)
        p, addressed = problem, self._backend.addressed
        looked_at = p.spans or p.blocks or p.function or p.of_float8 or p.packed or p.dropout or self._apart
        own = bool(addressed) and all(name == array for name, array in addressed) and not looked_at
        self.only_addresses_differ = own and _PLAIN.issuperset(dict(addressed))
        self.may_repeat_in_core = self._backend.is_core and own and _REPEATED.issuperset(dict(addressed))

    def run(
        self,
        raw: Views,
        run_options: RunOptions = NO_RUN_OPTIONS,
        workspace: ArrayView | None = None,
        length: int | None = None,
        results: dict[str, ArrayView] | None = None,
    ) -> dict[str, ArrayView]:
        """Allocate the results and compute them.

        Parameters
        ----------
        raw : mapping of str to ArrayView
            The caller's arrays, and ``out`` if it was given.
        run_options : RunOptions
            The seed, and where progress is reported.
        workspace : ArrayView, optional
            The caller's workspace; default: allocated from the pool of the library.
        length : int, optional
            Keys in use of every sequence in a cache, if it is one integer for all.
        results : dict of str to ArrayView, optional
            As returned by `new_results`; default: allocated here.

        Returns
        -------
        dict of str to ArrayView
            The results, by name.
        """
        q, problem, backend = raw["q"], self.problem, self._backend
        if problem.spans is not None or problem.blocks is not None:
            raw = with_own_tables(raw)
            check_spans(problem.spans, raw)
            check_blocks(problem.blocks, raw)
        if problem.function is not None and backend.integer_bits:
            check_integers(problem.function, problem.extents, backend.integer_bits, raw)
        if self._apart:
            check_overlap(raw, self._apart)
        given = None
        if workspace is not None and backend.workspace_bytes is not None:
            given = workspace_address(workspace, q, backend.workspace_bytes)
        if results is None:  # why not new_results(): the function call would cost 1 % of a short call
            results = {name: self._make(q, shape, dtype) for name, shape, dtype in self.results}
        backend.run({**raw, **results}, run_options, length=length, workspace=given)
        if self._written and q.library == "torch":
            outputs.bump_versions(raw, self._written)
        return results

    def run_at(self, addresses: dict[str, int], keep: object, library: str) -> None:
        """Compute a call from addresses of inputs and outputs; see `only_addresses_differ`.

        It adds a seed of 0 to `addresses`.
        """
        addresses[SEED] = 0
        self._backend.run_at(addresses, keep, library)

    def repeating(self, owner: str, way: Way) -> Callable[..., Any] | None:
        """As `cpu.core.repeat.repeating`; None if the CPU core does not compute it."""
        return self._backend.repeating(owner, way)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that run."""
        return self._backend.kernels

    def new_results(self, q: ArrayView) -> dict[str, ArrayView]:
        """Allocate the results of a call with this q."""
        return {name: self._make(q, shape, dtype) for name, shape, dtype in self.results}


# The arrays of a call without optional arrays.
_PLAIN = frozenset(("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"))
_REPEATED = frozenset(("q", "k", "v", "o", "mask", "bias"))  # arrays of calls that the core repeats
# Names of the arrays of views that are called differently: view -> array.
_SOURCES = {
    "block_table": "cache_batch_idx", "v": "k",
    "q_scale": "q.scale", "k_scale": "k.scale", "v_scale": "v.scale",
}  # fmt: skip


def _results(problem: Problem, views: Views, raw: Views, layout: str) -> dict[str, ArrayView]:
    """Views of the arrays that a call allocates, in the caller's layout, with address 0."""
    p, q = problem, raw["q"]
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    if p.direction == "backward":
        kinds |= {"d" + name: (raw[name].shape, p.result_dtype) for name in "qkv"}
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
    """The view of a result in the axes that kernels use."""
    return x if "[" in name else tangent_operand(name, x, layout, len(x.shape))


# ---------------------------------------------------------------------------------------------- memory


def prepared(
    direction: str,
    raw: Views,
    options: Options,
    want_lse: bool = True,
    packing: Packing | None = None,
    cache: CacheCall | None = None,
    unrounded: bool = False,
) -> Prepared:
    """The prepared call for these kinds of arrays and options: from the cache, or prepared now.

    Parameters
    ----------
    direction : {"forward", "backward", "decode"}
    raw : mapping of str to ArrayView
        The caller's arrays, and ``out`` if it was given.
    options : Options
        With seed 0 or None.
    want_lse : bool
    packing : Packing, optional
        For packed sequences, or for packed queries over a cache.
    cache : CacheCall, optional
        For "decode".
    unrounded : bool
        As in `describe.describe`.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
    """
    device = raw["q"].device
    driver = driver_of(device, raw["q"].library)
    kinds = [(x[1:_OWNER], x.pointer % 16) for x in raw.values()]
    given = options if cache is None else (*options, *cache)
    # why: the kinds do not tell two separate caches from latents and a view of their first columns.
    latents: Any = cache is not None and raw["v_cache"].pointer == raw["k_cache"].pointer
    if latents:
        one_scale = same_memory(raw, "v_scale", "k_scale")
        one = same_memory(raw, "k_cache", "v_cache"), same_memory(raw, "k", "v")
        latents = (
            is_first_columns(raw, "v_cache", "k_cache"),
            is_first_columns(raw, "v", "k"),
            one_scale,
            *one,
        )
    chosen = chosen_by_environment(driver, device)
    # why types: 1 == True == 1.0 as a key, but an option, or a bound of a window, accepts only one of them.
    types = [*map(type, given)]
    for pair in options.window, options.tile:
        if pair is not None and isinstance(pair, tuple):
            types += map(type, pair)
    flags = want_lse, packing, unrounded
    call = (direction, driver, chosen, latents, flags, given, *types, *raw, *kinds)
    try:
        known = _KNOWN.get(call)
    except TypeError:  # an option is not hashable
        return _prepare(direction, raw, options, flags, cache, driver)
    if known is None:
        known = _prepare(direction, raw, options, flags, cache, driver)
        if all(map(_constant, given)):
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[call] = known
    return known


# The kind of a view: its fields after the pointer and before this one.
_OWNER = ArrayView._fields.index("owner")
# why: programs repeat their calls, and preparing one takes twenty times as long as this look-up.
_KNOWN: dict[tuple[Any, ...], Prepared] = {}
_MOST_KNOWN = 1024
# Calls that adapters cache under keys of their own. A forked child has none, because some name the parent's
# threads.
REPEATED: dict[Hashable, Any] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=REPEATED.clear)
# Names of the kernels of calls that are not cached, those of second order.
_COMPUTED: dict[str, None] = {}


def forget() -> None:
    """Clear all caches of prepared calls, plans and kernels, after a change of what they depend on."""
    _KNOWN.clear()
    REPEATED.clear()
    _COMPUTED.clear()
    choose.cache_clear()
    load.cache_clear()


def computed_by(names: Iterable[str]) -> None:
    """Record the kernels of a call that is not cached."""
    _COMPUTED.update(dict.fromkeys(names))


def kernels() -> tuple[str, ...]:
    """Names of the kernels of all calls since `forget`, without duplicates."""
    # why copies: another thread may add a call meanwhile
    names = chain.from_iterable(call.kernels for call in [*_KNOWN.values()])
    return tuple(dict.fromkeys(chain(names, [*_COMPUTED])))


def _constant(option: Any) -> bool:
    """Whether an option cannot change its value later, as a tensor of one element can."""
    if isinstance(option, tuple):
        return all(map(_constant, option))
    return option is None or isinstance(option, (bool, int, float, str, np.generic, Program))


def _prepare(
    direction: str,
    raw: Views,
    options: Options,
    flags: tuple[bool, Packing | None, bool],
    cache: CacheCall | None,
    driver: Driver | None,
) -> Prepared:
    inputs = {name: x for name, x in raw.items() if name != "out"}
    if cache is None:
        problem, views, _ = describe(direction, inputs, options, *flags)
    else:
        problem, views = describe_cache(inputs, options, cache, *flags[:2])
        stored = problem.cache
        assert stored is not None
        check_two_arrays(inputs, bool(stored.rotary and not stored.unrotated))
    # why: packed queries are (rows, heads, head_dim) whatever the layout of the cache.
    return Prepared(problem, views, raw, "bshd" if problem.packed else options.layout, driver)
