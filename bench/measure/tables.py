"""Measured rows as tables: the newest run of each case, ours compared with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from . import results
from .peers import OURS
from .results import Row

# Rows that are not peers: they read or copy, and compute nothing.
REFERENCES = ("numpy read", "numpy copy")
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s", "median_ms": "ms", "megabytes": "MB"}


class Implementation(NamedTuple):
    """An implementation in a case of a run: its combined row, and its repetitions."""

    row: dict[str, str]
    visits: Sequence[Row]


class Timed(NamedTuple):
    """A case in one run: ours, and the peers that no newer run compares with ours."""

    when: str
    implementations: dict[str, Implementation]

    @property
    def ours(self) -> Row:
        return self.implementations[OURS.name].row

    @property
    def peers(self) -> list[str]:
        return [
            name for name in self.implementations if not name.startswith(OURS.name) and name not in REFERENCES
        ]

    def over(self, name: str, field: str) -> float | None:
        """Their time divided by ours, or their bytes; None if they were wrong or did not run."""
        if name not in self.implementations or not results.right(self.implementations[name].row):
            return None
        ours, theirs = self.ours, self.implementations[name].row
        if field != "megabytes" and ours["median_ms"] and theirs["median_ms"]:
            field = "median_ms"
        if not (ours[field] and theirs[field] and float(ours[field])):
            return None
        ratio = float(theirs[field]) / float(ours[field])
        return ratio if field in ("median_ms", "megabytes") else 1 / ratio

    def over_the_best(self, field: str) -> float | None:
        found = [ratio for name in self.peers if (ratio := self.over(name, field))]
        return min(found, default=None)


def machine(row: Row) -> str:
    """The identity of a machine: the GPU, or the CPU and the kernel set of OpenBLAS."""
    return row["gpu"] or f"{row['cpu']}, {row['cores']} cores, OpenBLAS {row['versions'].rpartition(' ')[2]}"


def newest(rows: Iterable[Row]) -> list[Timed]:
    """Each case on each machine in its newest run, and in older runs for peers that only these have.

    Rows with a note, and rows of a busy machine, are left out. A case has rows of one run only, because
    speeds of different runs cannot be compared.
    """
    cases: dict[tuple[str, ...], dict[tuple[str, str], dict[str, Implementation]]] = {}
    for visits in results.runs(row for row in rows if not row["note"]):
        row = results.pooled(visits)
        if results.calm(row):
            runs = cases.setdefault((machine(row), *results.case(row)), {})
            runs.setdefault((row["when"], row["commit"]), {})[row["implementation"]] = Implementation(
                row, visits
            )
    found = []
    for runs in cases.values():
        seen: set[str] = set()
        for (when, _), implementations in sorted(runs.items(), reverse=True):
            fresh = [name for name in implementations if name not in seen]
            if OURS.name in implementations and (not seen or fresh):
                found.append(
                    Timed(when, {name: implementations[name] for name in dict.fromkeys([OURS.name, *fresh])})
                )
                seen |= implementations.keys()
    return found


# ---------------------------------------------------------------------- comparisons with peers


class Comparison(NamedTuple):
    """A group of cases compared with one peer: ascending ratios, each with its case."""

    group: str
    peer: str
    ratios: list[tuple[float, Timed]]

    @property
    def slower(self) -> list[tuple[float, Timed]]:
        """Ratios that the tables print as less than 1."""
        return [each for each in self.ratios if round(each[0], 2) < 1]

    @property
    def count(self) -> str:
        return f"{len(self.slower)} of {len(self.ratios)}"

    @property
    def mean(self) -> float:
        return geometric_mean(ratio for ratio, _ in self.ratios)


def compared(timed: Iterable[Timed], group: Callable[[Row], str], field: str) -> list[Comparison]:
    """Compare every group with every peer; the least ratio first."""
    found: dict[tuple[str, str], list[tuple[float, Timed]]] = {}
    for each in timed:
        for peer in each.peers:
            if ratio := each.over(peer, field):
                found.setdefault((group(each.ours), peer), []).append((ratio, each))
    all_of_them = [
        Comparison(*key, sorted(ratios, key=lambda pair: pair[0])) for key, ratios in found.items()
    ]
    return sorted(all_of_them, key=lambda one: one.ratios[0][0])


def described(row: Row) -> str:
    """Describe a case in words."""
    words = [row["dtype"], f"head dim {row['head_dim']}", "causal" if row["causal"] == "True" else ""]
    words += [row["passes"] if row["passes"] != row["what"] else "", row["detail"]]
    if row["seqlen_k"]:
        words.append(f"{row['seqlen_k']} keys, batch {row['batch']}")
    else:
        words.append(f"{row['seqlen']} queries and keys")
    if row["heads_k"]:
        words.append(f"{row['heads']} heads of q, {row['heads_k']} of k")
    return ", ".join(filter(None, words))


# ---------------------------------------------------------------------- Markdown


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n".replace("  ", " ") for row in rows)


def number(text: str) -> str:
    """Format a value with three significant digits, or all integer digits."""
    value = float(text)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def between(values: Sequence[float], digits: int = 2) -> str:
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _cell(one: Timed, name: str, field: str) -> str:
    if name not in one.implementations or not one.implementations[name].row[field]:
        return ""
    row = one.implementations[name].row
    return number(row[field]) if results.right(row) else "wrong"


def _error(one: Timed, name: str) -> str:
    return one.implementations[name].row["error"] if name in one.implementations else ""


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "pass": lambda row: row["passes"],
    "dtype": lambda row: row["dtype"],
    "head dim": lambda row: row["head_dim"],
    "mask": lambda row: "causal" if row["causal"] == "True" else "",
    "batch": lambda row: row["batch"],
    "heads": lambda row: row["heads"],
    "of k": lambda row: row["heads_k"],
    "queries": lambda row: row["seqlen"],
    "keys": lambda row: row["seqlen_k"],
    "what": lambda row: row["detail"],
}


def _order(row: Row) -> tuple[object, ...]:
    numbers = ("head_dim", "seqlen_k", "seqlen", "batch", "heads")
    sizes = [int(row[name] or 0) for name in numbers]
    return (row["passes"], row["dtype"], row["detail"], sizes[0], row["causal"], *sizes[1:])


def of_run(timed: Sequence[Timed], field: str, errors: bool = False) -> str:
    """A table of one run: columns that differ between cases, rates, and the ratio to the fastest peer.

    With `errors` also the largest error against FP64 of each, relative to the largest value.
    """
    timed = sorted(timed, key=lambda one: _order(one.ours))
    columns = {name: [cell(one.ours) for one in timed] for name, cell in _COLUMNS.items()}
    same = {name: cells[0] for name, cells in columns.items() if len(set(cells)) == 1}
    names = list(dict.fromkeys(name for one in timed for name in one.implementations))
    peers = list(dict.fromkeys(name for one in timed for name in one.peers))
    head = [name for name in columns if name not in same]
    lines = [[columns[name][n] for name in head] for n in range(len(timed))]
    head += names
    for line, one in zip(lines, timed, strict=True):
        line += [_cell(one, name, field) for name in names]
    if peers:
        head.append(f"over {peers[0]}" if len(peers) == 1 else "over the fastest")
        for line, one in zip(lines, timed, strict=True):
            ratio = one.over_the_best(field)
            line.append(f"{ratio:.2f}" if ratio else "")
    exact = [name for name in names if errors and any(_error(one, name) for one in timed)]
    head += [f"error, {name}" for name in exact]
    for line, one in zip(lines, timed, strict=True):
        line += [_error(one, name) for name in exact]
    of_all = ", ".join(f"{name} {cell}" for name, cell in same.items() if cell)
    return f"{UNITS[field]}; {of_all}:\n\n{markdown(head, lines)}"
