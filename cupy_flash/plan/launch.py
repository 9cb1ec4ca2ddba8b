"""`Plan`, its launches and the parts of its workspace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..call.arrays import ITEM_BYTES, ArrayView, contiguous
from ..call.problem import Problem
from .catalog import Variant

__all__ = [
    "Launch", "Part", "Plan", "along_x", "beyond_band", "blocks_of", "class_of", "laid_out", "round_up",
    "rows_of", "tiles_of",
]  # fmt: skip


class Launch(NamedTuple):
    """One kernel launch of a plan."""

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    # Views passed under another name: (name in the params, name of the view).
    seen: tuple[tuple[str, str], ...] = ()
    # Row r of a tile is query r >> head_bits and head r % 2**head_bits of a group of query heads that share
    # a key head; 0: a tile has rows of one head.
    head_bits: int = 0
    heads_as_rows: bool = False  # whether the views pass the heads of a group as rows, see `heads_as_rows`
    # For deterministic gradients with ordered sums: number of blocks of a head that run at once, in an
    # order of their own; 0: one order for all blocks.
    wave: int = 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return self.variant.shared_bytes


class Part(NamedTuple):
    """A part of the workspace: a temporary array of one call, named as in abi.cuh."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # byte offset from the start of the workspace

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Plan(NamedTuple):
    """The kernels, grids and workspace of a call, chosen once per problem and architecture."""

    arch: str
    family: str
    launches: tuple[Launch, ...]  # in order
    workspace: tuple[Part, ...] = ()
    workspace_bytes: int = 0
    zeroed: tuple[str, ...] = ()  # names of the parts that must be zero before the first kernel starts
    # Preferred families that refused the problem, each with its reason.
    refused: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # remarks of the family on its choice, shown by `explain`

    def workspace_views(self) -> Mapping[str, ArrayView]:
        """Views of the parts of a workspace at address 0."""
        return {
            part.name: ArrayView(
                part.offset,
                part.shape,
                contiguous(part.shape),
                part.dtype,
                ("workspace", 0),
                "none",
                False,
                None,
            ).broadcast()
            for part in self.workspace
        }


def along_x(variant: Variant, blocks: int) -> list[Launch]:
    """A launch of this many blocks along x; empty for 0 blocks."""
    return [Launch(variant, (blocks, 1, 1), (variant.threads, 1, 1))] if blocks else []


def laid_out(*parts: tuple[str, str, tuple[int, ...]]) -> tuple[tuple[Part, ...], int]:
    """Assign each (name, dtype, shape) a 256-byte aligned offset; return the parts and the total bytes."""
    placed, offset = [], 0
    for name, dtype, shape in parts:
        placed.append(Part(name, dtype, shape, offset))
        offset += round_up(math.prod(shape) * ITEM_BYTES[dtype], 256)
    return tuple(placed), offset


def rows_of(problem: Problem) -> tuple[int, int, int]:
    """Shape of the LSE in kernels; packed sequences have a batch of 1."""
    if problem.packed:
        return 1, problem.heads_q, problem.rows_q
    return problem.batch, problem.heads_q, problem.seqlen_q


def blocks_of(n: int, block: int) -> int:
    """The number of blocks of this size that cover n, rounded up."""
    return -(-n // block)


def round_up(n: int, multiple: int) -> int:
    """The least multiple of a number that is not below n."""
    return blocks_of(n, multiple) * multiple


def tiles_of(problem: Problem, seqlen: int, rows: int, tile: int) -> int:
    """Number of tiles of all sequences, for a workspace; `rows` are those of all packed sequences together.

    The lengths of packed sequences are unknown: each may need one tile more than its rows fill.
    """
    return rows // tile + problem.batch if problem.packed else problem.batch * blocks_of(seqlen, tile)


def class_of(classes: Iterable[tuple[int, int]], problem: Problem) -> tuple[int, int] | None:
    """The first (head_dim, head_dim_v) that fits the head dims of a problem; None if none does."""
    return next(((d, v) for d, v in classes if problem.head_dim <= d and problem.head_dim_v <= v), None)


def beyond_band(problem: Problem) -> list[str]:
    """The options, masks aside, that need a kernel of kind "any"; empty if "band" computes them all."""
    p = problem
    given = {"ALiBi": p.alibi, "softcap": p.softcap, "scale <= 0": p.scale <= 0}
    return [name for name, is_given in given.items() if is_given]
