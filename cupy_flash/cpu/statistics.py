"""Statistics of the attention weights P in NumPy: P is recomputed from LSE, tile by tile.

statistics.cpp is the same algorithm in the compiled core.

[S.1]    for each query block i
[S.2]        LSE_i: given, or from a pass over the keys
[S.3]        for each key block j inside the band: log P = S - LSE_i
[S.4]            key_sum_j += colsum(P),  key_max_j = max(key_max_j, colmax(P))
[S.5]            entropy_i -= rowsum(P log P)
[S.6]            top_i = the largest of top_i and P
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import tiles
from .decode import gathered
from .progress import count
from .recompute import RowLse, recompute_scores, row_lse, row_sums
from .scores import Scores, by_key_head, grouped_inputs, operand, rows_of
from .threads import one_blas_thread

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]

_RESULTS = ("key_sum", "key_max", "entropy", "top_weights", "top_keys")


def statistics(problem: Problem, arrays: dict[str, Array]) -> None:
    """Compute statistics of the weights; over a cache one sequence at a time.

    Parameters
    ----------
    problem : Problem
        With direction "statistics".
    arrays : dict of str to array
        q, k, mask, bias, alibi_slopes, sinks and so on as in `forward`, over a cache as in `decode`; lse
        (batch, heads, seqlen_q) if it is known. Written, if given: key_sum and key_max (batch, heads_q,
        seqlen_k), entropy (batch, heads_q, seqlen_q), top_weights and top_keys (batch, heads_q,
        seqlen_q, top). The caller fills them with 0, and top_keys with -1.
    """
    if problem.empty:
        return
    if problem.cache is not None:
        for one, views in gathered(problem, arrays):
            statistics(one, views)
        return
    # As in the forward pass.
    with one_blas_thread(), np.errstate(all="ignore"):
        scores = Scores(problem, arrays)
        x = grouped_inputs(problem, arrays)
        x |= {name: by_key_head(arrays[name], problem.heads_k) for name in _RESULTS if name in arrays}
        for box in tiles.boxes(problem):
            _box(scores, x, box)


def _box(scores: Scores, x: dict[str, Array], box: tiles.Box) -> None:
    """Write the statistics of one key head."""
    p, acc = scores.problem, scores.acc
    k = operand(x["k"][box], acc)
    for i0, i1, blocks in tiles.visited(p):  # [S.1]
        at = (*box, slice(None), slice(i0, i1))
        q = rows_of(x["q"][at], acc, scores.query_scale(box))
        if "lse" in x:  # [S.2]
            lse = row_lse(scores, x, box, at, blocks, q, k)
        else:
            top, total = row_sums(scores, x, box, blocks, q, k)
            seen = total != 0  # or NaN
            lse = RowLse(np.where(seen, top, 0), np.where(seen, 1 / total, 1))
        high, unit = lse.reshape(*q.shape[:3], 1)
        for block in blocks:
            visible, nothing_left = scores.visible(box, block)
            if nothing_left:
                continue
            s = recompute_scores(scores, box, block, q, k[..., block.j0 : block.j1, :], visible)
            s -= high  # [S.3]
            if unit is not None:  # why separate: added to a large LSE, its logarithm would be rounded away
                s += np.log(unit)
            weights = np.exp(s)
            grouped = scores.grouped(weights, block)
            keys = (*box, slice(None), slice(block.j0, block.j1))
            if "key_sum" in x:  # [S.4]
                x["key_sum"][keys] += grouped.sum(axis=3)
            if "key_max" in x:
                x["key_max"][keys] = np.maximum(x["key_max"][keys], grouped.max(axis=3))
            if "entropy" in x:  # [S.5]
                s[weights == 0] = 0  # 0 log 0 is 0
                x["entropy"][at] -= np.einsum("...n,...n->...", scores.grouped(s, block), grouped)
            if "top_weights" in x:  # [S.6]
                _keep_largest(x["top_weights"][at], x["top_keys"][at], grouped, block.j0)
        count(p, i0, i1)


def _keep_largest(largest: Array, keys: Array, weights: Array, first: int) -> None:
    """Merge weights (..., n) of keys first, first + 1, ... into the largest (..., top); ties to lower keys.

    why not a sort: top is small, and equal weights would need a stable sort.
    """
    every = np.concatenate([largest, np.fmax(weights, 0)], axis=-1)  # NaN is not listed
    own = np.broadcast_to(np.arange(first, first + weights.shape[-1], dtype=keys.dtype), weights.shape)
    names = np.concatenate([keys, own], axis=-1)
    for place in range(largest.shape[-1]):
        at = every.argmax(axis=-1)[..., None]
        largest[..., place] = np.take_along_axis(every, at, -1)[..., 0]
        keys[..., place] = np.take_along_axis(names, at, -1)[..., 0]
        np.put_along_axis(every, at, -1, -1)
