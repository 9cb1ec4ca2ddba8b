"""The scores of one tile: softcap, score function, bias and ALiBi after the product; masks and band."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .blocks import TileBlocks
from .functions import TileFunction
from .philox import keep_mask
from .spans import TileSpans
from .tiles import Block, Box, cut_out

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]


def by_key_head(x: Array, heads_k: int) -> Array:
    """View (batch, heads, ...) as (batch, key heads, heads per key head, ...)."""
    batch, heads = x.shape[:2]
    # Splitting an axis gives a view for any strides.
    inner = (1, 1) if heads == 1 else (heads_k, heads // heads_k)
    return x.reshape(batch, *inner, *x.shape[2:])


def of_heads(x: Array, heads_k: int) -> Array:
    """View an array of a number per head, ([1 or batch,] heads), as (1 or batch, key heads, group, 1)."""
    return by_key_head(np.atleast_2d(x), heads_k)[..., None]


def grouped_inputs(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of keys unchanged, and views of the arrays of queries grouped by key head."""
    x = {name: arrays[name] for name in ("k", "v", "dk", "dv") if name in arrays}
    for name in ("q", "o", "lse", "do", "dlse", "dq"):
        if name in arrays:
            x[name] = by_key_head(arrays[name], problem.heads_k)
    return x | {name: of_heads(arrays[name], problem.heads_k) for name in problem.per_head}


class Scores:
    """Turns products of Q and K into scores, for tiles (batch, key heads, group, m, n).

    Of the arrays it reads mask, bias, spans, blocks, block_bits, alibi_slopes and bound[...].
    """

    def __init__(self, problem: Problem, arrays: Mapping[str, Array]) -> None:
        self.problem = problem
        self.acc = np.dtype(problem.accumulator)
        heads_k = problem.heads_k
        self.mask = by_key_head(arrays["mask"], heads_k) if problem.mask else None
        self.spans = TileSpans(problem, by_key_head(arrays["spans"], heads_k)) if problem.spans else None
        self.blocks: TileBlocks | None = None
        if problem.blocks:
            table = by_key_head(arrays["blocks"], heads_k)
            self.blocks = TileBlocks(problem.blocks, table, arrays["block_bits"])
        self.bias = by_key_head(arrays["bias"], heads_k) if problem.bias else None
        self.function: TileFunction | None = None
        if problem.function is not None:
            count = len(problem.function.arguments)
            self.function = TileFunction(problem, [arrays[f"bound[{n}]"] for n in range(count)])
        # slopes: (1 or batch, key heads, group, 1, 1)
        self.slopes = of_heads(arrays["alibi_slopes"], heads_k)[..., None] if problem.alibi else None
        # Dequantisation scales of 8-bit floats, (1 or batch, key heads, 1, 1, 1): q times k, and v.
        units = [arrays[name][..., None, None, None] for name in ("q_scale", "k_scale") if name in arrays]
        self.unit_qk = functools.reduce(np.multiply, units) if units else None
        self.unit_v = arrays["v_scale"][..., None, None, None] if "v_scale" in arrays else None

    @staticmethod
    def grouped(s: Array, block: Block) -> Array:
        """View a tile (batch, key heads, rows, n) as (batch, key heads, group, m, n)."""
        return s.reshape(*s.shape[:2], -1, block.i1 - block.i0, block.j1 - block.j0)

    def finish(
        self,
        s: Array,
        box: Box,
        block: Block,
        visible: Array | None = None,
        capped: Array | None = None,
        function_input: Array | None = None,
    ) -> None:
        """Turn s from products into scores, in place.

        Parameters
        ----------
        s : array (batch, key heads, group, m, n)
            q . k, with q scaled by `query_scale`.
        box, block
            Position of the tile.
        visible : array, optional
            As in `hide_scores`.
        capped : array like s, optional
            Filled with tanh(scale q k / softcap), which the gradient needs.
        function_input : array like s, optional
            Filled with the input of the score function, which its gradient needs.
        """
        p = self.problem
        if p.softcap is not None:
            tanh = np.tanh(s, out=s if capped is None else capped)
            np.multiply(tanh, self.acc.type(p.softcap), out=s)
        if self.function is not None:
            if function_input is not None:
                function_input[...] = s
            self.function.finish(s, box, block, lambda: self._seen(s, block, visible))
        i, j = slice(block.i0, block.i1), slice(block.j0, block.j1)
        if self.bias is not None:
            bias = cut_out(self.bias, box, i, j)
            np.add(s, bias, out=s, casting="same_kind")
            np.copyto(s, -np.inf, where=bias == -np.inf)  # also where a hidden k is NaN
        if self.slopes is not None:
            position = np.arange(block.i0, block.i1)[:, None] + p.offset
            distance = np.abs(position - np.arange(block.j0, block.j1)).astype(self.acc)
            s -= cut_out(self.slopes, box) * distance

    def new_function_input(self, rows: Array, block: Block) -> Array | None:
        """Allocate an array for the input of the score function on a tile; None without a function."""
        if self.function is None:
            return None
        return self.grouped(np.empty((*rows.shape[:3], block.j1 - block.j0), self.acc), block)

    def derivatives(
        self, function_input: Array | None, weights: Array, box: Box, block: Block
    ) -> tuple[Array, Array] | tuple[None, None]:
        """First and second derivative of the score function at its input, shaped as the weights of a tile."""
        if self.function is None or function_input is None:
            return None, None
        both = self.function.both_derivatives(function_input, self.grouped(weights, block), box, block)
        return both[0].reshape(weights.shape), both[1].reshape(weights.shape)

    def query_scale(self, box: Box) -> float | Array:
        """Return the factor of q before the product: scale, 1 / softcap, and dequantisation of q and k."""
        p = self.problem
        scale = p.scale if p.softcap is None else p.scale / p.softcap
        return scale if self.unit_qk is None else scale * cut_out(self.unit_qk, box)

    def visible(self, box: Box, block: Block) -> tuple[Array | None, bool]:
        """Return the pairs of a tile that mask, spans and blocks keep, None if all, and whether none is."""
        kept: Array | None = None
        for part in (self.spans, self.blocks):
            own, nothing_left = (None, False) if part is None else part.visible(box, block)
            if nothing_left:
                return None, True
            kept = own if kept is None else kept if own is None else kept & own
        if self.mask is not None:
            tile = cut_out(self.mask, box, slice(block.i0, block.i1), slice(block.j0, block.j1))
            kept = tile if kept is None else tile & kept
        if kept is None or kept.all():
            return None, False
        return kept, not kept.any()

    def hide_scores(self, s: Array, block: Block, visible: Array | None) -> None:
        """Write -inf over the scores (..., m, n) that mask, spans, blocks and band hide."""
        if visible is not None:
            np.copyto(s, -np.inf, where=~visible)
        for columns, triangle in self._edges(block):
            np.copyto(s[..., columns], -np.inf, where=~triangle)

    def _seen(self, s: Array, block: Block, visible: Array | None) -> Array:
        """Return the visible pairs of a tile shaped like s."""
        shown = np.zeros_like(s)
        self.hide_scores(shown, block, visible)
        seen: Array = shown == 0
        return seen

    def _edges(self, block: Block) -> Iterator[tuple[slice, Array]]:
        """Yield slices of columns that the band hides from some rows, with the visible pairs (m, columns)."""
        i0, i1, j0, j1 = block
        offset, left, right = self.problem.band
        if right is not None and j1 - 1 > i0 + offset + right:
            j = max(j0, i0 + offset + right + 1)
            last = i0 + offset + right - j
            yield slice(j - j0, None), _triangle(i1 - i0, j1 - j, None, last)
        if left is not None and j0 < i1 - 1 + offset - left:
            j = min(j1, i1 - 1 + offset - left)
            first = i0 + offset - left - j0
            yield slice(0, j - j0), _triangle(i1 - i0, j - j0, first, None)

    def keep(self, box: Box, block: Block) -> Array:
        """Return which weights of a tile dropout keeps: (batch, key heads, group, m, n)."""
        p = self.problem
        group = p.heads_q // p.heads_k
        batch = np.arange(p.sequence, p.sequence + p.batch)[box.batch][:, None, None]
        head = np.arange(p.heads_q).reshape(p.heads_k, group)[box.head]
        return keep_mask(p.dropout, p.seed, batch, head, range(block.i0, block.i1), range(block.j0, block.j1))


