"""A graph and its derivative as C++, which kernels include: ``score_function`` and ``score_slope``."""

from __future__ import annotations

import math
from functools import lru_cache

from .derivative import differentiated
from .graph import POSITIONS, Graph, Node
from .operations import OPERATIONS

__all__ = ["NAME", "header"]

# What kernels include, from the folder that a build makes.
NAME = "score_function.cuh"

_TYPES = {"float": "Real", "int": "int32_t", "bool": "bool"}
_STORED = {
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
    "int32": "int32_t", "int8": "int8_t", "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip


@lru_cache(maxsize=256)
def header(graph: Graph) -> str:
    """The header of a function: what it makes of a score, and the derivative by the score."""
    slope = differentiated(graph, by_arguments=False).graph
    return (
        f"// {graph.summary()}, traced by cupy_flash: {graph.digest}\n#pragma once\n"
        + _text("score_function", graph)
        + _text("score_slope", slope)
    )


def _text(name: str, graph: Graph) -> str:
    lines = [f"    const {_TYPES[node.kind]} x{at} = {_expression(node, graph)};"
             for at, node in enumerate(graph.nodes)]  # fmt: skip
    positions = ", ".join(f"[[maybe_unused]] int32_t {position}" for position in POSITIONS)
    return (
        f"\ntemplate <class Real>\nCF_DEVICE Real {name}([[maybe_unused]] Real s, {positions},\n"
        "        [[maybe_unused]] const FunctionArray* arrays) {\n"
        + "\n".join([*lines, f"    return x{graph.outputs[0]};", "}", ""])
    )


def _expression(node: Node, graph: Graph) -> str:
    operands = [f"x{x}" for x in node.operands]
    if node.op == "s" or node.op in POSITIONS:
        return node.op
    if node.op == "constant":
        return _constant(node)
    if node.op == "load":
        stored = _STORED[graph.arguments[int(node.value or 0)].dtype]
        array = ", ".join([f"arrays[{node.value}]", *operands])
        return f"element_at<{_TYPES[node.kind]}, {stored}>({array})"
    return OPERATIONS[node.op].c.format(*operands)


def _constant(node: Node) -> str:
    if node.kind == "bool":
        return "true" if node.value else "false"
    if node.kind == "int":
        return f"int32_t({node.value}ll)"
    number = float(node.value or 0)
    if math.isnan(number):
        return "Real(kInfinity) - Real(kInfinity)"
    if math.isinf(number):
        return "-Real(kInfinity)" if number < 0 else "Real(kInfinity)"
    return f"Real({number.hex()})"
