"""Attention over a sequence in parts by all-gather: every process gets all keys for its queries.

Each stretch of its queries is one ordinary call over the keys that they may attend to. Gradients of keys are
sent to the process that holds the keys and added there, in the order of processes, so that their bits are the
same on every run. Needs memory for all keys and values, and for their gradients in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..api import Gradients, attention
from ..call.blocks import BlockMask
from ..call.compound import Spans, masks_of
from ..call.describe import describe
from ..call.given import split
from ..call.masks import resolve_band
from ..errors import InvalidArgumentsError
from ..varlen import attention_varlen
from .exchange import ToParts, ToWhole, exchange, room
from .group import Link, LocalCall, Round, at, dropping
from .partial import attention_backward, attention_varlen_backward
from .parts import Rows, Split, block_rows, blocks_of_rows, packed_halves, packed_starts, packed_stretches

__all__ = ["backward", "check_blocks", "forward"]


class _Stretch(NamedTuple):
    """Queries of this process, the keys that they may attend to, and the arguments of their call."""

    # slice, or array of int: rows of the part, and of the whole sequence.
    queries: Any
    keys: slice
    call_options: dict[str, Any]
    cuts: tuple[Any, ...] = ()  # offsets of packed queries and of keys; empty if not packed


class _Call:
    """A checked call: the exchange of keys and values, and the stretches to compute afterwards."""

    def __init__(self, local_call: LocalCall) -> None:
        link, arrays, causal, options, cu_seqlens, _ = local_call
        self.terms = dict(local_call.terms)
        q, self.axis = arrays["q"], local_call.row_axis
        call_options = {name: x for name, x in options.items() if name not in ("parts", "seqlen", "schedule")}
        if cu_seqlens is None:
            whole = Split.of(local_call)
            keys = whole.keys
            self.stretches = _stretches(
                whole, link.rank, causal, call_options, lambda rows: link.index_array(rows, q)
            )
        else:
            starts, longest = packed_starts(cu_seqlens, q, causal)
            self.terms["cu_seqlens"] = starts.tolist()
            keys = packed_stretches(link.ranks, starts, causal)
            self.stretches = _packed_stretches(link, q, cu_seqlens, (starts, longest), causal, call_options)
        self.stretches = [
            stretch._replace(
                call_options=dropping(stretch.call_options, 2 * (link.rank + n // 2 * link.ranks) + n % 2)
            )
            for n, stretch in enumerate(self.stretches)
        ]
        self.rows = Rows(keys, lambda rows: link.index_array(rows, q))
        self.there = [ToWhole(link, arrays[name], self.rows, self.axis) for name in "kv"]
        for stretch in self.stretches:
            if not stretch.cuts:
                operands, values = split(stretch.call_options)
                describe(local_call.direction, {**operands, **self.operands(stretch, arrays)}, values)

    def operands(self, stretch: _Stretch, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays of the call for a stretch."""
        found = {}
        for name, x in arrays.items():
            if x is not None:
                axis = -1 if name in ("lse", "dlse") else self.axis
                found[name] = x[at(stretch.queries, axis)]
        return found | {
            name: x.whole[at(stretch.keys, self.axis)] for name, x in zip("kv", self.there, strict=True)
        }


def check_blocks(local_call: LocalCall) -> None:
    """Refuse a BlockMask whose blocks do not begin where stretches do."""
    blocks = [x for x in masks_of(local_call.options["mask"]) if isinstance(x, BlockMask)]
    if blocks:
        whole = Split.of(local_call)
        for mask in blocks:
            block_rows(mask, whole.queries, whole.lengths[0])