@functools.lru_cache(maxsize=8)
def _triangle(rows: int, columns: int, first: int | None, last: int | None) -> Array:
    """Return where i + first <= j <= i + last; cached, since tiles along a diagonal are equal."""
    i, j = np.arange(rows)[:, None], np.arange(columns)
    inside = np.ones((rows, columns), np.bool_)
    if first is not None:
        inside &= j >= i + first
    if last is not None:
        inside &= j <= i + last
    return inside


def operand(x: Array, acc: np.dtype[Any]) -> Array:
    """Return x as a matrix operand in the accumulator's dtype: a view if BLAS can read it, else a copy.

    x: (..., rows, d). NumPy multiplies matrices with overlapping, reversed or non-contiguous rows
    in a plain loop, a hundred times slower than one copy.
    """
    row, item = x.strides[-2:]
    if x.dtype == acc and item == acc.itemsize and row >= x.shape[-1] * item and row % item == 0:
        return x
    return np.array(x, acc, order="C")


def finite_rows(k: Array) -> Array:
    """Return K for products with dS, with 0 for infinite and NaN elements.

    why: dS of a hidden pair, or of one whose infinite k makes a score of -inf, is 0, but 0 times NaN is NaN.
    A row that any other of them makes a score of has a NaN in dS anyway.
    """
    finite = np.isfinite(k)
    return k if finite.all() else np.where(finite, k, k.dtype.type(0))


def rows_of(x: Array, acc: np.dtype[Any], factor: float | Array = 1.0) -> Array:
    """Copy queries (batch, key heads, group, m, d) times a factor to (..., group * m, d)."""
    rows: Array = np.multiply(x, np.asarray(factor, acc), dtype=acc, order="C")
    return rows.reshape(*x.shape[:2], -1, x.shape[-1])
