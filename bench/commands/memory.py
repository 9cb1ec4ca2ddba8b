"""memory: peak memory of a call in addition to its inputs, by length, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from ..measure.peers import Peer, chosen
from ..measure.session import Session, Settings
from ..work import Case


def _peak(peer: Peer, case: Case, device: str) -> int | str:
    """Peak bytes of a call in a fresh process, or why they could not be measured."""
    command = [sys.executable, "-m", "bench.measure.peak", peer.name, json.dumps(case), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "took more than 5 minutes"
    last = (done.stdout.strip() or done.stderr.strip() or "it failed without a word").splitlines()[-1]
    return int(last) if not done.returncode and last.isdigit() else last


def run(settings: Settings) -> None:
    session = Session("memory", settings)
    place = session.place
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192) if place.name == "cpu" else (
        1024, 4096, 16384, 65536,
    )  # fmt: skip
    suite = [
        Case(1, 2 if place.name == "cpu" else 16, length, 64, place.dtypes[0], True, passes)
        for passes in ("forward", "forward+backward")
        for length in (lengths[:3] if settings.quick else lengths)
    ]
    for case in session.cases(suite, visits=1):  # a peak does not drift
        session.say(f"{case}: {case.traffic() / 1e6:.4g} MB of operands and results")
        for peer in chosen(place, settings.peers):
            found = _peak(peer, case, place.name)
            if isinstance(found, str):
                session.skipped(peer.name, found)
                continue
            session.say(f"  {peer.name:24} {found / 1e6:10.2f} MB beside the inputs")
            session.append([session.row(case, peer.name, megabytes=f"{found / 1e6:.3f}")])
