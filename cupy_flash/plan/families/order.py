"""Which family's summation order `reproducible` guarantees."""

from __future__ import annotations

from types import ModuleType

from ...call.problem import Problem
from ..catalog import Arch
from . import flash, hopper, simple

__all__ = ["refusals"]


def refusals(family: str, problem: Problem, arch: Arch) -> list[str]:
    """Why a family may not replace a preferred one that computes such problems for contiguous arrays."""

    def computed_by(before: ModuleType) -> bool:
        return before.NAME in arch.families and not before.refusals_but_strides(problem, arch)

    order = problem.reproducible
    if family == flash.NAME and order == "prefill" and computed_by(hopper):
        return ["adds in another order than hopper, which computes contiguous arrays"]
    if family == simple.NAME and order in ("batch", "prefill") and computed_by(flash):
        return ["adds in another order than flash, which computes this dtype and head_dim"]
    return []
