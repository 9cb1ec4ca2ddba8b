"""The compiled core as a kernel family: its refusals, its tiles, and its calls."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...call.arrays import ArrayView
from ...call.problem import Problem
from ...call.progress import Tell
from ...call.work import flops
from ...program.graph import Graph
from .. import threads
from ..decode import flops as flops_of_decode
from ..progress import SECONDS
from .function import FilledFunction, FunctionCall
from .function import refusals as function_refusals
from .isa import ISAS, Isa
from .locate import Library, load
from .params import CALL, NO_MEMORY, OUTSIDE, STATE, STOP, TENSORS, Params
from .progress import Watch
from .sources import AMX, BFLOAT16
from .worker_thread import run_in_worker

__all__ = [
    "NAME", "Core", "decodes", "fills_tiles", "needs_float32", "notes", "refusals", "splits_floats",
    "workers",
]  # fmt: skip

NAME = "core"
# The options of scores that it reads.
READ = ("mask", "bias", "Spans", "BlockMask", "score function", "ALiBi", "softcap", "dropout")
PANEL_KEYS, TILE_KEYS = 144, 192  # keys of a block; with AMX
FEW_ROWS = 12  # rows of a key head, from which on a call does not count as decode
# Rows of a key head, and keys, from which on floats are faster by AMX: 0.7 times at 64, 0.9 to 1.1 times at
# 256, 1.05 to 1.2 times at 512.
FEW_SPLIT = 512
_PRODUCTS = {BFLOAT16: "pairs of bfloat16", AMX: "tiles of bfloat16, by AMX"}
SUMS = "function_sums"  # entry point after a backward pass of a score function with learned arguments

# why: below this, 20 us of a core, waking a second thread takes longer than it saves.
SMALL_FLOPS = 2e6
# Calls with more operations run in a worker thread, while the caller's thread waits and handles Ctrl-C.
# why not all calls: a worker cannot use torch's threads. Shorter calls take at most 0.2 s at 50 GFLOP/s, the
# rate of two old cores, and 30 ms at 300.
LONG_FLOPS = 1e10


def refusals(problem: Problem) -> list[str]:
    """Every reason why the core does not support a problem."""
    p = problem
    if p.empty or not p.heads_k:
        return ["there is nothing to compute"]
    unread = [name for name in p.per_head if name not in TENSORS] + p.unread(READ)
    reasons = [f"does not read {name}" for name in unread]
    if p.tile is not None:
        reasons.append(f"chooses its own tiles, and {p.tile} is asked for")
    if p.cache is not None and p.cache.codes and p.accumulator == "float64":
        reasons.append("converts 4-bit codes to float32, not to float64")
    if p.cache is not None and p.cache.codes and not p.in_rows:
        reasons.append("reads 4-bit codes only where the bytes of a key are contiguous")
    if p.alibi and p.accumulator == "float32" and abs(p.offset) + p.seqlen_q + p.seqlen_k >= 2**31:
        reasons.append("counts distances of ALiBi in 31 bits")
    if p.function is not None and p.second_order:
        reasons.append("has no second derivatives of score functions")
    elif p.direction == "statistics" and p.cache is not None and p.cache.rotary:
        reasons.append("counts weights of queries and keys that are rotated already")
    elif isinstance(p.function, Graph):
        reasons += function_refusals(p.function, p.extents)
    return reasons


def needs_float32(problem: Problem) -> bool:
    """Whether a bfloat16 problem is multiplied in float32 rather than in pairs, which round weights.

    Pairs have no score functions, dropout, gradient of a bias, second order nor statistics.
    """
    p = problem
    mixed = p.cache is not None and p.cache.dtype != p.dtype
    own = p.function is not None or p.want_dbias or p.second_order or p.dropout > 0
    return mixed or own or p.direction == "statistics"


def decodes(problem: Problem) -> bool:
    """Whether a problem is decode (few rows, over a cache or not) without the promise of a prompt's bits."""
    p = problem
    return p.seqlen_q * (p.heads_q // p.heads_k) < FEW_ROWS and p.reproducible is None


def fills_tiles(problem: Problem) -> bool:
    """Whether AMX may multiply: a key head has enough rows, and none needs the bits of decode.

    why not fewer rows: in the forward pass decode's loops compute them, and gradients have to use the same
    sums as their LSE.
    """
    p = problem
    return p.seqlen_q * (p.heads_q // p.heads_k) >= FEW_ROWS and p.reproducible in (None, "run")


def splits_floats(problem: Problem, wanted: bool = False) -> bool:
    """Whether AMX multiplies floats, each as three bfloat16: where it is faster, or wanted.

    It has no score functions nor gradients of a bias, and precision="ieee" asks for multiply-adds. In short
    prompts these are faster: K and V are split for each job, and a short one uses them for few rows.
    """
    p = problem
    if p.accumulator != "float32" or p.dtype == "bfloat16" or p.precision == "ieee" or not fills_tiles(p):
        return False
    mixed = p.cache is not None and p.cache.dtype != p.dtype
    if p.second_order or p.direction == "statistics" or p.function is not None or p.want_dbias or mixed:
        return False
    fewer = min(p.seqlen_q * (p.heads_q // p.heads_k), p.seqlen_k)
    return wanted or fewer >= FEW_SPLIT


def notes(problem: Problem, library: Library) -> list[str]:
    """Notes for `explain`: where the arithmetic differs from float32 products, and which bits are kept."""
    p, found = problem, []
    if library.part == AMX and p.dtype != "bfloat16":
        found.append(
            "products  of floats as three bfloat16 each, by AMX, with sums in float32: no input loses bits"
        )
    elif library.part in _PRODUCTS:
        of = _PRODUCTS[library.part]
        found.append(f"products  of {of}, with sums in float32: weights are rounded before they multiply")
    if p.reproducible is None:
        return found
    if library.part == AMX:
        found.append("bits      are the same on every run, with any number of threads")
    elif p.direction == "backward":
        found.append(
            "bits      of a sequence's gradients are its own: sums of parts of its rows, in one order"
        )
    else:
        found.append("bits      of a row are its own, at no cost: prompts and decode add in one order")
    return found


def workers(work: float, library: str = "") -> int:
    """Number of threads for a number of operations on arrays of a library."""
    return 1 if work < SMALL_FLOPS else threads.allowed(library)


def work_of(problem: Problem) -> float:
    """Operations of a problem, over a cache as if it were full; see `decode.flops` for few queries."""
    if problem.direction == "backward" or problem.second_order:
        p = problem
        pairs = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
        return flops(p.direction, pairs, p.head_dim, p.head_dim_v)
    return flops_of_decode(problem, problem.batch * problem.seqlen_k)


def tile_of(isa: Isa, problem: Problem, library: Library) -> tuple[int, int]:
    """Tile of the core: queries of a panel, and keys of a block."""
    lanes = isa.lanes // 2 if problem.accumulator == "float64" else isa.lanes
    return isa.vectors * lanes, TILE_KEYS if library.part == AMX else PANEL_KEYS


@functools.cache
def _entry(library: Library, name: str) -> Callable[[object], int]:
    function = getattr(load(library), f"cupy_flash_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int32
    found: Callable[[object], int] = function
    return found


_Struct = ctypes.c_char * CALL.itemsize


class Core(NamedTuple):
    """A problem ready for the compiled core."""

    problem: Problem
    library: Library
    names: tuple[str, ...]  # entry points, in the order of the calls
    entries: tuple[Callable[[object], int], ...]  # the functions of these names
    params: Params
    work: float  # operations of the products
    function: FunctionCall | None = None  # the score function; None without one

    @classmethod
    def of(
        cls,
        problem: Problem,
        views: Mapping[str, ArrayView],
        library: Library,
        directions: Sequence[Mapping[str, ArrayView]] = (),
        *,
        with_forward: bool = False,
        functions: Library | None = None,
    ) -> Core:
        """Load the library and describe the arrays; in second order also those of each direction.

        with_forward: a jvp also computes o and lse. functions: the library of score functions.
        """
        first = "forward_jvp" if with_forward else problem.direction
        names = (first, *[f"{problem.direction}_dbias"] * problem.want_dbias)
        entries = tuple(_entry(library, name) for name in names)
        work = work_of(problem) * max(1, len(directions))
        function = None
        if problem.function is not None and functions is not None:
            panel, _ = tile_of(next(isa for isa in ISAS if isa.name == library.isa), problem, library)
            function = FunctionCall.of(problem, views, functions, panel)
            if function.learned:
                names, entries = (*names, SUMS), (*entries, _entry(functions, SUMS))
        reals = 0 if function is None else function.reals
        return cls(
            problem, library, names, entries, Params(problem, views, directions, reals), work, function
        )

    def run(
        self,
        addresses: Mapping[str, int],
        seed: int,
        keep: object = None,
        tell: Tell | None = None,
        library: str = "",
    ) -> None:
        """Compute.

        Parameters
        ----------
        addresses : mapping of str to int
            Addresses of all arrays.
        seed : int
            Seed of dropout.
        keep : object
            Owner of the memory of the arrays, kept alive during the call.
        tell : callable, optional
            Called with the finished share during a long call.
        library : str, optional
            The library of the arrays; for "torch" its threads compute.
        """
        function: FilledFunction | None = None
        if self.function is not None:
            function = self.function.filled(addresses)
            addresses, keep = {**addresses, "function": function.address}, (keep, function)
        many, aside = workers(self.work, library), self.work > LONG_FLOPS
        team = 0 if aside or many == 1 else threads.team(library, many)
        struct = _Struct.from_buffer(self.params.filled(addresses, seed, many, team))
        state = self._run_in_thread(struct, keep, tell) if aside else self._run(struct)
        if state == NO_MEMORY:
            raise MemoryError("the CPU path found no memory for its tiles")
        if state == OUTSIDE and function is not None:
            raise function.outside()

    def _run(self, struct: ctypes.Array[ctypes.c_char], watch: Watch | None = None) -> int:
        address = ctypes.addressof(struct)
        for entry in self.entries:
            if watch is not None:
                watch.begin()
            if state := entry(address):
                return state
        return 0

    def _run_in_thread(self, struct: ctypes.Array[ctypes.c_char], keep: object, tell: Tell | None) -> int:
        states: list[int] = []
        watch = None if tell is None else Watch(self.problem, self.names, struct)

        def compute(_keep: object = keep) -> None:  # the arrays live as long as this function
            states.append(self._run(struct, watch))

        done = run_in_worker(compute)
        raised: BaseException | None = None
        while not done.is_set():
            try:
                # why a timeout: a signal that arrives right before a wait is handled when the wait ends.
                done.wait(SECONDS)
                if watch is not None and tell is not None and raised is None and not done.is_set():
                    tell(watch.share())
            except BaseException as error:
                ctypes.c_int32.from_buffer(struct, STATE).value = STOP
                raised = raised or error
        if raised is not None:
            raise raised
        return states[0]
