"""Checks of `Spans` in a call: the form of their array, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import InvalidArgumentsError
from .arrays import CPU, ArrayView
from .operands import Views, cast, table_of, wrong

__all__ = ["Intervals", "check_spans", "span_operand"]


class Intervals(NamedTuple):
    """The form of `Spans`, as part of a `Problem`; `cupy_flash.spans` describes both forms."""

    by_query: bool  # whether each query has intervals of keys; else each key has intervals of queries
    intervals: int  # {1, 2}: number of intervals per query or key
    limit: int  # the largest allowed bound: the number of keys, or of queries

    def summary(self) -> str:
        """A short description for messages."""
        owner, seen = ("query", "keys") if self.by_query else ("key", "queries")
        return f"Spans({self.intervals} of {seen} for each {owner})"


def span_operand(raw: Views, views: Views, full: tuple[int, int, int, int]) -> Intervals | None:
    """Check spans, add their (batch, heads, queries or keys, bounds) view, and return their form."""
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
    # why by_query first: with one query and one key both forms fit and agree; otherwise only one fits.
    dropped = 3 if by_query else 2
    five = view.lifted(5)
    views["spans"] = five.permuted(*(axis for axis in range(5) if axis != dropped))
    return Intervals(by_query, bounds // 2, full[3] if by_query else full[2])


def check_spans(spans: Intervals | None, raw: Mapping[str, ArrayView]) -> None:
    """Refuse bounds out of range, for arrays in main memory, where reading is free."""
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
