"""The mma.sync kernel of 8-bit floats: E4M3 products on tensor cores, sm_89 and sm_120, forward only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...call.operands import FLOAT8
from ...call.problem import Problem
from ..catalog import Arch, Variant
from ..launch import Plan, along_x, blocks_of

__all__ = ["NAME", "plan", "refusals", "variants"]

NAME = "fp8"
_MASKS = ("band", "any")


class Tile(NamedTuple):
    """A cell of `_FORWARD`.

    Attributes
    ----------
    m, n : int
        Queries and keys of a block.
    threads : int
    q_in_registers : int
        1: a warp holds its part of Q in registers; 0: it reads it from shared memory again.
    """

    m: int
    n: int
    threads: int
    q_in_registers: int


# head_dim class -> cells for each of _MASKS. "band": causal, window, sinks, packed. "any": also softcap,
# ALiBi, scale <= 0. Each was compiled without spilling, by both compilers.
# why these: a warp has 32 queries where its sums leave registers, so that K and V are read half as often; two
# blocks fit in the shared memory of a multiprocessor, but at 256, where O leaves through 64 KiB.
_FORWARD = {
    64: (Tile(128, 128, 128, 1), Tile(128, 64, 128, 1)),
    128: (Tile(128, 64, 128, 0), Tile(128, 64, 128, 0)),
    256: (Tile(128, 64, 256, 0), Tile(128, 64, 256, 0)),
}


def _forward(head_dim: int, mask: str, arch: Arch) -> Variant:
    """The kernel of a class."""
    m, n, threads, q_in_registers = _FORWARD[head_dim][_MASKS.index(mask)]
    return Variant(
        "flash_forward_fp8.cu",
        "",
        "Fp8ForwardParams",
        "e4m3",
        head_dim,
        head_dim,
        (m, n),
        threads,
        # O, of 16 bits, leaves through the place of Q. 128 bytes: what waits for the epilogue.
        2 * m * head_dim + 2 * n * head_dim + 128,
        mask,
        macros=(
            ("CF_Q_IN_REGISTERS", str(q_in_registers)),
            # why: sm_120 and sm_121 have products with a scale for each row and column, which others measured
            # at twice the rate of those without.
            ("CF_BLOCK_SCALE", str(int(arch.capability >= 120))),
            ("CF_MIN_BLOCKS", "2" if threads == 128 else "1"),
        ),
    )


def variants(arch: Arch) -> Iterator[Variant]:
    """What is compiled for an architecture."""
    for mask in _MASKS:
        yield from (_forward(head_dim, mask, arch) for head_dim in _FORWARD)


def _chosen(problem: Problem, arch: Arch) -> Variant | None:
    """The kernel for a problem's head dims and scores; None if no class takes them."""
    p = problem
    mask = "any" if p.alibi or p.softcap or p.scale <= 0 else "band"
    widest = max(p.head_dim, p.head_dim_v)
    return next((_forward(head_dim, mask, arch) for head_dim in _FORWARD if widest <= head_dim), None)


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """Every reason why this kernel cannot answer a problem."""
    p, reasons = problem, []
    if p.dtype != FLOAT8:
        return [f"multiplies {FLOAT8}, not {p.dtype}"]
    if p.result_dtype == "float32":
        reasons.append("writes float16 and bfloat16, not float32")
    if p.reproducible == "device":
        reasons.append("multiplies on tensor cores, whose sums follow the architecture")
    elif p.reproducible:
        reasons.append(f"no order is promised for {FLOAT8} yet")
    inside = {
        "mask": p.mask,
        "bias": p.bias,
        "Spans": p.spans,
        "BlockMask": p.blocks,
        "score function": p.function,
        "dropout": p.dropout,
    }
    if unknown := [name for name, given in inside.items() if given]:
        reasons.append(f"its inner loop has no {' or '.join(unknown)}")
    if not p.in_rows:
        reasons.append("the last axis of every tensor must be contiguous, its rows less than 2 GiB apart")
    if max(p.seqlen_q, p.seqlen_k) >= 2**30:
        reasons.append("sequences must be shorter than 2**30")
    variant = _chosen(p, arch)
    if variant is None:
        reasons.append(f"head_dim {max(p.head_dim, p.head_dim_v)} is above {max(_FORWARD)}")
    elif p.tile not in (None, variant.tile):
        reasons.append(f"tile {p.tile} is not built (built: {variant.tile})")
    return reasons


def plan(problem: Problem, arch: Arch) -> Plan:
    """The kernel for a problem that is not refused."""
    variant = _chosen(problem, arch)
    assert variant is not None
    blocks = problem.batch * problem.heads_q * blocks_of(problem.seqlen_q, variant.tile[0])
    return Plan(arch.name, NAME, tuple(along_x(variant, blocks)))
