"""Backward pass in NumPy, tile by tile: weights are recomputed from LSE.

Dao 2023, FlashAttention-2, Algorithm 2, with the query blocks outside and the key blocks inside,
as in the forward pass.

[A2.4]   delta = rowsum(dO * O) - dLSE
         for each query block i, for each key block j inside the band
[A2.11]      S = Q_i K_j^T, then softcap, score function, bias, ALiBi, mask; P = exp(S - LSE_i)
[A2.12]      dV_j += P^T dO_i
[A2.13]      dP = dO_i V_j^T
[A2.14]      dS = P * (dP - delta_i)
[A2.15]      dQ_i += dS K_j
[A2.16]      dK_j += dS^T Q_i
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..call.options import DERIVATIVES
from . import tiles
from .progress import count
from .recompute import drop, gradient_rows, recompute_weights, row_lse
from .scores import Scores, by_key_head, finite_rows, grouped_inputs, operand, rows_of
from .threads import one_blas_thread
from .tiles import cut_out

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]


def backward(problem: Problem, arrays: dict[str, Array]) -> None:
    """Compute the gradients tile by tile; equal calls return equal bits.

    Parameters
    ----------
    problem : Problem
        A backward problem.
    arrays : dict of str to array
        do, q, k, v, o (batch, heads, seq, dim), lse and optionally dlse (batch, heads, seqlen_q);
        mask, bias, alibi_slopes, sinks, bound as in `forward`. Written: dq, dk, dv and, if the problem
        asks for them, dbias (like bias), dsinks (heads,) and dbound[...]. Any strides.
    """
    p, acc = problem, np.dtype(problem.accumulator)
    if p.empty:
        for name, array in arrays.items():
            if name in DERIVATIVES or name.startswith("dbound"):
                array[...] = 0
        return
    scores = Scores(p, arrays)
    x = grouped_inputs(p, arrays)
    dbias = np.zeros(arrays["dbias"].shape, acc) if p.want_dbias else None
    dsinks = np.zeros((p.batch, p.heads_k, p.heads_q // p.heads_k)) if p.sinks else None
    # As in the forward pass; also, an lse that does not belong to q and k can give inf - inf.
    with one_blas_thread(), np.errstate(all="ignore"):
        for box in tiles.boxes(p):
            _backward_box(scores, x, box, dbias if dbias is None else by_key_head(dbias, p.heads_k), dsinks)
        if dbias is not None:
            arrays["dbias"][...] = dbias
        if dsinks is not None:
            arrays["dsinks"][...] = dsinks.sum(axis=0).reshape(-1)
        if scores.function is not None:
            for number in scores.function.sums:
                arrays[f"dbound[{number}]"][...] = scores.function.gradient(number)


def _backward_box(
    scores: Scores, x: dict[str, Array], box: tiles.Box, dbias: Array | None, dsinks: Array | None
) -> None:
    """Write the gradients of one key head, and add its share to dbias, dsinks and dbound."""
    p, acc = scores.problem, scores.acc
    k, v = operand(x["k"][box], acc), operand(x["v"][box], acc)
    finite_k = finite_rows(k)
    dk, dv = np.zeros(k.shape, acc), np.zeros(v.shape, acc)
    for i0, i1, blocks in tiles.visited(p):
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], acc, scores.query_scale(box))
        do, delta = gradient_rows(x, at, acc)  # [A2.4]
        lse = row_lse(scores, x, box, at, blocks, q, k)
        if dsinks is not None:
            share = lse.of_sinks(cut_out(x["sinks"], box))
            dsinks[box] -= (share * delta).sum(axis=-1)
        lse, delta = lse.reshape(*q.shape[:3], 1), delta.reshape(*q.shape[:3], 1)
        if p.dropout:
            do /= acc.type(1 - p.dropout)
        dq = np.zeros(q.shape, acc)
        for block in blocks:
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            j = slice(block.j0, block.j1)
            function_input, keys = scores.new_function_input(q, block), k[..., j, :]
            weights, capped = recompute_weights(
                scores, box, block, q, keys, lse, visible, function_input
            )  # [A2.11]
            ds = do @ v[..., j, :].swapaxes(-1, -2)  # [A2.13]
            kept = weights
            if p.dropout:
                kept, keep = weights.copy(), scores.keep(box, block)
                drop(scores, kept, block, keep)
                drop(scores, ds, block, keep)
            dv[..., j, :] += kept.swapaxes(-1, -2) @ do  # [A2.12]
            ds -= delta  # [A2.14]
            ds *= weights
            if dbias is not None:
                add_to_dbias(dbias, box, block, scores.grouped(ds, block))
            if scores.function is not None and function_input is not None:
                scores.function.slope(function_input, scores.grouped(ds, block), box, block)
            if capped is not None:
                ds *= 1 - np.square(capped)
            dq += ds @ finite_k[..., j, :]  # [A2.15]
            dk[..., j, :] += ds.swapaxes(-1, -2) @ q  # [A2.16]
        out = x["dq"][at]
        np.multiply(dq.reshape(out.shape), acc.type(p.scale), out=out, casting="same_kind")
        count(p, i0, i1)
    # q was scaled before the products: by all of the scale, or with softcap by scale / softcap.
    np.multiply(dk, acc.type(p.softcap or 1), out=x["dk"][box], casting="same_kind")
    x["dv"][box] = dv


def add_to_dbias(dbias: Array, box: tiles.Box, block: tiles.Block, ds: Array) -> None:
    """Add dS (batch, key heads, group, m, n) to dbias, summed over the broadcast axes of bias."""
    target = cut_out(dbias, box, slice(block.i0, block.i1), slice(block.j0, block.j1))
    summed = tuple(axis for axis, extent in enumerate(target.shape) if extent < ds.shape[axis])
    target += ds.sum(axis=summed, keepdims=True) if summed else ds
