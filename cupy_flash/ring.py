"""Attention over a sequence that several processes hold in parts: keys go round a ring, results are merged.

Every process keeps its queries and sees the keys of all others pass by, one process's part at a time; the
results over those parts are merged by `merge` [1]_. Causal attention would leave the first process idle most
of the time if each held one stretch of the sequence [2]_. Instead it is cut into two stretches per process,
and process r of n holds the r-th from the front and the r-th from the back, known as zigzag: every step is
then half a square for everybody. Of packed sequences each is cut so by itself. What travels are the heads of
k and v, however many heads of q share them.

This module is the schedule and the loop; how arrays travel is the business of the adapters,
`cupy_flash.torch`, `cupy_flash.jax` and `cupy_flash.mpi`.

.. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
.. [2] W. Brandon et al., "Striped Attention", arXiv:2311.09431, which deals out single rows instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from .api import Gradients, attention, attention_backward
from .call.given import Options
from .call.offsets import longest_length, offsets
from .call.problem import describe
from .errors import InvalidArgumentsError, UnsupportedError
from .merge import merge
from .varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "Link",
    "Pair",
    "all_done",
    "backward",
    "check_parts",
    "forward",
    "halves",
    "packed_positions",
    "pair",
    "positions",
]


class Pair(NamedTuple):
    """Which of a process's queries see which of the keys that pass by.

    Attributes
    ----------
    queries, keys : slice, or array of int
        Rows of the parts.
    causal : bool
        Row i sees rows up to i only.
    """

    queries: Any
    keys: Any
    causal: bool


def positions(rank: int, ranks: int, seqlen: int, causal: bool) -> np.ndarray[Any, Any]:
    """Rows of the whole sequence that a process holds, in their order.

    Parameters
    ----------
    rank, ranks : int
        Which process of how many.
    seqlen : int
        A multiple of ranks, of 2 * ranks if causal.
    causal : bool
        Two stretches, from the front and from the back; else one.

    Returns
    -------
    ndarray of int64, shape (seqlen / ranks,)

    Raises
    ------
    InvalidArgumentsError
        The length is no such multiple.
    """
    stretches = 2 * ranks if causal else ranks
    if seqlen % stretches:
        raise InvalidArgumentsError(
            f"a sequence of {seqlen} does not split evenly into {stretches} chunks.",
            hint=f"padding to {-(-seqlen // stretches) * stretches}",
        )
    rows = np.arange(seqlen).reshape(stretches, -1)
    return np.concatenate((rows[rank], rows[-1 - rank])) if causal else rows[rank]


def packed_positions(rank: int, ranks: int, lengths: Any, causal: bool) -> np.ndarray[Any, Any]:
    """Rows of all packed sequences that a process holds: of each those that `positions` names.

    Parameters
    ----------
    rank, ranks, causal
        As in `positions`.
    lengths : sequence of int
        Of the whole sequences. A process holds 1 / ranks of each, and its offsets are those of all rows
        divided by ranks.

    Returns
    -------
    ndarray of int64, shape (sum(lengths) / ranks,)
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    each = [start + positions(rank, ranks, int(n), causal) for start, n in zip(starts, lengths, strict=False)]
    return np.concatenate([starts[:0], *each])


def check_parts(queries: int, keys: int) -> None:
    """Refuse parts of different lengths: the sequence attends to itself."""
    if queries != keys:
        raise InvalidArgumentsError(
            f"a process holds {queries} queries and {keys} keys.", hint="parts of one length everywhere"
        )


