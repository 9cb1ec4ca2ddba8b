"""Bytecode of a graph and its derivative, for the interpreter in kernels_cpu/function.cpp."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from .derivative import differentiated
from .graph import POSITIONS, Graph, Node
from .tape import Tape

__all__ = ["MOST_REGISTERS", "OPS", "Instruction", "Machine", "machine", "only_masks"]

# The enum Op of kernels_cpu/function.h, in its order: names of operations, with the kind of the operands
# where opcodes differ by it.
OPS = (
    "b", "h", "i", "j", "constant float", "constant int", "constant bool", "load float", "load int",
    "load bool", "copy", "spread", "slope", "share", "bool to_float", "int to_float", "bool to_int",
    "add float", "subtract float", "multiply float", "true_divide", "negative float",
    "absolute float", "minimum float", "maximum float", "exp", "log", "tanh", "sqrt",
    "add int", "subtract int", "multiply int", "floor_divide", "remainder", "negative int", "absolute int",
    "minimum int", "maximum int",
    "less float", "less_equal float", "equal float", "not_equal float", "less int", "less_equal int",
    "equal int", "not_equal int",
    "logical_and", "logical_or", "logical_not", "where",
)  # fmt: skip
_CODES = {name: number for number, name in enumerate(OPS)}
# A value varies over lanes (queries), keys, or pairs of them.
_LANES, _KEYS, _PAIRS = 0, 1, 2
SCORE, RESULT, GRADIENT, KEPT, _FIRST = range(5)
MOST_REGISTERS = 256
_SWAPPED = {"greater": "less", "greater_equal": "less_equal"}
# Operations with one opcode for all kinds.
_ONCE = {"true_divide", "exp", "log", "tanh", "sqrt", "floor_divide", "remainder", "logical_and",
         "logical_or", "logical_not", "where"}  # fmt: skip


class Instruction(NamedTuple):
    """One instruction, as in kernels_cpu/function.h."""

    op: int
    reach: int  # {0, 1, 2}
    to: int  # register of the result
    operands: tuple[int, ...] = ()  # registers of the operands
    array: int = 0  # number of the argument, for loads and shares
    value: float = 0.0  # value of a constant


class Machine(NamedTuple):
    """The program that the interpreter runs on a tile."""

    code: tuple[Instruction, ...]  # instructions per lane, then per key, then per pair
    counts: tuple[int, int, int]  # number of instructions of each of these
    registers: tuple[int, int, int]  # number of registers for lanes, keys and pairs
    # In the program for values, what the program for gradients starts from: "" nothing, "scores", or "made",
    # the value in register KEPT.
    keeps: str = ""


NOTHING = Machine((), (0, 0, 0), (0, 0, 0))


class _Step(NamedTuple):
    """An instruction before register allocation.

    Attributes
    ----------
    op : str
        Name of the operation, one of `OPS`.
    reach : int
        What the result varies over: lanes, keys or pairs.
    to : int
        Number of the result. Numbers of nodes are those of the graph; later ones are temporaries.
    operands : tuple of int
        Numbers of the operands.
    array : int
        Number of the argument that it reads.
    value : float
        The constant, if it is one.
    """

    op: str
    reach: int
    to: int
    operands: tuple[int, ...] = ()
    array: int = 0
    value: float = 0.0


# Values with a fixed register.
_S, _RESULT, _DS = -1, -2, -3
_PLACES = {_S: SCORE, _RESULT: RESULT, _DS: GRADIENT}


class _Writer:
    """Generates the steps of a graph, and allocates registers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.steps: list[_Step] = []
        self.reach: dict[int, int] = {_S: _PAIRS, _DS: _PAIRS}
        self._values = len(graph.nodes)
        self._broadcast: dict[int, int] = {}
        self._as_int: dict[int, int] = {}
        self._lanes: dict[int, bool] = {}  # whether a value per lane varies between lanes
        self._place: list[int] = []
        for node in graph.nodes:
            self._place.append(self._write(node))

    def place(self, node: int) -> int:
        """The value number of a node."""
        return self._place[node]

    def new(
        self, op: str, reach: int, operands: tuple[int, ...] = (), array: int = 0, value: float = 0
    ) -> int:
        """Append a step; return the number of its value."""
        self._values += 1
        self.reach[self._values] = reach
        self.steps.append(_Step(op, reach, self._values, operands, array, value))
        return self._values

    def of_pairs(self, value: int) -> int:
        """Broadcast a value per key to pairs; other values need no broadcast."""
        if self.reach[value] != _KEYS:
            return value
        if value not in self._broadcast:
            self._broadcast[value] = self.new("spread", _PAIRS, (value,))
        return self._broadcast[value]

    def joined(self, values: list[int]) -> tuple[int, tuple[int, ...]]:
        """The reach of a result of these operands, and the operands broadcast to it where needed."""
        keyed = any(self.reach[x] == _KEYS for x in values)
        by_lane = any(self.reach[x] == _LANES and self._lanes.get(x) for x in values)
        if any(self.reach[x] == _PAIRS for x in values) or (keyed and by_lane):
            return _PAIRS, tuple([self.of_pairs(x) for x in values])
        return (_KEYS if keyed else _LANES), tuple(values)

    def _write(self, node: Node) -> int:
        if node.op == "s":
            return _S
        values = [self._place[x] for x in node.operands]
        kinds = [self.graph.nodes[x].kind for x in node.operands]
        op, array, value = node.op, 0, 0.0
        if op in POSITIONS:
            made = self.new(op, _KEYS if op == "j" else _LANES)
            self._lanes[made] = op in "hi"
            return made
        if op == "constant":
            return self.new(f"constant {node.kind}", _LANES, (), 0, float(node.value or 0))
        if op == "load":
            op, array = f"load {node.kind}", int(node.value or 0)
        elif op in ("to_float", "to_int"):
            op = f"{kinds[0]} {op}"
        else:
            if op in _SWAPPED:
                op, values = _SWAPPED[op], values[::-1]
            if op not in _ONCE:
                # why: a true condition has all bits set, which as an integer is -1
                values = [
                    self._int_of(x) if kind == "bool" else x for x, kind in zip(values, kinds, strict=True)
                ]
                op = f"{op} {'float' if 'float' in kinds else 'int'}"
        reach, operands = self.joined(values)
        made = self.new(op, reach, operands, array, value)
        self._lanes[made] = any(self._lanes.get(x, False) for x in operands)
        return made

    def _int_of(self, condition: int) -> int:
        if condition not in self._as_int:
            made = self.new("bool to_int", self.reach[condition], (condition,))
            self._lanes[made] = self._lanes.get(condition, False)
            self._as_int[condition] = made
        return self._as_int[condition]

    def finished(self, kept: int | None = None) -> Machine:
        """Allocate registers; those of pairs are reused, except that of `kept`."""
        by_reach = [[x for x in self.steps if (_PAIRS if x.op == "share" else x.reach) == reach]
                    for reach in (_LANES, _KEYS, _PAIRS)]  # fmt: skip
        made = [[x.to for x in by_reach[reach] if x.to >= 0] for reach in (_LANES, _KEYS)]
        register = dict(_PLACES) if kept is None else {**_PLACES, kept: KEPT}
        register |= {value: _FIRST + n for n, value in enumerate(made[0] + made[1])}
        before = _FIRST + len(made[0]) + len(made[1])
        pairs = by_reach[_PAIRS]
        last = {x: at for at, step in enumerate(pairs) for x in step.operands}
        free: list[int] = []
        used = 0
        for at, step in enumerate(pairs):
            if step.to not in register:
                if not free:
                    free.append(before + used)
                    used += 1
                register[step.to] = free.pop()
            free += [register[x] for x in {*step.operands} if last[x] == at and register[x] >= before]
        code = [
            Instruction(_CODES[x.op], x.reach, register[x.to], tuple([register[y] for y in x.operands]),
                        x.array, x.value)
            for steps in by_reach for x in steps
        ]  # fmt: skip
        counts = (len(by_reach[0]), len(by_reach[1]), len(pairs))
        return Machine(tuple(code), counts, (len(made[0]), len(made[1]), used))


