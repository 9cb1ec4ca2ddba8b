"""How a sequence is split into parts over processes, and which keys of other parts its queries attend to.

If each process held one stretch of a causal sequence, the first process would be idle most of the time [1]_.
Instead the sequence is cut into two stretches per process, and process r of n holds the r-th from the front
and the r-th from the back (zigzag), so that every step is half a square for every process. Packed sequences
are each cut so. With a sliding window, contiguous parts are as balanced and need fewer of the other parts.
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
from .group import LocalCall, dropping
from .partial import attention, attention_backward, attention_varlen, attention_varlen_backward

__all__ = [
    "DenseParts",
    "PackedParts",
    "Pair",
    "Rows",
    "Split",
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
    """The queries and keys of one pair of parts that are computed together."""

    # slice, or array of int: rows within the parts.
    queries: Any
    keys: Any
    causal: bool = False  # whether row i attends to rows up to i only
    # Band of the pair, as in `attention`; None without a window.
    window: tuple[int | None, int | None] | None = None
    align: int | None = None
    number: int = 0  # number of the pair of processes


def stretches(rank: int, ranks: int, seqlen: int, zigzag: bool) -> tuple[range, ...]:
    """Rows of the whole sequence that a process holds: one stretch, or two of a zigzag.

    All stretches have the same length, except the last ones, which may be shorter or empty.
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
    """Rows of the whole sequence that a process holds, in order.

    Parameters
    ----------
    rank, ranks : int
        Number of the process, and of processes.
    seqlen : int
        Length of the whole sequence. If it is not a multiple of ranks (in a zigzag, of 2 * ranks), processes
        hold different numbers of rows, and ``ring_attention`` needs its ``seqlen``.
        Decides the default of parts.
    parts : {"zigzag", "contiguous"}, optional
        Two stretches, from the front and from the back, or one. Default: zigzag if causal.

    Returns
    -------
    ndarray of int64

    Raises
    ------
    InvalidArgumentsError
        Invalid rank, ranks or seqlen.
    """
    _check_rank(rank, ranks)
    length = integer(seqlen)
    if length is None or length < 0:
        raise InvalidArgumentsError(f"seqlen is {seqlen!r}.", hint="an integer, at least 0")
    zigzag = order_of(parts, flag(causal, "causal")) == "zigzag"
    return _rows_of(stretches(rank, ranks, length, zigzag))


def _check_rank(rank: Any, ranks: Any) -> None:
    """Refuse an invalid rank or number of processes."""
    if (count := integer(ranks)) is None or count < 1:
        raise InvalidArgumentsError(f"ranks is {ranks!r}.", hint="the number of processes, at least 1")
    if (number := integer(rank)) is None or not 0 <= number < count:
        raise InvalidArgumentsError(
            f"rank is {rank!r}, and there are {count} processes.",
            hint=f"a rank of the group, from 0 to {count - 1}; a process outside of it has none",
        )


def order_of(parts: Any, causal: bool) -> str:
    """The order of parts, "zigzag" or "contiguous"."""
    if parts is None:
        return "zigzag" if causal else "contiguous"
    if not one_of(parts, _ORDERS):
        raise InvalidArgumentsError(f"parts is {parts!r}.", hint='parts="zigzag" or parts="contiguous"')
    return str(parts)


