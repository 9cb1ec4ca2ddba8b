"""Registers, spills and shared memory of every kernel of sm_80: a change that costs is a red diff."""

import functools
import importlib
import json
import re
import statistics
import zlib
from fnmatch import fnmatch

import pytest

from cupy_flash.cubins import build
from cupy_flash.plan import families
from cupy_flash.plan.families import flash
from tests.paths import ROOT
from tests.resource_cases import GOLDEN_FILE, MANIFEST, RESOURCES, compiled_names, names, renewed, resources


def test_resources_are_the_golden_ones():
    entries = json.loads(MANIFEST.read_text())["cubins"] if MANIFEST.exists() else {}
    # A test of the wheels may be building them at this moment.
    if entries.keys() < {*compiled_names()}:
        pytest.skip("not all cubins of sm_80 in this checkout: scripts/build_cubins.py --arch sm_80")
    expected = GOLDEN_FILE.read_text().splitlines()
    found = resources(entries)
    differing = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
    assert found == expected, f"{differing[:5]} ...; if meant: python scripts/update_golden.py"


def test_every_kernel_of_sm_80_has_its_line():
    """Without cubins too: a build of some kernels once took the lines of all others away."""
    lines = GOLDEN_FILE.read_text().splitlines()
    assert names(lines) == compiled_names()
    planned = {variant.name: variant.shared_bytes for variant in families.variants("sm_80")}
    assert {line.split()[0]: int(line.split()[-2]) for line in lines} == planned, "bytes of shared memory"


def test_a_build_of_some_kernels_leaves_the_lines_of_others():
    before = GOLDEN_FILE.read_text().splitlines()
    name = names(before)[1]
    after = renewed([*before, "a_kernel_that_is_gone 1 registers"], {name: dict.fromkeys(RESOURCES, 7)})
    assert len(after) == len(before)
    assert [x for x, y in zip(after, before, strict=True) if x != y] == [after[1]]
    assert after[1].split() == [name, "7", "registers", "7", "spilled", "7", "shared"]


# ------------------------------------------------------------------------------------------ budgets

# What this checkout has built, of either compiler.
BUILT = sorted(MANIFEST.parents[2].glob("cuda*/sm_*/manifest.json"))


