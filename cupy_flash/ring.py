"""Attention over a sequence that several processes hold in parts: keys go round a ring, results are merged.

Every process keeps its queries and sees the keys of all others pass by, one process's part at a time; the
results over those parts are united by `merge` [1]_. Causal attention would leave the first process idle most
of the time if each held one stretch of the sequence [2]_. Instead it is cut into two stretches per process,
and process r of n holds the r-th from the front and the r-th from the back, known as zigzag: every step is
then half a square for everybody.

This module is the schedule and the loop; how arrays travel is the business of the adapters,
`cupy_flash.torch`, `cupy_flash.jax` and `cupy_flash.mpi`.

.. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
.. [2] W. Brandon et al., "Striped Attention", arXiv:2311.09431, which deals out single rows instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from .api import Gradients, attention, attention_backward
from .call.options import Options
from .call.problem import describe
from .errors import InvalidArguments, Unsupported
from .merge import merge

__all__ = ["Link", "Pair", "backward", "check_parts", "forward", "halves", "pair", "positions"]


class Pair(NamedTuple):
    """Which of a process's queries see which of the keys that pass by.

    Attributes
    ----------
    queries, keys : slice
        Rows of the parts.
    causal : bool
        Row i sees rows up to i only.
    """

    queries: slice
    keys: slice
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
    InvalidArguments
        The length is no such multiple.
    """
    stretches = 2 * ranks if causal else ranks
    if seqlen % stretches:
        raise InvalidArguments(
            f"a sequence of {seqlen} is not cut evenly into {stretches} stretches.",
            hint=f"padding to {-(-seqlen // stretches) * stretches}",
        )
    rows = np.arange(seqlen).reshape(stretches, -1)
    return np.concatenate((rows[rank], rows[-1 - rank])) if causal else rows[rank]


def check_parts(queries: int, keys: int) -> None:
    """Refuse parts of different lengths: the sequence attends to itself."""
    if queries != keys:
        raise InvalidArguments(
            f"a process holds {queries} queries and {keys} keys.", hint="parts of one length everywhere"
        )


def halves(length: int) -> tuple[slice, slice]:
    """The two stretches of a part whose attention is causal."""
    if length % 2:
        raise InvalidArguments(
            f"a process holds {length} rows: causal parts are two stretches of equal length.",
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
        """Begin to send arrays to the next process; the result waits for those of the one before."""

    def wide(self, x: Any) -> Any:
        """A copy, float64 if x is, else float32, to add up in."""

    def narrow(self, x: Any, like: Any) -> Any:
        """X in another array's dtype."""


def _rows(x: Any, rows: slice, axis: int) -> Any:
    return x[(..., rows) + (slice(None),) * (-1 - axis)]


def _axis(options: dict[str, Any], q: Any) -> int:
    """The axis of rows in q, k, v and o; in lse it is the last."""
    return -3 if options["layout"] == "bshd" and len(q.shape) > 2 else -2


def forward(link: Link, q: Any, k: Any, v: Any, causal: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    """O and LSE of this process's queries over everybody's keys.

    Parameters
    ----------
    link : Link
    q, k, v : array
        This process's parts, of equal lengths everywhere.
    causal : bool
    options : dict
        scale, softcap, layout and precision of `attention`.
    """
    # Whatever can be refused is refused before the first message.
    problem, _, _ = describe("forward", {"q": q, "k": k, "v": v}, Options(causal=causal, **options))
    if problem.of_float8:
        raise Unsupported(
            f"a ring adds up results in the dtype of q, and {problem.dtype} is too narrow for that.",
            hint="q, k and v times their scales as bfloat16",
        )
    axis = _axis(options, q)
    length = q.shape[axis]
    check_parts(length, k.shape[axis])
    o = lse = None
    for step in range(link.ranks):
        arriving = link.pass_on((k, v)) if step + 1 < link.ranks else None
        todo = pair(link.rank, (link.rank - step) % link.ranks, length, causal)
        part, part_lse = attention(
            _rows(q, todo.queries, axis), _rows(k, todo.keys, axis), _rows(v, todo.keys, axis),
            causal=todo.causal, return_lse=True, **options,
        )  # fmt: skip
        part = link.wide(part)
        if o is None:
            o, lse = part, part_lse
        else:
            here, here_lse = _rows(o, todo.queries, axis), _rows(lse, todo.queries, -1)
            here[...], here_lse[...] = merge(here, here_lse, part, part_lse, layout=options["layout"])
        if arriving is not None:
            k, v = arriving()
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
    deterministic: bool,
    options: dict[str, Any],
) -> Gradients[Any]:
    """Gradients of this process's q, k and v; those of k and v travel with them and come home at the end.

    With the LSE of the whole sequence each pair of parts gives its share of the gradients exactly.
    """
    axis = _axis(options, q)
    length = q.shape[axis]
    home, dq = (k, v), link.wide(q)
    dq[...] = 0
    sums: tuple[Any, ...] = (link.wide(k), link.wide(v))
    for x in sums:
        x[...] = 0
    returning: Callable[[], tuple[Any, ...]] | None = None
    for step in range(link.ranks):
        arriving = link.pass_on((k, v)) if step + 1 < link.ranks else None
        todo = pair(link.rank, (link.rank - step) % link.ranks, length, causal)
        mine, theirs = partial(_rows, rows=todo.queries, axis=axis), partial(_rows, rows=todo.keys, axis=axis)
        grads = attention_backward(
            mine(do), mine(q), theirs(k), theirs(v), mine(o), _rows(lse, todo.queries, -1),
            dlse=None if dlse is None else _rows(dlse, todo.queries, -1), causal=todo.causal,
            deterministic=deterministic, **options,
        )  # fmt: skip
        _add(dq, grads.dq, todo.queries, axis)
        if returning is not None:
            sums = returning()
        for total, share in zip(sums, (grads.dk, grads.dv), strict=True):
            _add(total, share, todo.keys, axis)
        if link.ranks > 1:
            returning = link.pass_on(sums)
        if arriving is not None:
            k, v = arriving()
    if returning is not None:
        sums = returning()
    dk, dv = (link.narrow(x, like) for x, like in zip(sums, home, strict=True))
    return Gradients(link.narrow(dq, q), dk, dv)


def _add(total: Any, share: Any, rows: slice, axis: int) -> None:
    part = _rows(total, rows, axis)
    part += share
