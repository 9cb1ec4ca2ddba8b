"""Rows of measurements in CSV files, which are only appended to."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from ..machine import cpu_share

RESULTS = Path(__file__).parents[1] / "results"

# Columns that identify a measurement: rows that are equal in these measured the same thing.
IDENTITY = ("what", "implementation", "batch", "heads", "heads_k", "seqlen", "seqlen_k", "head_dim", "dtype",
            "causal", "passes", "detail")  # fmt: skip
MEASURED = ("lower_ms", "median_ms", "upper_ms", "samples", "tflops", "gb_per_s", "matrix_tflops",
            "copy_gb_per_s", "ceiling_ms", "bound", "of_ceiling", "megabytes", "error", "of_budget",
            "variant", "note")  # fmt: skip
WHERE = ("when", "commit", "cpu", "cores", "threads", "load", "others", "gpu", "driver", "clock_mhz",
         "watts", "python", "versions")  # fmt: skip
COLUMNS = (*IDENTITY, *MEASURED, *WHERE)
# Columns of which a run has the median over its repetitions.
_AVERAGED = ("lower_ms", "median_ms", "upper_ms", "tflops", "gb_per_s", "megabytes")
# Ceilings, of which a run has the best over its repetitions.
_BEST = (("matrix_tflops", max), ("copy_gb_per_s", max), ("ceiling_ms", min))

Row = Mapping[str, str]


def append(path: Path | str, rows: Iterable[Row], columns: Iterable[str] | None = None) -> Path:
    """Append rows to a CSV file.

    Parameters
    ----------
    path : Path or str
        A str is the name of a file in bench/results.
    rows : iterable of mapping
    columns : iterable of str, optional
        Columns of a new file; default is those of the first row. An existing file keeps its columns.

    Raises
    ------
    ValueError
        A row has a column that the file lacks.
    """
    rows = list(rows)
    path = RESULTS / path if isinstance(path, str) else path
    path.parent.mkdir(parents=True, exist_ok=True)
    held = _header(path)
    names = held or list(columns or rows[0])
    for row in rows:
        if unknown := [name for name in row if name not in names]:
            raise ValueError(f"{path} has no column {', '.join(unknown)}: begin a new file.")
    with path.open("a", newline="") as out:
        writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
        if not held:
            writer.writeheader()
        writer.writerows(rows)
    return path


def _header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="") as text:
        return next(csv.reader(text), [])


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a file; an empty list if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as text:
        return list(csv.DictReader(text))


def identity(row: Row) -> tuple[str, ...]:
    """The identity of a row's measurement, which is equal in other files."""
    return tuple(row.get(name, "") for name in IDENTITY)


def runs(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows into the repetitions of each measurement in each run, in file order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*identity(row), row["when"], row["commit"]), []).append(row)
    return list(found.values())


def pooled(visits: Sequence[Row]) -> dict[str, str]:
    """Combine the repetitions of a run: median times, best ceilings, all samples, mean share of others."""
    row = dict(visits[-1])
    if len(visits) > 1:
        for name in _AVERAGED:
            if values := [float(visit[name]) for visit in visits if visit.get(name)]:
                row[name] = f"{median(values):.6g}"
        for name, best in _BEST:
            if values := [float(visit[name]) for visit in visits if visit.get(name)]:
                row[name] = f"{best(values):.6g}"
        if row.get("ceiling_ms"):
            row["of_ceiling"] = f"{float(row['ceiling_ms']) / float(row['median_ms']):.3f}"
        row["samples"] = str(sum(int(visit["samples"] or 0) for visit in visits))
        row["note"] = "; ".join(dict.fromkeys(visit["note"] for visit in visits if visit.get("note")))
        row["others"] = f"{fmean(float(visit['others'] or 0) for visit in visits):.3f}"
    return row


def calm(row: Row) -> bool:
    """Whether other programs used little of the machine during a row."""
    return float(row["others"] or 0) <= cpu_share.CALM


def right(row: Row) -> bool:
    """Whether results were within the error budget, or were not compared."""
    return not float(row["of_budget"] or 0) > 1


def case(row: Row) -> tuple[str, ...]:
    """The identity of a row's case, for any implementation."""
    return tuple(row.get(name, "") for name in IDENTITY if name != "implementation")
