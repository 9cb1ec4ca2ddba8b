"""Faults put back, one at a time, in a copy of the checkout: how long random calls take to find each.

``python -m tests.random_calls.faults`` runs the soak as CI does on each fault, three times with new seeds,
and prints a row of the table in bench/README.md; ``... faults odd_pairs --runs 10`` does so on one fault.
The core of a copy is that of the best instruction set alone, as in the first of CI's two commands.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT

__all__ = ["FAULTS", "Fault", "Finding", "put_back", "searched"]


class Fault(NamedTuple):
    """A change of a source that makes results wrong.

    Attributes
    ----------
    says : str
        What is wrong, for the table.
    file : str
    old, new : str
        `old` is there once.
    """

    says: str
    file: str
    old: str
    new: str


FAULTS = {
    "odd_pairs": Fault(
        "pairs of bfloat16 begin at the first key of a window, even if it is odd (fixed in c6cfb25)",
        "kernels_cpu/backward.cpp",
        "        begin -= begin % depth;\n",
        "",
    ),
    "dbias_without_keys": Fault(
        "dbias is not written where there is no key",
        "kernels_cpu/bias_sums.h",
        "    int64_t j0 = 0;\n    do {",
        "    int64_t j0 = 0;\n    if (!p.seqlen_k) return;\n    do {",
    ),
    "empty_part": Fault(
        "merge multiplies the contents of a part without weight by 0 (fixed in 4ad6b12)",
        "cupy_flash/merge.py",
        "weighted.append(xp.where(share == 0, xp.zeros_like(o), o) * share)",
        "weighted.append(o * share)",
    ),
    "query_in_prefix": Fault(
        "a query inside a shared prefix is rotated as one at its end (fixed in 4ad6b12)",
        "cupy_flash/shared_prefix.py",
        "        return bool(q.shape[axis] > max(1, 0 if k is None else k.shape[axis]))",
        "        return False",
    ),
    "integers_wrap": Fault(
        "integers of functions wrap at 32 bits in the core (fixed in 1d978ab)",
        "cupy_flash/program/ranges.py",
        "if own is not None and not -(2 ** (bits - 1)) <= own[0] <= own[1] < 2 ** (bits - 1):",
        "if own is not None and not -(2**63) <= own[0] <= own[1] < 2**63:",
    ),
    "no_sink": Fault(
        "dsinks is NaN for a sink of -inf in rows without keys (NumPy; fixed in 5811a27)",
        "cupy_flash/cpu/backward.py",
        'share = lse.of_sinks(cut_out(x["sinks"], box))',
        "share = np.exp(cut_out(x['sinks'], box) - x['lse'][at])",
    ),
    "hidden_keys": Fault(
        "dQ multiplies the contents of masked keys, NaN included, by 0",
        "kernels_cpu/panel.h",
        "    if (all_finite(",
        "    if (true || all_finite(",
    ),
    "neighbour_code": Fault(
        "an appended key of NVFP4 changes a code of the following row",
        "kernels_cpu/convert.h",
        "        for (int64_t end = i + c.group; i < end; i += 2)\n            row[i / 2] = by > 0 ?",
        "        row[n / 2] &= i + c.group < n ? 255 : 15;\n"
        "        for (int64_t end = i + c.group; i < end; i += 2)\n            row[i / 2] = by > 0 ?",
    ),
    "only_key": Fault(
        "decode loses a chunk of keys if a row sees only one of them",
        "kernels_cpu/decode.cpp",
        "            if (x.row_sum[r] == 0) continue;",
        "            if (x.row_sum[r] <= 1) continue;",
    ),
    "more_queries": Fault(
        "with more queries than keys the last query is not at the position of the last key",
        "kernels_cpu/panel.h",
        "offset = p.offset + (p.offset_from_end ? keys - queries : 0);",
        "offset = p.offset + (p.offset_from_end ? most(keys - queries, 0) : 0);",
    ),
    "dropout_of_batch": Fault(
        "dropout keeps the same weights in every sequence of a batch",
        "kernels_cpu/score.h",
        "x.head, uint32_t(s.batch)",
        "x.head, 0",
    ),
    "softcap_twice": Fault(
        "the second derivative of softcap is 2 % too small",
        "kernels_cpu/hessian.h",
        "splat<Real>(2) * t * load(ds + i)",
        "splat<Real>(1.96) * t * load(ds + i)",
    ),
    "read_too_far": Fault(
        "the last features of a row are read as a whole vector",
        "kernels_cpu/panel.h",
        "} else if (n == w && in_place && g + w <= lanes) {",
        "} else if (in_place && g + w <= lanes) {",
    ),
}  # fmt: skip

# why -S: an editable installation of the checkout would come before PYTHONPATH.
PYTHON = (sys.executable, "-S")
_SAYS = re.compile(r"^after \d+ s and (\d+) calls: (.*)$", re.MULTILINE)


class Finding(NamedTuple):
    """What the soak found first.

    Attributes
    ----------
    calls : int
        Until then.
    seconds : float
        Of processor time of both processes, their start too.
    kind : str
        In which way the call was wrong.
    """

    calls: int
    seconds: float
    kind: str


def put_back(fault: Fault, root: Path) -> None:
    """Change a copy of the checkout.

    Raises
    ------
    ValueError
        What the fault changes is not there once.
    """
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {fault.old!r} {text.count(fault.old)} times")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def searched(root: Path, seconds: float, *words: str) -> Finding | None:
    """Run the soak of a copy until it finds something, for so many seconds of processor time.

    why of processor time: the machine may be doing other things.
    """
    command = [*PYTHON, "-m", "bench", "soak", "--device", "cpu", "--minutes", "60", *words]
    with tempfile.NamedTemporaryFile() as file:
        soak = subprocess.Popen(
            command, cwd=root, env=_surroundings(root), stdout=file, start_new_session=True
        )
        try:
            spent = 0.0
            while spent < seconds and soak.poll() is None:
                time.sleep(0.2)
                spent = _processor_time(soak.pid)
                if said := _SAYS.search(Path(file.name).read_text(encoding="utf-8")):
                    found = Finding(int(said[1]), spent, said[2])
                    print(
                        f"    {found.calls} calls, {spent:.0f} s: {found.kind}", file=sys.stderr, flush=True
                    )
                    return found
            if soak.poll() is not None:
                raise RuntimeError(f"the soak ended with {soak.returncode} and found nothing")
        finally:
            if soak.poll() is None:
                os.killpg(soak.pid, signal.SIGKILL)  # and the process that checks
            soak.wait()
    return None


def _surroundings(root: Path) -> dict[str, str]:
    """The environment in which a copy is what Python imports."""
    path = [str(root), *(place for place in sys.path if place and Path(place) != ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _processor_time(group: int) -> float:
    """Seconds that the processes of a group have computed."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def copied(to: Path) -> Path:
    """A copy of the checkout as it lies there, and of its compiled core."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    core = [path for path in (ROOT / "build" / "cpu").rglob("*") if path.is_file()]
    for path in (*(ROOT / name for name in names.split("\0") if name), *core):
        if path.is_file():  # of what is removed the index still knows
            there = to / path.relative_to(ROOT)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)
    return to


def compiled(root: Path) -> None:
    """Compile the core of a copy, as far as it is not up to date."""
    command = [*PYTHON, "scripts/build_cpu.py", "--native"]
    subprocess.run(command, cwd=root, env=_surroundings(root), check=True, stdout=2)


def main() -> int:
    """Measure the faults that are named, or all; the exit status is 1 if a run found nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=3.0, help="of processor time, of a run")
    chosen = parser.parse_args()
    if unknown := {*chosen.names} - {*FAULTS}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    failed = False
    for name in chosen.names or FAULTS:
        fault = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            root = copied(Path(folder) / "copy")
            put_back(fault, root)
            compiled(root)
            every = [searched(root, 60 * chosen.minutes) for _ in range(chosen.runs)]
        found = [one for one in every if one is not None]
        failed |= len(found) < chosen.runs
        calls, seconds = (
            f"{statistics.median(numbers):.0f} ({min(numbers):.0f} to {max(numbers):.0f})" if numbers else ""
            for numbers in ([one.calls for one in found], [one.seconds for one in found])
        )
        where = Path(fault.file).name
        print(
            f"| `{name}`: {fault.says} | `{where}` | {len(found)} of {chosen.runs} | {calls} | {seconds} |",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
