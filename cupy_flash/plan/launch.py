"""What choosing makes, as values: Plan, its launches and the parts of its workspace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..call.arrays import ITEM_BYTES, ArrayView, contiguous
from ..call.problem import Problem
from .catalog import Variant

__all__ = ["Launch", "Part", "Plan", "along_x", "blocks_of", "laid_out", "rows_of"]


class Launch(NamedTuple):
    """One kernel of a plan.

    Attributes
    ----------
    variant : Variant
    grid, block : (int, int, int)
    seen : tuple of (str, str)
        Views that it takes for another: (name in its params, name of the view).
    head_bits : int
        Row r of its tiles is query r >> head_bits and head r % 2**head_bits of the heads of q that share one
        of k; 0: a tile is of one head.
    heads_as_rows : bool
        It gets the heads of q that share one of k as rows, see `heads_as_rows`.
    wave : int
        Gradients in turns: blocks of a head that run at once, in an order of their own; 0: one order for all.
    """

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    seen: tuple[tuple[str, str], ...] = ()
    head_bits: int = 0
    heads_as_rows: bool = False
    wave: int = 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return self.variant.shared_bytes


class Part(NamedTuple):
    """A piece of the workspace: an array that lives for one call, by its name in abi.cuh."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Plan(NamedTuple):
    """What will run: a value, decided once per problem and architecture.

    Attributes
    ----------
    arch : str
    family : str
        Which family of kernels was chosen.
    launches : tuple of Launch
        In order.
    workspace : tuple of Part
    workspace_bytes : int
    zeroed : tuple of str
        Parts that are zero when the first kernel starts.
    refused : tuple of (str, str)
        Families that were preferred but cannot, each with its reason.
    notes : tuple of str
        What else the family has to say about its choice, for people.
    """

    arch: str
    family: str
    launches: tuple[Launch, ...]
    workspace: tuple[Part, ...] = ()
    workspace_bytes: int = 0
    zeroed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def workspace_views(self) -> Mapping[str, ArrayView]:
        """The parts of a workspace that begins at address 0."""
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
    """One launch of so many blocks; none if there is nothing to do."""
    return [Launch(variant, (blocks, 1, 1), (variant.threads, 1, 1))] if blocks else []


def laid_out(*parts: tuple[str, str, tuple[int, ...]]) -> tuple[tuple[Part, ...], int]:
    """Give each (name, dtype, shape) its 256-byte aligned place."""
    placed, offset = [], 0
    for name, dtype, shape in parts:
        placed.append(Part(name, dtype, shape, offset))
        offset += -(-math.prod(shape) * ITEM_BYTES[dtype] // 256) * 256
    return tuple(placed), offset


def rows_of(problem: Problem) -> tuple[int, int, int]:
    """Shape of an LSE; packed sequences share one batch."""
    if problem.packed:
        return 1, problem.heads_q, problem.rows_q
    return problem.batch, problem.heads_q, problem.seqlen_q


def blocks_of(n: int, block: int) -> int:
    """How many blocks cover n."""
    return -(-n // block)
