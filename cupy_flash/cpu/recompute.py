"""Recomputation from LSE: weights, dropout, and delta, which backward, jvp, hvp and statistics share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import tiles
from .forward import softmax
from .scores import Scores, rows_of
from .tiles import cut_out

Array = np.ndarray[Any, Any]

# Magnitude of LSE above which the sums of a row are recomputed, as in lse.h of the compiled core: below it
# weights have a relative error of at most 2^-14 in float32, 2^-43 in float64.
FAR_FROM_0 = 1024
# Units roundoff of LSE. why: BLAS may sum scores in another order than in the forward pass.
TOLERANCE = 64


class RowLse(NamedTuple):
    """LSE in two parts, so that log(sum) is not rounded away; weights are exp(S - high) * unit."""

    # LSE, but the largest score in rows with an LSE far from 0, and inf in rows without a visible key.
    high: Array
    # 1 / sum of exp(S - high) in rows with an LSE far from 0, 1 in others; None if it is 1 everywhere.
    unit: Array | None

    def exp(self, s: Array) -> Array:
        """Return the weights of scores, in place."""
        s -= self.high
        np.exp(s, out=s)
        if self.unit is not None:
            s *= self.unit
        return s

    def of_sinks(self, sinks: Array) -> Array:
        """Return the weights of the sinks of rows (..., group, m)."""
        return self.exp(sinks - np.zeros_like(self.high))

    def reshape(self, *shape: int) -> RowLse:
        """Reshape both parts."""
        return RowLse(self.high.reshape(shape), None if self.unit is None else self.unit.reshape(shape))


def row_lse(
    scores: Scores,
    x: dict[str, Array],
    box: tiles.Box,
    at: tuple[Any, ...],
    blocks: list[tiles.Block],
    q: Array,
    k: Array,
) -> RowLse:
    """Return the LSE of a query block; recompute the sums of rows where it is far from 0.

    q is scaled by `Scores.query_scale`; k holds all keys of the box.
    """
    lse: Array = x["lse"][at]
    finite = np.where(np.isneginf(lse), np.inf, lse)  # weights of 0
    far = np.isfinite(finite) & (np.abs(finite) > FAR_FROM_0)
    if not far.any():
        return RowLse(finite, None)
    top, total = row_sums(scores, x, box, blocks, q, k)
    # why: a larger LSE includes keys of other parts of a ring, so that it must not be recomputed here.
    more = TOLERANCE * np.spacing(scores.acc.type(1)) * np.abs(finite)
    own = far & (total > 0) & (finite - (top + np.log(total)) <= more)
    return RowLse(np.where(own, top, finite), np.where(own, 1 / total, scores.acc.type(1)))


def row_sums(
    scores: Scores, x: dict[str, Array], box: tiles.Box, blocks: list[tiles.Block], q: Array, k: Array
) -> tuple[Array, Array]:
    """Return the largest score of each row of a query block, including sinks, and the sum relative to it.

    The sum is 0 in a row without keys, whatever its sink is. Parameters as in `row_lse`; both results are
    (batch, key heads, group, m).
    """
    top, total = np.full(q.shape[:3], -np.inf, scores.acc), np.zeros(q.shape[:3], scores.acc)
    for block in blocks:
        visible, nothing_left = scores.visible(box, block)
        if nothing_left:
            continue
        s = recompute_scores(scores, box, block, q, k[..., block.j0 : block.j1, :], visible)
        top, rescale = softmax(s, top)
        total = rescale * total + s.sum(axis=-1)
    rows = (*q.shape[:2], scores.problem.heads_q // scores.problem.heads_k, -1)
    top, total = top.reshape(rows), total.reshape(rows)
    if scores.problem.sinks:
        sink = cut_out(x["sinks"], box)
        both = np.maximum(top, sink)
        total = np.where(total == 0, 0, total * np.exp(top - both) + np.exp(sink - both))
        top = both
    return top, total


def gradient_rows(x: dict[str, Array], at: tuple[Any, ...], acc: np.dtype[Any]) -> tuple[Array, Array]:
    """Return dO (batch, key heads, rows, head_dim_v) at an index, and [A2.4] delta, shaped as LSE."""
    do = rows_of(x["do"][at], acc)
    delta = np.einsum("...d,...d->...", do, rows_of(x["o"][at], acc)).reshape(x["lse"][at].shape)
    if "dlse" in x:
        delta -= x["dlse"][at]
    return do, delta


def recompute_scores(
    scores: Scores,
    box: tiles.Box,
    block: tiles.Block,
    q: Array,
    k: Array,
    visible: Array | None,
    capped: Array | None = None,
    function_input: Array | None = None,
) -> Array:
    """Return S of a tile (batch, key heads, rows, keys), -inf where hidden.

    Parameters are as in `recompute_weights`; capped and function_input are filled as in `Scores.finish`.
    """
    s: Array = q @ k.swapaxes(-1, -2)
    grouped = scores.grouped(s, block)
    tanh = None if capped is None else scores.grouped(capped, block)
    scores.finish(grouped, box, block, visible, tanh, function_input)
    scores.hide_scores(grouped, block, visible)
    return s


def recompute_weights(
    scores: Scores,
    box: tiles.Box,
    block: tiles.Block,
    q: Array,
    k: Array,
    lse: RowLse,
    visible: Array | None,
    function_input: Array | None,
) -> tuple[Array, Array | None]:
    """Return P = exp(S - LSE) of a tile (batch, key heads, rows, keys), and tanh of its capped scores.

    q is scaled by `Scores.query_scale`; k and visible belong to the tile; lse is (..., rows, 1);
    function_input is filled as in `Scores.finish`.
    """
    shape = (*q.shape[:-1], k.shape[-2])
    capped = None if scores.problem.softcap is None else np.empty(shape, scores.acc)
    weights = lse.exp(recompute_scores(scores, box, block, q, k, visible, capped, function_input))
    if capped is not None:
        np.copyto(capped, 0, where=weights == 0)  # it may be NaN for hidden keys
    return weights, capped


def drop(scores: Scores, weights: Array, block: tiles.Block, keep: Array | None) -> None:
    """Set dropped weights of a tile to 0, in place; keep is None without dropout."""
    if keep is not None:
        grouped = scores.grouped(weights, block)
        grouped *= keep
