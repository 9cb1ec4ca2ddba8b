"""How a sequence lies in parts on several processes, and which keys of others the queries of a part see.

Causal attention would leave the first process idle most of the time if each held one stretch of the sequence
[1]_. Instead it is cut into two stretches per process, and process r of n holds the r-th from the front and
the r-th from the back, known as zigzag: every step is then half a square for everybody. Of packed sequences
each is cut so by itself. With a sliding window contiguous parts are as even, and see fewer others.

.. [1] W. Brandon et al., "Striped Attention", arXiv:2311.09431, which deals out single rows instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from ..api import Gradients
from ..call.blocks import PARTIAL, SIZES, BlockMask
from ..call.checks import flag, integer, one_of
from ..call.masks import Band, resolve_band
from ..call.offsets import longest_length, offsets
from ..errors import InvalidArgumentsError
from .group import dropping
from .partial import attention, attention_backward, attention_varlen, attention_varlen_backward

__all__ = [
    "Packed",
    "Pair",
    "Rows",
    "Split",
    "Whole",
    "block_rows",
    "blocks_of_rows",
    "check_parts",
    "halves",
    "lengths_of",
    "order_of",
    "packed_halves",
    "packed_positions",
    "packed_starts",
    "packed_stretches",
    "pair",
    "positions",
    "stretches",
]

_ORDERS = ("zigzag", "contiguous")


class Pair(NamedTuple):
    """Which of a process's queries see which of the keys that pass by.

    Attributes
    ----------
    queries, keys : slice, or array of int
        Rows of the parts.
    causal : bool
        Row i sees rows up to i only.
    window, align
        Where the queries see some of the keys, as in `attention`.
    number : int
        Of the pair of processes.
    """

    queries: Any
    keys: Any
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: int | None = None
    number: int = 0


def stretches(rank: int, ranks: int, seqlen: int, zigzag: bool) -> tuple[range, ...]:
    """Rows of the whole sequence that a process holds: one stretch, or two of a zigzag.

    All stretches have one length but for the last ones, which are shorter, or empty.
    """
    count = 2 * ranks if zigzag else ranks
    length = -(-seqlen // count)
    numbers = (rank, count - 1 - rank) if zigzag else (rank,)
    return tuple(range(min(n * length, seqlen), min((n + 1) * length, seqlen)) for n in numbers)


def positions(
    rank: int,
    ranks: int,
    seqlen: int,
    causal: bool,
    *,
    parts: Literal["zigzag", "contiguous"] | None = None,
) -> np.ndarray[Any, Any]:
    """Rows of the whole sequence that a process holds, in their order.

    Parameters
    ----------
    rank, ranks : int
        Which process of how many.
    seqlen : int
        Of the whole sequence. If it is no multiple of ranks, of 2 * ranks in a zigzag, processes hold
        different numbers of rows, and ``ring_attention`` needs its ``seqlen``.
    causal : bool
        Decides the default of parts.
    parts : {"zigzag", "contiguous"}, optional
        Two stretches, from the front and from the back, or one. Default: zigzag if causal.

    Returns
    -------
    ndarray of int64

    Raises
    ------
    InvalidArgumentsError
        There is no such process or length.
    """
    _check_rank(rank, ranks)
    length = integer(seqlen)
    if length is None or length < 0:
        raise InvalidArgumentsError(f"seqlen is {seqlen!r}.", hint="an integer, at least 0")
    zigzag = order_of(parts, flag(causal, "causal")) == "zigzag"
    return _rows_of(stretches(rank, ranks, length, zigzag))


def _check_rank(rank: Any, ranks: Any) -> None:
    """Refuse what is no process of so many."""
    if (count := integer(ranks)) is None or count < 1:
        raise InvalidArgumentsError(f"ranks is {ranks!r}.", hint="the number of processes, at least 1")
    if (number := integer(rank)) is None or not 0 <= number < count:
        raise InvalidArgumentsError(
            f"rank is {rank!r}, and there are {count} processes.",
            hint=f"a rank of the group, from 0 to {count - 1}; a process outside of it has none",
        )


def order_of(parts: Any, causal: bool) -> str:
    """How a sequence is cut into parts: "zigzag" or "contiguous"."""
    if parts is None:
        return "zigzag" if causal else "contiguous"
    if not one_of(parts, _ORDERS):
        raise InvalidArgumentsError(f"parts is {parts!r}.", hint='parts="zigzag" or parts="contiguous"')
    return str(parts)


def packed_positions(rank: int, ranks: int, lengths: Any, causal: bool) -> np.ndarray[Any, Any]:
    """Rows of all packed sequences that a process holds: of each those that `positions` names.

    Parameters
    ----------
    rank, ranks, causal
        As in `positions`.
    lengths : sequence of int
        Of the whole sequences, multiples of ranks, of 2 * ranks if causal. A process holds 1 / ranks of each,
        and its offsets are those of all rows divided by ranks.

    Returns
    -------
    ndarray of int64, shape (sum(lengths) / ranks,)

    Raises
    ------
    InvalidArgumentsError
        A length is no such multiple, or there is no such process.
    """
    _check_rank(rank, ranks)
    count = 2 * ranks if causal else ranks
    for n in lengths:
        if n % count:
            raise InvalidArgumentsError(
                f"a sequence of {n} does not split evenly into {count} chunks.",
                hint=f"padding to {-(-n // count) * count}",
            )
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
            hint="an even number of rows, laid out as cupy_flash.parallel.positions says",
        )
    return slice(0, length // 2), slice(length // 2, length)


def pair(mine: tuple[range, ...], theirs: tuple[range, ...], band: Band) -> Pair | None:
    """What the queries of a part have to do with the keys of another one; None: nothing.

    Parameters
    ----------
    mine, theirs : tuple of range
        Rows of the queries and of the keys: of one stretch each, or of two if the parts are a zigzag, whose
        band is causal, or open.
    band : Band
        Of the whole sequence.
    """
    whole = slice(None)
    if band.open:
        return Pair(whole, whole) if sum(map(len, mine)) and sum(map(len, theirs)) else None
    if len(mine) == 2:
        if mine == theirs:
            return Pair(whole, whole, causal=True)
        # Keys of a process nearer to the front: their early half precedes all queries, their late half none.
        # Of one further to the back: both halves precede the late queries, neither the early ones.
        if theirs[0].start < mine[0].start:
            return Pair(whole, slice(0, len(theirs[0])))
        return Pair(slice(len(mine[0]), None), whole)
    (queries,), (keys,) = mine, theirs
    if not queries or not keys:
        return None
    offset = band.offset + queries.start - keys.start
    # How far keys lie behind the positions of queries: from the first key of the last query on.
    lowest, highest = 1 - len(queries) - offset, len(keys) - 1 - offset
    left, right = (math.inf if side is None else side for side in (band.left, band.right))
    if highest < -left or lowest > right:
        return None
    if -left <= lowest and highest <= right:
        return Pair(whole, whole)
    return Pair(whole, whole, window=(band.left, band.right), align=offset)


class Split:
    """How one sequence, or those of a batch, are split over processes.

    Attributes
    ----------
    order : {"zigzag", "contiguous"}
    lengths : (int, int)
        Queries and keys of the whole.
    queries, keys : list of tuple of range
        Rows that each process holds.
    """

    def __init__(self, rank: int, ranks: int, rows: tuple[int, int], causal: bool, parts: Any, seqlen: Any):
        self.order = order_of(parts, causal)
        self.lengths = (rows[0] * ranks, rows[1] * ranks) if seqlen is None else lengths_of(seqlen)
        if self.order == "zigzag" and seqlen is None and ranks > 1:
            for held in rows:
                halves(held)
        self.queries, self.keys = (
            [stretches(r, ranks, n, self.order == "zigzag") for r in range(ranks)] for n in self.lengths
        )
        for what, held_by, n, length in zip(
            ("queries", "keys"), (self.queries, self.keys), rows, self.lengths, strict=True
        ):
            if n != (right := sum(map(len, held_by[rank]))):
                raise InvalidArgumentsError(
                    f"process {rank} holds {n} {what}; of {length} in {self.order} parts it holds {right}.",
                    hint="the rows that cupy_flash.parallel.positions names",
                )


class Rows:
    """Where the rows that processes hold lie in the whole.

    Parameters
    ----------
    held : list of tuple of range
        Of each process.
    beside : callable
        Makes of integers an array that indexes those of the caller.

    Attributes
    ----------
    total : int
    counts : list of int
        Rows of each process.
    places : list of (slice or array)
        Their indices.
    """

    def __init__(self, held: list[tuple[range, ...]], beside: Callable[[np.ndarray[Any, Any]], Any]):
        self.counts = [sum(map(len, x)) for x in held]
        self.total = sum(self.counts)
        self.places = [slice(x[0].start, x[0].stop) if len(x) == 1 else beside(_rows_of(x)) for x in held]


def _rows_of(held: tuple[range, ...]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.arange(0), *(np.arange(x.start, x.stop) for x in held)])


class Whole:
    """Parts of one sequence, or of a batch."""

    def __init__(self, rank: int, ranks: int, rows: tuple[int, int], causal: bool, options: dict[str, Any]):
        self._rank, self._ranks = rank, ranks
        given = {name: x for name, x in options.items() if name != "schedule"}
        parts, seqlen, window, align = (given.pop(name) for name in ("parts", "seqlen", "window", "align"))
        self._options = given
        split = Split(rank, ranks, rows, causal, parts, seqlen)
        self._band = resolve_band(causal, window, align, False, *split.lengths)
        _check_order(split.order, parts, causal, self._band, split.lengths)
        self._queries, self._keys = split.queries, split.keys

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """How far the keys have come which some process has something to do with, its own first."""
        everyone = range(self._ranks)
        return tuple(
            step
            for step in everyone
            if step == 0 or any(self._pair(r, (r - step) % self._ranks) is not None for r in everyone)
        )

    def rows(self, owner: int) -> int:
        """Keys of a process."""
        return sum(map(len, self._keys[owner]))

    @property
    def most_rows(self) -> int:
        """Keys of the process that has most."""
        return max(self.rows(owner) for owner in range(self._ranks))

    def pair(self, owner: int) -> Pair | None:
        """What this process has to do with the keys of another; with its own always something."""
        found = self._pair(self._rank, owner)
        if found is None and owner == self._rank:
            found = Pair(slice(None), slice(0, 0))
        return found and found._replace(number=self._rank * self._ranks + owner)

    def _pair(self, rank: int, owner: int) -> Pair | None:
        return pair(self._queries[rank], self._keys[owner], self._band)

    def attend(self, todo: Pair, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        """O and LSE of a pair."""
        return attention(q, k, v, sinks=sinks, **self._how(todo))

    def differentiate(self, todo: Pair, arrays: tuple[Any, ...], sinks: Any, dlse: Any) -> Gradients[Any]:
        """Gradients of a pair."""
        do, q, k, v, o, lse = arrays
        return attention_backward(do, q, k, v, o, lse, dlse=dlse, sinks=sinks, **self._how(todo))

    def _how(self, todo: Pair) -> dict[str, Any]:
        band = {"causal": todo.causal, "window": todo.window, "align": todo.align}
        return {**band, **dropping(self._options, todo.number)}


def block_rows(mask: BlockMask, held: list[tuple[range, ...]], queries: int) -> int:
    """Queries of the blocks that a mask of the whole is cut into, so that each stretch begins with one."""
    size = int(mask.bits.shape[-2])
    if mask.table.shape[-2] != -(-queries // size):
        raise InvalidArgumentsError(
            f"mask.table has shape {tuple(mask.table.shape)} for {queries} queries in blocks of {size}.",
            hint="the mask of the whole sequence, in every process",
        )
    found = math.gcd(size, *(rows.start for part in held for rows in part if rows))
    if found not in SIZES:
        raise InvalidArgumentsError(
            f"stretches of queries begin at multiples of {found}: a BlockMask is not cut there.",
            hint=f'schedule="alltoall"; or stretches of a multiple of {SIZES[0]} rows, two in a zigzag part',
        )
    return found


def blocks_of_rows(mask: BlockMask, numbers: Any, size: int) -> BlockMask:
    """Some of the blocks of so many queries that a mask is cut into, by their numbers."""
    each = mask.bits.shape[-2] // size
    table = mask.table[..., numbers // each, :]
    inner = (numbers % each)[:, None]
    table = table + (table >= PARTIAL) * ((table - PARTIAL) * (each - 1) + inner)
    return BlockMask(table, mask.bits.reshape(-1, size, mask.bits.shape[-1]))


def lengths_of(seqlen: Any) -> tuple[int, int]:
    """Queries and keys of the whole sequence."""
    both = seqlen if isinstance(seqlen, (tuple, list)) and len(seqlen) == 2 else (seqlen, seqlen)
    queries, keys = (integer(n) for n in both)
    if queries is None or keys is None or min(queries, keys) < 0:
        raise InvalidArgumentsError(
            f"seqlen is {seqlen!r}.", hint="the length of the whole sequence; or those of queries and keys"
        )
    return queries, keys


def _check_order(order: str, parts: Any, causal: bool, band: Band, lengths: tuple[int, int]) -> None:
    """Refuse an order of parts that does not fit, and one that would be a guess."""
    if order == "contiguous" or band.open:
        return
    if not causal:
        raise InvalidArgumentsError(
            'parts="zigzag" with a window is for causal.', hint='parts="contiguous", or causal=True'
        )
    if band != (0, None, 0) or lengths[0] != lengths[1]:
        counts = f"{lengths[0]} queries and {lengths[1]} keys"
        what = "a window" if band.left is not None else counts if len({*lengths}) > 1 else "an offset"
        takes = "takes contiguous parts, which must be named" if parts is None else "takes no zigzag parts"
        raise InvalidArgumentsError(
            f"causal with {what} {takes}.",
            hint='parts="contiguous", here and of cupy_flash.parallel.positions',
        )


def packed_starts(cut: Any, q: Any, causal: bool) -> tuple[np.ndarray[Any, Any], int]:
    """Where packed sequences begin in a part, as integers, and the longest of them there."""
    if len(q.shape) != 3:
        raise InvalidArgumentsError(
            f"q has shape {q.shape}.", hint="packed sequences are (rows, heads, head_dim)"
        )
    view = offsets(cut, "cu_seqlens")
    longest = longest_length(view, "cu_seqlens", q.shape[0], None)
    starts = view.integers().astype(np.int64)
    if causal:
        for n in np.diff(starts):
            halves(int(n))
    return starts, longest


def packed_halves(starts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of a part that are of the early stretches of its packed sequences, and of their late ones."""
    middles = (starts[:-1] + starts[1:]) // 2
    early, late = ((starts[:-1], middles), (middles, starts[1:]))
    return _rows_between(*early), _rows_between(*late)


