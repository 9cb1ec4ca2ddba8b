"""Attention over a sequence in parts by a ring: keys and values circulate, and results are merged.

Every process keeps its queries and receives the keys of the others, one part at a time; `merge` combines the
results over the parts [1]_. Only the heads of k and v are sent, however many heads of q share them, and only
as far as a process attends to them.

This module is the loop. `parts` defines how a sequence is split, `agreement` what is compared before the
first message, `alltoall` and `allgather` are the other schedules. The adapters `cupy_flash.torch` and
`cupy_flash.parallel.mpi` send the arrays; `cupy_flash.jax` has the loop in a program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..api import Gradients
from ..merge import merge
from .group import Link, LocalCall, Round, at, with_length
from .parts import DenseParts, PackedParts, Pair

__all__ = ["backward", "checked", "forward"]


class _Call(NamedTuple):
    """A checked call.

    Attributes
    ----------
    parts : DenseParts or PackedParts
    axis : int
        Axis of rows in q, k, v and o, from the end.
    terms : dict
        Arguments that must be the same in all processes, by name.
    """

    parts: DenseParts | PackedParts
    axis: int
    terms: dict[str, Any]


def checked(local_call: LocalCall) -> _Call:
    """Check a call and return its parts; all refusals happen here, before the first message."""
    link, arrays, causal, options, cu_seqlens, _ = local_call
    terms = dict(local_call.terms)
    q, axis = arrays["q"], local_call.row_axis
    plain = {name: x for name, x in options.items() if name != "sinks"}
    parts: DenseParts | PackedParts
    if cu_seqlens is None:
        parts = DenseParts(link.rank, link.ranks, (q.shape[axis], arrays["k"].shape[axis]), causal, plain)
    else:
        parts = PackedParts(link.rank, link.ranks, cu_seqlens, q, causal, plain, link.index_array)
        terms["cu_seqlens"] = parts.starts.tolist()
    return _Call(parts, axis, terms)


class _Buffers:
    """Double buffers for received arrays: one is sent while the other receives.

    why allocated before the first message: a process without enough memory then leaves no other waiting.
    """

    def __init__(
        self, link: Link, call: _Call, like: tuple[Any, ...], turns: int, wide: bool = False
    ) -> None:
        self._call, self._like = call, like
        most = call.parts.most_rows
        counts = [(x, math.prod(with_length(x.shape, call.axis, most))) for x in like]
        self._each = [[link.reserve(x, n, wide) for x, n in counts] for _ in range(min(turns, 2))]

    def of(self, owner: int, turn: int) -> tuple[Any, ...]:
        """The buffers for the arrays of a process, in this turn."""
        parts, axis, _ = self._call
        shapes = (with_length(x.shape, axis, parts.rows(owner)) for x in self._like)
        return tuple(
            flat[: math.prod(shape)].reshape(shape)
            for flat, shape in zip(self._each[turn % 2], shapes, strict=True)
        )


def forward(local_call: LocalCall) -> tuple[Any, Any]:
    """O and LSE of this process's queries over the keys of all processes."""
    link, options = local_call.link, local_call.options
    q, k, v = local_call.arrays.values()
    with link.agreement.refusals():
        call = checked(local_call)
        keys = tuple(link.contiguous(x) for x in (k, v))
        room = _Buffers(link, call, keys, len(call.parts.steps) - 1)
    link.agreement.reach(call.terms)
    parts, axis, _ = call
    steps = parts.steps
    o: Any = None
    lse: Any = None

    def add(todo: Pair, keys: tuple[Any, ...]) -> None:
        nonlocal o, lse
        mine, theirs = at(todo.queries, axis), at(todo.keys, axis)
        # why: sinks must count once, so only the own part has them.
        sinks = options["sinks"] if o is None else None
        k, v = (x[theirs] for x in keys)
        part, part_lse = parts.attend(todo, q[mine], k, v, sinks)
        part = link.upcast(part)
        if o is None:
            o, lse = part, part_lse
        else:
            of_lse = at(todo.queries, -1)
            o[mine], lse[of_lse] = merge(o[mine], lse[of_lse], part, part_lse, layout=options["layout"])

    with Round(link) as messages:
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
    return link.cast_like(o, q), lse


def backward(local_call: LocalCall, wanted: tuple[bool, bool] = (True, True)) -> Gradients[Any]:
    """Gradients of this process's q, k and v; gradients of k and v travel with the keys, and home at the end.

    With the LSE of the whole sequence, the gradients of each pair of parts are exact summands. A process that
    cannot add its own adds NaN and raises, so that no other process gets an incomplete sum.

    `wanted` says whether any process needs the gradients of k, and of v; others are not sent, and are None.
    """
    link, options = local_call.link, local_call.options
    do, q, k, v, o, lse, dlse = local_call.arrays.values()
    with link.agreement.refusals():
        call = checked(local_call)
        keys = tuple(link.contiguous(x) for x in (k, v))
        room = _Buffers(link, call, keys, len(call.parts.steps) - 1)
        home = tuple(x for x, asked_for in zip((k, v), wanted, strict=True) if asked_for)
        room_of_sums = _Buffers(link, call, home, len(call.parts.steps), wide=True)
        dq, sums = link.upcast(q), room_of_sums.of(link.rank, 0)
        for x in (dq, *sums):
            x[...] = 0
    link.agreement.reach(call.terms)
    parts, axis, _ = call
    steps = parts.steps
    shares: tuple[Any, ...] = ()
    dsinks: Any = None

    def differentiate(todo: Pair, keys: tuple[Any, ...], sinks: Any) -> None:
        nonlocal shares, dsinks
        mine, theirs, of_lse = at(todo.queries, axis), at(todo.keys, axis), at(todo.queries, -1)
        given = do[mine], q[mine], *(x[theirs] for x in keys), o[mine], lse[of_lse]
        grads = parts.differentiate(todo, given, sinks, dlse=None if dlse is None else dlse[of_lse])
        dq[mine] += grads.dq
        shares = tuple(x for x, asked_for in zip((grads.dk, grads.dv), wanted, strict=True) if asked_for)
        dsinks = grads.dsinks if dsinks is None else dsinks

    def add(todo: Pair) -> None:
        for total, share in zip(sums, shares, strict=True):
            total[at(todo.keys, axis)] += share

    returning: Callable[[], tuple[Any, ...]] | None = None
    with Round(link) as messages:
        for turn, step in enumerate(steps):
            arriving = None
            then = steps[turn + 1] if turn + 1 < len(steps) else link.ranks  # the last step returns them home
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
    narrowed = iter([link.cast_like(x, like) for x, like in zip(sums, home, strict=True)])
    dk, dv = (next(narrowed) if asked_for else None for asked_for in wanted)
    return Gradients(link.cast_like(dq, q), dk, dv, dsinks=dsinks)
