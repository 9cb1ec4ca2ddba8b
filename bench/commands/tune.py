"""tune: measure candidate tiles of a kernel, and print the best cell for the table.

There are two steps, because a machine with a GPU may have no compiler: `--build DIR` compiles the candidates
on any machine, `--cubins DIR` measures them, each in a process of its own. `--dry-run` needs neither: it
ranks them by the cost model, which is a STAND-IN, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from cupy_flash.errors import UnsupportedError

from ..machine import place as places
from ..machine import timing
from ..measure.peers import ours
from ..measure.session import progress, write
from ..model import candidates, cost_model, counting, rates
from ..model.candidates import Cell, Question

TABLE = "candidates.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", choices=candidates.KERNELS, default="flash_forward")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mask", choices=("band", "any"), default="band")
    parser.add_argument("--all-keys", action="store_true", help="measure without a causal mask")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--at-most", type=int, default=40, help="most candidates")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--build", type=Path, metavar="DIR", help="compile the candidates; needs no GPU")
    how.add_argument("--cubins", type=Path, metavar="DIR", help="measure what --build compiled")
    how.add_argument(
        "--dry-run", action="store_true", help="rank candidates by the cost model, and measure none"
    )
    how.add_argument("--one", help=argparse.SUPPRESS)  # a cell: what each process measures
    parser.add_argument(
        "--cuda", type=int, choices=(12, 13), default=13, help="CUDA major version of the compiler"
    )


def _plan(question: Question, cell: Cell, seqlen: int) -> Any:
    with candidates.applied(question, cell):
        return question.case(seqlen).plan(question.arch, **candidates.options(question))


# ---------------------------------------------------------------------- compile


def _build(question: Question, cells: list[Cell], out: Path, cuda: int, seqlen: int) -> int:
    """Compile each candidate into a folder of its own; record its cell, or why it does not compile."""
    from cupy_flash.cubins import build
    from cupy_flash.plan import families

    out.mkdir(parents=True, exist_ok=True)
    table = []
    for number, cell in enumerate(progress(cells, "tune")):
        entry: dict[str, Any] = {"cell": cell, "folder": f"{number:03}"}
        try:
            plan = _plan(question, cell, seqlen)
            kernels = tuple(launch.variant for launch in plan.launches)
            of = {build.native_targets(question.arch)[0]: kernels}
            with mock.patch.object(families, "variants", lambda target, of=of: of.get(target, ())):
                built, *_ = build.build(cuda, [question.arch], out / entry["folder"], progress=False)
            manifest = json.loads((built.folder / "manifest.json").read_text())["cubins"]
            entry["registers"] = {name: each["registers"] for name, each in manifest.items()}
        except (build.BuildFailed, UnsupportedError) as error:
            entry["refused"] = str(error).splitlines()[0]
        table.append(entry)
        write(f"{cell!s:32} {entry.get('refused', 'compiled')}"[:150])
    (out / TABLE).write_text(json.dumps({"question": question._asdict(), "cells": table}, indent=1) + "\n")
    return 0


# ---------------------------------------------------------------------- measure


def _measure_one(question: Question, cell: Cell, seqlen: int) -> int:
    """Time one candidate on the GPU and print seconds as JSON; each candidate has its own process."""
    place, sentences = places.find()
    if place.name == "cpu":
        print(*sentences)
        return 1
    with candidates.applied(question, cell):
        case = question.case(seqlen)
        call = ours(case, place.inputs(case), place, **candidates.options(question))
        took = timing.alternate({"it": (call, place.stopwatch())}, 21, 3.0, warm_up=3)["it"]
    print(json.dumps(took))
    return 0


def _measure(question: Question, folder: Path, seqlen: int) -> list[tuple[float, Cell, str]]:
    table = json.loads((folder / TABLE).read_text())
    if table["question"] != question._asdict():
        raise ValueError(f"{folder} holds candidates for {table['question']}")
    found = []
    for entry in progress(table["cells"], "tune"):
        cell = tuple(entry["cell"])
        if "refused" in entry:
            continue
        environment = dict(os.environ) | {"CUPY_FLASH_CUBIN_DIR": str((folder / entry["folder"]).resolve())}
        q = question
        command = [sys.executable, "-m", "bench", "tune", "--one", json.dumps(cell), "--kernel", q.kernel,
                   "--arch", q.arch, "--dtype", q.dtype, "--head-dim", str(q.head_dim), "--mask", q.mask,
                   "--seqlen", str(seqlen), *([] if q.causal else ["--all-keys"])]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=120
            )
        except subprocess.TimeoutExpired:  # a candidate that hangs does not affect the others
            write(f"{cell!s:32} failed: no end after 120 s")
            continue
        last = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
        if done.returncode:
            write(f"{cell!s:32} failed: {last[:100]}")
            continue
        took = timing.Timing(*json.loads(last))
        rate = question.case(seqlen).flops() / took.median / 1e12
        found.append((took.median, cell, f"{rate:.0f} TFLOP/s measured, noise {took.noise:.1%}"))
        write(f"{cell!s:32} {took!s:>32} {found[-1][2]}")
    return found


# ---------------------------------------------------------------------- rehearse


def _stand_in(question: Question, cells: list[Cell], seqlen: int) -> list[tuple[float, Cell, str]]:
    """Rank candidates by counts of the simulator and published rates."""
    gpu = next((gpu for gpu in rates.GPUS if gpu.arch == question.arch), None)
    if gpu is None:
        raise ValueError(f"no rates for {question.arch}: {', '.join(gpu.arch for gpu in rates.GPUS)}")
    case, found = question.case(seqlen), []
    for cell in progress(cells, "tune"):
        try:
            with candidates.applied(question, cell):
                counts = counting.counted(question.arch, case, **candidates.options(question))
                launches = case.plan(question.arch, **candidates.options(question)).launches
                costs = [cost_model.of_launch(case, x, counts[x.variant.name], gpu) for x in launches]
        except Exception as error:  # why any: a candidate that does not compile is skipped
            write(f"{cell!s:32} refused: {f'{type(error).__name__}: {error}'.splitlines()[0][:100]}")
            continue
        seconds = sum(sum(cost.seconds.values()) for cost in costs)
        note = f"STAND-IN, nothing overlapped: {seconds * 1e3:.4g} ms on {gpu.name}"
        found.append((seconds, cell, note))
        write(f"{cell!s:32} {note}; {cost_model.describe(costs)}")
    return found


def run(chosen: argparse.Namespace) -> int:
    question = Question(
        chosen.kernel, chosen.arch, chosen.dtype, chosen.head_dim, chosen.mask, not chosen.all_keys
    )
    try:
        if chosen.one:
            return _measure_one(question, tuple(json.loads(chosen.one)), chosen.seqlen)
        cells = candidates.cells(question)[: chosen.at_most]
        if chosen.build:
            return _build(question, cells, chosen.build, chosen.cuda, chosen.seqlen)
        if chosen.dry_run:
            print("STAND-IN: ranked by the cost model; nothing below was measured.")
            found = _stand_in(question, cells, chosen.seqlen)
        else:
            place, sentences = places.find()
            if place.name == "cpu":
                print(*sentences, "Tiles are measured on a GPU; --dry-run ranks them without one.")
                return 0
            found = _measure(question, chosen.cubins, chosen.seqlen)
    except (ValueError, StopIteration, OSError) as error:
        print(f"usage: python -m bench tune --help\n{error}", file=sys.stderr)
        return 2
    present = candidates.now(question)
    for _, cell, note in sorted(found)[:5]:
        mark = "  <- the table's" if cell == present else ""
        print(f"{candidates.line(question, cell)}  {note}{mark}")
    return 0
