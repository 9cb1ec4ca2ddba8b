"""Every instruction of every variant is known: PTX of both compilers, for every target, is translated.

On a push each variant once, compilers and targets in turn, others each day; with the plugin every variant of
every target.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from cupy_flash.cubins import build, nvrtc, sources
from cupy_flash.plan import families
from cupy_flash.plan.catalog import Variant
from tests.simulator.ptx import plugin, toolchain
from tests.simulator.ptx.backend import Build
from tests.simulator.ptx.conftest import need
from tests.simulator.ptx.translate import translate

BUILDS = [Build(target, cuda) for cuda in nvrtc.TOOLKITS for target in build.targets(cuda)]
EVERY = {one: families.variants(one.target) for one in BUILDS}


def in_turn(word: str) -> dict[Build, list[Variant]]:
    """Each variant with one of the builds that have it, in turn; another word begins at another build."""
    first = zlib.crc32(word.encode())
    builds_of: dict[str, list[Build]] = {}
    for one, variants in EVERY.items():
        for variant in variants:
            builds_of.setdefault(variant.name, []).append(one)
    chosen = {
        name: builds[(first + k) % len(builds)] for k, (name, builds) in enumerate(sorted(builds_of.items()))
    }
    return {one: [v for v in variants if chosen[v.name] == one] for one, variants in EVERY.items()}


def check_translates(one: Build, variants: list[Variant], count: Callable[[str, object], None]) -> None:
    need(one.cuda)
    for variant in variants:
        translated = translate(toolchain.ptx_of(variant, *one), f"{variant.name}-{one}.ptx")
        assert f"PTX_KERNEL({variant.name}," in translated
        count("variants whose PTX is translated", variant.name)
        count(
            f"builds of variants whose PTX is translated, of {sum(map(len, EVERY.values()))}",
            f"{variant.name} {one}",
        )


def test_every_variant_has_its_turn() -> None:
    names = [variant.name for variants in in_turn("today").values() for variant in variants]
    assert sorted(names) == sorted({variant.name for variants in EVERY.values() for variant in variants})
    days = [in_turn(f"day {k}") for k in range(200)]
    for one, variants in EVERY.items():
        assert {v.name for day in days for v in day[one]} == {v.name for v in variants}


@pytest.mark.slow
@pytest.mark.parametrize("one", BUILDS, ids=str)
def test_each_variant_once(
    one: Build, count: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    check_translates(one, in_turn(request.config.option.sample)[one], count)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("one", BUILDS, ids=str)
def test_every_variant(
    one: Build, part: int, count: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    plugin.need(request.config)
    check_translates(one, list(EVERY[one])[part::8], count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one", [Build(t, c) for t, c in (("sm_75", 13), ("sm_80", 12), ("sm_90a", 13))], ids=str
)
def test_it_is_the_ptx_that_a_cubin_is_made_of(one: Build) -> None:
    """NVRTC also tells what it gave to ptxas, of the options of a build."""
    need(one.cuda)
    compiler = nvrtc.Compiler(one.cuda)
    for variant in [v for v in EVERY[one] if "_f16_d64_" in v.name and "band" in v.name][:2]:
        source = sources.folder() / variant.source
        folders = [f"-I{source.parent}", f"-I{source.parent / 'include'}"]
        options = [*sources.options(variant, one.target), *folders]
        text, _ = compiler.compile(source.read_text(), source.name, options, result="PTX")
        assert _instructions(text.decode()) == _instructions(toolchain.ptx_of(variant, *one))


def _instructions(text: str) -> list[str]:
    """Without comments, and without what -lineinfo adds."""
    debug = (".loc", ".file", ".section", "//", "$L__info", "}", "{", ".b8", ".b32", ".b64")
    lines = (line.split("//")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(debug)]
