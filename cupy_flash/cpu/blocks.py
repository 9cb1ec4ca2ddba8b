"""Block masks in NumPy: which tiles are skipped, and which pairs of a tile are visible."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..call.blocks import NOTHING, PARTIAL, WHOLE, Blocks
from .tiles import Block, Box, cut_out

Array = np.ndarray[Any, Any]


class TileBlocks:
    """The block mask of a problem, for tiles: any ranges of queries and keys.

    Parameters
    ----------
    blocks : Blocks
    table : array of int32 (1 or batch, key heads or 1, group or 1, blocks of queries, blocks of keys)
    bits : array of uint8 (n, queries of a block, keys of a block / 8)
    """

    def __init__(self, blocks: Blocks, table: Array, bits: Array) -> None:
        self._size, self._table, self._bits = (blocks.queries, blocks.keys), table, bits

    def visible(self, box: Box, block: Block) -> tuple[Array | None, bool]:
        """Return the visible pairs of a tile, or None if all are visible, and whether none is.

        Visible pairs are a boolean array (batch, key heads, group or 1, m, n).
        """
        rows, columns = self._size
        of_queries = slice(block.i0 // rows, -(-block.i1 // rows))
        of_keys = slice(block.j0 // columns, -(-block.j1 // columns))
        codes = cut_out(self._table, box, of_queries, of_keys)
        if (codes == NOTHING).all():
            return None, True
        if (codes == WHOLE).all():
            return None, False
        # Expand each distinct code to its pairs, then gather these for every block of the tile.
        found, at = np.unique(codes, return_inverse=True)
        pairs = np.zeros((len(found), rows, columns), np.bool_)
        pairs[found == WHOLE] = True
        some = found >= PARTIAL
        bits = self._bits[found[some] - PARTIAL]
        pairs[some] = np.unpackbits(bits, axis=-1, bitorder="little").view(np.bool_)
        tile = pairs[at.reshape(codes.shape)].swapaxes(-3, -2)  # (..., m blocks, rows, n blocks, columns)
        *lead, m, _, n, _ = tile.shape
        i, j = block.i0 % rows, block.j0 % columns
        kept = tile.reshape(*lead, m * rows, n * columns)
        kept = kept[..., i : i + block.i1 - block.i0, j : j + block.j1 - block.j0]
        return kept, not bool(kept.any())
