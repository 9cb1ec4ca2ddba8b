"""Run cases: which kernels computed each, and how much of its error budget it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import testing
from ..dispatch import memo
from ..errors import UnsupportedError
from ..plan.families.primitives import KERNEL
from ..testing import Verdict
from .cases import Case, drawing
from .places import Place, first_line
from .primitives import Primitive

__all__ = ["LEFT_OUT", "REFUSED", "RIGHT", "STATES", "WRONG", "Outcome", "run_case", "run_cases"]

RIGHT, WRONG, REFUSED, LEFT_OUT = STATES = ("right", "wrong", "refused", "left out")


class Outcome(NamedTuple):
    """The result of a case."""

    case: str
    kind: str  # one of "primitive", "forward", "backward", "decode", "second order"
    # One of `STATES`: "right" is within the error budget, "wrong" is over it or raised an error, "refused"
    # by the library, "left out" because its arrays could not be made or the device is lost.
    state: str
    # The largest share of the error budget that a result uses; None if nothing was compared.
    used: float | None = None
    kernels: tuple[str, ...] = ()  # names of the kernels that computed it
    says: str = ""  # why it is not right; "" if it is


def run_cases(
    cases: Sequence[Case], places: Sequence[Place], seed: int, tell: Callable[[int, Case], None]
) -> list[Outcome]:
    """Run every case.

    Parameters
    ----------
    cases, places
        A case runs at the first place that can hold its arrays.
    seed : int
    tell : callable
        Called with the index and the case before it runs.
    """
    found: list[Outcome] = []
    lost = ""
    for n, case in enumerate(cases):
        tell(n, case)
        if lost:
            found.append(Outcome(str(case), case.kind, LEFT_OUT, says=lost))
            continue
        found.append(run_case(case, places, seed))
        if found[-1].state == WRONG and (why := _lost(places)):
            lost = f"the device is lost since an earlier case: {why}"
    return found


def _lost(places: Sequence[Place]) -> str:
    """Why a device accepts no more work, as after a failed kernel; "" if it does."""
    try:
        for place in places:
            place.synchronize()
    except Exception as error:  # why any: each library has its own error
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def run_case(case: Case, places: Sequence[Place], seed: int) -> Outcome:
    """Run a case, and compare its results with FP64."""
    name, kind = str(case), case.kind
    try:
        host = case.inputs(drawing(case, seed))
    except UnsupportedError as error:  # ml_dtypes is not installed
        return Outcome(name, kind, LEFT_OUT, says=_reasons(error))
    put = _put(places, host)
    if isinstance(put, str):
        return Outcome(name, kind, LEFT_OUT, says=put)
    place, given = put
    memo.forget()
    try:
        results = case.run(given)
        results = {n: testing.to_numpy(x) for n, x in results.items() if x is not None}
    except UnsupportedError as error:
        return Outcome(name, kind, REFUSED, says=_reasons(error))
    except Exception as error:  # why any: each library has its own error for a failed kernel
        says = f"{type(error).__name__}: {first_line(error)}"
        return Outcome(name, kind, WRONG, None, _computed(case), says)
    with np.errstate(all="ignore"):
        verdicts = case.judge(host, results, place)
    worst = max(verdicts, key=lambda verdict: verdict.used)
    state = RIGHT if all(verdict.within for verdict in verdicts) else WRONG
    says = "" if state == RIGHT else _numbers(verdicts)
    return Outcome(name, kind, state, worst.used, _computed(case), says)


def _computed(case: Case) -> tuple[str, ...]:
    """Names of the kernels that computed a case."""
    return (KERNEL,) if isinstance(case, Primitive) else memo.kernels()


def _put(places: Sequence[Place], host: dict[str, Any]) -> tuple[Place, dict[str, Any]] | str:
    """Copy the arrays of a case to the first place that can hold them, or say why none can."""
    reasons = []
    for place in places:
        try:
            return place, place.put(host)
        except (TypeError, ValueError, MemoryError, RuntimeError) as error:
            reasons.append(f"{place.library} does not hold its arrays: {first_line(error)}")
    return "; ".join(reasons)


def _reasons(error: UnsupportedError) -> str:
    """The message of a refusal on one line, without its hint."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if not line.startswith("Try:"))


def _numbers(verdicts: Sequence[Verdict]) -> str:
    """The worst verdict of each wrong tensor: its errors and the allowed errors."""
    worst: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.used):
        if not verdict.within:
            worst[verdict.tensor] = verdict
    parts = []
    for name, x in worst.items():
        if x.mismatch:
            parts.append(f"{name}: {x.mismatch}")
        else:
            parts.append(
                f"{name}: largest error {x.largest:.2e} of {x.largest_allowed:.2e} allowed, "
                f"rms {x.rms:.2e} of {x.rms_allowed:.2e}"
            )
    return "; ".join(parts)
