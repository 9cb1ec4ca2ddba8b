"""Attention over a sequence that several processes hold in parts: keys go round a ring, results are merged.

Every process keeps its queries and sees the keys of the others pass by, one process's part at a time; the
results over those parts are merged by `merge` [1]_. What travels are the heads of k and v, however many heads
of q share them, and no further than some process sees them.

This module is the loop. How a sequence lies in parts is in `parts`, what is compared before the first message
in `agreement`; how arrays travel is the business of the adapters, `cupy_flash.torch`, `cupy_flash.jax` and
`cupy_flash.mpi`.

.. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from .agreement import Agreement
from .api import Gradients
from .call.given import Options
from .call.problem import describe
from .errors import UnsupportedError
from .merge import merge
from .parts import Packed, Pair, Whole, packed_positions, positions

__all__ = ["Link", "all_done", "backward", "forward", "packed_positions", "positions"]


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


class _Round:
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

    def __enter__(self) -> _Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for arriving in self._under_way:
            with suppress(Exception):  # one of a message is on its way out already
                arriving()
        if self.error is not None:
            raise self.error


class _Call(NamedTuple):
    """A call that is checked: its parts, their axis of rows, and what must be the same in all processes."""

    parts: Whole | Packed
    axis: int
    terms: dict[str, Any]


def _checked(
    link: Link,
    direction: str,
    arrays: dict[str, Any],
    causal: bool,
    options: dict[str, Any],
    cut: Any,
) -> _Call:
    """The parts of a call; what can be refused is refused here, before the first message."""
    given = {name: x for name, x in {**arrays, "sinks": options["sinks"]}.items() if x is not None}
    values = {name: x for name, x in options.items() if name not in ("sinks", "parts", "seqlen")}
    problem, _, raw = describe(direction, given, Options(causal=causal, **values), True)
    if problem.of_float8:
        raise UnsupportedError(
            f"a ring adds up results in the dtype of q, and {problem.dtype} is too narrow for that.",
            hint="q, k and v times their scales as bfloat16",
        )
    q, axis = arrays["q"], _axis(options, arrays["q"])
    plain = {name: x for name, x in options.items() if name != "sinks"}
    terms = {"pass": direction, "causal": bool(causal), "cu_seqlens": None}
    parts: Whole | Packed
    if cut is None:
        parts = Whole(link.rank, link.ranks, (q.shape[axis], arrays["k"].shape[axis]), causal, plain)
    else:
        parts = Packed(link.rank, link.ranks, cut, q, causal, plain, link.beside)
        terms["cu_seqlens"] = parts.starts.tolist()
    for name in ("q", "k", "v", "sinks"):
        if name in raw:
            shape: list[Any] = list(raw[name].shape)
            if name != "sinks" and options["seqlen"] is not None:  # it says what the rows of each are
                shape[axis] = "rows"
            terms[name] = f"{raw[name].dtype} ({', '.join(map(str, shape))})"
    terms |= {name: tuple(x) if isinstance(x, list) else x for name, x in plain.items()}
    terms |= {"scale": problem.scale, "softcap": problem.softcap}
    return _Call(parts, axis, terms)


class _Room:
    """Memory that arrays arrive in, two of each: while one is sent, the other one is received into.

    why before the first message: where there is too little memory, nobody waits for this process.
    """

    def __init__(
        self, link: Link, call: _Call, like: tuple[Any, ...], turns: int, wide: bool = False
    ) -> None:
        self._call, self._like = call, like
        counts = [(x, math.prod(self._shape(x, call.parts.most_rows))) for x in like]
        self._each = [[link.reserve(x, n, wide) for x, n in counts] for _ in range(min(turns, 2))]

    def _shape(self, x: Any, rows: int) -> tuple[int, ...]:
        shape = list(x.shape)
        shape[self._call.axis] = rows
        return tuple(shape)

    def of(self, owner: int, turn: int) -> tuple[Any, ...]:
        """Arrays for those of a process, this turn."""
        shapes = (self._shape(x, self._call.parts.rows(owner)) for x in self._like)
        return tuple(
            flat[: math.prod(shape)].reshape(shape)
            for flat, shape in zip(self._each[turn % 2], shapes, strict=True)
        )


def _at(rows: Any, axis: int) -> tuple[Any, ...]:
    """The index of rows along an axis that is counted from the end."""
    return (..., rows) + (slice(None),) * (-1 - axis)


def _axis(options: dict[str, Any], q: Any) -> int:
    """The axis of rows in q, k, v and o; in lse it is the last."""
    return -3 if options["layout"] == "bshd" and len(q.shape) > 2 else -2


def forward(
    link: Link,
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    options: dict[str, Any],
    cut: Any = None,
    terms: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """O and LSE of this process's queries over everybody's keys.

    Parameters
    ----------
    link : Link
    q, k, v : array
        This process's parts.
    causal : bool
    options : dict
        The other `RingOptions`.
    cut : array of int32, optional
        Offsets of this process's rows of packed sequences; layout is then "bshd".
    terms : dict, optional
        What else must be the same in all processes.
    """
    with link.agreement.refusals():
        call = _checked(link, "forward", {"q": q, "k": k, "v": v}, causal, options, cut)
        keys = tuple(link.contiguous(x) for x in (k, v))
        room = _Room(link, call, keys, len(call.parts.steps) - 1)
    link.agreement.reach({**call.terms, **(terms or {})})
    parts, axis, _ = call
    steps = parts.steps
    o: Any = None
    lse: Any = None

    def add(todo: Pair, keys: tuple[Any, ...]) -> None:
        nonlocal o, lse
        mine, theirs = _at(todo.queries, axis), _at(todo.keys, axis)
        # Sinks are keys that one part has, this process's own.
        sinks = options["sinks"] if o is None else None
        k, v = (x[theirs] for x in keys)
        part, part_lse = parts.attend(todo, q[mine], k, v, sinks)
        part = link.wide(part)
        if o is None:
            o, lse = part, part_lse
        else:
            of_lse = _at(todo.queries, -1)
            o[mine], lse[of_lse] = merge(o[mine], lse[of_lse], part, part_lse, layout=options["layout"])

    with _Round(link) as messages:
        for turn, step in enumerate(steps):
            arriving = None
            if turn + 1 < len(steps):
                into = room.of((link.rank - steps[turn + 1]) % link.ranks, turn)
                arriving = messages.pass_on(keys, into, steps[turn + 1] - step)
            todo = parts.pair((link.rank - step) % link.ranks)
            if todo is not None:
                messages.work(functools.partial(add, todo, keys))
            if arriving is not None:
                keys = arriving()
    return link.narrow(o, q), lse


def backward(
    link: Link,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any,
    causal: bool,
    options: dict[str, Any],
    cut: Any = None,
    wanted: tuple[bool, bool] = (True, True),
    terms: dict[str, Any] | None = None,
) -> Gradients[Any]:
    """Gradients of this process's q, k and v; those of k and v travel with them and come home at the end.

    With the LSE of the whole sequence each pair of parts gives its share of the gradients exactly. A process
    that cannot add its share adds NaN, and raises: the others get no sum in which it is missing.

    wanted: whether anybody asks for the gradients of k, and of v; others do not travel, and are None.
    """
    arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse}
    with link.agreement.refusals():
        call = _checked(link, "backward", arrays, causal, options, cut)
        keys = tuple(link.contiguous(x) for x in (k, v))
        room = _Room(link, call, keys, len(call.parts.steps) - 1)
        home = tuple(x for x, asked in zip((k, v), wanted, strict=True) if asked)
        room_of_sums = _Room(link, call, home, len(call.parts.steps), wide=True)
        dq, sums = link.wide(q), room_of_sums.of(link.rank, 0)
        for x in (dq, *sums):
            x[...] = 0
    link.agreement.reach({**call.terms, **(terms or {})})
    parts, axis, _ = call
    steps = parts.steps
    shares: tuple[Any, ...] = ()
    dsinks: Any = None

    def differentiate(todo: Pair, keys: tuple[Any, ...], sinks: Any) -> None:
        nonlocal shares, dsinks
        mine, theirs, of_lse = _at(todo.queries, axis), _at(todo.keys, axis), _at(todo.queries, -1)
        given = do[mine], q[mine], *(x[theirs] for x in keys), o[mine], lse[of_lse]
        grads = parts.differentiate(todo, given, sinks, dlse=None if dlse is None else dlse[of_lse])
        dq[mine] += grads.dq
        shares = tuple(x for x, asked in zip((grads.dk, grads.dv), wanted, strict=True) if asked)
        dsinks = grads.dsinks if dsinks is None else dsinks

    def add(todo: Pair) -> None:
        for total, share in zip(sums, shares, strict=True):
            total[_at(todo.keys, axis)] += share

    returning: Callable[[], tuple[Any, ...]] | None = None
    with _Round(link) as messages:
        for turn, step in enumerate(steps):
            arriving = None
            then = steps[turn + 1] if turn + 1 < len(steps) else link.ranks  # they go home at last
            owner, next_owner = ((link.rank - n) % link.ranks for n in (step, then))
            if then < link.ranks:
                arriving = messages.pass_on(keys, room.of(next_owner, turn), then - step)
            todo = parts.pair(owner)
            if todo is not None:
                sinks = options["sinks"] if turn == 0 else None
                messages.work(functools.partial(differentiate, todo, keys, sinks))
            if returning is not None:
                sums = returning()
            if todo is not None:
                messages.work(functools.partial(add, todo))
            if messages.error is not None:
                for x in sums:
                    x[...] = np.nan
            if sums and len(steps) > 1:
                returning = messages.pass_on(sums, room_of_sums.of(next_owner, turn + 1), then - step)
            if arriving is not None:
                keys = arriving()
        if returning is not None:
            sums = returning()
    narrowed = iter([link.narrow(x, like) for x, like in zip(sums, home, strict=True)])
    dk, dv = (next(narrowed) if asked else None for asked in wanted)
    return Gradients(link.narrow(dq, q), dk, dv, dsinks=dsinks)
