"""`BlockMask`, and the checks of its arrays in a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArgumentsError
from .arrays import CPU, ArrayView, contiguous
from .operands import Views, cast, table_of, wrong
from .public_names import public_name

__all__ = [
    "NOTHING",
    "PARTIAL",
    "WHOLE",
    "BlockMask",
    "Blocks",
    "block_operands",
    "check_blocks",
    "foreign_blocks",
]

# Codes in the table: the block is empty, full, or partial with the mask bits[code - PARTIAL].
NOTHING, WHOLE, PARTIAL = 0, 1, 2
SIZES = (16, 32, 64, 128, 256)


class BlockMask(NamedTuple):
    """A block mask: each block of queries and keys is full, empty or partial.

    `cupy_flash.block_mask` makes one from a function, `cupy_flash.block_mask_of_lists` from counts and
    indices. Its arrays are NumPy arrays; ``BlockMask(*map(cupy.asarray, made))`` (or `torch.from_numpy`,
    `jax.numpy.asarray`) converts them. In JAX it is a pytree of two arrays.

    Attributes
    ----------
    table : array of int32, shape (batch or 1, heads_q or 1, blocks of queries, blocks of keys)
        0: the block is empty, no pair is visible; 1: it is full; n + 2: it is partial, with the mask
        ``bits[n]``. The first two axes may be left out.
    bits : array of uint8, shape (n, queries of a block, keys of a block / 8)
        Masks of the partial blocks: key j of a block is bit j % 8 of byte j // 8. Equal blocks share one
        mask. A block has 16, 32, 64, 128 or 256 queries, and one of these numbers of keys.
    """

    table: Any
    bits: Any


class Blocks(NamedTuple):
    """The sizes of a `BlockMask`, as part of a `Problem`."""

    # Queries and keys per block.
    queries: int
    keys: int
    partial: int  # number of distinct partial blocks

    def summary(self) -> str:
        """A short description for messages."""
        return f"BlockMask({self.queries} x {self.keys}, {self.partial} in part)"


def foreign_blocks(given: Any) -> InvalidArgumentsError:
    """The error for a BlockMask class of another library."""
    return InvalidArgumentsError(
        f"mask is of type {type(given).__module__}.{type(given).__name__}.",
        hint="cupy_flash.torch.attention, which takes torch's; or cupy_flash.torch.block_mask(of_torch)",
    )


def block_operands(raw: Views, views: Views, full: tuple[int, int, int, int]) -> Blocks | None:
    """Check a block mask, add the 4-axis view of its table to `views`, and return its sizes."""
    table, bits = raw.get("blocks"), raw.get("block_bits")
    if table is None and bits is None:
        return None
    if table is None or bits is None:
        raise wrong(
            f"mask is a BlockMask without {'table' if table is None else 'bits'}.",
            raw,
            "a BlockMask of two arrays",
        )
    for name, view, dtype in (("blocks", table, "int32"), ("block_bits", bits, "uint8")):
        if view.dtype != dtype:
            headline = f"{public_name(name)} has dtype {view.dtype}, not {dtype}."
            raise wrong(headline, raw, cast(name, view, dtype))
    if len(bits.shape) != 3 or bits.shape[1] not in SIZES or 8 * bits.shape[2] not in SIZES:
        raise wrong(
            f"mask.bits has shape {bits.shape}.",
            raw,
            f"(n, queries of a block, keys of a block / 8), of {', '.join(map(str, SIZES))} queries and keys",
        )
    apart = zip(bits.shape, bits.strides, contiguous(bits.shape), strict=True)
    if any(n > 1 and step != wanted for n, step, wanted in apart) and bits.shape[0]:
        raise wrong("mask.bits is not contiguous.", raw, "a contiguous copy")
    found = Blocks(bits.shape[1], 8 * bits.shape[2], bits.shape[0])
    counts = (-(-full[2] // found.queries), -(-full[3] // found.keys))
    lead = (1,) * (4 - len(table.shape)) + table.shape[:-2]
    broadcasts = len(lead) == 2 and lead[0] in (1, full[0]) and lead[1] in (1, full[1])
    if not (len(table.shape) >= 2 and broadcasts and table.shape[-2:] == counts):
        raise wrong(
            f"mask.table has shape {table.shape} for {full[2]} queries and {full[3]} keys in blocks of "
            f"{found.queries} and {found.keys}.",
            raw,
            f"(batch or 1, heads_q or 1, {counts[0]}, {counts[1]}), as cupy_flash.block_mask makes it",
        )
    views["blocks"], views["block_bits"] = table.lifted(4), bits
    return found


def check_blocks(blocks: Blocks | None, raw: Mapping[str, ArrayView]) -> None:
    """Refuse table entries without a block in `bits`, for arrays in main memory, where reading is free."""
    if blocks is None or raw["blocks"].device != CPU:
        return
    table = raw["blocks"].numpy()
    least, most = int(np.min(table, initial=0)), int(np.max(table, initial=0))
    if least < 0 or most >= PARTIAL + blocks.partial:
        raise InvalidArgumentsError(
            f"mask.table holds {least if least < 0 else most}, and there are bits of {blocks.partial}.",
            table_of(raw),
            hint="0 for masked blocks, 1 for blocks without a mask, n + 2 for blocks masked by bits[n]",
        )
