"""Backward pass: the weights computed again from LSE, tile by tile, in NumPy.

Dao 2023, FlashAttention-2, Algorithm 2, with the query blocks outside and the key blocks inside,
as in the forward pass.

[A2.4]   delta = rowsum(dO * O) - dLSE
         for each query block i, for each key block j inside the band
[A2.11]      S = Q_i K_j^T, then softcap, bias, ALiBi, mask; P = exp(S - LSE_i)
[A2.12]      dV_j += P^T dO_i
[A2.13]      dP = dO_i V_j^T
[A2.14]      dS = P * (dP - delta_i)
[A2.15]      dQ_i += dS K_j
[A2.16]      dK_j += dS^T Q_i
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import threads, tiles
from .bound import BOUNDED_UNIT, bounded, bounded_exp
from .scores import Scores, add_product, by_key_head, cut_out, grouped_inputs, operand, rows_of
from .threads import Work, scratch

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

# why: bounded scores alone stay below half of this, but a large sink, or the keys of another part
# of a merged result, can raise LSE until exp(-LSE) underflows.
LARGEST_LSE = 64.0


def backward(problem: Problem, arrays: dict[str, Array]) -> None:
    """Compute the gradients tile by tile; equal calls give equal bits.

    Parameters
    ----------
    problem : Problem
        A backward problem.
    arrays : dict of str to array
        do, q, k, v, o (batch, heads, seq, dim), lse and, if there, dlse (batch, heads, seqlen_q);
        mask, bias, alibi_slopes, sinks as in `forward`. Written: dq, dk, dv and, as the problem
        wants them, dbias (like bias) and dsinks (heads,). Any strides.
    """
    workers = threads.worker_count(tiles.flops(problem))
    threads.carry_out(prepare(problem, arrays, workers), workers)


def prepare(problem: Problem, arrays: dict[str, Array], workers: int, alone: bool = True) -> Work:
    """Cut `backward` into jobs; workers and alone as in `tiles.schedule`."""
    p = problem
    if p.empty:
        for name in ("dq", "dk", "dv", "dbias", "dsinks"):
            if name in arrays:
                arrays[name][...] = 0
        return Work([])
    cut = tiles.schedule(p, workers, alone)
    scores = Scores(p, arrays)
    x = grouped_inputs(p, arrays)
    sums = _Sums(p, arrays, len(cut.parts))
    # why: one thread adds to an element of dbias, always in the same order.
    in_turn = [cut.boxes] if tiles.boxes_share_dbias(p) else [(box,) for box in cut.boxes]
    jobs = [
        partial(_backward_job, scores, cut, x, sums, boxes, part)
        for part in reversed(range(len(cut.parts)))
        for boxes in in_turn
    ]
    return Work(jobs, sums.write)


class _Sums:
    """Where parts put the gradients they share: a copy for each, added up in order at the end.

    Attributes
    ----------
    dk, dv : array (parts, batch, key heads, seqlen_k, d)
        The outputs themselves if there is one part.
    dbias : list of array by key head, or None
        For each part.
    dsinks : array (parts, batch, key heads, group)
    """

    def __init__(self, problem: Problem, arrays: dict[str, Array], parts: int) -> None:
        p = problem
        self.acc = np.dtype(p.accumulator)
        self.outputs: list[tuple[Array, Array]] = []
        self.dk = self._copies(arrays["dk"], parts)
        self.dv = self._copies(arrays["dv"], parts)
        self.dbias: list[Array] | None = None
        if p.want_dbias and p.bias is not None:
            # Where each query has its own row of dbias, parts never meet: one copy is enough.
            copies = self._copies(arrays["dbias"], parts if p.bias[2] == 1 else 1, sums=True)
            copies[...] = 0
            self.dbias = [by_key_head(copies[i % len(copies)], p.heads_k) for i in range(parts)]
        if p.sinks:
            self.dsinks = np.zeros((parts, p.batch, p.heads_k, p.heads_q // p.heads_k))
            self.outputs.append((arrays["dsinks"], self.dsinks.reshape(-1, p.heads_q)))

    def _copies(self, output: Array, count: int, sums: bool = False) -> Array:
        """Return uninitialised (count, *output.shape): the output itself where that will do."""
        if count == 1 and (output.dtype == self.acc or not sums):
            return output[None]
        copies = np.empty((count, *output.shape), self.acc)
        self.outputs.append((output, copies))
        return copies

    def write(self) -> None:
        """Add the copies up into the outputs."""
        for output, copies in self.outputs:
            output[...] = copies.sum(axis=0)


def _backward_job(
    scores: Scores,
    cut: tiles.Schedule,
    x: dict[str, Array],
    sums: _Sums,
    boxes: tuple[tiles.Box, ...],
    part: int,
) -> None:
    for box in boxes:
        _backward_box(scores, cut, x, sums, box, part)


def _backward_box(
    scores: Scores,
    cut: tiles.Schedule,
    x: dict[str, Array],
    sums: _Sums,
    box: tiles.Box,
    part: int,
) -> None:
    """Add the gradients of some heads' queries in one part."""
    p, acc = scores.problem, scores.acc
    k = operand(x["k"][box], acc, "k")
    v = operand(x["v"][box], acc, "v")
    # why: the sums stay in this thread's cache; an output is touched once, and not by one thread.
    dk, dv = scratch("dk", k.shape, acc), scratch("dv", v.shape, acc)
    dk[...] = dv[...] = 0
    whole = (*box, slice(None), slice(*cut.parts[part]))
    no_max = (
        scores.plain
        and bounded(x["q"][whole], k, p.scale, (v, x["do"][whole]))
        and x["lse"][whole].max(initial=-np.inf) <= LARGEST_LSE
    )
    q_scale = p.scale * BOUNDED_UNIT if no_max else scores.query_scale(box)
    for i0, i1, blocks in tiles.visited(p, cut, cut.parts[part]):
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], "q", acc, q_scale)
        do = rows_of(x["do"][at], "do", acc)
        matrices, rows = q.shape[:2], q.shape[2]
        lse = x["lse"][at]
        delta = np.einsum("...d,...d->...", do, rows_of(x["o"][at], "o", acc)).reshape(lse.shape)
        if "dlse" in x:
            delta -= x["dlse"][at]  # [A2.4]
        # A row that sees no key has LSE = -inf, and weights exp(-inf - 0) = 0.
        finite = np.where(np.isneginf(lse), 0, lse)
        if p.sinks:
            share = np.exp(cut_out(x["sinks"], box) - finite)
            sums.dsinks[part][box] -= (share * delta).sum(axis=-1)
        finite = finite.reshape(*matrices, rows, 1)
        delta = delta.reshape(*matrices, rows, 1)
        if no_max:
            # P = exp(S) exp(-LSE): the second factor is carried by dO and delta.
            from_lse = np.exp(-finite)
            do *= from_lse
            delta *= from_lse
        if p.dropout:
            do /= acc.type(1 - p.dropout)
        dq = scratch("dq", q.shape, acc)
        first = True
        for block in blocks:
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            j = slice(block.j0, block.j1)
            k_j, v_j = k[..., j, :], v[..., j, :]
            tile = (*matrices, rows, block.j1 - block.j0)
            s = scratch("s", tile, acc)
            np.matmul(q, k_j.swapaxes(-1, -2), out=s)  # [A2.11]
            s_grouped = scores.grouped(s, block)
            capped = None
            if no_max:
                bounded_exp(s, out=s)
                scores.zero_weights(s_grouped, block, visible)
            else:
                if p.softcap is not None:
                    capped = scratch("capped", tile, acc)
                    scores.finish(s_grouped, box, block, scores.grouped(capped, block))
                else:
                    scores.finish(s_grouped, box, block)
                scores.hide_scores(s_grouped, block, visible)
                s -= finite
                np.exp(s, out=s)
            weights = s
            ds = scratch("ds", tile, acc)
            np.matmul(do, v_j.swapaxes(-1, -2), out=ds)  # [A2.13]
            if p.dropout:
                keep = scores.keep(box, block)
                weights = scratch("kept", tile, acc)
                np.multiply(s_grouped, keep, out=scores.grouped(weights, block))
                scores.grouped(ds, block)[...] *= keep
            add_product(dv[..., j, :], weights.swapaxes(-1, -2), do, first=False)  # [A2.12]
            ds -= delta  # [A2.14]
            ds *= s
            if sums.dbias is not None:
                _add_to_dbias(sums.dbias[part], box, block, scores.grouped(ds, block))
            if capped is not None:
                np.square(capped, out=capped)
                np.subtract(1, capped, out=capped)
                ds *= capped
            add_product(dq, ds, k_j, first=first)  # [A2.15]
            add_product(dk[..., j, :], ds.swapaxes(-1, -2), q, first=False)  # [A2.16]
            first = False
        if first:
            dq[...] = 0
        out = x["dq"][at]
        np.multiply(dq.reshape(out.shape), acc.type(p.scale), out=out, casting="same_kind")
    # Here q carried q_scale; dK takes the scale only.
    q_unit = BOUNDED_UNIT if no_max else 1 if p.softcap is None else 1 / p.softcap
    np.multiply(dk, acc.type(1 / q_unit), out=sums.dk[part][box], casting="same_kind")
    sums.dv[part][box] = dv


def _add_to_dbias(dbias: Array, box: tiles.Box, block: tiles.Block, ds: Array) -> None:
    """Add dS (batch, key heads, group, m, n), summed over the axes that bias broadcasts."""
    target = cut_out(dbias, box, slice(block.i0, block.i1), slice(block.j0, block.j1))
    summed = tuple(axis for axis, extent in enumerate(target.shape) if extent < ds.shape[axis])
    target += ds.sum(axis=summed, keepdims=True) if summed else ds
