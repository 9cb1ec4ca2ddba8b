"""Kernel families: each lists its variants, refuses problems with reasons, and plans the others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from ...call.problem import Problem
from ...program.graph import Body
from ..catalog import ARCHITECTURES, SHORT, Arch, Variant, architecture
from ..launch import Plan
from . import cached, decode, flash, fp8, hopper, primitives, simple

__all__ = [
    "CACHE_FAMILIES",
    "FAMILIES",
    "OF_STATISTICS",
    "Family",
    "has_own_target",
    "names",
    "of_function",
    "variants",
]


class Family(Protocol):
    """The interface of a family, which is a module of this folder."""

    NAME: str

    def variants(self, arch: Arch, /) -> Iterator[Variant]:
        """The variants compiled for an architecture."""

    def refusals(self, problem: Problem, arch: Arch, /) -> list[str]:
        """All reasons why this family does not support a problem; empty if it does."""

    def plan(self, problem: Problem, arch: Arch, /) -> Plan:
        """The plan for a problem that is not refused."""


# In order of preference: the first family that does not refuse is used.
FAMILIES: tuple[Family, ...] = (hopper, flash, simple, fp8)
# For problems over a KV cache.
CACHE_FAMILIES: tuple[Family, ...] = (cached, decode)
# For statistics, with and without a cache.
OF_STATISTICS: tuple[Family, ...] = (simple,)


@lru_cache(maxsize=64)
def names(target: str) -> dict[Variant, str]:
    """All variants compiled for a target, each with the name of its family.

    For an `own_target`, only the variants of the architecture's `own` families.
    """
    arch = architecture(target)
    own = has_own_target(target)
    rows = [arch] if own else [row for row in ARCHITECTURES if row.target == arch.target]
    every = (*FAMILIES, *CACHE_FAMILIES)
    offered = (
        (family, row)
        for row in rows
        for family in every
        if family.NAME in row.families and (family.NAME in row.own) == own
    )
    found: dict[Variant, str] = {}
    for family, row in offered:
        for variant in family.variants(row):
            found.setdefault(variant, family.NAME)
    # why the condition: if every row has an own target, that target has the kernel, and this one needs no
    # copy
    if own or not all(row.own for row in rows):
        found[primitives.variant(target if own else arch.target)] = primitives.NAME
    return found


def has_own_target(target: str) -> bool:
    """Whether a target is an `own_target`, for the few kernels that an architecture compiles separately."""
    row = architecture(target)
    return bool(row.own) and target == row.own_target


def of_function(
    function: Body, dtype: str, head_dim: int, target: str, second_order: bool = False
) -> tuple[Variant, ...]:
    """The variants compiled for a score function, by the dtype and head_dim of q, k and v.

    With second_order, those of tangents and second derivatives too.
    """
    row = architecture(target)
    if has_own_target(target):
        return ()
    short = SHORT[dtype]
    on_any = simple.of_function(function, short, head_dim, second_order)
    return (*flash.of_function(function, short, head_dim, row), *on_any)


def variants(target: str) -> tuple[Variant, ...]:
    """All variants compiled for a target such as "sm_80" or "sm_90a"."""
    return tuple(names(target))