def packed_positions(rank: int, ranks: int, lengths: Any, causal: bool) -> np.ndarray[Any, Any]:
    """Rows of all packed sequences that a process holds: for each sequence those of `positions`.

    Parameters
    ----------
    rank, ranks, causal
        As in `positions`.
    lengths : sequence of int
        Lengths of the whole sequences, multiples of ranks, or of 2 * ranks if causal. A process holds 1 /
        ranks of each, and its offsets are those of all rows divided by ranks.

    Returns
    -------
    ndarray of int64, shape (sum(lengths) / ranks,)

    Raises
    ------
    InvalidArgumentsError
        A length is not such a multiple, or rank or ranks is invalid.
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
    """Refuse a different number of queries and keys, for a sequence that attends to itself."""
    if queries != keys:
        raise InvalidArgumentsError(
            f"a process holds {queries} queries and {keys} keys.", hint="parts of one length everywhere"
        )


def halves(length: int) -> tuple[slice, slice]:
    """The two halves of a zigzag part."""
    if length % 2:
        raise InvalidArgumentsError(
            f"a process holds {length} rows: causal parts are two chunks of equal length.",
            hint="an even number of rows, laid out as cupy_flash.parallel.positions says",
        )
    return slice(0, length // 2), slice(length // 2, length)


def pair(mine: tuple[range, ...], theirs: tuple[range, ...], band: Band) -> Pair | None:
    """The pair to compute for the queries of one part and the keys of another; None if all are masked.

    Parameters
    ----------
    mine, theirs : tuple of range
        Rows of the queries and of the keys: one stretch each, or two in a zigzag, where the band must be
        causal or open.
    band : Band
        Band of the whole sequence.
    """
    whole = slice(None)
    if band.open:
        return Pair(whole, whole) if sum(map(len, mine)) and sum(map(len, theirs)) else None
    if len(mine) == 2:
        if mine == theirs:
            return Pair(whole, whole, causal=True)
        # why: of a process nearer to the front, the early half of the keys precedes all queries and the late
        # half none; of one nearer to the back, both halves precede the late queries and none the early ones.
        if theirs[0].start < mine[0].start:
            return Pair(whole, slice(0, len(theirs[0])))
        return Pair(slice(len(mine[0]), None), whole)
    (queries,), (keys,) = mine, theirs
    if not queries or not keys:
        return None
    offset = band.offset + queries.start - keys.start
    # Key minus query position: from the first key of the last query to the last key of the first one.
    lowest, highest = 1 - len(queries) - offset, len(keys) - 1 - offset
    left, right = (math.inf if side is None else side for side in (band.left, band.right))
    if highest < -left or lowest > right:
        return None
    if -left <= lowest and highest <= right:
        return Pair(whole, whole)
    return Pair(whole, whole, window=(band.left, band.right), align=offset)


class Split:
    """The split of one sequence, or of those of a batch, over processes.

    Attributes
    ----------
    order : {"zigzag", "contiguous"}
    lengths : (int, int)
        Queries and keys of the whole sequence.
    queries, keys : list of tuple of range
        Rows of the whole that each process holds.
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

    @classmethod
    def of(cls, local_call: LocalCall) -> Split:
        """The split of a call that is not packed."""
        link, options = local_call.link, local_call.options
        q, k = (local_call.arrays[name].shape[local_call.row_axis] for name in "qk")
        return cls(link.rank, link.ranks, (q, k), local_call.causal, options["parts"], options["seqlen"])


class Rows:
    """Indices, in the whole sequence, of the rows that each process holds.

    Parameters
    ----------
    held : list of tuple of range
        Rows of each process.
    index_array : callable
        Converts integers to an index array of the caller's library.

    Attributes
    ----------
    total : int
    counts : list of int
        Number of rows per process.
    places : list of (slice or array)
        Indices of the rows of each process.
    """

    def __init__(self, held: list[tuple[range, ...]], index_array: Callable[[np.ndarray[Any, Any]], Any]):
        self.counts = [sum(map(len, x)) for x in held]
        self.total = sum(self.counts)
        self.places = [
            slice(x[0].start, x[0].stop) if len(x) == 1 else index_array(_rows_of(x)) for x in held
        ]


def _rows_of(held: tuple[range, ...]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.arange(0), *(np.arange(x.start, x.stop) for x in held)])


