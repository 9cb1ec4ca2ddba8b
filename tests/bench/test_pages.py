"""docs/benchmarks is what `python -m bench pages` makes of bench/results; no typed number drifts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.commands import pages
from bench.measure import results, tables
from tests.paths import ROOT

HELD = f"{pages.COMMAND} writes docs/benchmarks, and the first table of docs/performance.md"
UNITS = {"TFLOP/s": 1.0, "TB/s": 1e-3, "GB/s": 1.0, "MB": 1.0, "GB": 1e-3, "ms": 1.0, "us": 1e3}
# A measurement: a number with a unit, or with a point, as ratios have; either end of a range.
MEASURED = re.compile(
    rf"(?<![\w.:-])(\d+(?:\.\d+)?)(?: to (\d+(?:\.\d+)?))?(?:\s({'|'.join(UNITS)})\b)?(?!\w|\.\d|-\d)"
)
LINKED = re.compile(r"\]\((?:docs/)?benchmarks/(\w+)\.md")


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_pages_are_of_the_rows(page: pages.Page) -> None:
    path = pages.FOLDER / f"{page.name}.md"
    assert path.read_text(encoding="utf-8") == pages.written(page), HELD


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in pages.FOLDER.iterdir()} == set(pages.PAGES_BY_NAME)


def test_what_is_slower_is_of_the_rows() -> None:
    text = pages.FRONT.read_text(encoding="utf-8")
    assert pages.slower() in text, HELD
    assert pages.front(text) == text


# ---------------------------------------------------------------------- numbers that are typed


@cache
def numbers_of(page: str) -> list[float]:
    text = (pages.FOLDER / f"{page}.md").read_text(encoding="utf-8")
    return [float(word) for word in re.findall(r"(?<![\w.:-])\d+(?:\.\d+)?(?![\w.:-])", text)]


def without_a_row(paragraph: str) -> list[str]:
    """Measurements of a paragraph that are on none of the pages that it links to."""
    held = [value for page in LINKED.findall(paragraph) for value in numbers_of(page)]
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", paragraph)
    missing = []
    for first, last, unit in MEASURED.findall(prose):
        for said in filter(None, (first, last)):
            scale, digits = UNITS.get(unit, 1.0), len(said.partition(".")[2])
            if (unit or digits) and said not in {f"{value * scale:.{digits}f}" for value in held}:
                missing.append(f"{said} {unit}".strip())
    return missing


def typed() -> Iterator[str]:
    """What people write: paragraphs of docs/performance.md and the README's lines on speed."""
    text = pages.FRONT.read_text(encoding="utf-8").replace(pages.slower(), "")
    yield from re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n")
    yield from re.findall(r"^\|.*benchmarks/.*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)


def test_typed_numbers_are_on_the_pages_beside_them() -> None:
    assert {paragraph: missing for paragraph in typed() if (missing := without_a_row(paragraph))} == {}
    assert sum(len(MEASURED.findall(paragraph)) for paragraph in typed()) > 20


@pytest.mark.parametrize(
    "said", ["0.42 of [flash-attn 3](benchmarks/float8.md).", "[so](benchmarks/mla.md) 2434 to 4068 GB/s",
             "4.09 TB/s in [latents](docs/benchmarks/mla.md)", "0.77 of flash-attn 3", "999 us"],
)  # fmt: skip
def test_a_number_without_a_row_is_found(said: str) -> None:
    assert len(without_a_row(said)) == 1


@pytest.mark.parametrize(
    "said", ["4.07 TB/s [there](benchmarks/mla.md)", "76 us [here](benchmarks/host.md)", "sm_90, 2.11.0"]
)
def test_a_number_with_a_row_is_known(said: str) -> None:
    assert without_a_row(said) == []


# ---------------------------------------------------------------------- which rows are taken


def row(when: str, implementation: str, ms: float, **fields: str) -> dict[str, str]:
    given = {"what": "forward", "implementation": implementation, "when": when, "median_ms": str(ms),
             "gpu": "NVIDIA H200", "commit": "a", "of_budget": "0.1", "seqlen": "8"}  # fmt: skip
    return dict.fromkeys(results.COLUMNS, "") | given | fields


def test_the_newest_run_is_taken_and_an_older_one_for_a_peer_that_it_lacks() -> None:
    rows = [row("1", "cupy_flash", 4), row("1", "b", 2), row("1", "a", 6), row("2", "cupy_flash", 1),
            row("2", "a", 3), row("3", "a", 1)]  # fmt: skip
    newer, older = tables.newest(rows)
    assert (newer.when, newer.peers, newer.over("a", "tflops")) == ("2", ["a"], 3)
    assert (older.when, older.peers, older.over("b", "tflops")) == ("1", ["b"], 0.5)


def test_rows_beside_other_programs_with_a_note_or_wrong_are_left_out() -> None:
    rows = [row("1", "cupy_flash", 2), row("1", "a", 4, of_budget="3"), row("1", "b", 4, others="0.5"),
            row("1", "c", 4, note="WRONG"), row("2", "cupy_flash", 1, others="0.5")]  # fmt: skip
    (one,) = tables.newest(rows)
    assert list(one.implementations) == ["cupy_flash", "a"]
    assert one.over("a", "tflops") is None


def test_the_worst_ratio_comes_first() -> None:
    rows = [row("1", "cupy_flash", 1), row("1", "a", 2), row("1", "cupy_flash", 4, seqlen="9"),
            row("1", "a", 3, seqlen="9")]  # fmt: skip
    (one,) = tables.compared(tables.newest(rows), lambda _row: "all", "tflops")
    assert [ratio for ratio, _ in one.ratios] == [0.75, 2]
    assert one.count == "1 of 2"


def test_pages_say_that_they_are_made() -> None:
    for path in sorted(Path(pages.FOLDER).glob("*.md")):
        assert f"<!-- Made by `{pages.COMMAND}`; do not edit. -->" in path.read_text(encoding="utf-8")


def test_every_figure_is_shown() -> None:
    texts = [
        path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    ]
    drawn = sorted(path.stem for path in (ROOT / "bench" / "plots").glob("*.svg"))
    assert drawn
    assert [name for name in drawn if not any(f"bench/plots/{name}." in text for text in texts)] == []
