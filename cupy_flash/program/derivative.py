"""Reverse-mode differentiation of a graph, by the score and by the elements of arguments that it reads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .graph import Graph
from .operations import OPERATIONS
from .tape import Tape, Value

__all__ = ["Derivative", "both_derivatives", "differentiated"]


class Derivative(NamedTuple):
    """The derivatives of a function."""

    # Its outputs: the derivative by the score; then, for each element read of a learned argument, the
    # derivative by it and its indices.
    graph: Graph
    reads: tuple[tuple[int, int], ...]  # for each such element: number of the argument, and number of indices


@lru_cache(maxsize=256)
def differentiated(graph: Graph, by_arguments: bool = True) -> Derivative:
    """The derivatives of a graph with one output; without `by_arguments`, only by the score."""
    tape = Tape(graph.nodes)
    gradients: dict[int, Value] = {graph.outputs[0]: tape.constant(1.0)}
    # why in reverse: a node comes after its operands, so all its users have added to its gradient by then.
    for at in range(graph.outputs[0], -1, -1):
        node, gradient = graph.nodes[at], gradients.get(at)
        operation = OPERATIONS.get(node.op)
        if gradient is None or node.kind != "float" or operation is None or operation.derivative is None:
            continue
        operands = [Value(tape, x) for x in node.operands]
        parts = operation.derivative(gradient, Value(tape, at), *operands)
        for x, part in zip(node.operands, parts, strict=True):
            if part is None or graph.nodes[x].kind != "float" or graph.nodes[x].op == "constant":
                continue
            gradients[x] = part if x not in gradients else gradients[x] + part
    zero = tape.constant(0.0)
    score = next((at for at, node in enumerate(graph.nodes) if node.op == "s"), -1)
    outputs, reads = [gradients.get(score, zero).at], []
    for at, node in enumerate(graph.nodes if by_arguments else ()):
        if node.op == "load" and node.value in graph.learned and at in gradients:
            outputs += [gradients[at].at, *node.operands]
            reads.append((int(node.value or 0), len(node.operands)))
    made = Graph(*tape.pruned(outputs), graph.arguments, graph.learned, graph.name)
    return Derivative(made, tuple(reads))


@lru_cache(maxsize=256)
def both_derivatives(graph: Graph) -> Graph:
    """A graph with two outputs: the first and second derivative by the score."""
    slope = differentiated(graph.learning(()), by_arguments=False).graph
    curvature = differentiated(slope, by_arguments=False).graph
    tape = Tape(slope.nodes)
    numbers = tape.joined(curvature.nodes)
    return Graph(
        *tape.pruned((slope.outputs[0], numbers[curvature.outputs[0]])), graph.arguments, (), graph.name
    )
