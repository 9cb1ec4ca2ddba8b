"""Exchange of rows between all processes: from parts to the whole sequence, and back.

All memory is allocated before the first message, so that a process without enough memory leaves no other
waiting.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .group import Link, Round, at, own_heads, with_length
from .parts import Rows

__all__ = ["ToParts", "ToWhole", "exchange", "room"]


def room(link: Link, like: Any, shape: tuple[int, ...], wide: bool = False) -> Any:
    """Memory for an array of this shape, with the dtype of `like`, or if `wide` of its sums."""
    return link.reserve(like, math.prod(shape), wide).reshape(shape)


class ToWhole:
    """The exchange that assembles the whole from parts, in the order of its rows.

    Parameters
    ----------
    link : Link
    x : array
        This process's part.
    rows : Rows
    axis : int
        Axis of rows, from the end.
    heads : int, optional
        Axis of heads: each process then gets only its own heads. Default: every process gets all.

    Attributes
    ----------
    out, into : list of array
        What this process sends to each, and receives from each.
    whole : array
        The whole array, filled by `arrive`.
    """

    def __init__(self, link: Link, x: Any, rows: Rows, axis: int, heads: int | None = None) -> None:
        self._rows, self._axis = rows, axis
        everyone = range(link.ranks)
        if heads is None:
            self.out = [link.contiguous(x)] * link.ranks
        else:
            shares = (at(own_heads(x.shape[heads], r, link.ranks), heads) for r in everyone)
            self.out = [link.contiguous(x[share]) for share in shares]
        own = self.out[link.rank]
        self.into = [
            own if r == link.rank else room(link, x, with_length(own.shape, axis, rows.counts[r]))
            for r in everyone
        ]
        self.whole = room(link, x, with_length(own.shape, axis, rows.total))

    def arrive(self) -> Any:
        """The whole array, after the messages have arrived."""
        for place, part in zip(self._rows.places, self.into, strict=True):
            self.whole[at(place, self._axis)] = part
        return self.whole


class ToParts:
    """The exchange that returns the rows of a whole array to the processes that hold them.

    Without a call of `fill`, NaN is sent: if this process fails, the others do not get incomplete results.

    Parameters
    ----------
    link : Link
    like : array
        Array with the dtype of the whole, or with `wide` of its sums.
    shape : tuple of int
        Shape of the whole.
    rows, axis, heads
        As in `ToWhole`; without heads, contributions of all processes are summed, in their order.
    wide : bool

    Attributes
    ----------
    out, into : list of array
        As in `ToWhole`.
    """

    def __init__(
        self,
        link: Link,
        like: Any,
        shape: tuple[int, ...],
        rows: Rows,
        axis: int,
        heads: int | None = None,
        wide: bool = False,
    ) -> None:
        self._rows, self._axis, self._heads = rows, axis, heads
        everyone = range(link.ranks)
        self.out = [room(link, like, with_length(shape, axis, rows.counts[r]), wide) for r in everyone]
        for x in self.out:
            x[...] = np.nan
        mine = with_length(shape, axis, rows.counts[link.rank])
        self.into = [self.out[r] if r == link.rank else room(link, like, mine, wide) for r in everyone]
        if heads is not None:
            self._part = room(link, like, with_length(mine, heads, mine[heads] * link.ranks), wide)

    def fill(self, whole: Any) -> None:
        """Copy the rows of the whole into the messages."""
        for place, part in zip(self._rows.places, self.out, strict=True):
            part[...] = whole[at(place, self._axis)]

    def arrive(self) -> Any:
        """The part of this process, after the messages have arrived."""
        if self._heads is None:
            total, *others = self.into
            for other in others:
                total += other
            return total
        heads, ranks = self._part.shape[self._heads], len(self.into)
        for rank, part in enumerate(self.into):
            self._part[at(own_heads(heads, rank, ranks), self._heads)] = part
        return self._part


def exchange(messages: Round, link: Link, journeys: list[Any]) -> None:
    """Send each process its arrays, and wait for those of this process."""
    arriving = []
    for by in range(1, link.ranks) if journeys else ():
        to, source = ((link.rank + n) % link.ranks for n in (by, -by))
        sent, received = tuple(x.out[to] for x in journeys), tuple(x.into[source] for x in journeys)
        arriving.append(messages.pass_on(sent, received, by))
    for arrived in arriving:
        arrived()
