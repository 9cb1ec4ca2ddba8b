"""Tangents of the scores in a direction, which `jvp` and `hvp` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..call.options import DERIVATIVES, PER_HEAD
from . import tiles
from .scores import Scores, by_key_head, of_heads, operand, rows_of
from .tiles import cut_out

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]


def grouped_direction(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tangents and results of a direction, grouped by key head as in `grouped_inputs`."""
    names = ("k_dot", "v_dot", *DERIVATIVES)
    dots = {name: arrays[name] for name in names if name in arrays}
    for name in ("q_dot", "bias_dot", "o_dot", "lse_dot", "dq"):
        if name in arrays:
            dots[name] = by_key_head(arrays[name], problem.heads_k)
    for name in PER_HEAD:
        if f"{name}_dot" in arrays:
            dots[f"{name}_dot"] = of_heads(arrays[f"{name}_dot"], problem.heads_k)
    return dots


class Direction:
    """One direction, for the keys of a box and one query block at a time.

    Parameters
    ----------
    scores : Scores
    dots : dict of str to array
        Result of `grouped_direction`.
    box : Box
    k : array (batch, key heads, keys, d)
        The keys as an operand, after `finite_rows`.

    Attributes
    ----------
    q, k, v : array or None
        Tangents as operands, None if they are 0; q is that of the query block, scaled as the queries are.
    """

    def __init__(self, scores: Scores, dots: dict[str, Array], box: tiles.Box, k: Array) -> None:
        self.scores, self.dots, self._box = scores, dots, box
        self.k, self.v = (
            operand(dots[name][box], scores.acc) if name in dots else None for name in ("k_dot", "v_dot")
        )
        # why one product of depth 2 D, [dQ Q] [K dK]^T: it writes a tile once; two would write and add.
        self._right = _side_by_side(k if "q_dot" in dots else None, self.k)
        self._left: Array | None = None
        self.q: Array | None = None

    @property
    def has_score_tangent(self) -> bool:
        """Whether any score has a tangent."""
        return self._right is not None or "bias_dot" in self.dots

    def begin(self, at: tuple[Any, ...], q: Array) -> None:
        """Start the query block at an index; q is its operand."""
        if "q_dot" in self.dots:
            self.q = rows_of(self.dots["q_dot"][at], self.scores.acc, self.scores.query_scale(self._box))
        self._left = _side_by_side(self.q, None if self.k is None else q)

    def of_scores(
        self, block: tiles.Block, like: Array, capped: Array | None, slope: Array | None
    ) -> tuple[Array, Array | None, Array]:
        """Return the tangents of a tile's scores, of the argument of tanh, and of the function's input.

        like: the weights of the tile; capped: as in `recompute_weights`; slope: as in `Scores.derivatives`.
        """
        scores = self.scores
        if self._left is None or self._right is None:
            s = np.zeros_like(like)
        else:
            s = self._left @ self._right[..., block.j0 : block.j1, :].swapaxes(-1, -2)
        inside = None
        if capped is not None:
            inside = s
            s = s * (1 - np.square(capped)) * scores.acc.type(scores.problem.softcap)
        given = s
        if slope is not None:
            s = s * slope
        if "bias_dot" in self.dots:
            i, j = slice(block.i0, block.i1), slice(block.j0, block.j1)
            grouped = scores.grouped(s, block)
            np.add(grouped, cut_out(self.dots["bias_dot"], self._box, i, j), out=grouped, casting="same_kind")
        return s, inside, given


def _side_by_side(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return np.concatenate((a, b), axis=-1)
