"""The nodes of a graph while it is made: which operations may be, of which kinds, and what needs no node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import captured, refused
from .graph import Node
from .operations import OPERATIONS
from .values import Elements, Value

__all__ = ["Tape"]

# The kind of what operations with these rules take; of others the widest of their operands.
_OF_RULE = {"float": "float", "logic": "bool", "int": "int"}


def _key(node: Node) -> tuple[Any, ...]:
    """What makes nodes one. why types and signs: True, 1 and 1.0 are equal, and so are 0.0 and -0.0."""
    return (*node, type(node.value), repr(node.value)) if node.op == "constant" else node


class Tape:
    """The nodes of a graph while it is made; equal ones are one."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)
        self._known = {_key(node): at for at, node in enumerate(self.nodes)}

    def add(self, op: str, kind: str, operands: tuple[int, ...] = (), value: Any = None) -> Value:
        """The value of a node, a new one if there is none like it."""
        node = Node(op, kind, operands, value)
        nodes = self.nodes
        at = self._known.setdefault(_key(node) if op == "constant" else node, len(nodes))
        if at == len(nodes):
            nodes.append(node)
        return Value(self, at)

    def constant(self, x: Any) -> Value:
        """A number of Python or NumPy."""
        if isinstance(x, (bool, np.bool_)):
            return self.add("constant", "bool", value=bool(x))
        if isinstance(x, (int, np.integer)):
            if not -(2**31) <= int(x) < 2**31:
                raise refused(f"the number {x} is beyond 32 bits, which positions have.", f"{x}.0, a float")
            return self.add("constant", "int", value=int(x))
        return self.add("constant", "float", value=float(x))

    def pruned(self, outputs: Sequence[int]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """The nodes that these outputs need, and the numbers of the outputs among them."""
        nodes, needed = self.nodes, set(outputs)
        for at in range(max(outputs), -1, -1):  # a node stands behind its operands
            if at in needed:
                needed.update(nodes[at].operands)
        number = {old: new for new, old in enumerate(sorted(needed))}
        kept = []
        for old in number:
            node = nodes[old]
            if node.operands:
                op, kind, operands, value = node
                node = Node(op, kind, tuple([number[x] for x in operands]), value)
            kept.append(node)
        return tuple(kept), tuple([number[x] for x in outputs])

    def joined(self, nodes: Sequence[Node]) -> list[int]:
        """The numbers that the nodes of another graph have here, new ones if there are none like them."""
        numbers: list[int] = []
        for op, kind, operands, value in nodes:
            numbers.append(self.add(op, kind, tuple([numbers[x] for x in operands]), value).at)
        return numbers

    def value(self, x: Any) -> Value:
        """What stands in an expression, as a value of this tape."""
        if isinstance(x, Value):
            if x.tape is not self:
                raise refused(
                    "a value of another function, or of another call, is used.",
                    "arguments, bound by a call: f(array)",
                )
            return x
        if isinstance(x, (bool, int, float, np.bool_, np.integer, np.floating)):
            return self.constant(x)
        if isinstance(x, Elements):
            x._whole()
        if isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype.kind in "biuf":
            return self.constant(x[()])
        if hasattr(x, "shape"):
            raise captured(x)
        raise refused(
            f"a {type(x).__name__} stands in an expression.",
            "numbers, and what is made of the arguments of the function",
        )

    def converted(self, x: Value, kind: str, exactly: bool = False) -> Value:
        """A value as a wider kind; exactly: as this one, if it is another."""
        node = self.nodes[x.at]
        if node.kind == kind:
            return x
        if exactly and kind == "bool":
            return self.apply("not_equal", x, 0)
        if exactly and node.kind == "float":
            raise refused("a float is cast to an integer.", "a comparison of it; or what it is made of")
        if node.op == "constant":
            return self.constant(float(node.value or 0) if kind == "float" else int(node.value or 0))
        return self.add(f"to_{kind}", kind, (x.at,))

    def apply(self, op: str, *operands: Any) -> Value:
        """An operation on values, converted as its rule has it."""
        values = [self.value(x) for x in operands]
        kinds = [self.nodes[x.at].kind for x in values]
        rule = OPERATIONS[op].rule
        met = kinds[1:] if rule == "where" else kinds
        widest = "float" if "float" in met else "int" if "int" in met else "bool"
        of = _OF_RULE.get(rule) or widest
        if rule == "same" and of == "bool":
            of = "int"
        if (rule == "int" and "float" in kinds) or (rule == "logic" and set(kinds) != {"bool"}):
            what = "integers" if rule == "int" else "conditions"
            raise refused(
                f"{op} is of {what}; here it is of {' and '.join(kinds)}.",
                "a / b for floats" if rule == "int" else "a comparison, such as a != 0",
            )
        if rule == "where":
            if kinds[0] != "bool":
                raise refused(
                    f"the condition of where is of kind {kinds[0]}.", "a comparison, such as a != 0"
                )
            values[1:] = [self.converted(x, of) for x in values[1:]]
        else:
            values = [self.converted(x, of) for x in values]
        simple = self._simplified(op, values)
        if simple is not None:
            return simple
        return self.add(op, "bool" if rule == "compare" else of, tuple([x.at for x in values]))

    def _simplified(self, op: str, values: list[Value]) -> Value | None:
        """What needs no node: gradients are full of ones and zeros."""
        if op == "where":
            return values[1] if values[1].at == values[2].at else None
        nodes = [self.nodes[x.at] for x in values]
        first, last = nodes[0], nodes[-1]
        if first.op != "constant" and last.op != "constant":
            return None
        if op == "add" and _is(last, 0):
            return values[0]
        if op == "add" and _is(first, 0):
            return values[1]
        if op in ("multiply", "true_divide") and _is(last, 1):
            return values[0]
        if op == "multiply" and _is(first, 1):
            return values[1]
        # why no product with 0: 0 times what is infinite is no number.
        if op == "negative" and _is(first, 0):
            return values[0]
        return None


def _is(node: Node, number: int) -> bool:
    return node.op == "constant" and node.value == number and not math.copysign(1, node.value or 0) < 0
