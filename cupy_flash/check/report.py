"""The result of a check: a summary on one screen, and a report for an issue without names and paths."""

from __future__ import annotations

import json
import platform
import re
from typing import Any, NamedTuple

from .run import LEFT_OUT, REFUSED, RIGHT, STATES, WRONG, Outcome
from .speed import Timing

__all__ = ["ALL_RIGHT", "NOTHING_CHECKED", "SOMETHING_WRONG", "Found"]

ALL_RIGHT, SOMETHING_WRONG, NOTHING_CHECKED = 0, 1, 2

_VERDICTS = {
    ALL_RIGHT: "all right",
    SOMETHING_WRONG: "some cases fail",
    NOTHING_CHECKED: "nothing could be checked",
}
_WRONG_PRIMITIVE = (
    "a primitive is wrong, and with it every kernel that is made of it: python -m cupy_flash check --report, "
    "as an issue"
)
# A path of any operating system.
_PATH = re.compile(r"(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"()<>]+){2,}[/\\]?")


def without_paths(text: str) -> str:
    """Replace each path by its last name, if that has a known suffix, or by dots."""

    def name(found: re.Match[str]) -> str:
        last = re.split(r"[/\\]", found[0].rstrip("/\\"))[-1].rstrip(".")
        return f".../{last}" if re.fullmatch(r"[\w-]+\.(cubin|json|so|dll|dylib|py)", last) else "..."

    return _PATH.sub(name, text)


