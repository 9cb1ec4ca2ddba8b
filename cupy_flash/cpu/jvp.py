"""J: the tangents of O and LSE in a direction, from O and LSE, tile by tile, in NumPy.

With D the factors of dropout (1 / (1 - dropout), or 0), and dQ, dK, dV, dbias the tangents:

[J.1]    for each query block i, for each key block j inside the band
[J.2]        P = exp(S - LSE_i), as in the backward pass
[J.3]        dS = f' g' scale (dQ_i K_j^T + Q_i dK_j^T) + dbias, with g the softcap, f the score function
[J.4]        mean += rowsum(P * dS)
[J.5]        dO_i += (D * P * dS) V_j + (D * P) dV_j
[J.6]    mean += p_sink dsink
[J.7]    dO_i -= mean * O_i,  dLSE_i = mean

Five products and no running maximum: the sums of a row need no rescaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tiles
from .directions import Direction, grouped_direction
from .recompute import RowLse, drop, recompute_weights, row_lse
from .scores import Scores, finite_rows, grouped_inputs, operand, rows_of
from .threads import one_blas_thread
from .tiles import cut_out

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]


def jvp(problem: Problem, arrays: dict[str, Array], directions: Sequence[dict[str, Array]]) -> None:
    """Compute the tangents of o and lse in several directions, which share P.

    Parameters
    ----------
    problem : Problem
        With direction "jvp".
    arrays : dict of str to array
        q, k, v, o, lse and mask, bias, alibi_slopes, sinks as in `backward`.
    directions : sequence of dict of str to array
        Tangents q_dot, k_dot, v_dot, bias_dot, sinks_dot, shaped as their arrays; a missing one is 0.
        Written: o_dot and lse_dot.
    """
    if problem.empty:
        return
    scores = Scores(problem, arrays)
    x = grouped_inputs(problem, arrays)
    dots = [grouped_direction(problem, direction) for direction in directions]
    # As in the backward pass.
    with one_blas_thread(), np.errstate(all="ignore"):
        for box in tiles.boxes(problem):
            _box(scores, x, dots, box)


def _box(scores: Scores, x: dict[str, Array], dots: list[dict[str, Array]], box: tiles.Box) -> None:
    """Write the tangents of one key head."""
    p, acc = scores.problem, scores.acc
    k, v = operand(x["k"][box], acc), operand(x["v"][box], acc)
    finite_k = finite_rows(k)
    directions = [Direction(scores, dot, box, finite_k) for dot in dots]
    for i0, i1, blocks in tiles.visited(p):  # [J.1]
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], acc, scores.query_scale(box))
        lse = row_lse(scores, x, box, at, blocks, q, k)
        rows = lse.reshape(*q.shape[:3], 1)
        means = [np.zeros((*q.shape[:3], 1), acc) for _ in directions]
        sums = [np.zeros((*q.shape[:3], p.head_dim_v), acc) for _ in directions]
        for direction in directions:
            direction.begin(at, q)
        for block in blocks:
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            j = slice(block.j0, block.j1)
            function_input, keys = scores.new_function_input(q, block), k[..., j, :]
            weights, capped = recompute_weights(
                scores, box, block, q, keys, rows, visible, function_input
            )  # [J.2]
            slope, _ = scores.derivatives(function_input, weights, box, block)
            keep = scores.keep(box, block) if p.dropout else None
            for direction, mean, o in zip(directions, means, sums, strict=True):
                if direction.has_score_tangent:
                    s, _, _ = direction.of_scores(block, weights, capped, slope)  # [J.3]
                    s *= weights
                    mean += s.sum(axis=-1, keepdims=True)  # [J.4]
                    drop(scores, s, block, keep)
                    o += s @ v[..., j, :]  # [J.5]
            drop(scores, weights, block, keep)
            for direction, o in zip(directions, sums, strict=True):
                if direction.v is not None:
                    o += weights @ direction.v[..., j, :]  # [J.5]
        for dot, mean, o in zip(dots, means, sums, strict=True):
            _finish(scores, x, dot, box, at, o, mean.reshape(lse.high.shape), lse)


def _finish(
    scores: Scores,
    x: dict[str, Array],
    dots: dict[str, Array],
    box: tiles.Box,
    at: tuple[Any, ...],
    o: Array,
    mean: Array,
    lse: RowLse,
) -> None:
    """Write the tangents of a query block."""
    p, acc = scores.problem, scores.acc
    if p.dropout:
        o /= acc.type(1 - p.dropout)
    if "sinks_dot" in dots:  # [J.6]
        mean += lse.of_sinks(cut_out(x["sinks"], box)) * cut_out(dots["sinks_dot"], box)
    out = dots["o_dot"][at]
    fixed = x["o"][at].astype(acc) * mean[..., None]
    np.subtract(o.reshape(out.shape), fixed, out=out, casting="same_kind")  # [J.7]
    dots["lse_dot"][at] = mean
