"""Spans for tests: random intervals of both forms, beside the options of a case, and the masks they mean."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from cupy_flash import Spans
from tests.cases import Case
from tests.masked_case import MaskedCase


def as_mask(spans: np.ndarray | Spans, queries: int, keys: int) -> np.ndarray:
    """The pairs that spans keep, one bound at a time."""
    spans = spans.bounds if isinstance(spans, Spans) else spans
    by_query = spans.shape[-3:-1] == (queries, 1)
    rows = spans.reshape(*spans.shape[:-3], queries if by_query else keys, spans.shape[-1])
    mask = np.zeros((*rows.shape[:-1], keys if by_query else queries), bool)
    for at in np.ndindex(*rows.shape[:-1]):
        for start, stop in rows[at].reshape(-1, 2):
            mask[at][start:stop] = True
    return mask if by_query else mask.swapaxes(-1, -2)


def random_spans(
    draw: np.random.Generator, lead: tuple[int, ...], rows: int, along: int, intervals: int
) -> np.ndarray:
    """Bounds (*lead, rows, 2 * intervals), neighbours alike as in real ones; some are empty, some all."""
    runs = np.sort(draw.integers(0, max(rows, 1), 4))
    made = np.zeros((*lead, rows, 2 * intervals), np.int32)
    for at in np.ndindex(*lead, intervals):
        ends = np.sort(draw.integers(0, along + 1, (5, 2)), axis=1)
        ends[draw.integers(0, 5)] = draw.permutation([along, 0])
        of_row = np.searchsorted(runs, np.arange(rows))
        shift = draw.integers(-2, 3, (rows, 1))
        bounds = np.clip(ends[of_row] + shift, 0, along)
        made[at[:-1]][:, 2 * at[-1] : 2 * at[-1] + 2] = bounds
    return made


@dataclass(frozen=True)
class SpanCase(MaskedCase):
    """A case, and spans of it.

    Attributes
    ----------
    lead : str
        Axes before those of pairs, as of `cases.BROADCASTS`: "", "h", "1h", "b1", "bh".
    """

    by_query: bool = False
    intervals: int = 1
    lead: str = ""

    def __str__(self) -> str:
        kind = f"{'query' if self.by_query else 'key'}{self.intervals}{self.lead}"
        return f"{kind} {self.case}"

    def inputs(self) -> dict[str, np.ndarray]:
        """Those of the case, and spans."""
        made, case = self.case.inputs(), self.case
        draw = np.random.default_rng(zlib.crc32(str(self).encode()))
        lead = tuple({"b": case.batch, "h": case.heads[0], "1": 1}[axis] for axis in self.lead)
        rows, along = case.lengths if self.by_query else case.lengths[::-1]
        spans = random_spans(draw, lead, rows, along, self.intervals)
        return made | {"spans": spans[..., :, None, :] if self.by_query else spans[..., None, :, :]}

    def mask_of(self, arrays: dict[str, np.ndarray]) -> Spans:
        """The spans among the inputs."""
        return Spans(arrays["spans"])

    def as_mask(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The pairs that they keep."""
        return as_mask(arrays["spans"], *self.case.lengths)


def crossed(plain: list[dict[str, object]]) -> list[SpanCase]:
    """Each of these fields of `Case` with one of the kinds of spans in turn."""
    kinds = [(by, n, lead) for lead in ("", "h", "b1", "bh", "1h") for n in (1, 2) for by in (False, True)]
    return [SpanCase(Case(**fields), *kinds[7 * n % len(kinds)]) for n, fields in enumerate(plain)]  # type: ignore[arg-type]