class DenseParts:
    """Parts of one sequence, or of a batch of sequences."""

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
        """The ring distances at which some process has work, the own keys (0) first."""
        everyone = range(self._ranks)
        return tuple(
            step
            for step in everyone
            if step == 0 or any(self._pair(r, (r - step) % self._ranks) is not None for r in everyone)
        )

    def rows(self, owner: int) -> int:
        """Number of keys of a process."""
        return sum(map(len, self._keys[owner]))

    @property
    def most_rows(self) -> int:
        """The largest number of keys of a process."""
        return max(self.rows(owner) for owner in range(self._ranks))

    def pair(self, owner: int) -> Pair | None:
        """The pair of this process's queries and the keys of another; for its own keys never None."""
        found = self._pair(self._rank, owner)
        if found is None and owner == self._rank:
            found = Pair(slice(None), slice(0, 0))
        return found and found._replace(number=self._rank * self._ranks + owner)

    def _pair(self, rank: int, owner: int) -> Pair | None:
        return pair(self._queries[rank], self._keys[owner], self._band)

    def attend(self, todo: Pair, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        """O and LSE of a pair."""
        return attention(q, k, v, sinks=sinks, **self._call_options(todo))

    def differentiate(self, todo: Pair, arrays: tuple[Any, ...], sinks: Any, dlse: Any) -> Gradients[Any]:
        """Gradients of a pair."""
        do, q, k, v, o, lse = arrays
        return attention_backward(do, q, k, v, o, lse, dlse=dlse, sinks=sinks, **self._call_options(todo))

    def _call_options(self, todo: Pair) -> dict[str, Any]:
        band = {"causal": todo.causal, "window": todo.window, "align": todo.align}
        return {**band, **dropping(self._options, todo.number)}


def block_rows(mask: BlockMask, held: list[tuple[range, ...]], queries: int) -> int:
    """Queries per block after cutting a BlockMask of the whole, so that each stretch begins with a block."""
    size = int(mask.bits.shape[-2])
    if mask.table.shape[-2] != -(-queries // size):
        raise InvalidArgumentsError(
            f"mask.table has shape {tuple(mask.table.shape)} for {queries} queries in blocks of {size}.",
            hint="the mask of the whole sequence, in every process",
        )
    found = math.gcd(size, *(rows.start for part in held for rows in part if rows))
    if found not in SIZES:
        raise InvalidArgumentsError(
            f"ranges of queries start at multiples of {found}, which are not block boundaries of the mask.",
            hint=f'schedule="alltoall"; or ranges of a multiple of {SIZES[0]} rows, two in a zigzag part',
        )
    return found


def blocks_of_rows(mask: BlockMask, numbers: Any, size: int) -> BlockMask:
    """A BlockMask of some block rows, by their numbers, after cutting blocks to `size` queries."""
    each = mask.bits.shape[-2] // size
    table = mask.table[..., numbers // each, :]
    inner = (numbers % each)[:, None]
    table = table + (table >= PARTIAL) * ((table - PARTIAL) * (each - 1) + inner)
    return BlockMask(table, mask.bits.reshape(-1, size, mask.bits.shape[-1]))


def lengths_of(seqlen: Any) -> tuple[int, int]:
    """Numbers of queries and keys of the whole sequence."""
    both = seqlen if isinstance(seqlen, (tuple, list)) and len(seqlen) == 2 else (seqlen, seqlen)
    queries, keys = (integer(n) for n in both)
    if queries is None or keys is None or min(queries, keys) < 0:
        raise InvalidArgumentsError(
            f"seqlen is {seqlen!r}.", hint="the length of the whole sequence; or those of queries and keys"
        )
    return queries, keys


def _check_order(order: str, parts: Any, causal: bool, band: Band, lengths: tuple[int, int]) -> None:
    """Refuse an order of parts that does not fit the band, and one that would be a guess."""
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


def packed_starts(cu_seqlens: Any, q: Any, causal: bool) -> tuple[np.ndarray[Any, Any], int]:
    """Offsets of packed sequences in a part, as integers on the host, and their longest length there."""
    if len(q.shape) != 3:
        raise InvalidArgumentsError(
            f"q has shape {q.shape}.", hint="packed sequences are (rows, heads, head_dim)"
        )
    view = offsets(cu_seqlens, "cu_seqlens")
    longest = longest_length(view, "cu_seqlens", q.shape[0], None)
    starts = view.integers().astype(np.int64)
    if causal:
        for n in np.diff(starts):
            halves(int(n))
    return starts, longest


def packed_halves(starts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of a part in the early halves of its packed sequences, and in the late halves."""
    middles = (starts[:-1] + starts[1:]) // 2
    early, late = ((starts[:-1], middles), (middles, starts[1:]))
    return _rows_between(*early), _rows_between(*late)


def _rows_between(starts: Any, stops: Any) -> np.ndarray[Any, Any]:
    return _rows_of(tuple(map(range, starts, stops)))


def packed_stretches(ranks: int, starts: np.ndarray[Any, Any], causal: bool) -> list[tuple[range, ...]]:
    """Rows of the whole packed sequences that each process holds, from the offsets in a part."""
    return [
        tuple(
            range(start * ranks + rows.start, start * ranks + rows.stop)
            for start, n in zip(starts.tolist(), np.diff(starts).tolist(), strict=False)
            for rows in stretches(rank, ranks, n * ranks, causal)
        )
        for rank in range(ranks)
    ]


class PackedParts:
    """Parts of packed sequences, (rows, heads, head_dim)."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        cu_seqlens: Any,
        q: Any,
        causal: bool,
        options: dict[str, Any],
        index_array: Any,
    ):
        self._rank, self._ranks, self._causal = rank, ranks, causal
        self.steps, self.most_rows = tuple(range(ranks)), int(q.shape[0])
        self.starts, self._longest = starts, _ = packed_starts(cu_seqlens, q, causal)
        self._cuts: dict[bool, Any] = {False: cu_seqlens}
        if causal:
            self._early, self._late = (index_array(rows, q) for rows in packed_halves(starts))
            self._cuts[True] = index_array((starts // 2).astype(np.int32), q)
        unused = ("layout", "parts", "seqlen", "window", "align", "schedule", "mask")
        self._options = {name: x for name, x in options.items() if name not in unused}

    def rows(self, owner: int) -> int:  # noqa: ARG002
        """As in `DenseParts`; the same for all processes."""
        return self.most_rows

    def pair(self, owner: int) -> Pair | None:
        """As in `DenseParts`."""
        whole = slice(None)
        if not self._causal or self._rank == owner:
            found = Pair(whole, whole, self._causal)
        else:
            found = Pair(whole, self._early) if owner < self._rank else Pair(self._late, whole)
        return found._replace(number=self._rank * self._ranks + owner)

    def _call_options(self, todo: Pair) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Offsets of the queries and keys of a pair, and options."""
        half = [not isinstance(rows, slice) for rows in (todo.queries, todo.keys)]
        q, k = (self._longest >> n for n in half)
        cuts = self._cuts[half[0]], self._cuts[half[1]]
        how = {"max_seqlen_q": q, "max_seqlen_k": k, "causal": todo.causal}
        return cuts, {**how, **dropping(self._options, todo.number)}

    def attend(self, todo: Pair, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        """As in `DenseParts`."""
        (cut_q, cut_k), how = self._call_options(todo)
        return attention_varlen(q, k, v, cut_q, cut_k, sinks=sinks, **how)

    def differentiate(self, todo: Pair, arrays: tuple[Any, ...], sinks: Any, dlse: Any) -> Gradients[Any]:
        """As in `DenseParts`."""
        (cut_q, cut_k), how = self._call_options(todo)
        do, q, k, v, o, lse = arrays
        return attention_varlen_backward(do, q, k, v, o, lse, cut_q, cut_k, dlse=dlse, sinks=sinks, **how)
