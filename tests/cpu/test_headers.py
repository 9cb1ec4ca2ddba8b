"""The headers of the kernels: each folder includes only from those below it; banners name design notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import KERNELS_CU, ROOT

INCLUDE = KERNELS_CU / "include"
# Folders, and files outside of them, from the ground up. Those of one line do not include each other.
LAYERS = (
    ("base.cuh",),
    ("abi.cuh", "prim", "same_bits.cuh"),
    ("prim.cuh",),
    ("element.cuh",),
    ("attention",),
    ("simple", "tile"),
    ("backward", "cache"),
    ("hopper",),
)
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}
HEADERS = {path.relative_to(INCLUDE).as_posix(): path for path in sorted(INCLUDE.rglob("*.cuh"))}


def folder_of(name: str) -> str:
    return name.split("/")[0]


def includes_of(path: Path) -> list[str]:
    """What a file includes with quotes: paths from `INCLUDE`, whatever folder the file is in."""
    return re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_include_downwards(name: str) -> None:
    folder = folder_of(name)
    for included in includes_of(HEADERS[name]):
        assert included in HEADERS, f"{name} includes {included}, which is no path from {INCLUDE}"
        below = folder_of(included)
        assert below == folder or LEVEL[below] < LEVEL[folder], f"{name} includes {included} above it"


def test_layers_name_only_folders_that_are_there() -> None:
    assert set(LEVEL) == {folder_of(name) for name in HEADERS}


def test_every_header_is_included() -> None:
    files = [*KERNELS_CU.glob("*.cu"), *HEADERS.values()]
    assert {name for file in files for name in includes_of(file)} == set(HEADERS)


NOTES = ROOT / "docs/kernels"
# Headers of every family: the guide of the kernels has what there is to say of them.
OF_ALL = ("abi.cuh", "base.cuh", "element.cuh", "prim.cuh", "attention", "prim")
SOURCES = {path.name: path for path in sorted(KERNELS_CU.glob("*.cu"))}


def banner_of(path: Path) -> str:
    """The comment that a file begins with."""
    lines = path.read_text().splitlines()
    return "\n".join(lines[: next(n for n, line in enumerate(lines) if not line.startswith("//"))])


@pytest.mark.parametrize("name", [*SOURCES, *HEADERS])
def test_banners_name_a_design_note(name: str) -> None:
    if name == "check_primitives.cu" or folder_of(name) in OF_ALL:
        return
    (note,) = re.findall(r"^// Design note: (.+)\.$", banner_of(SOURCES.get(name) or HEADERS[name]), re.M)
    assert (ROOT / note).parent == NOTES
    assert (ROOT / note).is_file()


def test_the_guide_lists_every_kernel_and_note() -> None:
    rows = [line for line in (KERNELS_CU / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = "\n".join(rows)
    assert set(re.findall(r"`(\w+\.cu)`", listed)) == set(SOURCES)
    notes = {path.name for path in NOTES.glob("*.md")}
    assert set(re.findall(r"docs/kernels/(\w+\.md)", listed)) == notes


def test_the_walk_through_a_kernel_names_what_is_there() -> None:
    section = (KERNELS_CU / "README.md").read_text().partition("\n## How to read a kernel\n")[2]
    steps = "\n".join(re.findall(r"^\d+\. .*$", section.partition("\n## ")[0], re.M))
    spans = [span for span in re.findall(r"`([^`\n]+)`", steps) if "/" not in span]
    code = SOURCES["flash_forward.cu"].read_text()
    tags = {tag for span in spans for tag in re.findall(r"\[A1\.\d+\]", span)}
    names = {re.findall(r"\w+", span)[-1] for span in spans if not span.startswith("[")}
    assert len(names) > 12
    assert names - set(re.findall(r"\w+", code)) == set()
    assert tags
    assert [tag for tag in tags if tag not in code] == []
