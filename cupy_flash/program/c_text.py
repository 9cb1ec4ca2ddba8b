"""Generate the C++ header of a score function and its derivatives, from a graph or around C text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from .derivative import both_derivatives, differentiated
from .graph import POSITIONS, Body, Graph, Node
from .operations import OPERATIONS
from .ranges import wide_nodes
from .tape import Tape
from .template import Template

__all__ = ["NAME", "header", "reads_learnable"]

# The file name that kernels include, from a folder made by the build.
NAME = "score_function.cuh"

# Most nodes, or lines of C, of a function that is unrolled over a tile. why 32: twice as many are twice the
# code.
_SHORT = 32
_POSITIONS = ", ".join(f"[[maybe_unused]] int32_t {position}" for position in POSITIONS)
_TYPES = {"float": "Real", "int": "int32_t", "bool": "bool"}
_STORED = {
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
    "int32": "int32_t", "int8": "int8_t", "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip
# 64-bit forms of integer operations, for nodes that may exceed 32 bits; and the functions that they call.
_WIDE = {
    "add": "int64_t({0}) + {1}", "subtract": "int64_t({0}) - {1}", "multiply": "int64_t({0}) * {1}",
    "floor_divide": "wide_quotient({0}, {1})", "remainder": "wide_remainder({0}, {1})",
    "negative": "-int64_t({0})", "absolute": "({0} < 0 ? -int64_t({0}) : int64_t({0}))",
    "minimum": "({1} < {0} ? int64_t({1}) : int64_t({0}))",
    "maximum": "({0} < {1} ? int64_t({1}) : int64_t({0}))",
    "where": "({0} ? int64_t({1}) : int64_t({2}))",
}  # fmt: skip
_WIDE_TEXT = """
CF_DEVICE int64_t wide_quotient(int64_t a, int64_t b) {
    return b == 0 ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
}
CF_DEVICE int64_t wide_remainder(int64_t a, int64_t b) { return a - wide_quotient(a, b) * b; }
// As an index: what is beyond 32 bits is outside of every axis.
CF_DEVICE int32_t wide_index(int64_t x) {
    return static_cast<int32_t>(x < 0 ? -1 : x > 0x7fffffff ? 0x7fffffff : x);
}
"""


@lru_cache(maxsize=256)
def header(function: Body) -> str:
    """The header of a function: the function, its first two derivatives, and those by its arguments."""
    if isinstance(function, Template):
        return _header_of_text(function)
    assert isinstance(function, Graph)
    not_learned = function.learning(())
    slope = differentiated(not_learned, by_arguments=False).graph
    both = both_derivatives(not_learned)
    derivatives = "{" + ", ".join([f"x{at}" for at in both.outputs]) + "}"
    return (
        f"// {not_learned.summary()}, traced by cupy_flash: {function.digest}\n#pragma once\n"
        + _WIDE_TEXT * bool(wide_nodes(function))
        + _text("\ntemplate <class Real>\nCF_DEVICE Real score_function", function)
        + _text("\ntemplate <class Real>\nCF_DEVICE Real score_slope", slope)
        + _text(
            "\ntemplate <class Real>\nCF_DEVICE ScoreDerivatives<Real> score_derivatives", both, derivatives
        )
        + "".join(_argument_shares(function))
        + f"\nconstexpr bool kShortFunction = {_bool(len(function.nodes) <= _SHORT)};\n"
    )


def reads_learnable(function: Body) -> bool:
    """Whether the function reads any element that may have a gradient."""
    return isinstance(function, Graph) and bool(differentiated(function.learns_all()).reads)


def _header_of_text(function: Template) -> str:
    """The header around C text: the text, and calls of it with numbers and with dual numbers."""
    given = []
    for number, (dtype, rank) in enumerate(function.arguments):
        kinds = f"{_TYPES[function.arguments[number].kind]}, {_STORED[dtype]}"
        array = f"arrays[{number}]"
        given.append(f"Elements<{kinds}, {rank}>{{{array}}}" if rank else f"element_at<{kinds}>({array})")
    behind = ", ".join([*POSITIONS, *given])
    call = f"score_text::score<T>(s, {behind})"
    if function.entry == "mask":
        call = f"score_text::mask({behind}) ? s : T(-Real(kInfinity))"
    place = _POSITIONS + ",\n        [[maybe_unused]] const FunctionArray* arrays) {\n"
    return (
        f"// {function.summary()}, by cupy_flash: {function.digest}\n#pragma once\n\n"
        # why #line: compiler errors then refer to lines of the text.
        f'namespace score_text {{\n#line 1 "{function.entry} text"\n{function.text}\n'
        f'#line 1 "call of the {function.entry} text"\n}}    // namespace score_text\n\n'
        "template <class Real, class T>\nCF_DEVICE T of_text([[maybe_unused]] T s, "
        f"{place}    return {call};\n}}\n\n"
        f"template <class Real>\nCF_DEVICE Real score_function(Real s, {place}"
        "    return of_text<Real>(s, b, h, i, j, arrays);\n}\n\n"
        f"template <class Real>\nCF_DEVICE Real score_slope(Real s, {place}"
        "    return of_text<Real>(score_text::Dual<Real>(s, Real(1)), b, h, i, j, arrays).slope;\n}\n\n"
        f"template <class Real>\nCF_DEVICE ScoreDerivatives<Real> score_derivatives(Real s, {place}"
        "    using Slope = score_text::Dual<Real>;\n"
        "    const score_text::Dual<Slope> s_and_slope(Slope(s, Real(1)), Slope(1));\n"
        "    const auto y = of_text<Real>(s_and_slope, b, h, i, j, arrays);\n"
        "    return {y.value.slope, y.slope.slope};\n}\n\n"
        "constexpr int kShares = 0;\ntemplate <int> struct ScoreShare;\n"
        f"constexpr bool kShortFunction = {_bool(function.text.count(chr(10)) < _SHORT)};\n"
    )


def _text(head: str, graph: Graph, result: str = "") -> str:
    wide = wide_nodes(graph)
    types = ["int64_t" if at in wide else _TYPES[node.kind] for at, node in enumerate(graph.nodes)]
    lines = [f"    const {kind} x{at} = {_expression(at, graph, wide)};" for at, kind in enumerate(types)]
    return (
        f"{head}([[maybe_unused]] Real s, {_POSITIONS},\n"
        "        [[maybe_unused]] const FunctionArray* arrays) {\n"
        + "\n".join([*lines, f"    return {result or f'x{graph.outputs[0]}'};", "}", ""])
    )


def _argument_shares(graph: Graph) -> Iterator[str]:
    """Per element read that may be learned: its derivative, its address, and the positions it depends on."""
    made, reads = differentiated(graph.learns_all())
    outputs = list(made.outputs[1:])
    yield f"\nconstexpr int kShares = {len(reads)};\ntemplate <int> struct ScoreShare;\n"
    for number, (argument, count) in enumerate(reads):
        own, outputs = outputs[: count + 1], outputs[count + 1 :]
        nodes, (factor, *indices) = Tape(made.nodes).pruned(own)
        from_query, from_key = (any(_depends(nodes, x, on) for x in indices) for on in ("i", "j"))
        made_of = Graph(nodes, (factor,), graph.arguments)
        place = ", ".join([f"arrays[{argument}]", *(_index(x, wide_nodes(made_of)) for x in indices)])
        yield (
            f"\ntemplate <> struct ScoreShare<{number}> {{\n"
            f"    static constexpr int kArgument = {argument};\n"
            f"    static constexpr bool kByQuery = {_bool(from_query)}, kByKey = {_bool(from_key)};\n"
            + _text(
                "    template <class Real> CF_DEVICE static ArgumentShare<Real> at",
                made_of,
                f"{{x{factor}, place_of({place})}}",
            )
            + "};\n"
        )


def _depends(nodes: tuple[Node, ...], at: int, position: str) -> bool:
    """Whether a value depends on this position, "i" or "j"; a score depends on both."""
    node = nodes[at]
    return node.op in ("s", position) or any(_depends(nodes, x, position) for x in node.operands)


def _bool(x: bool) -> str:
    return "true" if x else "false"


def _index(at: int, wide: frozenset[int]) -> str:
    return f"wide_index(x{at})" if at in wide else f"x{at}"


def _expression(at: int, graph: Graph, wide: frozenset[int]) -> str:
    node = graph.nodes[at]
    operands = [f"x{x}" for x in node.operands]
    if node.op == "s" or node.op in POSITIONS:
        return node.op
    if node.op == "constant":
        return _constant(node)
    if node.op in ("to_float", "to_int"):
        return f"{_TYPES[node.kind]}({operands[0]})"
    if node.op == "load":
        stored = _STORED[graph.arguments[int(node.value or 0)].dtype]
        array = ", ".join([f"arrays[{node.value}]", *(_index(x, wide) for x in node.operands)])
        return f"element_at<{_TYPES[node.kind]}, {stored}>({array})"
    if node.op == "true_divide":
        divisor = graph.nodes[node.operands[1]]
        number = abs(float(divisor.value or 0)) if divisor.op == "constant" else 0.0
        if 1e-30 < number < 1e30:  # why: division takes 8 instructions or a call
            inverse = Node("constant", "float", (), 1 / float(divisor.value or 0))
            return f"{operands[0]} * {_constant(inverse)}"
    if node.kind == "int" and not wide.isdisjoint((at, *node.operands)):
        text = _WIDE[node.op].format(*operands)
        return text if at in wide else f"int32_t({text})"
    return OPERATIONS[node.op].c.format(*operands)


def _constant(node: Node) -> str:
    if node.kind == "bool":
        return _bool(bool(node.value))
    if node.kind == "int":
        return f"int32_t({node.value}ll)"
    number = float(node.value or 0)
    if math.isnan(number):
        return "Real(kInfinity) - Real(kInfinity)"
    if math.isinf(number):
        return "-Real(kInfinity)" if number < 0 else "Real(kInfinity)"
    return f"Real({number.hex()})"
