"""The simulator with kernels made from their PTX: launches, schedules, costs, reports stay the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from cupy_flash.device import simulator
from cupy_flash.device.host_build import Buildable, flags
from cupy_flash.dispatch import memo
from cupy_flash.plan import catalog, families
from tests.simulator.ptx import toolchain
from tests.simulator.ptx.reader import source_lines

__all__ = ["Build", "PtxKernel", "kernels_from_ptx", "target_of"]


class Build(NamedTuple):
    """What a kernel is made with: the target, such as "sm_90a", and the CUDA major of NVRTC."""

    target: str
    cuda: int

    def __str__(self) -> str:
        return f"{self.target}-cuda{self.cuda}"


class PtxKernel(simulator.Kernel):
    """A variant, made from the PTX of a build."""

    def __init__(self, variant: Buildable, build: Build) -> None:
        self._ptx, library = toolchain.build(variant, *build)
        super().__init__(variant, library)

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """As of a simulated kernel; reports have the lines of the PTX, and of its sources."""
        try:
            super().launch(*args, **kwargs)
        except simulator.KernelFailed as failure:
            raise simulator.KernelFailed(self._readable(str(failure))) from None

    def _readable(self, report: str) -> str:
        text = self._ptx.read_text()
        return re.sub(
            rf"{re.escape(self._ptx.name)}:(\d+)",
            lambda m: f"{m[0]} ({source_lines(text, int(m[1]))})",
            report,
        )


def target_of(variant: Buildable) -> str:
    """What a kernel of the simulated GPU is compiled for; some of tests are Turing's wherever they run."""
    if variant.defines().get("CF_TURING") == "1":
        return "sm_75"
    row = catalog.architecture(simulator.arch())
    return next((target for target in row.targets if variant in families.variants(target)), row.target)


@functools.cache
def _loaded(variant: Buildable, build: Build, _options: tuple[str, ...]) -> PtxKernel:
    return PtxKernel(variant, build)


@contextmanager
def kernels_from_ptx(cuda: int, target: str | None = None) -> Iterator[set[tuple[Buildable, Build]]]:
    """Load kernels from the PTX of this NVRTC; the target is that of the simulated GPU, if none is given.

    Yields
    ------
    set of (Buildable, Build)
        Variants, as they are loaded.
    """
    used: set[tuple[Buildable, Build]] = set()

    def load(variant: Buildable, device: int = 0) -> PtxKernel:
        wanted = target or target_of(variant)
        oldest = 75 if cuda >= 13 else 0
        build = Build(wanted, cuda if catalog.architecture(wanted).capability >= oldest else 12)
        used.add((variant, build))
        return _loaded(variant, build, flags())

    memo.forget()
    with mock.patch.object(simulator, "load", load):
        try:
            yield used
        finally:
            memo.forget()