class Found(NamedTuple):
    """The result of a check."""

    facts: dict[str, Any]  # result of `info.facts`
    where: str  # short description of the device; "" if nothing was checked
    gpu: dict[str, Any] | None  # the checked GPU, a row of the facts; None for the CPU
    notes: tuple[str, ...]  # sentences about devices that were not checked, and compiled kernels
    problems: tuple[str, ...]  # problems of the installation
    outcomes: tuple[Outcome, ...]
    timings: tuple[Timing, ...]
    seed: int
    seconds: float  # time of the cases

    @property
    def status(self) -> int:
        """Exit status: 0 all right, 1 something is wrong, 2 nothing could be checked."""
        if self.problems or self._failing:
            return SOMETHING_WRONG
        return ALL_RIGHT if self.of(RIGHT) else NOTHING_CHECKED

    @property
    def _failing(self) -> bool:
        """Whether a case is wrong, or a call failed as it was timed."""
        return bool(self.of(WRONG)) or any(x.failed for x in self.timings)

    @property
    def verdict(self) -> str:
        """The status in words, with counts."""
        parts = [f"{len(self.of(state))} {state}" for state in STATES if self.of(state)]
        if self.problems:
            count = len(self.problems)
            parts.append(f"{count} problem{'s' * (count > 1)} of the installation")
        parts += [f"{x.call.split()[0]} failed as it was timed" for x in self.timings if x.failed]
        only_installed = self.problems and not self._failing
        said = "the installation has problems" if only_installed else _VERDICTS[self.status]
        return f"{said}: {', '.join(parts) or 'no case ran'}"

    def of(self, state: str) -> list[Outcome]:
        """The outcomes with this state."""
        return [x for x in self.outcomes if x.state == state]

    # ---- one screen

    def screen(self) -> str:
        """The summary, one line per fact."""
        versions = ", ".join(f"{name} {version}" for name, version in self.facts["versions"].items())
        lines = [f"versions  {versions}", f"checked   {self.where or 'nothing'}"]
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"cubins    {line}" for line in self._cubins()]
        lines += [f"primitive {x.case}: {x.state}" for x in self.outcomes if x.kind == "primitive"]
        lines += [f"cases     {line}" for line in self._summary()]
        for x in self.of(WRONG):
            lines += [f"wrong     {x.case}", f"          {x.says}", f"          computed by {_kernels(x)}"]
        if any(x.kind == "primitive" for x in self.of(WRONG)):
            lines.append(f"report    {_WRONG_PRIMITIVE}")
        for state in (REFUSED, LEFT_OUT):
            lines += [f"{state:9} {x.case}: {x.says}" for x in self.of(state)]
        lines += [f"speed     {_speed_text(x)}" for x in self.timings]
        for problem in self.problems:
            first, *rest = problem.splitlines()
            lines += [f"problem   {first}", *(f"          {line.strip()}" for line in rest)]
        return "\n".join([*lines, f"verdict   {self.verdict}"])

    def _cubins(self) -> list[str]:
        """One line per set, state and origin, with the number of kernels of each target."""
        lines: dict[str, list[str]] = {}
        for row in self.facts["cubins"]:
            state = "damaged" if row["problem"] else "verified"
            line = lines.setdefault(f"{row['set']}, {state}, {row['origin']}", [])
            line.append(f"{row['target']} ({row['kernels']})")
        sets = [f"{what}: {', '.join(targets)}" for what, targets in lines.items()]
        sets += [f"{row['origin']} cannot be read: {row['why']}" for row in self.facts["unreadable"]]
        return sets or ["none installed"]

    def _summary(self) -> list[str]:
        """One line per kind of call."""
        lines = [f"{len(self.outcomes)} in {self.seconds:.1f} s, --seed {self.seed}, against FP64"]
        for kind in dict.fromkeys(x.kind for x in self.outcomes):
            own = [x for x in self.outcomes if x.kind == kind]
            counts = [f"{n} {state}" for state in STATES if (n := sum(x.state == state for x in own))]
            used = [x.used for x in own if x.state == RIGHT and x.used is not None]
            most = f"; right ones use at most {max(used):.0%} of the error budget" if used else ""
            lines.append(f"{kind:12} {', '.join(counts)}{most}")
        return lines

    # ---- for an issue

    def for_machines(self) -> dict[str, Any]:
        """All results as plain values for JSON, without names of users and hosts, and without paths."""
        facts = self.facts
        return {
            "verdict": self.verdict,
            "status": self.status,
            "versions": facts["versions"],
            "system": f"{platform.system()} {platform.machine()}",
            "checked": self.where,
            "gpu": self.gpu,
            "drivers": facts["drivers"] if self.gpu else [],
            "cubins": [
                {name: row[name] for name in ("set", "target", "kernels", "bytes")}
                | {"verified": not row["problem"], "origin": without_paths(row["origin"])}
                for row in facts["cubins"]
            ],
            "unreadable": [{name: row[name] for name in ("origin", "why")} for row in facts["unreadable"]],
            "notes": [without_paths(note) for note in self.notes],
            "problems": [without_paths(problem) for problem in self.problems],
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "cases": [x._replace(used=_finite(x.used), says=without_paths(x.says))._asdict()
                      for x in self.outcomes],
            "speed": [x._replace(says=without_paths(x.says))._asdict() | {"ratio": x.ratio}
                      for x in self.timings],
        }  # fmt: skip

    def as_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.for_machines(), indent=2)

    def as_markdown(self) -> str:
        """The report as Markdown."""
        found = self.for_machines()
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        lines = [f"### cupy-flash check: {found['verdict']}", ""]
        lines += [f"- versions: {versions}", f"- system: {found['system']}", f"- checked: {found['checked']}"]
        lines += [f"- {row['of']}: {row['with']}" for row in found["drivers"]]
        lines += [f"- cubins: {without_paths(line)}" for line in self._cubins()]
        lines += [f"- note: {note}" for note in found["notes"]]
        lines += [f"- problem: {' '.join(problem.split())}" for problem in found["problems"]]
        lines += [f"- seed: {self.seed}, {found['seconds']} s", ""]
        lines += ["| case | outcome | of its error budget | computed by | why |", "|---|---|---:|---|---|"]
        for x in self.outcomes:
            used = "" if x.used is None else f"{x.used:.2f}"
            cells = (x.case, x.state, used, ", ".join(x.kernels), without_paths(x.says))
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        if self.timings:
            lines += ["", "| call | ms | speedup over torch's SDPA |", "|---|---:|---:|"]
        for t in self.timings:
            ms = without_paths(t.says) if t.ms is None else f"{t.ms:.3f}"
            ratio = "" if t.ratio is None else f"{t.ratio:.2f}"
            lines.append(f"| {_cell(t.call)} | {_cell(ms)} | {ratio} |")
        return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _finite(used: float | None) -> float | None:
    """Round a share of the budget, with None for infinity, which JSON does not have."""
    return None if used is None or used == float("inf") else round(used, 4)


def _kernels(x: Outcome) -> str:
    return ", ".join(x.kernels) or "nothing"


def _speed_text(x: Timing) -> str:
    if x.ms is None:
        return f"{x.call}: {x.says}"
    ratio = f", {x.ratio:.2f}x the speed of torch's SDPA" if x.ratio else ""
    return f"{x.call}: {x.ms:.3g} ms{ratio}"