def _stretches(
    whole: Split, rank: int, causal: bool, options: dict[str, Any], index_array: Callable[..., Any]
) -> list[_Stretch]:
    """The stretches of one sequence, or of a batch: each with the keys in its band."""
    call_options = dict(options)
    window, align, mask = (call_options.pop(name) for name in ("window", "align", "mask"))
    alibi = call_options["alibi_slopes"] is not None
    band = resolve_band(causal, window, align, alibi, *whole.lengths)
    found, first = [], 0
    for rows in whole.queries[rank]:
        if rows:
            start, stop = band.keys(rows[0], rows[-1], whole.lengths[1])
            if mask is not None:
                start, stop = 0, whole.lengths[1]
            position = band.offset + rows.start - start
            its_own = {
                "causal": causal, "window": window, "mask": _mask_of(mask, rows, whole, index_array),
                "align": position if not band.open or alibi else None,
            }  # fmt: skip
            queries = slice(first, first + len(rows))
            found.append(_Stretch(queries, slice(start, stop), {**call_options, **its_own}))
        first += len(rows)
    return found


def _mask_of(mask: Any, rows: range, whole: Split, index_array: Callable[..., Any]) -> Any:
    """The mask for the queries in `rows`."""
    queries = whole.lengths[0]
    if mask is None or type(mask) is tuple:
        return mask and tuple(_mask_of(x, rows, whole, index_array) for x in mask)
    if isinstance(mask, BlockMask):
        size = block_rows(mask, whole.queries, queries)
        numbers = np.arange(rows.start // size, -(-rows.stop // size), dtype=np.int32)
        return blocks_of_rows(mask, index_array(numbers), size)
    bounds = mask.bounds if isinstance(mask, Spans) else None
    if bounds is not None and bounds.shape[-3] != queries:  # the queries that see each key
        return Spans((bounds - rows.start).clip(0, len(rows)))
    x, axis = (mask, -2) if bounds is None else (bounds, -3)
    if len(x.shape) >= -axis and x.shape[axis] != 1:
        if x.shape[axis] != queries:
            raise InvalidArgumentsError(
                f"mask has shape {tuple(x.shape)}, and the whole sequence {queries} queries.",
                hint="the mask of the whole sequence, in every process",
            )
        x = x[at(slice(rows.start, rows.stop), axis)]
    return x if bounds is None else Spans(x)


def _packed_stretches(
    link: Link,
    q: Any,
    cu_seqlens: Any,
    lengths: tuple[np.ndarray[Any, Any], int],
    causal: bool,
    options: dict[str, Any],
) -> list[_Stretch]:
    """The stretches of packed sequences: if causal, one call per half, whose keys end with the half.

    Other bands have a different offset in each sequence, but a packed call has only one `align`, so each
    sequence is a call of its own.
    """
    starts, longest = lengths
    band = resolve_band(causal, options["window"], options["align"], False, longest, longest, True)
    if not band.open and not (causal and band.offset == 0):
        return _sequence_by_sequence(link, starts.tolist(), causal, options)
    call_options = {name: x for name, x in options.items() if name not in ("layout", "align", "mask")}
    call_options |= {"causal": causal, "max_seqlen_k": longest * link.ranks}
    everything = slice(None)

    def offsets(rows: np.ndarray[Any, Any]) -> Any:
        return link.index_array(rows.astype(np.int32), q)

    cut_k = offsets(starts * link.ranks)
    if not causal:
        return [
            _Stretch(everything, everything, {**call_options, "max_seqlen_q": longest}, (cu_seqlens, cut_k))
        ]
    cuts, each = (offsets(starts // 2), cut_k), np.diff(starts) // 2
    ends = link.rank + 1, 2 * link.ranks - link.rank
    return [
        _Stretch(
            link.index_array(rows, q),
            everything,
            {
                **call_options,
                "max_seqlen_q": longest // 2,
                "seqused_k": offsets(each * end),
                "align": "bottom_right",
            },
            cuts,
        )
        for rows, end in zip(packed_halves(starts), ends, strict=True)
    ]


def _sequence_by_sequence(
    link: Link, starts: list[int], causal: bool, options: dict[str, Any]
) -> list[_Stretch]:
    """The stretches of packed sequences, with a call for each sequence."""
    found = []
    for start, stop in itertools.pairwise(starts):
        rows, first = stop - start, start * link.ranks
        whole = Split(link.rank, link.ranks, (rows, rows), causal, None, None)
        for stretch in _stretches(whole, link.rank, causal, options, link.index_array):
            queries, keys = stretch.queries, stretch.keys
            found.append(
                stretch._replace(
                    queries=slice(start + queries.start, start + queries.stop),
                    keys=slice(first + keys.start, first + keys.stop),
                )
            )
    return found


def forward(local_call: LocalCall) -> tuple[Any, Any]:
    """As in `ring.forward`."""
    link = local_call.link
    q, _, v = local_call.arrays.values()
    with link.agreement.refusals():
        call = _Call(local_call)
        o = room(link, q, (*q.shape[:-1], v.shape[-1]))
        swapped = call.axis == -3
        lse = room(link, q, (*q.shape[:-3], q.shape[-2], q.shape[-3]) if swapped else q.shape[:-1], wide=True)
    link.agreement.reach(call.terms)

    def attend() -> None:
        for journey in call.there:
            journey.arrive()
        for stretch in call.stretches:
            given = call.operands(stretch, {"q": q})
            function = attention_varlen if stretch.cuts else attention
            part, part_lse = function(*given.values(), *stretch.cuts, return_lse=True, **stretch.call_options)
            o[at(stretch.queries, call.axis)] = link.cast_like(part, o)  # torch casts for slices only
            lse[at(stretch.queries, -1)] = part_lse

    with Round(link) as messages:
        exchange(messages, link, call.there)
        messages.work(attend)
    return o, lse


def backward(local_call: LocalCall, wanted: tuple[bool, bool] = (True, True)) -> Gradients[Any]:
    """As in `ring.backward`."""
    link, arrays, options = local_call.link, local_call.arrays, local_call.options
    q = arrays["q"]
    with link.agreement.refusals():
        call = _Call(local_call)
        dq = room(link, q, tuple(q.shape))
        given_back = [name for name, x in zip("kv", wanted, strict=True) if x]
        shapes = {name: tuple(x.whole.shape) for name, x in zip("kv", call.there, strict=True)}
        sums = {name: room(link, arrays[name], shapes[name], wide=True) for name in given_back}
        dsinks = None if options["sinks"] is None else link.upcast(options["sinks"])
        for total in (*sums.values(), *([] if dsinks is None else [dsinks])):
            total[...] = 0
        homes = {
            name: ToParts(link, arrays[name], shapes[name], call.rows, call.axis, wide=True)
            for name in given_back
        }
    link.agreement.reach(call.terms)
    of_queries = {name: x for name, x in arrays.items() if name not in ("k", "v")}

    def differentiate() -> None:
        for journey in call.there:
            journey.arrive()
        for stretch in call.stretches:
            given = call.operands(stretch, of_queries)
            function = attention_varlen_backward if stretch.cuts else attention_backward
            ordered = [given[name] for name in ("do", "q", "k", "v", "o", "lse")]
            grads = function(*ordered, *stretch.cuts, dlse=given.get("dlse"), **stretch.call_options)
            dq[at(stretch.queries, call.axis)] = link.cast_like(grads.dq, dq)
            for name, total in sums.items():
                total[at(stretch.keys, call.axis)] += getattr(grads, f"d{name}")
            if dsinks is not None:
                dsinks[...] += grads.dsinks
        for name, home in homes.items():
            home.fill(sums[name])

    with Round(link) as messages:
        exchange(messages, link, call.there)
        messages.work(differentiate)
        exchange(messages, link, [*homes.values()])
    arrived = {f"d{name}": link.cast_like(home.arrive(), arrays[name]) for name, home in homes.items()}
    return Gradients(**{"dq": dq, "dk": None, "dv": None, **arrived}, dsinks=dsinks)
