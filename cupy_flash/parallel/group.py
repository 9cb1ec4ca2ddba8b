"""Code that all schedules share: the link between processes, rounds of messages, and checks of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..call.describe import describe
from ..call.given import Options
from ..call.options import PER_HEAD
from ..call.values import checked_seed
from ..errors import UnsupportedError
from .agreement import Agreement

__all__ = [
    "Link", "LocalCall", "Round", "all_done", "at", "dropping", "own_heads", "row_axis", "seed_step",
    "terms_of", "with_length",
]  # fmt: skip


class Link(Protocol):
    """The interface by which an adapter sends and allocates its arrays."""

    rank: int
    ranks: int
    agreement: Agreement

    def pass_on(self, arrays: tuple[Any, ...], into: tuple[Any, ...], by: int) -> Callable[[], None]:
        """Start sending arrays to rank + by, and receiving from rank - by, modulo the number of processes.

        All arrays are contiguous, and allocated before the first message. The result waits for both. If this
        function or the result raises, none of its messages is in flight any more.
        """

    def contiguous(self, x: Any) -> Any:
        """The array, copied if it is not contiguous."""

    def reserve(self, like: Any, count: int, wide: bool) -> Any:
        """Memory for `count` elements on the device of `like`, in its dtype or, if wide, that of its sums."""

    def upcast(self, x: Any) -> Any:
        """A copy as an accumulator: float64 if x is, else float32."""

    def cast_like(self, x: Any, like: Any) -> Any:
        """X in another array's dtype."""

    def index_array(self, rows: np.ndarray[Any, Any], like: Any) -> Any:
        """Integers as an array of the library and on the device of `like`."""


class LocalCall(NamedTuple):
    """The call of one process."""

    link: Link
    arrays: dict[str, Any]  # its parts of q, k and v; in the backward pass of do, q, k, v, o, lse and dlse
    causal: bool
    options: dict[str, Any]  # the other `RingOptions`
    # array of int32, optional: offsets of its rows, for packed sequences; layout is then "bshd".
    cu_seqlens: Any = None
    # Further arguments that must be the same in all processes.
    terms: Mapping[str, Any] = MappingProxyType({})

    @property
    def direction(self) -> str:
        """The pass, "forward" or "backward"."""
        return "backward" if "do" in self.arrays else "forward"

    @property
    def row_axis(self) -> int:
        """The axis of rows in q, k, v and o, from the end; in lse it is the last one."""
        return row_axis(self.options["layout"], self.arrays["q"])


def all_done(waits: Iterable[Callable[[], Any]]) -> None:
    """Wait for every message even if some fail, then raise the first error."""
    errors = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


class Round:
    """The messages of a call and the work between them; errors of the work are raised after all messages.

    why: other processes wait for messages of this one, and a pending receive writes to memory that an
    exception would free.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._under_way: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    def pass_on(
        self, arrays: tuple[Any, ...], into: tuple[Any, ...], by: int
    ) -> Callable[[], tuple[Any, ...]]:
        """As `Link.pass_on`, but the result returns the received arrays."""
        arriving = self._link.pass_on(arrays, into, by)
        self._under_way.append(arriving)

        def arrived() -> tuple[Any, ...]:
            self._under_way.remove(arriving)
            arriving()
            return into

        return arrived

    def work(self, step: Callable[[], None]) -> None:
        """Run a step, unless an earlier one has failed."""
        if self.error is None:
            try:
                step()
            except BaseException as error:
                self.error = error

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for arriving in self._under_way:
            with suppress(Exception):  # why: an error of a message is being raised
                arriving()
        if self.error is not None:
            raise self.error


def at(rows: Any, axis: int) -> tuple[Any, ...]:
    """The index of rows along an axis counted from the end."""
    return (..., rows) + (slice(None),) * (-1 - axis)


def with_length(shape: Any, axis: int, length: int) -> tuple[int, ...]:
    """The shape with a different length along one axis."""
    changed = list(shape)
    changed[axis] = length
    return tuple(changed)


def row_axis(layout: str | None, q: Any) -> int:
    """The axis of rows in arrays of the rank of q, from the end."""
    return -3 if layout == "bshd" and len(q.shape) > 2 else -2


def own_heads(heads: int, rank: int, ranks: int) -> slice:
    """The heads of a process that attends to some of them."""
    each = heads // ranks
    return slice(rank * each, (rank + 1) * each)


def dropping(options: dict[str, Any], number: int) -> dict[str, Any]:
    """The options of one of the calls on parts, with a dropout seed of its own.

    why: a weight is dropped by its position in the call, not in the whole sequence; with one seed, all calls
    would drop the same positions.
    """
    if not options["dropout"]:
        return options
    return {**options, "seed": (checked_seed(options["seed"]) + seed_step(number)) % 2**64}


def seed_step(number: int) -> int:
    """The offset of the seed, modulo 2**64, for the call with this number."""
    step = 0x9E3779B97F4A7C15  # Weyl sequence: odd, so that no two numbers share a seed
    return number * step % 2**64


# Options that describe the whole sequence, not the rows of a process.
_OF_THE_WHOLE = ("mask", "parts", "seqlen", "schedule")


def terms_of(local_call: LocalCall) -> dict[str, Any]:
    """Check the part of this process; return, by name, what must be the same in all processes."""
    direction, causal, options = local_call.direction, local_call.causal, local_call.options
    per_head = {name: options[name] for name in PER_HEAD if options[name] is not None}
    given = {name: x for name, x in {**local_call.arrays, **per_head}.items() if x is not None}
    values = {name: x for name, x in options.items() if name not in (*PER_HEAD, *_OF_THE_WHOLE)}
    problem, _, raw = describe(direction, given, Options(causal=causal, **values), True)
    if problem.of_float8:
        raise UnsupportedError(
            f"a sequence in parts has results in the dtype of q, and {problem.dtype} is too narrow for that.",
            hint="q, k and v times their scales as bfloat16",
        )
    terms: dict[str, Any] = {"pass": direction, "causal": bool(causal), "cu_seqlens": None}
    for name in ("q", "k", "v", *per_head):
        shape: list[Any] = list(raw[name].shape)
        if name not in per_head and options["seqlen"] is not None:  # why: seqlen fixes the rows of each
            shape[local_call.row_axis] = "rows"
        terms[name] = f"{raw[name].dtype} ({', '.join(map(str, shape))})"
    mask = options["mask"]
    if mask is not None:
        terms["mask"] = f"{type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}"
    plain = {name: x for name, x in options.items() if name not in (*PER_HEAD, "mask")}
    terms |= {name: tuple(x) if isinstance(x, list) else x for name, x in plain.items()}
    seed = checked_seed(options["seed"]) if problem.dropout else None
    return terms | {
        "scale": problem.scale, "softcap": problem.softcap, "dropout": problem.dropout, "seed": seed
    }  # fmt: skip
