"""Rows of measurements: appended to CSV files, never changed, and read back."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from ..machine import weather

RESULTS = Path(__file__).parents[1] / "results"

# Which measurement a row is of: rows that agree in these measured the same thing.
IDENTITY = ("what", "implementation", "batch", "heads", "heads_k", "seqlen", "seqlen_k", "head_dim", "dtype",
            "causal", "passes", "detail")  # fmt: skip
MEASURED = ("lower_ms", "median_ms", "upper_ms", "samples", "tflops", "gb_per_s", "matrix_tflops",
            "copy_gb_per_s", "ceiling_ms", "bound", "of_ceiling", "megabytes", "error", "of_budget",
            "variant", "note")  # fmt: skip
WHERE = ("when", "commit", "cpu", "cores", "threads", "load", "others", "gpu", "driver", "clock_mhz",
         "watts", "python", "versions")  # fmt: skip
COLUMNS = (*IDENTITY, *MEASURED, *WHERE)
# What visits of one run to a measurement say of it, each for itself.
_AVERAGED = ("lower_ms", "median_ms", "upper_ms", "tflops", "gb_per_s", "megabytes")
# The ceilings of a run are the best that any of its visits saw.
_BEST = (("matrix_tflops", max), ("copy_gb_per_s", max), ("ceiling_ms", min))

Row = Mapping[str, str]


def append(path: Path | str, rows: Iterable[Row], columns: Iterable[str] | None = None) -> Path:
    """Append rows to a CSV file.

    Parameters
    ----------
    path : Path or str
        A bare name is one of bench/results.
    rows : iterable of mapping
    columns : iterable of str, optional
        Of a new file; default is those of the first row. A file keeps the columns it has.

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
    """Every row of a file; an empty list if there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as text:
        return list(csv.DictReader(text))


def identity(row: Row) -> tuple[str, ...]:
    """What a row measured, to find it again in another file."""
    return tuple(row.get(name, "") for name in IDENTITY)


def runs(rows: Iterable[Row]) -> list[list[Row]]:
    """The visits that each run paid to each measurement, the runs in their order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*identity(row), row["when"], row["commit"]), []).append(row)
    return list(found.values())


def pooled(visits: Sequence[Row]) -> dict[str, str]:
    """One row of the visits of a run: medians of times, best ceilings, all samples, what others used."""
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
    """Whether a row was not taken beside other programs."""
    return float(row["others"] or 0) <= weather.CALM


def right(row: Row) -> bool:
    """Whether results were within the error budget, as far as they were compared."""
    return not float(row["of_budget"] or 0) > 1


def case(row: Row) -> tuple[str, ...]:
    """What a row measured, whoever ran it."""
    return tuple(row.get(name, "") for name in IDENTITY if name != "implementation")
