"""Registers, spills and shared memory of every kernel of sm_80: a change that costs is a red diff."""

import json

import pytest

from tests.resource_cases import GOLDEN_FILE, MANIFEST, resources


def test_resources_are_the_golden_ones():
    if not MANIFEST.exists():
        pytest.skip("no cubins of sm_80 in this checkout: scripts/build_cubins.py --arch sm_80")
    entries = json.loads(MANIFEST.read_text())["cubins"]
    expected = GOLDEN_FILE.read_text().splitlines()
    found = resources(entries)
    differing = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
    assert found == expected, f"{differing[:5]} ...; if meant: python scripts/update_golden.py"