@lru_cache(maxsize=256)
def machine(graph: Graph) -> tuple[Machine, Machine]:
    """The program that changes scores, and the one that changes their gradients.

    The second also adds the gradients of learned arguments; it is empty if it changes nothing.
    """
    derivative = differentiated(graph)
    kept, rest = _cut(graph, derivative.graph)
    gradients = _of_gradients(only_masks(graph), rest, derivative.reads)
    return _of_values(graph, kept if gradients.code else None), gradients


def _cut(graph: Graph, made: Graph) -> tuple[int | None, Graph]:
    """Find the last value of the function through which alone its derivatives depend on the score.

    Return its node, and the derivatives as a graph in which it takes the place of the score; None and `made`
    if they do not depend on the score.
    """
    # why joined: nodes of the derivatives that equal nodes of the function get their numbers.
    home = Tape(graph.nodes).joined(made.nodes)
    last = {x: at for at, node in enumerate(made.nodes) for x in node.operands}
    last |= dict.fromkeys(made.outputs, len(made.nodes))
    depends: list[bool] = []
    cut, wanted_until = -1, -1  # last user of any score-dependent node so far
    for at, node in enumerate(made.nodes):
        depends.append(node.op == "s" or any(depends[x] for x in node.operands))
        if not depends[at]:
            continue
        if wanted_until <= at and node.kind == "float" and home[at] < len(graph.nodes):
            cut = at
        wanted_until = max(wanted_until, last[at])
    if cut < 0:
        return None, made
    nodes = (*made.nodes[:cut], Node("s", "float"), *made.nodes[cut + 1 :])
    return home[cut], Graph(*Tape(nodes).pruned(made.outputs), made.arguments, made.learned, made.name)


