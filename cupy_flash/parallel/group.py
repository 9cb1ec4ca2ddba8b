"""What every schedule shares: the link between processes, messages that end well, the check of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..call.given import Options
from ..call.options import PER_HEAD
from ..call.problem import describe
from ..call.values import checked_seed
from ..errors import UnsupportedError
from .agreement import Agreement

__all__ = ["Asked", "Link", "Round", "all_done", "at", "dropping", "row_axis", "seed_step", "terms_of"]


class Link(Protocol):
    """How an adapter's arrays travel, and are made."""

    rank: int
    ranks: int
    agreement: Agreement

    def pass_on(self, arrays: tuple[Any, ...], into: tuple[Any, ...], by: int) -> Callable[[], None]:
        """Begin to send arrays to the process that is so many further, and to receive from the one before.

        All are contiguous, and allocated before the first message. The result waits for both. When either
        raises, no message of its own is under way any more.
        """

    def contiguous(self, x: Any) -> Any:
        """The array, copied if it is not contiguous."""

    def reserve(self, like: Any, count: int, wide: bool) -> Any:
        """So many elements of the dtype of an array, or of that of sums, on its device."""

    def wide(self, x: Any) -> Any:
        """A copy, float64 if x is, else float32, to add up in."""

    def narrow(self, x: Any, like: Any) -> Any:
        """X in another array's dtype."""

    def beside(self, rows: np.ndarray[Any, Any], like: Any) -> Any:
        """Integers as an array of the library of another one, on its device."""


class Asked(NamedTuple):
    """What a process asks of all.

    Attributes
    ----------
    link : Link
    arrays : dict of str to array
        Its parts of q, k and v; for gradients of do, q, k, v, o, lse and dlse.
    causal : bool
    options : dict
        The other `RingOptions`.
    cut : array of int32, optional
        Offsets of its rows of packed sequences; layout is then "bshd".
    terms : dict
        What else must be the same in all processes.
    """

    link: Link
    arrays: dict[str, Any]
    causal: bool
    options: dict[str, Any]
    cut: Any = None
    terms: Mapping[str, Any] = MappingProxyType({})

    @property
    def direction(self) -> str:
        """Which pass it is, forward or backward."""
        return "backward" if "do" in self.arrays else "forward"


def all_done(waits: Iterable[Callable[[], Any]]) -> None:
    """Wait for every message, whatever becomes of the others, then raise the first error."""
    errors = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


class Round:
    """A process's messages and its work between them: an error of the work is raised when all are through.

    why: the others wait for messages of this process, and a library that was told to receive some writes into
    memory which an exception would free.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._under_way: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    def pass_on(
        self, arrays: tuple[Any, ...], into: tuple[Any, ...], by: int
    ) -> Callable[[], tuple[Any, ...]]:
        """As that of the link; the result returns what has arrived."""
        arriving = self._link.pass_on(arrays, into, by)
        self._under_way.append(arriving)

        def arrived() -> tuple[Any, ...]:
            self._under_way.remove(arriving)
            arriving()
            return into

        return arrived

    def work(self, step: Callable[[], None]) -> None:
        """Do a step, unless one before failed."""
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
            with suppress(Exception):  # one of a message is on its way out already
                arriving()
        if self.error is not None:
            raise self.error


def at(rows: Any, axis: int) -> tuple[Any, ...]:
    """The index of rows along an axis that is counted from the end."""
    return (..., rows) + (slice(None),) * (-1 - axis)


def row_axis(options: dict[str, Any], q: Any) -> int:
    """The axis of rows in q, k, v and o; in lse it is the last."""
    return -3 if options["layout"] == "bshd" and len(q.shape) > 2 else -2


def dropping(options: dict[str, Any], number: int) -> dict[str, Any]:
    """The options of one of the calls that a call over parts is made of: each drops its own weights.

    why: a weight is dropped by its place in a call, which is another than in the whole; with one seed, all
    calls would drop the same places.
    """
    if not options["dropout"]:
        return options
    return {**options, "seed": (checked_seed(options["seed"]) + seed_step(number)) % 2**64}


def seed_step(number: int) -> int:
    """What is added to the seed, modulo 2**64, in the call that has this number."""
    step = 0x9E3779B97F4A7C15  # of Weyl's sequence: odd, so that no two numbers have one seed
    return number * step % 2**64


# Options that are not of a process's own rows.
_OF_THE_WHOLE = ("mask", "parts", "seqlen", "schedule")


def terms_of(asked: Asked) -> dict[str, Any]:
    """Check what this process holds; what must be the same in all processes, by name."""
    direction, arrays, causal, options = asked.direction, asked.arrays, asked.causal, asked.options
    per_head = {name: options[name] for name in PER_HEAD if options[name] is not None}
    given = {name: x for name, x in {**arrays, **per_head}.items() if x is not None}
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
        if name not in per_head and options["seqlen"] is not None:  # it says what the rows of each are
            shape[row_axis(options, arrays["q"])] = "rows"
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