def _rows_between(starts: Any, stops: Any) -> np.ndarray[Any, Any]:
    return _rows_of(tuple(map(range, starts, stops)))


def packed_stretches(ranks: int, starts: np.ndarray[Any, Any], causal: bool) -> list[tuple[range, ...]]:
    """Rows of all whole packed sequences that each process holds, from where they begin in a part."""
    return [
        tuple(
            range(start * ranks + rows.start, start * ranks + rows.stop)
            for start, n in zip(starts.tolist(), np.diff(starts).tolist(), strict=False)
            for rows in stretches(rank, ranks, n * ranks, causal)
        )
        for rank in range(ranks)
    ]


class Packed:
    """Parts that have their share of several sequences, (rows, heads, head_dim)."""

    def __init__(
        self, rank: int, ranks: int, cut: Any, q: Any, causal: bool, options: dict[str, Any], beside: Any
    ):
        self._rank, self._ranks, self._causal = rank, ranks, causal
        self.steps, self.most_rows = tuple(range(ranks)), int(q.shape[0])
        self.starts, self._longest = starts, _ = packed_starts(cut, q, causal)
        self._cuts: dict[bool, Any] = {False: cut}
        if causal:
            self._early, self._late = (beside(rows, q) for rows in packed_halves(starts))
            self._cuts[True] = beside((starts // 2).astype(np.int32), q)
        unused = ("layout", "parts", "seqlen", "window", "align", "schedule", "mask")
        self._options = {name: x for name, x in options.items() if name not in unused}

    def rows(self, owner: int) -> int:  # noqa: ARG002
        """As of `Whole`: the same of all."""
        return self.most_rows

    def pair(self, owner: int) -> Pair | None:
        """As of `Whole`."""
        whole = slice(None)
        if not self._causal or self._rank == owner:
            found = Pair(whole, whole, self._causal)
        else:
            found = Pair(whole, self._early) if owner < self._rank else Pair(self._late, whole)
        return found._replace(number=self._rank * self._ranks + owner)

    def _how(self, todo: Pair) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Offsets of the queries and keys of a pair, and options."""
        half = [not isinstance(rows, slice) for rows in (todo.queries, todo.keys)]
        q, k = (self._longest >> n for n in half)
        cuts = self._cuts[half[0]], self._cuts[half[1]]
        how = {"max_seqlen_q": q, "max_seqlen_k": k, "causal": todo.causal}
        return cuts, {**how, **dropping(self._options, todo.number)}

    def attend(self, todo: Pair, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        """As of `Whole`."""
        (cut_q, cut_k), how = self._how(todo)
        return attention_varlen(q, k, v, cut_q, cut_k, sinks=sinks, **how)

    def differentiate(self, todo: Pair, arrays: tuple[Any, ...], sinks: Any, dlse: Any) -> Gradients[Any]:
        """As of `Whole`."""
        (cut_q, cut_k), how = self._how(todo)
        do, q, k, v, o, lse = arrays
        return attention_varlen_backward(do, q, k, v, o, lse, cut_q, cut_k, dlse=dlse, sinks=sinks, **how)