def _of_values(graph: Graph, kept: int | None) -> Machine:
    writer = _Writer(graph)
    result = writer.place(graph.outputs[0])
    of_kept = None if kept is None else writer.place(kept)
    final = writer.steps[-1] if writer.steps else None
    if final is not None and final.to == result != of_kept and final.reach == _PAIRS:
        writer.steps[-1] = final._replace(to=_RESULT)
    else:
        op = "spread" if writer.reach[result] == _KEYS else "copy"
        writer.steps.append(_Step(op, _PAIRS, _RESULT, (result,)))
    if of_kept is None or of_kept == _S:
        return writer.finished()._replace(keeps="scores" if of_kept == _S else "")
    return writer.finished(of_kept)._replace(keeps="made")


def _of_gradients(only_masks: bool, made: Graph, reads: tuple[tuple[int, int], ...]) -> Machine:
    slope = made.nodes[made.outputs[0]]
    unchanged = (slope.op == "constant" and slope.value == 1) or only_masks
    if unchanged and not reads:
        return NOTHING
    writer = _Writer(made)
    outputs = list(made.outputs[1:])
    for argument, count in reads:
        by_element, *indices = (writer.place(x) for x in outputs[: count + 1])
        del outputs[: count + 1]
        reach, places = writer.joined(indices)
        operands = (writer.of_pairs(by_element), *places)
        writer.steps.append(_Step("share", reach, _RESULT, operands, argument))
    if not unchanged:
        writer.steps.append(
            _Step("slope", _PAIRS, _DS, (_DS, writer.of_pairs(writer.place(made.outputs[0]))))
        )
    return writer.finished()


def only_masks(graph: Graph) -> bool:
    """Whether the function only masks pairs; their gradients are 0 anyway."""
    node = graph.nodes[graph.outputs[0]]
    if node.op != "where" or graph.nodes[node.operands[1]].op != "s":
        return False
    return graph.nodes[node.operands[2]].value == -math.inf
