"""spans: masks as spans compared with equivalent options, on the CPU, by CPU time.

Causality and `causal=True`, documents in one sequence and a packed call, making spans and the forward pass
with them, and the masks of the gallery as functions, blocks and spans. Ratios are relative to the first
implementation of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash import Spans, spans

from ..machine import timing
from ..machine.place import Place
from ..measure import peers, results
from ..measure.peers import Call, Inputs, Peer
from ..measure.session import Session, Settings, variant
from ..work import Case, Named
from . import functions

Options = Callable[[Case], dict[str, Any]]
Prepare = Callable[[Any, Inputs, Place], Call]

DOCUMENTS = 32


class Mask(NamedTuple):
    """A mask with several implementations.

    Attributes
    ----------
    exact : callable
        Returns keyword arguments of `cupy_flash.attention` for a case, also for the FP64 reference.
    ways : mapping of str to callable
        Functions that prepare a call, by name. Ratios are relative to the first.
    """

    exact: Options
    ways: Mapping[str, Prepare]


def _ours(options: Options) -> Prepare:
    return lambda case, inputs, place: peers.ours(case.case, inputs, place, **options(case.case))


# ---------------------------------------------------------------------- masks


def _causality(_case: Case) -> dict[str, Any]:
    return {"causal": True}


def _causal(by: str) -> Options:
    def options(case: Case) -> dict[str, Any]:
        own = np.arange(case.seqlen, dtype=np.int32)
        if by == "key":
            return {"mask": Spans(np.stack([own, np.full_like(own, case.seqlen)], axis=-1)[None])}
        return {"mask": Spans(np.stack([np.zeros_like(own), own + 1], axis=-1)[:, None])}

    return options


def lengths(case: Case) -> list[int]:
    """Lengths of the documents of a case, which may be reduced to fewer tokens."""
    return [case.seqlen // DOCUMENTS] * DOCUMENTS


def _packed(case: Problem, inputs: Inputs, _place: Place) -> Call:
    counts = lengths(case.case)
    cuts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    how = {"causal": True, "max_seqlen_q": max(counts), "max_seqlen_k": max(counts)}
    q, k, v, do = (np.ascontiguousarray(inputs[name][0].swapaxes(0, 1)) for name in ("q", "k", "v", "do"))

    def forward() -> tuple[Any, ...]:
        return (cupy_flash.attention_varlen(q, k, v, cuts, cuts, **how).swapaxes(0, 1)[None],)

    if case.passes == "forward":
        return forward
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, return_lse=True, **how)
    backward = cupy_flash.attention_varlen_backward
    return lambda: tuple(x.swapaxes(0, 1)[None] for x in backward(do, q, k, v, o, lse, cuts, cuts, **how)[:3])


def _one_sequence(case: Case) -> dict[str, Any]:
    return {"mask": spans.documents(lengths(case)), "causal": True}


MAKING = "making"


def _made(make: Callable[[int], Spans], **besides: Any) -> Mask:
    """Compare making spans with the forward pass that uses them."""

    def options(case: Case) -> dict[str, Any]:
        return {"mask": make(case.seqlen)} | besides

    def prepare(case: Problem, _inputs: Inputs, _place: Place) -> Call:
        return lambda: (make(case.case.seqlen),)

    return Mask(options, {"cupy_flash spans": _ours(options), MAKING: prepare})


def _of_gallery(name: str, intervals: Callable[[Case], Spans] | None) -> Mask:
    """A mask of the gallery as a function, as blocks, and as spans if possible."""
    function: Options = lambda case: functions.Gallery(name, case).options()  # noqa: E731
    ways = {
        "cupy_flash function": _ours(function),
        "cupy_flash blocks": _ours(lambda case: functions.Blocks(name, case).options()),
    }
    if intervals is not None:
        ways["cupy_flash spans"] = _ours(lambda case: {"mask": intervals(case)})
    return Mask(function, ways)


def _documents_of_gallery(case: Case) -> Spans:
    own = np.arange(case.seqlen)
    (of,) = functions.GALLERY["documents"].arguments(case.heads, case.seqlen)
    return Spans(np.stack([own, np.searchsorted(of, of, "right")], axis=-1).astype(np.int32)[None])


def _window(case: Case) -> Spans:
    own = np.arange(case.seqlen)
    stop = np.minimum(own + functions.WINDOW, case.seqlen)
    return Spans(np.stack([own, stop], axis=-1).astype(np.int32)[None])


def _widths(case: Case) -> Spans:
    own, width = np.arange(case.seqlen), functions.widths(case.heads, case.seqlen)[:, None]
    bounds = np.maximum(own - width + 1, 0), np.minimum(own + width, case.seqlen)
    return Spans(np.stack(bounds, axis=-1).astype(np.int32)[None, :, None])


# Masks of the gallery as spans; None for a mask that needs more than two intervals per query and per key.
_INTERVALS: dict[str, Callable[[Case], Spans] | None] = {
    "causal": lambda case: _causal("key")(case)["mask"],
    "documents": _documents_of_gallery,
    "natten": None,
    "prefix": lambda case: spans.prefix_lm(functions.prefix(case.seqlen), case.seqlen),
    "window": _window,
    "dilated": None,
    "widths": _widths,
    "table": None,
}
MASKS = {
    "causal": Mask(
        _causality,
        {
            "cupy_flash causal": _ours(_causality),
            "cupy_flash spans by key": _ours(_causal("key")),
            "cupy_flash spans by query": _ours(_causal("query")),
        },
    ),
    "32 documents": Mask(
        _one_sequence, {"cupy_flash packed": _packed, "cupy_flash spans": _ours(_one_sequence)}
    ),
    "make documents": _made(lambda n: spans.documents([n // 32] * 32), causal=True),
    "make prefix_lm": _made(lambda n: spans.prefix_lm(n // 4, n)),
    "make shared_prefix": _made(lambda n: spans.shared_prefix(n // 2, [n // 8] * 4)),
    "make global_and_window": _made(lambda n: spans.global_and_window(n, 4, (n // 8, 0)), causal=True),
    "make tree": _made(lambda n: spans.tree(np.arange(n) - 1)),
    **{f"gallery {name}": _of_gallery(name, intervals) for name, intervals in _INTERVALS.items()},
}


class Problem(Named):
    """A problem with one of `MASKS`."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(name, case)
        self.mask = MASKS[name]

    def options(self) -> dict[str, Any]:
        return self.mask.exact(self.case)