@pytest.fixture
def budgets(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("budgets")


def sizes_in(manifest):
    return {name: entry["bytes"] for name, entry in json.loads(manifest.read_text())["cubins"].items()}


# Of a file in the directory of a wheel, and in its RECORD.
ENTRY_BYTES = 300


@functools.cache
def packed_sizes(manifest):
    """Bytes of each cubin in a wheel, which compresses file by file."""
    return {
        name: len(zlib.compress(manifest.with_name(f"{name}.cubin").read_bytes(), 9)) + ENTRY_BYTES
        for name in json.loads(manifest.read_text())["cubins"]
    }


def estimates(budgets, target, sizes, reference):
    """Bytes of each family for a target."""
    of = dict.fromkeys(families.names(target).values())
    return {(target, family): budgets.estimate(target, family, sizes, reference) for family in of}


@pytest.mark.parametrize("manifest", BUILT, ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}")
def test_the_kernels_of_a_target_will_keep_to_their_budget(budgets, manifest):
    """Also where only some are compiled: what all would take is estimated from those."""
    reference = sizes_in(MANIFEST) if MANIFEST.exists() else {}
    if not reference.keys() >= {variant.name for variant in families.variants(budgets.REFERENCE)}:
        pytest.skip("not all cubins of sm_80 in this checkout: scripts/build_cubins.py --arch sm_80")
    assert budgets.excess(estimates(budgets, manifest.parent.name, sizes_in(manifest), reference)) == []


@pytest.mark.parametrize("cuda", [12, 13])
def test_a_wheel_will_keep_to_its_budget(budgets, cuda):
    """By its kernels, compressed; how much all of them take is estimated from those that are compiled."""
    manifests = [MANIFEST.parents[2] / f"cuda{cuda}" / name / MANIFEST.name for name in build.targets(cuda)]
    if missing := [path.parent.name for path in (MANIFEST, *manifests) if not path.exists()]:
        pytest.skip(f"no cubins of {', '.join(missing)} in this checkout: scripts/build_cubins.py")
    reference = sizes_in(MANIFEST)
    if not reference.keys() >= {variant.name for variant in families.variants(budgets.REFERENCE)}:
        pytest.skip("not all cubins of sm_80 in this checkout: scripts/build_cubins.py --arch sm_80")
    # why each target by its own kernels: those of some pack to 0.23 of their bytes, of others to 0.32.
    packed = packed_sizes(MANIFEST)
    total = sum(budgets.estimate(path.parent.name, None, packed_sizes(path), packed) for path in manifests)
    # With all 2911 kernels for CUDA 12 compiled, the four turns of a push that have some for each target
    # estimated 0.995 to 1.015 of their bytes.
    assert total <= budgets.WHEEL_BYTES, f"{total / 1e6:.1f} MB"


@pytest.mark.parametrize("cuda", [12, 13])
def test_parts_of_a_wheel_will_keep_to_their_budgets(budgets, cuda):
    """By what their kernels take for sm_80, compressed; one that is only elsewhere counts as their mean."""
    packed = {part: {} for part in budgets.PART_BYTES}
    for variant in families.variants(budgets.REFERENCE):
        if part := budgets.part_of(variant):
            path = MANIFEST.with_name(f"{variant.name}.cubin")
            if not path.exists():
                pytest.skip("not all cubins of sm_80 in this checkout: scripts/build_cubins.py --arch sm_80")
            packed[part][variant.name] = len(zlib.compress(path.read_bytes()))
    total = dict.fromkeys(packed, 0)
    for variant in (v for target in build.targets(cuda) for v in families.names(target)):
        if part := budgets.part_of(variant):
            total[part] += packed[part].get(variant.name, statistics.mean(packed[part].values()))
    assert all(total.values())
    assert budgets.excess_of_parts(total) == [], total


@pytest.mark.parametrize("only", ["*", "*_f16_*", "flash_backward_*_f16_d192_*", "flash_*_tf32x3_d256_*"])
def test_an_estimate_is_near_what_all_take(budgets, only):
    """Kernels for sm_100 half as large again as those of their kind for sm_80, of which a build has some."""

    def bytes_of(variant):
        return 5_000 + 200 * variant.head_dim + 9_000 * ("backward" in variant.source)

    reference = {variant.name: bytes_of(variant) for variant in families.variants(budgets.REFERENCE)}
    every = {v.name: bytes_of(v) * 3 // 2 for v, of in families.names("sm_100").items() if of == flash.NAME}
    some = {name: size for name, size in every.items() if fnmatch(name, only)}
    assert some
    estimate = budgets.estimate("sm_100", flash.NAME, some, reference)
    assert estimate == pytest.approx(sum(every.values()), rel=0.02)


def test_a_budget_that_is_too_small_is_told(budgets, monkeypatch):
    """By the target's name, and in time: from a few of its kernels."""
    reference = dict.fromkeys((variant.name for variant in families.variants(budgets.REFERENCE)), 10_000)
    count = sum(of == flash.NAME for of in families.names("sm_100").values())
    some = dict.fromkeys(
        [v.name for v, of in families.names("sm_100").items() if of == flash.NAME][:9], 20_000
    )
    monkeypatch.setitem(budgets.FAMILY_BYTES, flash.NAME, 20_000 * count)
    assert budgets.excess(estimates(budgets, "sm_100", some, reference)) == []
    monkeypatch.setitem(budgets.FAMILY_BYTES, flash.NAME, 20_000 * count - 1_000)
    (line,) = budgets.excess(estimates(budgets, "sm_100", some, reference))
    assert line.startswith("the flash kernels of sm_100 take ")
    assert "over their budget of " in line
    assert line.endswith("Try: fewer variants, or another FAMILY_BYTES in scripts/budgets.py")


def test_ci_compiles_some_of_every_target_of_a_release():
    """Of the family that has a budget; and the one that others are scaled by whole."""
    script = (ROOT / "scripts" / "test").read_text()
    whole, some = script.split("if [ ${#cases[@]} -ne 0 ]; then")[1].split("else")[1], set()
    assert "scripts/build_cubins.py --arch sm_80\n" in whole
    for line in re.findall(r"scripts/build_cubins.py ((?!.*\{part).*--only .*)", whole):
        pattern = re.search(r"--only '(.*)'", line)[1]
        archs = re.findall(r"--arch (\S+)", line)
        for cuda in map(int, re.findall(r"--cuda (\d+)", line)):
            for target in archs or build.targets(cuda):
                names = (v.name for v, of in families.names(target).items() if of == flash.NAME)
                some |= {(cuda, target)} if any(fnmatch(name, pattern) for name in names) else set()
    expected = {(cuda, target) for cuda in (12, 13) for target in build.targets(cuda)}
    assert some == {(c, t) for c, t in expected if flash.NAME in families.names(t).values()}
