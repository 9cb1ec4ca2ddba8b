"""gpu_check: probes, correctness and speed in one session on a machine with a GPU, in limited time.

It runs from the checkout, without an install, as stages in processes of their own: probes, correctness,
compute-sanitizer, then speed compared with the peers. Each stage writes its results to disk, so that another
run can resume after the time limit. Without a GPU the same stages run on the CPU, as a rehearsal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from ..machine import conditions
from ..machine import place as places
from ..measure import results
from ..measure.peers import OURS
from .compare import label

ROOT = Path(__file__).resolve().parents[2]
LOG, STATE, RESULTS, PROBES = "log.txt", "state.json", "results.csv", "probes.json"
# Imports of tests/gpu; if one is missing, the soak replaces these tests.
NEEDED_BY_TESTS = ("pytest", "ml_dtypes")
# Files of tests/gpu that run first: instructions, then kernels that use the rarest of them.
FIRST = ("test_primitives.py", "test_hopper.py", "test_adapters.py", "test_kv_cache.py")
LOG_BYTES_PER_STAGE = 1_500_000


class Stage(NamedTuple):
    """One stage, a process.

    Attributes
    ----------
    name : str
    command : tuple of str
        Arguments of the interpreter.
    most : float
        Its largest share of the whole time, 0 to 1.
    goes_on : bool
        Whether it can resume after its time limit.
    before : tuple of str
        Command in front of the interpreter, such as a sanitizer.
    """

    name: str
    command: tuple[str, ...]
    most: float = 0.2
    goes_on: bool = False
    before: tuple[str, ...] = ()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="as scripts/build_cubins.py --out made it")
    parser.add_argument("--only", default="", metavar="TEXT", help="only stages whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="list the stages, and run none")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")


def stages(out: Path, device: str, cubins: Path | None, minutes: float) -> list[Stage]:
    """All stages, the most important first."""
    bench = ("-m", "bench")
    given = ("--cubins", str(cubins.resolve())) if cubins else ()
    on = ("--device", device)
    found = [
        Stage("info", ("-m", "cupy_flash", "info")),
        Stage("probes", (*bench, "probes", "--out", str(out / PROBES), *given, *on), 0.15),
        *_correctness(on, minutes),
        *_sanitizer(on),
    ]
    measured = ("--results", str(out / RESULTS), "--resume", *on)
    for name, most in (("forward", 0.3), ("backward", 0.3), ("decode", 0.15), ("varlen", 0.15),
                       ("latency", 0.1), ("cold", 0.15), ("memory", 0.15)):  # fmt: skip
        found.append(Stage(name, (*bench, name, "--quick", *measured), most, goes_on=True))
    for name in ("forward", "backward"):
        found.append(Stage(f"{name} whole", (*bench, name, *measured), 0.5, goes_on=True))
    return found


def _correctness(on: tuple[str, ...], minutes: float) -> list[Stage]:
    """Stages of tests/gpu, one per file; without pytest the soak."""
    soak = Stage("soak", ("-m", "bench", "soak", "--minutes", f"{minutes / 20:.3f}", *on), 0.15)
    missing = [name for name in NEEDED_BY_TESTS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{', '.join(missing)} not installed: the soak stands in for tests/gpu")
        longer = ("-m", "bench", "soak", "--minutes", f"{minutes / 5:.3f}", *on)
        return [soak._replace(command=longer, most=0.3)]
    # -p no:cacheprovider: the checkout may be read-only.
    # -W default: a newer version of a package may warn, which is not an error of this library.
    # -v: if a kernel hangs until the stage ends, the last line of the log names the test.
    pytest = ("-m", "pytest", "-v", "-rfE", "--tb=short", "--maxfail=30", "-p", "no:cacheprovider")
    pytest += ("-W", "default")
    names = {name: place for place, name in enumerate(FIRST)}
    found = (ROOT / "tests" / "gpu").glob("test_*.py")
    files = sorted(found, key=lambda file: (names.get(file.name, len(names)), file.name))
    tests = [Stage(f"tests/gpu/{f.name}", (*pytest, f"tests/gpu/{f.name}"), 0.35) for f in files]
    return [*tests, soak]


def _sanitizer(on: tuple[str, ...]) -> list[Stage]:
    found = shutil.which("compute-sanitizer")
    if found is None:
        print("compute-sanitizer is not on the PATH: left out")
        return []
    few = ("-m", "bench", "soak", "--count", "6", "--threads", "1", *on)
    return [
        Stage(f"sanitizer {tool}", few, 0.12, before=(found, "--tool", tool, "--error-exitcode", "9"))
        for tool in ("memcheck", "racecheck")
    ]


class Visit:
    """One run of the command: its time limit, its folder, and the state of earlier runs."""

    def __init__(self, out: Path, minutes: float, environment: dict[str, str]) -> None:
        self.out, self.environment = out, environment
        self.seconds = 60 * minutes
        self.end = time.monotonic() + self.seconds
        out.mkdir(parents=True, exist_ok=True)
        path = out / STATE
        self.state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.state.setdefault("stages", {})

    def save(self) -> None:
        new = self.out / (STATE + ".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self.out / STATE)

    def done(self, stage: Stage) -> bool:
        return self.state["stages"].get(stage.name, {}).get("status") in ("passed", "failed")

    def run(self, stage: Stage) -> None:
        """Run a stage within the remaining time, and record how it ended."""
        left = self.end - time.monotonic()
        limit = min(left, stage.most * self.seconds)
        if left < min(20.0, 0.05 * self.seconds):
            self._note(stage, "no time", 0.0, "")
            return
        begun = time.monotonic()
        command = [*stage.before, sys.executable, *stage.command]
        if stage.goes_on:  # it ends by itself after a whole row
            command += ["--minutes", f"{0.9 * limit / 60:.3f}"]
        with (self.out / LOG).open("ab") as log:
            log.write(f"\n== {stage.name}: {' '.join(command)}\n".encode())
            log.flush()
            at = log.tell()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = "passed" if process.wait(limit) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timed out"
                os.killpg(process.pid, signal.SIGKILL)  # the stage's own session, and nothing else
                process.wait()
        text = _cut(self.out / LOG, at)
        if stage.goes_on and status == "passed" and "minutes are over" in text:
            status = "timed out"
        self._note(stage, status, time.monotonic() - begun, _last(text))

    def _note(self, stage: Stage, status: str, seconds: float, last: str) -> None:
        self.state["stages"][stage.name] = {"status": status, "seconds": round(seconds, 1), "last": last}
        self.save()
        print(f"{stage.name:32} {status:10} {seconds:6.1f} s  {last[:90]}", flush=True)


def _cut(log: Path, start: int) -> str:
    """The log from an offset on; cut the middle out of the log of a stage that wrote too much."""
    data = log.read_bytes()
    text = data[start:]
    if len(text) > LOG_BYTES_PER_STAGE:
        half = LOG_BYTES_PER_STAGE // 2
        text = text[:half] + b"\n[...]\n" + text[-half:]
        log.write_bytes(data[:start] + text)
    return text.decode(errors="replace")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _table(path: Path) -> list[str]:
    """Our speed and that of the fastest peer, one line per case."""
    cases: dict[tuple[str, ...], dict[str, results.Row]] = {}
    for row in map(results.pooled, results.runs(results.read(path))):
        if row["median_ms"]:
            identity = results.identity(row)
            cases.setdefault((identity[0], "", *identity[2:]), {})[row["implementation"]] = row
    lines = []
    for identity, rows in cases.items():
        ours = rows.pop(OURS.name, None)
        if ours is None:
            continue
        peers = {n: r for n, r in rows.items() if not n.startswith(OURS.name)}
        best = min(peers, key=lambda name: float(peers[name]["median_ms"]), default=None)
        beside = "no peer"
        if best is not None:
            ratio = float(peers[best]["median_ms"]) / float(ours["median_ms"])
            beside = f"{ratio:5.2f} x {best}"
        rate = f"{float(ours['tflops']):.4g} TFLOP/s" if ours["tflops"] else f"{ours['median_ms']} ms"
        wrong = f"  {ours['of_budget']} of budget" if ours["of_budget"] else ""
        lines.append(f"{label(identity):64} {rate:>16}  {beside}{wrong}")
    return lines


def run(chosen: argparse.Namespace) -> int:
    place, sentences = places.find(chosen.device)
    print(*sentences, sep="\n")
    if place.name == "cpu":
        print("No GPU: this is a rehearsal on the CPU path, and nothing it finds is about a GPU.")
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    if chosen.cubins is not None:
        if not any(chosen.cubins.glob("cuda1[23]/*/manifest.json")):
            print(f"usage: --cubins DIR\n{chosen.cubins} holds no cuda12 or cuda13", file=sys.stderr)
            return 2
        environment["CUPY_FLASH_CUBIN_DIR"] = str(chosen.cubins.resolve())
    out = chosen.out.resolve()
    every = stages(out, place.name, chosen.cubins, chosen.minutes)
    wanted = [stage for stage in every if chosen.only in stage.name]
    if chosen.list or not wanted:
        print("stages: " + ", ".join(stage.name for stage in every))
        return 0 if wanted else 2
    visit = Visit(out, chosen.minutes, environment)
    where = {"commit": conditions.commit(), "gpu": place.gpu or place.name}
    before = {name: visit.state.get(name, value) for name, value in where.items()}
    if before != where:
        print(f"{out} holds another visit ({before}); this is {where}: give another --out", file=sys.stderr)
        return 2
    visit.state |= where
    for stage in wanted:
        if visit.done(stage):
            print(f"{stage.name:32} {'known':10}")
        else:
            visit.run(stage)
    print("\n".join(_table(out / RESULTS)))
    ended = [visit.state["stages"][stage.name]["status"] for stage in wanted]
    print(", ".join(f"{ended.count(status)} {status}" for status in dict.fromkeys(ended)) + f"; all in {out}")
    return 0
