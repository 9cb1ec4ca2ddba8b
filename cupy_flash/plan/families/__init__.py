"""Families of kernels: what each compiles, which problems it refuses and why, and how it plans the others."""

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
    "has_own",
    "names",
    "of_function",
    "variants",
]


class Family(Protocol):
    """What a module of this folder offers."""

    NAME: str

    def variants(self, arch: Arch, /) -> Iterator[Variant]:
        """What is compiled for an architecture."""

    def refusals(self, problem: Problem, arch: Arch, /) -> list[str]:
        """Every reason why this family cannot answer a problem; empty if it can."""

    def plan(self, problem: Problem, arch: Arch, /) -> Plan:
        """The kernels for a problem that is not refused."""


# In order of preference: the first family with nothing against it answers.
FAMILIES: tuple[Family, ...] = (hopper, flash, simple, fp8)
# The same for problems over a KV cache.
CACHE_FAMILIES: tuple[Family, ...] = (cached, decode)
# And for sums over the weights, whatever the keys lie in.
OF_STATISTICS: tuple[Family, ...] = (simple,)


@lru_cache(maxsize=64)
def names(target: str) -> dict[Variant, str]:
    """Everything that is compiled for a target, with the name of its family.

    Of the target of an architecture's own families, what it has beside the others.
    """
    asked = architecture(target)
    own = has_own(target)
    rows = [asked] if own else [row for row in ARCHITECTURES if row.target == asked.target]
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
    # why not where all rows have an own target: that one has the kernel, for they run no other
    if own or not all(row.own for row in rows):
        found[primitives.variant(target if own else asked.target)] = primitives.NAME
    return found


def has_own(target: str) -> bool:
    """Whether a target is that of the few kernels that an architecture has beside those of another target."""
    row = architecture(target)
    return bool(row.own) and target == row.own_target


def of_function(
    function: Body, dtype: str, head_dim: int, target: str, second_order: bool = False
) -> tuple[Variant, ...]:
    """What is compiled for a target of a score function, for a dtype of q, k and v and their head dim.

    second_order: those of tangents and second derivatives, too.
    """
    row = architecture(target)
    if has_own(target):
        return ()
    short = SHORT[dtype]
    on_any = simple.of_function(function, short, head_dim, row, second_order)
    return (*flash.of_function(function, short, head_dim, row), *on_any)


def variants(target: str) -> tuple[Variant, ...]:
    """Everything that is compiled for a target such as "sm_80" or "sm_90a"."""
    return tuple(names(target))