def halves(length: int) -> tuple[slice, slice]:
    """The two stretches of a part whose attention is causal."""
    if length % 2:
        raise InvalidArgumentsError(
            f"a process holds {length} rows: causal parts are two chunks of equal length.",
            hint="an even number of rows, laid out as cupy_flash.ring.positions says",
        )
    return slice(0, length // 2), slice(length // 2, length)


def pair(rank: int, owner: int, length: int, causal: bool) -> Pair:
    """What process `rank` has to do with the keys of process `owner`."""
    whole = slice(0, length)
    if not causal or rank == owner:
        return Pair(whole, whole, causal)
    early, late = halves(length)
    # Keys of a process nearer to the front: their early half precedes all queries, their late half none.
    # Of one further to the back: both halves precede the late queries, neither the early ones.
    return Pair(whole, early, False) if owner < rank else Pair(late, whole, False)


class Link(Protocol):
    """How an adapter's arrays travel."""

    rank: int
    ranks: int

    def pass_on(self, arrays: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        """Begin to send arrays to the next process; the result waits for those of the one before.

        When either raises, no message of its own is under way any more.
        """

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
        self._under_way: list[Callable[[], tuple[Any, ...]]] = []
        self.error: BaseException | None = None

    def pass_on(self, arrays: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        """As that of the link."""
        arriving = self._link.pass_on(arrays)
        self._under_way.append(arriving)

        def arrived() -> tuple[Any, ...]:
            self._under_way.remove(arriving)
            return arriving()

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


class _Whole:
    """A part that is of one sequence, or of a batch."""

    def __init__(self, link: Link, length: int, causal: bool, options: dict[str, Any]) -> None:
        if causal and link.ranks > 1:
            halves(length)
        self._length, self._options = length, options

    def pair(self, rank: int, owner: int, causal: bool) -> Pair:
        return pair(rank, owner, self._length, causal)

    def attend(self, todo: Pair, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal=todo.causal, return_lse=True, **self._options)

    def differentiate(self, todo: Pair, arrays: tuple[Any, ...], gradient: dict[str, Any]) -> Gradients[Any]:
        do, q, k, v, o, lse = arrays
        return attention_backward(do, q, k, v, o, lse, causal=todo.causal, **gradient, **self._options)


class _Packed:
    """A part that has its share of several sequences, (rows, heads, head_dim)."""

    def __init__(self, link: Link, cut: Any, q: Any, causal: bool, options: dict[str, Any]) -> None:
        if len(q.shape) != 3:
            raise InvalidArgumentsError(
                f"q has shape {q.shape}.", hint="packed sequences are (rows, heads, head_dim)"
            )
        view = offsets(cut, "cu_seqlens")
        self._longest = longest_length(view, "cu_seqlens", q.shape[0], None)
        starts = view.integers().astype(np.int64)
        self._cuts: dict[bool, Any] = {False: cut}
        if causal:
            lengths = np.diff(starts)
            middles = starts[:-1] + [halves(int(n))[1].start for n in lengths]
            sides = zip((starts[:-1], middles), (middles, starts[1:]), strict=True)
            self._early, self._late = (
                link.beside(np.concatenate([starts[:0], *map(np.arange, *side)]), q) for side in sides
            )
            self._cuts[True] = link.beside((starts // 2).astype(np.int32), q)
        self._options = {name: x for name, x in options.items() if name != "layout"}

    def pair(self, rank: int, owner: int, causal: bool) -> Pair:
        whole = slice(None)
        if not causal or rank == owner:
            return Pair(whole, whole, causal)
        return Pair(whole, self._early, False) if owner < rank else Pair(self._late, whole, False)

    def _how(self, todo: Pair) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Offsets of the queries and keys of a pair, and options."""
        half = [not isinstance(rows, slice) for rows in (todo.queries, todo.keys)]
        q, k = (self._longest >> n for n in half)
        cuts = self._cuts[half[0]], self._cuts[half[1]]
        return cuts, {"max_seqlen_q": q, "max_seqlen_k": k, "causal": todo.causal, **self._options}

    def attend(self, todo: Pair, q: Any, k: Any, v: Any) -> Any:
        (cut_q, cut_k), how = self._how(todo)
        return attention_varlen(q, k, v, cut_q, cut_k, return_lse=True, **how)

    def differentiate(self, todo: Pair, arrays: tuple[Any, ...], gradient: dict[str, Any]) -> Gradients[Any]:
        (cut_q, cut_k), how = self._how(todo)
        do, q, k, v, o, lse = arrays
        return attention_varlen_backward(do, q, k, v, o, lse, cut_q, cut_k, **gradient, **how)


def _checked(
    link: Link,
    direction: str,
    arrays: dict[str, Any],
    causal: bool,
    options: dict[str, Any],
    cut: Any,
) -> tuple[_Whole | _Packed, int]:
    """The parts of a call and their axis of rows; what can be refused is refused before the first message."""
    given = {name: x for name, x in arrays.items() if x is not None}
    problem, _, _ = describe(direction, given, Options(causal=causal, **options), True)
    if problem.of_float8:
        raise UnsupportedError(
            f"a ring adds up results in the dtype of q, and {problem.dtype} is too narrow for that.",
            hint="q, k and v times their scales as bfloat16",
        )
    q, axis = arrays["q"], _axis(options, arrays["q"])
    length = q.shape[axis]
    check_parts(length, arrays["k"].shape[axis])
    if cut is None:
        return _Whole(link, length, causal, options), axis
    return _Packed(link, cut, q, causal, options), axis


def _at(rows: Any, axis: int) -> tuple[Any, ...]:
    """The index of rows along an axis that is counted from the end."""
    return (..., rows) + (slice(None),) * (-1 - axis)


def _axis(options: dict[str, Any], q: Any) -> int:
    """The axis of rows in q, k, v and o; in lse it is the last."""
    return -3 if options["layout"] == "bshd" and len(q.shape) > 2 else -2


def forward(
    link: Link, q: Any, k: Any, v: Any, causal: bool, options: dict[str, Any], cut: Any = None
) -> tuple[Any, Any]:
    """O and LSE of this process's queries over everybody's keys.

    Parameters
    ----------
    link : Link
    q, k, v : array
        This process's parts, of equal lengths everywhere.
    causal : bool
    options : dict
        scale, softcap, layout and precision of `attention`.
    cut : array of int32, optional
        Offsets of this process's rows of packed sequences; layout is then "bshd".
    """
    parts, axis = _checked(link, "forward", {"q": q, "k": k, "v": v}, causal, options, cut)
    o: Any = None
    lse: Any = None

    def add(todo: Pair, keys: tuple[Any, Any]) -> None:
        nonlocal o, lse
        mine, theirs = _at(todo.queries, axis), _at(todo.keys, axis)
        part, part_lse = parts.attend(todo, q[mine], *(x[theirs] for x in keys))
        part = link.wide(part)
        if o is None:
            o, lse = part, part_lse
        else:
            of_lse = _at(todo.queries, -1)
            o[mine], lse[of_lse] = merge(o[mine], lse[of_lse], part, part_lse, layout=options["layout"])

    keys: tuple[Any, ...] = k, v
    with _Round(link) as messages:
        for step in range(link.ranks):
            arriving = messages.pass_on(keys) if step + 1 < link.ranks else None
            todo = parts.pair(link.rank, (link.rank - step) % link.ranks, causal)
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
) -> Gradients[Any]:
    """Gradients of this process's q, k and v; those of k and v travel with them and come home at the end.

    With the LSE of the whole sequence each pair of parts gives its share of the gradients exactly. A process
    that cannot add its share adds NaN, and raises: the others get no sum in which it is missing.
    """
    arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse}
    parts, axis = _checked(link, "backward", arrays, causal, options, cut)
    dq = link.wide(q)
    dq[...] = 0
    sums: tuple[Any, ...] = (link.wide(k), link.wide(v))
    for x in sums:
        x[...] = 0
    shares: tuple[Any, ...] = ()

    def differentiate(todo: Pair, keys: tuple[Any, Any]) -> None:
        nonlocal shares
        mine, theirs, of_lse = _at(todo.queries, axis), _at(todo.keys, axis), _at(todo.queries, -1)
        given = do[mine], q[mine], *(x[theirs] for x in keys), o[mine], lse[of_lse]
        gradient = {"dlse": None if dlse is None else dlse[of_lse]}
        grads = parts.differentiate(todo, given, gradient)
        dq[mine] += grads.dq
        shares = grads.dk, grads.dv

    def add(todo: Pair) -> None:
        for total, share in zip(sums, shares, strict=True):
            total[_at(todo.keys, axis)] += share

    keys: tuple[Any, ...] = k, v
    returning: Callable[[], tuple[Any, ...]] | None = None
    with _Round(link) as messages:
        for step in range(link.ranks):
            arriving = messages.pass_on(keys) if step + 1 < link.ranks else None
            todo = parts.pair(link.rank, (link.rank - step) % link.ranks, causal)
            messages.work(functools.partial(differentiate, todo, keys))
            if returning is not None:
                sums = returning()
            messages.work(functools.partial(add, todo))
            if messages.error is not None:
                for x in sums:
                    x[...] = np.nan
            if link.ranks > 1:
                returning = messages.pass_on(sums)
            if arriving is not None:
                keys = arriving()
        if returning is not None:
            sums = returning()
    dk, dv = (link.narrow(x, like) for x, like in zip(sums, (k, v), strict=True))
    return Gradients(link.narrow(dq, q), dk, dv)
