"""Forward pass: the online softmax of FlashAttention over tiles, in NumPy.

Milakov, Gimelshein 2018 (the online softmax); Dao 2023, FlashAttention-2, Algorithm 1. Its line 10
prints an inverse of the rescaling that must not be there; [A1.10] below is right.

[A1.3]   for each query block i
[A1.4]       load Q_i
[A1.5]       O_i = 0, row_sum = 0, row_max = -inf
[A1.6]       for each key block j inside the band
[A1.8]           S = Q_i K_j^T, then softcap, score function, bias, ALiBi, mask
[A1.9]           row_max, P = exp(S - row_max), row_sum
[A1.10]          O_i = rescale(O_i) + P V_j
[A1.12]      O_i = O_i / row_sum
[A1.13]      LSE_i = row_max + log(row_sum)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import tiles
from .progress import count
from .scores import Scores, grouped_inputs, operand, rows_of
from .threads import one_blas_thread
from .tiles import cut_out

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
        extent 1 where broadcast, spans (1 or batch, 1 or heads, queries or keys, bounds), alibi_slopes
        (1 or batch, heads), sinks (heads,) and bound[...] if the problem has them. Written: o (batch,
        heads, seqlen_q, head_dim_v) and, if given, lse (batch, heads, seqlen_q). Any strides.
    """
    if problem.empty:
        return
    # Scores of -inf, empty rows (0/0) and overflowing inputs have defined results.
    with one_blas_thread(), np.errstate(all="ignore"):
        scores = Scores(problem, arrays)
        x = grouped_inputs(problem, arrays)
        for box in tiles.boxes(problem):
            _forward_box(scores, x, box)


def _forward_box(scores: Scores, x: dict[str, Array], box: tiles.Box) -> None:
    """Compute attention for one key head."""
    p, acc = scores.problem, scores.acc
    k, v = operand(x["k"][box], acc), operand(x["v"][box], acc)
    for i0, i1, blocks in tiles.visited(p):  # [A1.3]
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], acc, scores.query_scale(box))  # [A1.4]
        o = np.zeros((*q.shape[:3], p.head_dim_v), acc)  # [A1.5]
        row_sum = np.zeros(q.shape[:3], acc)
        row_max = np.full(q.shape[:3], -np.inf, acc)
        for block in blocks:  # [A1.6]
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            j = slice(block.j0, block.j1)
            s = q @ k[..., j, :].swapaxes(-1, -2)  # [A1.8]
            s_grouped = scores.grouped(s, block)
            scores.finish(s_grouped, box, block, visible)
            scores.hide_scores(s_grouped, block, visible)
            row_max, rescale = softmax(s, row_max)  # [A1.9]
            row_sum = rescale * row_sum + s.sum(axis=-1)
            if p.dropout:
                s_grouped *= scores.keep(box, block)
            o *= rescale[..., None]  # [A1.10]
            o += s @ v[..., j, :]
        _finish(scores, x, box, at, o, row_max, row_sum)
        count(p, i0, i1)


def softmax(s: Array, row_max: Array) -> tuple[Array, Array]:
    """Replace scores by weights relative to the new row maximum, in place.

    Returns that maximum, and the rescale factor of earlier sums.
    """
    new_max = np.maximum(row_max, s.max(axis=-1))
    # The weights of a row without a visible key so far are exp(-inf - 0) = 0.
    finite = np.where(np.isneginf(new_max), 0, new_max)
    s -= finite[..., None]
    np.exp(s, out=s)
    return new_max, np.exp(row_max - finite)


def _finish(
    scores: Scores,
    x: dict[str, Array],
    box: tiles.Box,
    at: tuple[slice, ...],
    o: Array,
    row_max: Array,
    row_sum: Array,
) -> None:
    """Normalise a query block and write its O and LSE."""
    p = scores.problem
    o_out = x["o"][at]
    grouped = o_out.shape[:-1]
    sink = cut_out(x["sinks"], box) if p.sinks else None
    factor, lse = finish_rows(row_max.reshape(grouped), row_sum.reshape(grouped), sink)
    if p.dropout:
        factor = factor / factor.dtype.type(1 - p.dropout)
    if scores.unit_v is not None:
        factor = factor * cut_out(scores.unit_v, box)[..., 0]
    np.multiply(o.reshape(o_out.shape), factor[..., None], out=o_out, casting="same_kind")  # [A1.12]
    if "lse" in x:
        x["lse"][at] = lse


def finish_rows(row_max: Array, row_sum: Array, sink: Array | None) -> tuple[Array, Array]:
    """Return the factor of unnormalised O and the LSE of rows: without keys 0 and the sink, or -inf."""
    unseen = row_sum == 0
    if sink is None:
        return np.where(unseen, 0, 1 / row_sum), row_max + np.log(row_sum)  # [A1.13]
    top = np.maximum(row_max, sink)
    share = np.exp(row_max - top)
    total = row_sum * share + np.exp(sink - top)
    return np.where(unseen, 0, share / total), np.where(unseen, sink, top + np.log(total))
