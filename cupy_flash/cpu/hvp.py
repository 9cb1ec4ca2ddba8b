"""H: the derivative of the backward pass in a direction, tile by tile, in NumPy.

Letters are those of `backward`; dot marks a derivative. dO and dLSE are constant, dotO and mean = dotLSE come
from `jvp`, and dropout applies to all products with V:

[H.1]    dotdelta = rowsum(dO * dotO)
         for each query block i, for each key block j inside the band
[H.2]        P = exp(S - LSE_i), dotS as in `jvp`, dP = dO_i V_j^T - delta, dotdP = dO_i dotV_j^T
[H.3]        dotP = P * (dotS - mean)                        dotdV_j += dotP^T dO_i
[H.4]        dS = P * dP
[H.5]        dotdS = dotP * dP + P * (dotdP - dotdelta)      dotdbias += dotdS
[H.6]        through the score function, then softcap: dotdS = g' dotdS + g'' dS dotT, dS = g' dS, with T the
             input of g, for softcap scale Q_i K_j^T
[H.7]        dotdQ_i += dotdS K_j + dS dotK_j
[H.8]        dotdK_j += dotdS^T Q_i + dS^T dotQ_i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..call.options import DERIVATIVES
from . import tiles
from .backward import add_to_dbias
from .directions import Direction, grouped_direction
from .recompute import drop, gradient_rows, recompute_weights, row_lse
from .scores import Scores, by_key_head, finite_rows, grouped_inputs, operand, rows_of
from .threads import one_blas_thread
from .tiles import cut_out

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]


def hvp(problem: Problem, arrays: dict[str, Array], directions: Sequence[dict[str, Array]]) -> None:
    """Compute the derivatives of the gradients in several directions, which share P and dP.

    Parameters
    ----------
    problem : Problem
        With direction "hvp".
    arrays : dict of str to array
        Inputs as in `backward`.
    directions : sequence of dict of str to array
        Tangents as in `jvp`, and its results o_dot and lse_dot. Written: dq, dk, dv and, if the problem asks
        for them, dbias and dsinks.
    """
    p = problem
    if p.empty:
        for direction in directions:
            for name in DERIVATIVES:
                if name in direction:
                    direction[name][...] = 0
        return
    scores = Scores(p, arrays)
    x = grouped_inputs(p, arrays)
    sums = [_Sums(scores, grouped_direction(p, direction)) for direction in directions]
    # As in the backward pass.
    with one_blas_thread(), np.errstate(all="ignore"):
        for box in tiles.boxes(p):
            _box(scores, x, sums, box)
        for each in sums:
            each.write()


class _Sums:
    """Results of one direction that are sums over heads; None if the problem does not ask for them.

    `dbias` is by key head, in the accumulator's dtype; `dsinks` (batch, key heads, group) in float64.
    """

    def __init__(self, scores: Scores, dots: dict[str, Array]) -> None:
        p = scores.problem
        self.dots = dots
        self._dbias = np.zeros(dots["dbias"].shape, scores.acc) if p.want_dbias else None
        self.dbias = None if self._dbias is None else by_key_head(self._dbias, p.heads_k)
        self.dsinks = np.zeros((p.batch, p.heads_k, p.heads_q // p.heads_k)) if p.sinks else None

    def write(self) -> None:
        """Write dbias and dsinks to the result arrays."""
        if self._dbias is not None:
            self.dots["dbias"][...] = self._dbias
        if self.dsinks is not None:
            self.dots["dsinks"][...] = self.dsinks.sum(axis=0).reshape(-1)


def _box(scores: Scores, x: dict[str, Array], sums: list[_Sums], box: tiles.Box) -> None:
    """Write the derivatives of the gradients of one key head, and add its share to the sums over heads."""
    p, acc = scores.problem, scores.acc
    k, v = operand(x["k"][box], acc), operand(x["v"][box], acc)
    finite_k = finite_rows(k)
    box_sums = [
        _BoxSums(Direction(scores, each.dots, box, finite_k), box, finite_k, v, each) for each in sums
    ]
    for i0, i1, blocks in tiles.visited(p):
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], acc, scores.query_scale(box))
        do, delta = gradient_rows(x, at, acc)
        lse = row_lse(scores, x, box, at, blocks, q, k)
        p_sink = lse.of_sinks(cut_out(x["sinks"], box)) if p.sinks else None
        for one in box_sums:
            one.begin(at, q, do, delta, p_sink)
        if p.dropout:
            do /= acc.type(1 - p.dropout)
        lse, delta = lse.reshape(*q.shape[:3], 1), delta.reshape(*q.shape[:3], 1)
        for block in blocks:
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            j = slice(block.j0, block.j1)
            function_input, keys = scores.new_function_input(q, block), k[..., j, :]
            weights, capped = recompute_weights(
                scores, box, block, q, keys, lse, visible, function_input
            )  # [H.2]
            derivatives = scores.derivatives(function_input, weights, box, block)
            keep = scores.keep(box, block) if p.dropout else None
            dp = do @ v[..., j, :].swapaxes(-1, -2)
            drop(scores, dp, block, keep)
            dp -= delta
            for one in box_sums:
                one.add(block, weights, capped, derivatives, dp, q, do, keep)
        for one in box_sums:
            one.write_queries(at)
    for one in box_sums:
        one.write_keys()


class _BoxSums:
    """The accumulators of one box and one direction; k and v are operands, k after `finite_rows`."""

    def __init__(self, direction: Direction, box: tiles.Box, k: Array, v: Array, sums: _Sums) -> None:
        self.direction, self.box, self.k, self.sums = direction, box, k, sums
        self.scores, self.dots = direction.scores, sums.dots
        self.dk, self.dv = np.zeros(k.shape, self.scores.acc), np.zeros(v.shape, self.scores.acc)

    def begin(self, at: tuple[Any, ...], q: Array, do: Array, delta: Array, p_sink: Array | None) -> None:
        """Start the query block at an index."""
        acc, dots = self.scores.acc, self.dots
        self.direction.begin(at, q)
        mean = dots["lse_dot"][at]
        delta_dot = np.einsum("...d,...d->...", do, rows_of(dots["o_dot"][at], acc)).reshape(
            mean.shape
        )  # [H.1]
        if p_sink is not None and self.sums.dsinks is not None:
            sink_dot = cut_out(dots["sinks_dot"], self.box) if "sinks_dot" in dots else 0
            change = p_sink * ((sink_dot - mean) * delta + delta_dot)
            self.sums.dsinks[self.box] -= change.sum(axis=-1)
        self.mean, self.delta_dot = (y.reshape(*q.shape[:3], 1) for y in (mean, delta_dot))
        self.dq = np.zeros(q.shape, acc)

    def add(
        self,
        block: tiles.Block,
        weights: Array,
        capped: Array | None,
        derivatives: tuple[Array, Array] | tuple[None, None],
        dp: Array,
        q: Array,
        do: Array,
        keep: Array | None,
    ) -> None:
        """Add a tile; derivatives is the result of `Scores.derivatives`, dp is dP - delta."""
        direction, scores, j = self.direction, self.scores, slice(block.j0, block.j1)
        first, second = derivatives
        p_dot, inside, given = direction.of_scores(block, weights, capped, first)
        p_dot -= self.mean
        p_dot *= weights  # [H.3]
        kept = p_dot if keep is None else p_dot.copy()
        drop(scores, kept, block, keep)
        self.dv[..., j, :] += kept.swapaxes(-1, -2) @ do
        ds = weights * dp  # [H.4]
        ds_dot = p_dot * dp + weights * self._of_dp(block, do, keep)  # [H.5]
        if self.sums.dbias is not None:
            add_to_dbias(self.sums.dbias, self.box, block, scores.grouped(ds_dot, block))
        if first is not None and second is not None:  # [H.6]
            ds_dot *= first
            ds_dot += second * ds * given
            ds *= first
        if capped is not None and inside is not None:  # [H.6]
            slope = 1 - np.square(capped)
            ds *= slope
            ds_dot *= slope
            ds_dot -= 2 * capped * ds * inside
        self.dq += ds_dot @ self.k[..., j, :]  # [H.7]
        self.dk[..., j, :] += ds_dot.swapaxes(-1, -2) @ q  # [H.8]
        if direction.k is not None:
            self.dq += ds @ direction.k[..., j, :]
        if direction.q is not None:
            self.dk[..., j, :] += ds.swapaxes(-1, -2) @ direction.q

    def _of_dp(self, block: tiles.Block, do: Array, keep: Array | None) -> Array:
        """Return the derivative of dP - delta of a tile."""
        v = self.direction.v
        if v is None:
            still: Array = -self.delta_dot
            return still
        dp_dot: Array = do @ v[..., block.j0 : block.j1, :].swapaxes(-1, -2)
        drop(self.scores, dp_dot, block, keep)
        dp_dot -= self.delta_dot
        return dp_dot

    def write_queries(self, at: tuple[Any, ...]) -> None:
        """Write dq of a query block."""
        out, scale = self.dots["dq"][at], self.scores.acc.type(self.scores.problem.scale)
        np.multiply(self.dq.reshape(out.shape), scale, out=out, casting="same_kind")

    def write_keys(self) -> None:
        """Write dk and dv of the box."""
        # As in the backward pass: q was scaled before the products.
        unit = self.scores.acc.type(self.scores.problem.softcap or 1)
        np.multiply(self.dk, unit, out=self.dots["dk"][self.box], casting="same_kind")
        self.dots["dv"][self.box] = self.dv
