"""Intervals as a call has them: which of the two forms an array is, and whether its bounds are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import InvalidArgumentsError
from .arrays import CPU, ArrayView
from .operands import Views, cast, table_of, wrong

__all__ = ["Intervals", "check_spans", "span_operand"]


class Intervals(NamedTuple):
    """What is asked of `spans`; the form is described in `cupy_flash.spans`.

    Attributes
    ----------
    by_query : bool
        Whether queries have intervals of keys, not keys intervals of queries.
    intervals : {1, 2}
        Of each.
    limit : int
        The largest bound: all keys, or all queries.
    """

    by_query: bool
    intervals: int
    limit: int

    def summary(self) -> str:
        """A phrase for people."""
        owner, seen = ("query", "keys") if self.by_query else ("key", "queries")
        return f"Spans({self.intervals} of {seen} for each {owner})"


def span_operand(raw: Views, views: Views, full: tuple[int, int, int, int]) -> Intervals | None:
    """Check spans, put their (batch, heads, queries or keys, bounds) view into views, say what they are.

    Parameters
    ----------
    raw, views : dict of str to ArrayView
        As of `describe`.
    full : (int, int, int, int)
        Batch, heads of q, queries, keys.
    """
    view = raw.get("spans")
    if view is None:
        return None
    if view.dtype != "int32":
        raise wrong(f"mask.bounds has dtype {view.dtype}, not int32.", raw, cast("spans", view, "int32"))
    *lead, bounds = (1,) * (5 - len(view.shape)) + view.shape
    by_key, by_query = lead[2:] == [1, full[3]], lead[2:] == [full[2], 1]
    broadcasts = len(lead) == 4 and lead[0] in (1, full[0]) and lead[1] in (1, full[1])
    if not (len(view.shape) >= 3 and broadcasts and (by_key or by_query) and bounds in (2, 4)):
        raise wrong(
            f"mask.bounds has shape {view.shape} for {full[2]} queries and {full[3]} keys.",
            raw,
            f"(..., 1, {full[3]}, 2 or 4) for the queries that see each key, "
            f"(..., {full[2]}, 1, 2 or 4) for the keys that each query sees; cupy_flash.spans makes them",
        )
    # why by_query first: of one query and one key both say the same, of any other lengths one fits.
    dropped = 3 if by_query else 2
    five = view.lifted(5)
    views["spans"] = five.permuted(*(axis for axis in range(5) if axis != dropped))
    return Intervals(by_query, bounds // 2, full[3] if by_query else full[2])


def check_spans(spans: Intervals | None, raw: Mapping[str, ArrayView]) -> None:
    """Refuse bounds that are none, where looking at them is free: in main memory.

    Parameters
    ----------
    spans : Intervals or None
        Of the problem.
    raw : mapping of str to ArrayView
        The caller's arrays, or the views that `describe` makes.
    """
    if spans is None or raw["spans"].device != CPU:
        return
    bounds = raw["spans"].numpy()
    if not bounds.size:
        return
    least, most = int(bounds.min()), int(bounds.max())
    if least < 0 or most > spans.limit:
        counted = "keys" if spans.by_query else "queries"
        raise InvalidArgumentsError(
            f"mask.bounds holds {least if least < 0 else most}; its bounds are of {spans.limit} {counted}.",
            table_of(raw),
            hint=f"bounds from 0 to {spans.limit}; an interval with stop at or before start is empty",
        )
