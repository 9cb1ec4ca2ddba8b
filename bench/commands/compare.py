"""compare: ratios of two result files, or of two commits in one, row by row, with their noise."""

from __future__ import annotations

import argparse
import sys
from math import exp, log
from pathlib import Path
from statistics import median

from ..measure import results
from ..measure.peers import OURS

# Relative difference between two runs of the same code, in addition to the spread of their repetitions.
RUN_TO_RUN = 0.02


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", help="FILE.csv, or FILE.csv@COMMIT for the rows of one commit")
    parser.add_argument("after", help="the same, for the later rows")


def rows_of(name: str) -> dict[tuple[str, ...], list[results.Row]]:
    """Repetitions of each measurement in the last run of FILE or FILE@COMMIT.

    Raises
    ------
    ValueError
        There is no such file, or no such row.
    """
    file, _, commit = name.partition("@")
    path = Path(file) if Path(file).exists() else results.RESULTS / file
    if not path.exists():
        raise ValueError(f"there is no {file}, nor one in {results.RESULTS}")
    timed = (row for row in results.read(path) if row.get("median_ms") and row["commit"].startswith(commit))
    found = {results.identity(visits[0]): visits for visits in results.runs(timed)}
    if not found:
        raise ValueError(f"{file} has no timed row" + (f" of commit {commit}" if commit else ""))
    return found


def spread(visits: list[results.Row]) -> float:
    """Range of the repetitions of a run, relative to their median; of a single one, from its quartiles."""
    medians = [float(row["median_ms"]) for row in visits]
    if len(medians) > 1:
        return (max(medians) - min(medians)) / median(medians)
    lower, upper = (float(visits[0][f"{name}_ms"]) for name in ("lower", "upper"))
    return (upper - lower) / 2 / medians[0]


def noise(visits: list[results.Row], usual: float) -> float:
    """Relative uncertainty of the median of a run's repetitions: their spread, or the run's usual spread.

    why the whole range: for two runs of one version, half of it missed 3 of 24 rows, quartiles within the
    repetitions 10. why the usual spread: repetitions that happen to agree missed 2 of 100 rows.
    """
    return max(spread(visits), usual) + RUN_TO_RUN


def label(identity: tuple[str, ...]) -> str:
    row = dict(zip(results.IDENTITY, identity, strict=True))
    heads = row["heads"] + (f"/{row['heads_k']}" if row["heads_k"] else "")
    length = row["seqlen"] + (f"/{row['seqlen_k']}" if row["seqlen_k"] else "")
    band = "causal " if row["causal"] == "True" else ""
    return (
        f"{row['what']} {row['implementation']}: B{row['batch']} H{heads} S{length} D{row['head_dim']} "
        f"{row['dtype']} {band}{row['passes']} {row['detail']}"
    ).strip()


def run(chosen: argparse.Namespace) -> int:
    try:
        before, after = rows_of(chosen.before), rows_of(chosen.after)
    except ValueError as error:
        print(f"usage: python -m bench compare A.csv[@COMMIT] B.csv[@COMMIT]\n{error}", file=sys.stderr)
        return 2
    shared = [identity for identity in before if identity in after]
    if not shared:
        print("The two have no measurement in common.")
        return 0
    usual = [median(map(spread, run.values())) for run in (before, after)]
    logarithms: dict[str, list[float]] = {}
    told = {"faster": 0, "slower": 0, "same within noise": 0}
    print(f"{'':78} {'before':>10} {'after':>10}  speed   noise")
    for identity in shared:
        a, b = (results.pooled(run[identity]) for run in (before, after))
        ratio = float(a["median_ms"]) / float(b["median_ms"])
        # why squares: the noise of the two runs is independent
        uncertain = (noise(before[identity], usual[0]) ** 2 + noise(after[identity], usual[1]) ** 2) ** 0.5
        verdict = "same within noise"
        if abs(log(ratio)) > uncertain:
            verdict = "faster" if ratio > 1 else "slower"
        told[verdict] += 1
        logarithms.setdefault(a["implementation"], []).append(log(ratio))
        print(
            f"{label(identity):78} {a['median_ms']:>10} {b['median_ms']:>10} "
            f"{ratio:6.3f}x +-{uncertain:5.1%}  {verdict}"
        )
    means = {name: sum(ratios) / len(ratios) for name, ratios in logarithms.items()}
    for name, mean in means.items():
        print(f"{name}: {exp(mean):.3f} times as fast, geometric mean of {len(logarithms[name])}")
    controls = [mean for name, mean in means.items() if not name.startswith(OURS.name)]
    if controls and OURS.name in means:
        control = sum(controls) / len(controls)
        print(f"less what the peers changed, as the machine did: {exp(means[OURS.name] - control):.3f}")
    print(", ".join(f"{count} {verdict}" for verdict, count in told.items()))
    machines = {visits[0]["gpu"] or visits[0]["cpu"] for visits in (*before.values(), *after.values())}
    if len(machines) > 1:
        print(f"Not one machine: {', '.join(sorted(machines))}")
    return 0
