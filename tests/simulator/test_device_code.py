"""The device side of the primitives compiles for every architecture, without a complaint of ptxas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupy_flash.cubins import nvrtc, sources
from tests.simulator.units import KERNELS

TARGETS = [
    *((12, f"sm_{n}") for n in ("61", "70", "75", "80", "89", "90a", "100", "120", "120f")),
    *((13, f"sm_{n}") for n in ("75", "80", "89", "90a", "100", "120", "120f")),
]


def compile_unit(cuda: int, target: str, name: str, *macros: str) -> str:
    """The log of a compilation of a test kernel as a cubin would be made of it."""
    if not nvrtc.installed(cuda):
        pytest.skip(f"the NVRTC wheel of CUDA {cuda} is not installed")
    source = KERNELS / f"{name}.cu"
    include = sources.folder() / "include"
    options = [f"--gpu-architecture={target}", *sources.OPTIONS, *macros, f"-I{include}"]
    cubin, log = nvrtc.Compiler(cuda).compile(source.read_text(), source.name, options)
    assert cubin.startswith(b"\x7fELF")
    return log


def complaints(log: str) -> list[str]:
    ignored = ("Architectures prior to",)
    marks = ("warning", "C75", "Potential Performance Loss")
    return [
        line
        for line in log.splitlines()
        if any(mark in line for mark in marks) and not any(known in line for known in ignored)
    ]


@pytest.mark.parametrize(("cuda", "target"), TARGETS)
def test_every_primitive_compiles(cuda: int, target: str) -> None:
    assert not complaints(compile_unit(cuda, target, "every_primitive"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width_of_wgmma_compiles(n: int) -> None:
    compile_unit(13, "sm_90a", "every_primitive", f"-DPROBE_N={n}")


@pytest.mark.parametrize("cuda", [12, 13])
@pytest.mark.parametrize(
    "kernel",
    [
        "ampere_forward",
        "boxes",
        "hopper_forward",
        "matrices",
        "products",
        "warp",
        "warpgroup_products",
    ],
)
def test_units_of_the_simulator_compile_for_a_gpu(kernel: str, cuda: int) -> None:
    """The same files can run on a GPU, to compare the simulator with one."""
    compile_unit(cuda, "sm_90a", kernel)


def test_asm_is_in_primitives_only() -> None:
    folder = sources.folder()
    files = [*folder.glob("*.cu"), *(folder / "include").rglob("*.cuh")]
    found = {p for p in files if "asm" in _words(p)}
    assert {p.parent for p in found} == {folder / "include/prim"}, found


@pytest.mark.parametrize("word", ["__shared__", "__CUDA_ARCH__", "asm"])
def test_kernels_leave_to_the_primitives(word: str) -> None:
    """What would make a kernel differ between GPU and simulator."""
    files = [*sources.folder().glob("*.cu"), *KERNELS.glob("*.cu")]
    offenders = {p.name for p in files if word in _words(p) and p.name != "every_primitive.cu"}
    assert not offenders


def test_every_primitive_has_a_kernel() -> None:
    """One that only tests use has no kernel to be right for."""
    folder = sources.folder()
    primitives = {*(folder / "include/prim").glob("*.cuh")}
    kernels = {*folder.glob("*.cu"), *(folder / "include").rglob("*.cuh")} - primitives
    text = " ".join(path.read_text() for path in primitives)
    named = {*re.findall(r"^(?:template <.*> )?CF_DEVICE .*?\b(\w+)\(", text, re.MULTILINE)}
    assert len(named) > 50
    assert not named - set().union(*map(_words, kernels))


def _words(path: Path) -> set[str]:
    lines = (line.split("//")[0] for line in path.read_text().splitlines())
    text = " ".join(lines)
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
