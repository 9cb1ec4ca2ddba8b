"""Blocks for tests: random tables and bits, beside the options of a case, and the masks they mean."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from cupy_flash import BlockMask
from tests.cases import Case
from tests.masked_case import MaskedCase


def as_mask(blocks: BlockMask, queries: int, keys: int) -> np.ndarray:
    """The pairs that blocks keep, one block at a time."""
    table, bits = blocks
    _, rows, columns = bits.shape[0], bits.shape[1], 8 * bits.shape[2]
    mask = np.zeros((*table.shape[:-2], table.shape[-2] * rows, table.shape[-1] * columns), bool)
    for at in np.ndindex(*table.shape):
        *lead, m, n = at
        place = (*lead, slice(m * rows, (m + 1) * rows), slice(n * columns, (n + 1) * columns))
        code = table[at]
        if code == 1:
            mask[place] = True
        elif code > 1:
            mask[place] = np.unpackbits(bits[code - 2], axis=-1, bitorder="little")
    return mask[..., :queries, :keys]


def random_blocks(
    draw: np.random.Generator, lead: tuple[int, ...], lengths: tuple[int, int], sizes: tuple[int, int]
) -> BlockMask:
    """Tables of which half is empty and a quarter whole, and some rows and columns have nothing."""
    counts = tuple(-(-n // size) for n, size in zip(lengths, sizes, strict=True))
    bits = draw.integers(0, 256, (5, sizes[0], sizes[1] // 8), np.uint8)
    bits[1], bits[2, : sizes[0] // 2], bits[3, :, 1:] = 0, 0, 0
    table = draw.choice(np.int32([0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6]), (*lead, *counts))
    table[..., draw.integers(0, max(1, counts[0])), :] *= draw.integers(0, 2)
    table[..., :, draw.integers(0, max(1, counts[1]))] *= draw.integers(0, 2)
    return BlockMask(table, bits)


@dataclass(frozen=True)
class BlockCase(MaskedCase):
    """A case, and blocks of it.

    Attributes
    ----------
    lead : str
        Axes before those of blocks, as of `cases.BROADCASTS`: "", "h", "1h", "b1", "bh".
    """

    sizes: tuple[int, int] = (16, 16)
    lead: str = ""

    def __str__(self) -> str:
        return f"{self.sizes[0]}x{self.sizes[1]}{self.lead} {self.case}"

    def inputs(self) -> dict[str, np.ndarray]:
        """Those of the case, and blocks."""
        made, case = self.case.inputs(), self.case
        draw = np.random.default_rng(zlib.crc32(str(self).encode()))
        lead = {"b": case.batch, "h": case.heads[0], "1": 1}
        axes = ("11" + self.lead)[-2:]
        blocks = random_blocks(draw, tuple(lead[axis] for axis in axes), case.lengths, self.sizes)
        return made | {"table": blocks.table, "bits": blocks.bits}

    def mask_of(self, arrays: dict[str, np.ndarray]) -> BlockMask:
        """The blocks among the inputs."""
        return BlockMask(arrays["table"], np.ascontiguousarray(arrays["bits"]))

    def as_mask(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The pairs that they keep."""
        return as_mask(self.mask_of(arrays), *self.case.lengths)


def crossed(plain: list[dict[str, object]]) -> list[BlockCase]:
    """Each of these fields of `Case` with one of the kinds of blocks in turn."""
    sizes = [(16, 16), (32, 128), (64, 64), (128, 16), (256, 32)]
    kinds = [(size, lead) for lead in ("", "h", "b1", "bh", "1h") for size in sizes]
    return [BlockCase(Case(**fields), *kinds[7 * n % len(kinds)]) for n, fields in enumerate(plain)]  # type: ignore[arg-type]
