"""Forward pass: the online softmax of FlashAttention over tiles, in NumPy.

Milakov, Gimelshein 2018 (the online softmax); Dao 2023, FlashAttention-2, Algorithm 1. Its line 10
prints an inverse of the rescaling that must not be there; [A1.10] below is right.

[A1.3]   for each query block i
[A1.4]       load Q_i
[A1.5]       O_i = 0, row_sum = 0, row_max = -inf
[A1.6]       for each key block j inside the band
[A1.8]           S = Q_i K_j^T, then softcap, bias, ALiBi, mask
[A1.9]           row_max, P = exp(S - row_max), row_sum
[A1.10]          O_i = rescale(O_i) + P V_j
[A1.12]      O_i = O_i / row_sum
[A1.13]      LSE_i = row_max + log(row_sum)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import threads, tiles
from .bound import BOUNDED_UNIT, bounded, bounded_exp
from .scores import Scores, add_product, cut_out, grouped_inputs, operand, rows_of
from .threads import Work, scratch

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]


def forward(problem: Problem, arrays: dict[str, Array]) -> None:
    """Compute attention tile by tile.

    Parameters
    ----------
    problem : Problem
        A forward problem.
    arrays : dict of str to array
        q, k, v (batch, heads, seq, head_dim); mask, bias (batch, heads, seqlen_q, seqlen_k) with
        extent 1 where broadcast, alibi_slopes (1 or batch, heads), sinks (heads,) as the problem
        has them. Written: o (batch, heads, seqlen_q, head_dim_v) and, if there, lse (batch, heads,
        seqlen_q). Any strides.
    """
    workers = threads.worker_count(tiles.flops(problem))
    threads.carry_out(prepare(problem, arrays, workers), workers)


def prepare(problem: Problem, arrays: dict[str, Array], workers: int, alone: bool = True) -> Work:
    """Cut `forward` into jobs; workers and alone as in `tiles.schedule`."""
    if problem.empty:
        return Work([])
    cut = tiles.schedule(problem, workers, alone)
    scores = Scores(problem, arrays)
    x = grouped_inputs(problem, arrays)
    # why: under a causal mask the last part has the most keys; begun first, it does not end last.
    return Work(
        [
            partial(_forward_job, scores, cut, x, box, part)
            for part in reversed(cut.parts)
            for box in cut.boxes
        ]
    )


def _forward_job(
    scores: Scores, cut: tiles.Schedule, x: dict[str, Array], box: tiles.Box, part: tuple[int, int]
) -> None:
    p, acc = scores.problem, scores.acc
    k = operand(x["k"][box], acc, "k")
    v = operand(x["v"][box], acc, "v")
    whole = (*box, slice(None), slice(*part))
    no_max = scores.plain and bounded(x["q"][whole], k, p.scale, (v,))
    q_scale = p.scale * BOUNDED_UNIT if no_max else scores.query_scale(box)
    ones = np.ones(cut.keys, acc)
    for i0, i1, blocks in tiles.visited(p, cut, part):  # [A1.3]
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], "q", acc, q_scale)  # [A1.4]
        matrices, rows = q.shape[:2], q.shape[2]
        o = scratch("o", (*matrices, rows, p.head_dim_v), acc)  # [A1.5]
        row_sum = np.empty((*matrices, rows), acc)
        row_max = np.full((*matrices, rows), 0 if no_max else -np.inf, acc)
        first = True
        for block in blocks:  # [A1.6]
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            j = slice(block.j0, block.j1)
            keys = block.j1 - block.j0
            s = scratch("s", (*matrices, rows, keys), acc)
            np.matmul(q, k[..., j, :].swapaxes(-1, -2), out=s)  # [A1.8]
            s_grouped = scores.grouped(s, block)
            if no_max:  # [A1.9] with row_max = 0
                bounded_exp(s, out=s)
                scores.zero_weights(s_grouped, block, visible)
            else:
                scores.finish(s_grouped, box, block)
                scores.hide_scores(s_grouped, block, visible)
                rescale = _softmax(s, row_max)  # [A1.9]
                if rescale is not None and not first:  # [A1.10]
                    row_sum *= rescale
                    o *= rescale[..., None]
            # why: a product with ones runs at four times the speed of a sum along rows.
            add_product(row_sum[..., None], s, ones[:keys, None], first=first)
            if p.dropout:
                s_grouped *= scores.keep(box, block)
            add_product(o, s, v[..., j, :], first=first)  # [A1.10]
            first = False
        if first:
            o[...] = row_sum[...] = 0
        _finish(scores, x, box, at, o, row_max, row_sum)


def _softmax(s: Array, row_max: Array) -> Array | None:
    """Replace scores by weights relative to the running maximum.

    Returns what brings earlier sums to the new maximum, None if it is the old one.
    """
    new_max = np.maximum(row_max, s.max(axis=-1))
    # A row that has seen no key yet keeps its weights at exp(-inf - 0) = 0.
    finite = np.where(np.isneginf(new_max), 0, new_max)
    rescale = None
    if not np.array_equal(new_max, row_max):
        rescale = np.exp(row_max - finite)
        row_max[...] = new_max
    np.subtract(s, finite[..., None], out=s)
    np.exp(s, out=s)
    return rescale


def _finish(
    scores: Scores,
    x: dict[str, Array],
    box: tiles.Box,
    at: tuple[slice, ...],
    o: Array,
    row_max: Array,
    row_sum: Array,
) -> None:
    """Normalise a query block and write it out."""
    p = scores.problem
    o_out = x["o"][at]
    grouped = o_out.shape[:-1]
    row_max, row_sum = row_max.reshape(grouped), row_sum.reshape(grouped)
    total = row_sum
    if p.sinks:
        sink = cut_out(x["sinks"], box)
        total = row_sum + np.exp(sink - np.where(np.isneginf(row_max), 0, row_max))
    if p.dropout:
        total = total * total.dtype.type(1 - p.dropout)
    # A row without keys has row_sum = 0 and O = 0.
    inverse = np.where(row_sum == 0, 0, 1 / total)[..., None]
    if scores.unit_v is not None:
        inverse = inverse * cut_out(scores.unit_v, box)
    np.multiply(o.reshape(o_out.shape), inverse, out=o_out, casting="same_kind")  # [A1.12]
    if "lse" in x:
        lse = row_max + np.log(row_sum)  # [A1.13]
        x["lse"][at] = np.logaddexp(lse, sink) if p.sinks else lse
