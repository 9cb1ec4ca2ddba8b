"""The headers of the kernels: each is in a room, and includes from rooms below its own only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import KERNELS_CU

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
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
HEADERS = {path.relative_to(INCLUDE).as_posix(): path for path in sorted(INCLUDE.rglob("*.cuh"))}


def room_of(name: str) -> str:
    return name.split("/")[0]


def includes_of(path: Path) -> list[str]:
    """What a file includes with quotes: paths from `INCLUDE`, whatever folder the file is in."""
    return re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_include_downwards(name: str) -> None:
    room = room_of(name)
    for included in includes_of(HEADERS[name]):
        assert included in HEADERS, f"{name} includes {included}, which is no path from {INCLUDE}"
        below = room_of(included)
        assert below == room or LEVEL[below] < LEVEL[room], f"{name} includes {included} above it"


def test_layers_name_only_rooms_that_are_there() -> None:
    assert set(LEVEL) == {room_of(name) for name in HEADERS}


def test_every_header_is_included() -> None:
    files = [*KERNELS_CU.glob("*.cu"), *HEADERS.values()]
    assert {name for file in files for name in includes_of(file)} == set(HEADERS)
