"""Score functions in NumPy, tile by tile: values, derivatives, and gradients of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..program.derivative import both_derivatives, differentiated
from ..program.errors import read_outside
from ..program.graph import Graph
from ..program.operations import OPERATIONS
from .tiles import Block, Box

if TYPE_CHECKING:
    from ..call.problem import Problem

Array = np.ndarray[Any, Any]
# Returns the mask of visible pairs of a tile.
VisibleKeys = Callable[[], Array]


class TileFunction:
    """The score function of a problem with its arguments, over tiles (batch, key heads, group, m, n)."""

    def __init__(self, problem: Problem, arguments: list[Array]) -> None:
        assert isinstance(problem.function, Graph)
        self.problem, self.arguments = problem, arguments
        self.acc = np.dtype(problem.accumulator)
        self.graph = problem.function
        # Gradient sums of learned arguments, by number. why float64: each element sums many terms.
        self.sums = {n: np.zeros(arguments[n].size) for n in self.graph.learned}

    def finish(self, s: Array, box: Box, block: Block, seen: VisibleKeys) -> None:
        """Apply the function to scores, in place."""
        s[...] = self._values(self.graph, s, box, block, seen)[0]

    def slope(self, s: Array, ds: Array, box: Box, block: Block) -> None:
        """Turn gradients of the function's results into gradients of s, in place; sum those of its arguments.

        s, ds are (batch, key heads, group, m, n); ds is 0 for pairs that are not visible.
        """
        derivative = differentiated(self.graph)
        by_score, *rest = self._values(derivative.graph, s, box, block, lambda: ds != 0)
        for argument, count in derivative.reads:
            by_element, *indices = rest[: count + 1]
            del rest[: count + 1]
            # why where: the derivative need not exist where the function hides a pair.
            share = np.multiply(ds, by_element, out=np.zeros_like(ds), where=ds != 0)
            self._add(argument, share, indices)
        np.multiply(ds, by_score, out=ds, where=ds != 0)

    def both_derivatives(self, s: Array, weights: Array, box: Box, block: Block) -> tuple[Array, Array]:
        """First and second derivative with respect to s, for pairs with a weight; 0 for others."""
        seen = weights != 0
        first, second = self._values(both_derivatives(self.graph), s, box, block, lambda: seen)
        return np.where(seen, first, self.acc.type(0)), np.where(seen, second, self.acc.type(0))

    def _add(self, argument: int, share: Array, indices: list[Array]) -> None:
        """Add a tile of gradients to the elements that were read, in a fixed order per element."""
        shape = self.arguments[argument].shape
        extents = np.broadcast_shapes(*(x.shape for x in indices)) if indices else ()
        extents = (1,) * (share.ndim - len(extents)) + extents
        # why: gradients of an element that a whole row reads are summed before the scatter.
        summed = tuple(axis for axis, n in enumerate(extents) if n == 1)
        share = share.sum(axis=summed, keepdims=True, dtype=np.float64)
        flat = np.zeros((1,) * share.ndim, np.intp)
        for index, extent in zip(indices, shape, strict=True):
            flat = flat * extent + np.clip(index, 0, extent - 1)
        flat = np.broadcast_to(flat, share.shape).ravel()
        total = self.sums[argument]
        total += np.bincount(flat, share.ravel(), total.size)

    def gradient(self, argument: int) -> Array:
        """The gradient of a learned argument, summed over all tiles."""
        total: Array = self.sums[argument].reshape(self.arguments[argument].shape)
        return total

    def _values(self, graph: Graph, s: Array, box: Box, block: Block, seen: VisibleKeys) -> list[Array]:
        """Evaluate a graph on a tile; return its outputs, arrays that broadcast to the tile."""
        p, group = self.problem, self.problem.heads_q // self.problem.heads_k
        heads = np.arange(p.heads_q, dtype=np.int64).reshape(p.heads_k, group)[box.head]
        batches = np.arange(p.sequence, p.sequence + p.batch, dtype=np.int64)[box.batch]
        leaves = {
            "s": s,
            "b": batches[:, None, None, None, None],
            "h": heads[:, :, None, None],
            "i": np.arange(block.i0, block.i1, dtype=np.int64)[:, None],
            "j": np.arange(block.j0, block.j1, dtype=np.int64),
        }
        # why 64 bits: the core, with 32-bit integers, leaves functions that would wrap there to NumPy
        kinds = {"float": self.acc, "int": np.dtype(np.int64), "bool": np.dtype(np.bool_)}
        values: list[Array] = []
        for node in graph.nodes:
            operands = [values[x] for x in node.operands]
            if node.op in leaves:
                values.append(leaves[node.op])
            elif node.op == "constant":
                values.append(np.array(node.value, kinds[node.kind]))
            elif node.op == "load":
                element = self._load(int(node.value or 0), operands, seen)
                values.append(element.astype(kinds[node.kind], copy=False))
            elif node.op in ("to_float", "to_int"):
                values.append(operands[0].astype(kinds[node.kind]))
            else:
                values.append(OPERATIONS[node.op].numpy(*operands))
        return [values[x] for x in graph.outputs]

    def _load(self, argument: int, indices: list[Array], seen: VisibleKeys) -> Array:
        """Read elements of an argument; clamp an index out of range, but refuse it for a visible pair."""
        x = self.arguments[argument]
        cut = []
        for axis, (index, extent) in enumerate(zip(indices, x.shape, strict=True)):
            inside = np.clip(index, 0, extent - 1)
            if (inside != index).any():
                outside = (inside != index) & seen()
                if outside.any():
                    wrong = int(np.broadcast_to(index, outside.shape)[outside][0])
                    raise read_outside(self.graph.name, argument, axis, wrong, x.shape)
            cut.append(inside)
        element: Array = x[tuple(cut)]
        return element
