"""Heads of q that share one of k and v as rows of one tile: where each has one query, they see the same keys.

A kernel that has tiles of one head then reads keys once for all of them, and knows nothing of it: it is told
of rows of fewer heads, by their strides. A row's bits do not depend on where in a tile it stands.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..call.arrays import ArrayView
from ..call.problem import Problem

__all__ = ["problem_of_rows", "sees_alike", "views_of_rows"]

# What a call may have. why these are listed: under an option that this does not know nothing is shared.
_ALIKE = frozenset((
    "softcap", "offset", "left", "right", "offset_from_end", "mask", "bias", "bias_dtype", "want_lse",
    "deterministic", "in_rows", "aligned", "boxes", "reproducible", "cache", "seed",
))  # fmt: skip


def sees_alike(problem: Problem) -> bool:
    """Whether the heads of a group differ in nothing but q."""
    p = problem
    others = (name for name, default in p._field_defaults.items() if getattr(p, name) != default)
    if p.direction != "forward" or p.seqlen_q != 1 or p.heads_q <= p.heads_k or not _ALIKE.issuperset(others):
        return False
    if any(operand is not None and operand[1] != 1 for operand in (p.mask, p.bias)):
        return False
    last = 0 if p.offset_from_end else p.seqlen_k - 1
    return p.left is None and (p.right is None or p.offset + p.right >= last)


def problem_of_rows(problem: Problem) -> Problem:
    """The same with a row for each head of a group; there is nothing left that a position decides."""
    p = problem
    return p._replace(
        heads_q=p.heads_k,
        seqlen_q=p.heads_q // p.heads_k,
        offset=0,
        left=None,
        right=None,
        offset_from_end=False,
    )


def views_of_rows(views: Mapping[str, ArrayView], group: int) -> dict[str, ArrayView]:
    """The arrays that have a row for each query, with one for each head of a group."""

    def of_rows(view: ArrayView) -> ArrayView:
        batch, heads, _, *columns = view.shape
        step, of_head, _, *of_column = view.strides
        return view._replace(
            shape=(batch, heads // group, group, *columns),
            strides=(step, of_head * group, of_head, *of_column),
        )

    return {name: of_rows(view) if name in ("q", "o", "lse") else view for name, view in views.items()}