def suite(quick: bool) -> list[Any]:
    small, long = (1024, 4096) if quick else (4096, 32768)
    both = ("forward", "backward")
    return [
        *(Problem("causal", Case(1, 2, small, 64, passes=passes)) for passes in both),
        *(Problem("32 documents", Case(1, 2, long, 64, passes=passes)) for passes in both),
        *(Problem(name, Case(1, 8, small, 64)) for name in MASKS if name.startswith("make ")),
        *(
            Problem(name, Case(1, 2, small // 2, 64, passes=passes))
            for passes in both[: 1 if quick else None]
            for name in MASKS
            if name.startswith("gallery ")
        ),
    ]


def ratios(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], float]:
    """CPU time relative to the first implementation, by mask, pass and implementation; medians of a run."""
    found: dict[tuple[str, str, str], float] = {}
    first: dict[tuple[str, str], float] = {}
    for row in map(results.pooled, results.runs(rows)):
        of, taken = (row["detail"], row["passes"]), float(row["median_ms"])
        found[(*of, row["implementation"])] = taken / first.setdefault(of, taken)
    return found


def run(settings: Settings) -> None:
    """Measure on the CPU, and append to bench/results/spans.csv."""
    session = Session("spans", settings._replace(device="cpu"), bounded=False)
    rows = []
    for case in session.cases(suite(settings.quick), first=lambda case: next(iter(case.mask.ways))):
        able, calls, _ = session.ready(case, [Peer(*way) for way in case.mask.ways.items()])
        if not calls:
            continue
        ways = {name: (call, timing.by_processor) for name, call in calls.items()}
        # why 2 repetitions: ratios of the others are far from 1. why any load: CPU time hardly depends on it.
        often = 5 if case.name in ("causal", "32 documents") and not settings.quick else 2
        times = timing.alternate(ways, often, 5.0, warm_up=0, calm=1.0)  # the stopwatch warms up
        session.say(f"{case}, processor time")
        for name, took in times.items():
            exact = {} if name == MAKING else session.errors_of(able[name], case)._asdict()
            errors = {measure: f"{value:.2g}" for measure, value in exact.items()}
            session.say(f"  {name:24} {took!s:>32}  {errors.get('of_budget', 'none')} of budget")
            row = session.row(
                case, name, **took.row(), **errors,
                variant=variant(case.case, session.place) if exact else "", note="processor time",
            )  # fmt: skip
            session.append([row])
            rows.append(row)
    for (mask, passes, way), ratio in ratios(rows).items():
        print(f"{mask:24} {passes:9} {way:28} {ratio:.4f}")
    if rows:
        print(f"appended to {session.path}")
