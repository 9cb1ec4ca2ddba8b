"""Registers, spills and shared memory of every kernel of sm_80: a change that costs is a red diff."""

import json

import pytest

from cupy_flash.plan import families
from cupy_flash.plan.families import flash
from tests.resource_cases import GOLDEN_FILE, MANIFEST, resources


def test_resources_are_the_golden_ones():
    entries = json.loads(MANIFEST.read_text())["cubins"] if MANIFEST.exists() else {}
    # A test of the wheels may be building them at this moment.
    if entries.keys() < {variant.name for variant in families.variants("sm_80")}:
        pytest.skip("not all cubins of sm_80 in this checkout: scripts/build_cubins.py --arch sm_80")
    expected = GOLDEN_FILE.read_text().splitlines()
    found = resources(entries)
    differing = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
    assert found == expected, f"{differing[:5]} ...; if meant: python scripts/update_golden.py"


# What this checkout has built, of either compiler.
BUILT = sorted(MANIFEST.parents[2].glob("cuda*/sm_*/manifest.json"))


@pytest.mark.parametrize("manifest", BUILT, ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}")
def test_flash_kernels_of_an_architecture_keep_to_their_budget(manifest):
    entries = json.loads(manifest.read_text())["cubins"]
    family = families.names(manifest.parent.name)
    size = sum(
        entries[v.name]["bytes"] for v, name in family.items() if name == flash.NAME and v.name in entries
    )
    assert size <= flash.BUDGET_BYTES, f"{size / 1e6:.2f} MB"
