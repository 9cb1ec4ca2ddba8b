"""Every instruction of every variant is known: PTX of both compilers, for every target, is translated.

On a push each kernel in every dtype and with every kind of mask; its classes of head dims, compilers and
targets in turn, others each day. With the plugin every variant of every target. why this loses little:
classes do the same operations, another number of times, and the translator alone would lack an instruction.
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


def kernels() -> list[dict[str, list[Build]]]:
    """Of each kernel, dtype and kind of mask the variants, each with the builds that have it."""
    found: dict[tuple[str, ...], dict[str, list[Build]]] = {}
    for one, variants in EVERY.items():
        for v in variants:
            found.setdefault((v.source, v.step, v.dtype, v.mask), {}).setdefault(v.name, []).append(one)
    return [*found.values()]


def in_turn(word: str) -> dict[Build, set[str]]:
    """Names of variants, one of each kernel, with one of the builds that have it; other words, others."""
    first = zlib.crc32(word.encode())
    chosen: dict[Build, set[str]] = {one: set() for one in BUILDS}
    for k, variants in enumerate(KERNELS):
        at, number = divmod(first + k, len(variants))
        name, builds = [*variants.items()][number]
        chosen[builds[at % len(builds)]].add(name)
    return chosen


KERNELS = kernels()


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
    names = [name for names in in_turn("today").values() for name in names]
    assert [sum(name in names for name in variants) for variants in KERNELS] == [1] * len(KERNELS)
    days = [in_turn(f"day {k}") for k in range(2000)]
    for one, variants in EVERY.items():
        assert set().union(*(day[one] for day in days)) == {v.name for v in variants}


@pytest.mark.slow
@pytest.mark.parametrize("one", BUILDS, ids=str)
def test_each_kernel_once(
    one: Build, count: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    names = in_turn(request.config.option.sample)[one]
    check_translates(one, [v for v in EVERY[one] if v.name in names], count)


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
