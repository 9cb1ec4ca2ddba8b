"""The mma.sync kernel for float8 (E4M3), on sm_89 and sm_120, forward only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...call.operands import FLOAT8
from ...call.problem import Problem
from ..catalog import Arch, Variant
from ..launch import Plan, along_x, beyond_band, blocks_of

__all__ = ["NAME", "plan", "refusals", "variants"]

NAME = "fp8"
_MASKS = ("band", "any")


class Tile(NamedTuple):
    """A cell of `_FORWARD`."""

    # Queries and keys per block.
    m: int
    n: int
    threads: int
    q_in_registers: int  # 1: a warp keeps its rows of Q in registers; 0: it rereads them from shared memory


# head_dim class -> cells for each of _MASKS. "band": causal, window, sinks, packed. "any": also softcap,
# ALiBi, scale <= 0. All compile without spills, with both compilers.
# why these: a warp has 32 queries where registers allow, so that K and V are read half as often; two blocks
# fit in the shared memory of a multiprocessor, except at 256, where O is stored through 64 KiB.
_FORWARD = {
    64: (Tile(128, 128, 128, 1), Tile(128, 64, 128, 1)),
    128: (Tile(128, 64, 128, 0), Tile(128, 64, 128, 0)),
    256: (Tile(128, 64, 256, 0), Tile(128, 64, 256, 0)),
}


def _forward(head_dim: int, mask: str, arch: Arch) -> Variant:
    """The kernel of a head dim class."""
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
        # O, of 16 bits, is stored through the memory of Q. 128 bytes: values parked for the epilogue.
        2 * m * head_dim + 2 * n * head_dim + 128,
        mask,
        macros=(
            ("CF_Q_IN_REGISTERS", str(q_in_registers)),
            # why: sm_120 and sm_121 have block-scaled products, which others measured at twice the rate of
            # those without scales.
            ("CF_BLOCK_SCALE", str(int(arch.capability >= 120))),
            ("CF_MIN_BLOCKS", "2" if threads == 128 else "1"),
        ),
    )


def variants(arch: Arch) -> Iterator[Variant]:
    """The variants compiled for an architecture."""
    for mask in _MASKS:
        yield from (_forward(head_dim, mask, arch) for head_dim in _FORWARD)


def _chosen(problem: Problem, arch: Arch) -> Variant | None:
    """The kernel for the head dims and options of a problem; None if no class fits."""
    p = problem
    mask = "any" if beyond_band(p) else "band"
    widest = max(p.head_dim, p.head_dim_v)
    return next((_forward(head_dim, mask, arch) for head_dim in _FORWARD if widest <= head_dim), None)


def refusals(problem: Problem, arch: Arch) -> list[str]:
    """All reasons why this kernel does not support a problem."""
    p, reasons = problem, []
    if p.dtype != FLOAT8:
        return [f"multiplies {FLOAT8}, not {p.dtype}"]
    if p.result_dtype == "float32":
        reasons.append("writes float16 and bfloat16, not float32")
    if p.reproducible == "device":
        reasons.append("multiplies on tensor cores, whose order of sums depends on the architecture")
    elif p.reproducible:
        reasons.append(f"the order of sums of {FLOAT8} is not guaranteed")
    if unknown := p.unread(("ALiBi", "softcap")):
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
    """The plan for a problem that is not refused."""
    variant = _chosen(problem, arch)
    assert variant is not None
    blocks = problem.batch * problem.heads_q * blocks_of(problem.seqlen_q, variant.tile[0])
    return Plan(arch.name, NAME, tuple(along_x(variant, blocks)))
