"""choose, on the CPU: the compiled core where it supports the problem, else NumPy, with the reasons."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..call.problem import Problem
from ..errors import CubinNotFoundError, InvalidArgumentsError, UnsupportedError
from ..program.errors import integer_overflow
from ..program.graph import Graph
from ..program.ranges import too_large
from ..program.template import Template, only_in_python
from .core import family
from .core.isa import BY_AMX, FLOATS, OVERRIDE, PAIRS, Isa, chosen, host, why_floats
from .core.locate import Library, how_to_get_one, locate
from .core.sources import AMX, BFLOAT16, FUNCTIONS, PRODUCTS, SECOND_ORDER, STATISTICS, multiplies

__all__ = ["CpuPlan", "choose", "override", "products_of_bfloat16"]


class CpuPlan(NamedTuple):
    """The chosen implementation of a problem on the CPU."""

    family: str  # {"core", "numpy"}
    isa: Isa | None = None  # instruction set of the core; None for NumPy
    library: Library | None = None  # library of the core; None for NumPy
    # Preferred families that do not support the problem, each with a reason.
    refused: tuple[tuple[str, str], ...] = ()
    functions: Library | None = None  # the core's library of score functions; None for a problem without one


def override() -> str:
    """The value of CUPY_FLASH_CPU: an instruction set, "numpy", or "" if unset."""
    return os.environ.get(OVERRIDE, "")


def core(part: str = "") -> tuple[Isa, Library] | str:
    """Find the best library of a part (of `sources.PARTS`) for this CPU, or say why there is none."""
    wanted = override()
    isas = chosen(wanted)
    for way, of_way in PRODUCTS.items():
        if wanted.endswith(way) and not multiplies(isas[0], of_way):
            raise InvalidArgumentsError(
                f"the environment variable {OVERRIDE} is {wanted!r}, and this CPU has no such products.",
                hint=f"unset it, or {isas[0].name}",
            )
    if wanted == "numpy":
        return f"{OVERRIDE} is numpy"
    for isa in isas:
        library = locate(isa, part)
        if library is not None:
            return isa, library
    if wanted:
        raise CubinNotFoundError(
            f"{OVERRIDE} is {wanted!r}, and there is no such library of the compiled core.",
            hint=how_to_get_one(),
        )
    if not isas:
        return f"is not compiled for {host().platform} with this CPU"
    return f"no library for {', '.join(isa.name for isa in isas)}; try {how_to_get_one()}"


def choose(problem: Problem) -> CpuPlan:
    """Choose the implementation of a problem.

    Raises
    ------
    InvalidArgumentsError, CubinNotFoundError
        As in `core`.
    UnsupportedError
        Reproducible bits are requested and only NumPy could compute, or the bits of a GPU are requested; or
        the score function is in C, or has integers beyond 64 bits.
    """
    if isinstance(problem.function, Template):
        raise only_in_python("these arrays are on the CPU")
    if isinstance(problem.function, Graph) and (large := too_large(problem.function, 64, problem.extents)):
        raise integer_overflow(problem.function.name, large, 64)
    if problem.reproducible == "device" and not problem.empty:
        raise UnsupportedError(
            'reproducible="device" is kept by the kernels of GPUs, and by the simulator that runs them: '
            "on a CPU the order of sums follows its vectors.",
            hint='reproducible="batch", CuPy arrays, or the environment variable CUPY_FLASH_DRIVER=simulator',
        )
    part = STATISTICS if problem.direction == "statistics" else ""
    found = core(SECOND_ORDER if problem.second_order else part)
    reasons = [found] if isinstance(found, str) else family.refusals(problem)
    functions = None
    if problem.function is not None and not reasons:
        made = core(FUNCTIONS)
        functions, reasons = (None, [made]) if isinstance(made, str) else (made[1], [])
    if reasons and problem.reproducible and not problem.empty:
        raise UnsupportedError(
            f'reproducible="{problem.reproducible}" is kept on a CPU by the compiled core only: NumPy '
            "multiplies by BLAS, whose order of sums follows the shape of a product.",
            reasons=[(family.NAME, reason) for reason in reasons],
            hint=f"{how_to_get_one()}, or reproducible=None",
        )
    if reasons:
        return CpuPlan("numpy", refused=tuple((family.NAME, reason) for reason in reasons))
    assert not isinstance(found, str)
    isa, library = found
    if problem.dtype == "bfloat16" and not family.needs_float32(problem):
        tiles, decodes = family.fills_tiles(problem), family.decodes(problem)
        library = products_of_bfloat16(isa, tiles, decodes) or library
    elif family.splits_floats(problem, wanted=override().endswith(BY_AMX)):
        library = by_amx(isa) or library
    return CpuPlan(family.NAME, isa, library, functions=functions)


def by_amx(isa: Isa) -> Library | None:
    """The library that multiplies by AMX, if this CPU supports it and CUPY_FLASH_CPU does not forbid it."""
    if override().endswith((FLOATS, PAIRS)) or not multiplies(isa, AMX):
        return None
    return locate(isa, AMX)


def products_of_bfloat16(isa: Isa, tiles: bool = True, decodes: bool = False) -> Library | None:
    """The library that multiplies bfloat16 by AMX or in pairs, if this CPU supports it; None for floats.

    `tiles` and `decodes` are results of `family.fills_tiles` and `family.decodes`.
    """
    library = by_amx(isa) if tiles else None
    if library is not None:
        return library
    if not why_floats(override(), decodes) and multiplies(isa, BFLOAT16):
        return locate(isa, BFLOAT16)
    return None
