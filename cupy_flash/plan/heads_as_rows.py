"""Pack the query heads of a group into the rows of one tile (GQA), where all of them see the same keys.

With one query per head, a kernel with tiles of one head then reads keys once for the whole group. The kernel
is unchanged: views with other strides give it fewer heads of more rows. The bits of a row do not depend on
its place in a tile.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..call.arrays import ArrayView
from ..call.problem import Problem

__all__ = ["heads_share_keys", "problem_of_rows", "views_of_rows"]

# Fields that a problem may set. why a list of allowed ones: a new option must not be packed unchecked.
_ALIKE = frozenset((
    "softcap", "offset", "left", "right", "offset_from_end", "mask", "bias", "bias_dtype", "want_lse",
    "deterministic", "in_rows", "aligned", "boxes", "reproducible", "cache", "seed",
))  # fmt: skip


def heads_share_keys(problem: Problem) -> bool:
    """Whether the query heads of a group attend to the same keys with the same options."""
    p = problem
    others = (name for name, default in p._field_defaults.items() if getattr(p, name) != default)
    if p.direction != "forward" or p.seqlen_q != 1 or p.heads_q <= p.heads_k or not _ALIKE.issuperset(others):
        return False
    if any(operand is not None and operand[1] != 1 for operand in (p.mask, p.bias)):
        return False
    last = 0 if p.offset_from_end else p.seqlen_k - 1
    return p.left is None and (p.right is None or p.offset + p.right >= last)


def problem_of_rows(problem: Problem) -> Problem:
    """The problem with a row per head of a group, without the band, which masks nothing here."""
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
    """Views of q, o and lse with a row per head of a group; other views unchanged."""

    def of_rows(view: ArrayView) -> ArrayView:
        batch, heads, _, *columns = view.shape
        step, of_head, _, *of_column = view.strides
        return view._replace(
            shape=(batch, heads // group, group, *columns),
            strides=(step, of_head * group, of_head, *of_column),
        )

    return {name: of_rows(view) if name in ("q", "o", "lse") else view for name, view in views.items()}
