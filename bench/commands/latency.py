"""latency: time from the call to the result, for problems with more overhead than arithmetic."""

from __future__ import annotations

import time
from typing import Any

from ..machine import timing
from ..machine.place import Place
from ..measure.peers import WITHOUT_CUPY, chosen
from ..measure.session import Session, Settings
from ..work import Case, Named


def to_result(place: Place) -> timing.Stopwatch:
    """Seconds from the call until its result is ready, including Python and the launch."""

    def seconds(call: timing.Call) -> float:
        call()
        place.synchronize()
        start = time.perf_counter()
        call()
        place.synchronize()
        return time.perf_counter() - start

    return seconds


def to_return(place: Place) -> timing.Stopwatch:
    """Seconds until the call returns, with its work only enqueued."""

    def seconds(call: timing.Call) -> float:
        place.synchronize()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def run(settings: Settings) -> None:
    session = Session("latency", settings)
    place = session.place
    details = {"to result": to_result(place)}
    peers = chosen(place, settings.peers)
    if place.name == "gpu":
        details["to return"] = to_return(place)
        peers.append(WITHOUT_CUPY)  # the two drivers differ only in latency
    lengths = (1, 64, 256) if settings.quick else (1, 16, 64, 128, 256, 512)
    suite: list[Any] = [
        Named(detail, Case(1, 8, length, 64, place.dtypes[0], passes=passes))
        for passes in ("forward", "forward+backward")
        for length in lengths
        for detail in details
    ]
    repetitions = 70 if settings.quick else 350
    for case in session.cases(suite):
        _, calls, _ = session.ready(case.case, peers)
        if not calls:
            continue
        ways = {name: (call, details[case.name]) for name, call in calls.items()}
        times = timing.alternate(ways, repetitions, 1.0, warm_up=3)
        session.say(str(case))
        for name, took in times.items():
            session.say(f"  {name:24} {took!s:>32}")
        session.append(session.row(case, name, **took.row()) for name, took in times.items())
