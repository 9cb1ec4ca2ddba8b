"""choose: map a problem and an architecture to a plan of kernels; pure, needs no GPU."""

from __future__ import annotations

from functools import lru_cache

from ..call.operands import FLOAT8
from ..call.problem import Problem
from ..errors import UnsupportedError
from ..program.errors import integer_overflow
from ..program.graph import Graph
from ..program.ranges import OF_DTYPE, too_large
from .catalog import architecture
from .launch import Launch, Part, Plan

__all__ = ["Launch", "Part", "Plan", "choose"]


# Options with one number per head that kernels support.
_PER_HEAD = ("alibi_slopes", "sinks")


@lru_cache(maxsize=4096)
def choose(problem: Problem, arch: str, multiprocessors: int | None = None) -> Plan:
    """Choose the kernels for a problem on "sm_86", "sm_90a" ...; an error has the reasons of each family."""
    # why here: importing their tables takes a third of the package's import time, and NumPy arrays need none.
    from .families import CACHE_FAMILIES, FAMILIES, OF_STATISTICS, order

    unread = [(name, True) for name in problem.per_head if name not in _PER_HEAD]
    for name, given in (("seqused_q", problem.used_q), ("a RaggedMask", problem.ragged_mask), *unread):
        if given:
            raise UnsupportedError(f"no kernel reads {name}.", hint=f"no {name}; or NumPy arrays, on the CPU")
    if isinstance(problem.function, Graph):
        _refuse_what_wraps(problem.function, problem.extents)
    row = architecture(arch)
    if multiprocessors:
        row = row._replace(multiprocessors=multiprocessors)
    families = FAMILIES if problem.cache is None else CACHE_FAMILIES
    if problem.direction == "statistics":
        families = OF_STATISTICS
    absent = [(f.NAME, f"is not compiled for {row.name}") for f in families if f.NAME not in row.families]
    refused: list[tuple[str, str]] = []
    for family in families:
        if family.NAME not in row.families:
            continue
        reasons = family.refusals(problem, row) + order.refusals(family.NAME, problem, row)
        if not reasons:
            planned = family.plan(problem, row)
            blocks = max((launch.grid[0] for launch in planned.launches), default=0)
            if blocks < 2**31:
                return planned._replace(refused=tuple(refused))
            reasons = [f"needs a grid of {blocks} blocks, above 2**31 - 1"]
        refused += [(family.NAME, reason) for reason in reasons]
    if problem.tile is not None:
        hint = "tuning=None, or one of the built tiles"
    elif problem.reproducible:
        hint = "reproducible=None; or, if the reason is strides, contiguous arrays"
    elif problem.direction == "statistics":
        hint = "want= some of key_sum, key_max, entropy, over contiguous keys; or arrays on a CPU"
    elif problem.dtype == FLOAT8:
        hint = "q, k and v times their scales as bfloat16, or NumPy arrays"
    elif problem.precision is not None:
        hint = 'precision=None or precision="ieee"'
    else:
        hint = "NumPy arrays: the CPU path takes any head dim"
    raise UnsupportedError(
        f"no kernel fits this problem on {row.name}.",
        table=[("problem", problem.summary())],
        reasons=absent + refused,
        hint=hint,
    )


def _refuse_what_wraps(function: Graph, sizes: tuple[int, int, int, int]) -> None:
    """Refuse integers that overflow in kernels: of positions in 32 bits, of elements of arguments in 64."""
    held = tuple([OF_DTYPE.get(x.dtype, (0, 0)) for x in function.arguments])
    for bits, known in ((32, None), (64, held)):
        found = too_large(function, bits, sizes, known)
        if found is not None:
            raise integer_overflow(
                function.name, found, bits, "" if known is None else "; or arguments of int8"
            )
