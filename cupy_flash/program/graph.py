"""What a function is when its arguments are known; traced, it is nodes, each behind its operands."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

__all__ = ["MOST_ARGUMENTS", "POSITIONS", "Argument", "Body", "Graph", "Node"]

# Batch, head of q, query and key, each within its sequence: what a function gets beside the score.
POSITIONS = ("b", "h", "i", "j")
# Of a function on a GPU: params have 4 KB, an argument 72 bytes of them and its gradient 64.
MOST_ARGUMENTS = 16


class Node(NamedTuple):
    """One value of the function.

    Attributes
    ----------
    op : str
        "s" (the score), one of `POSITIONS`, "constant", "load" (an element of an argument), or a name in
        `operations.OPERATIONS`.
    kind : {"float", "int", "bool"}
        A float is of the accumulator's dtype, an int has 32 bits; see `ranges` for where that is not enough.
    operands : tuple of int
        Numbers of the nodes that it is made from; of a load its indices.
    value : float, int, bool or None
        Of a constant; of a load the number of the argument.
    """

    op: str
    kind: str
    operands: tuple[int, ...] = ()
    value: float | int | None = None


class Argument(NamedTuple):
    """What is known of an argument when a function is traced: its dtype and number of axes."""

    dtype: str
    rank: int

    @property
    def kind(self) -> str:
        """Of its elements, as of `Node`."""
        return "float" if "float" in self.dtype else "bool" if self.dtype == "bool" else "int"

    @property
    def differentiable(self) -> bool:
        """Whether it may have a gradient."""
        return self.kind == "float"


class Body:
    """A function of a score, its positions and arguments of certain kinds: what kernels are compiled for.

    It is equal to another of the same digest that learns the same.

    Parameters
    ----------
    of : str
        What it does, for the hash.

    Attributes
    ----------
    arguments : tuple of Argument
    learned : tuple of int
        The arguments whose gradient is wanted.
    name : str
        For people.
    digest : str
        Hash of all but what is learned and the name: of what is compiled for it.
    """

    __slots__ = ("arguments", "digest", "learned", "name")

    def __init__(self, of: str, arguments: tuple[Argument, ...], learned: tuple[int, ...], name: str) -> None:
        self.arguments, self.learned, self.name = arguments, learned, name
        self.digest = hashlib.sha256(of.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and (self.digest, self.learned) == (other.digest, other.learned)

    def __hash__(self) -> int:
        return hash((self.digest, self.learned))

    def summary(self) -> str:
        """A phrase for people."""
        learned = f", {len(self.learned)} learned" if self.learned else ""
        count = len(self.arguments)
        return f"score({self.name}, {count} argument{'s' * (count != 1)}{learned})"


class Graph(Body):
    """A function that has been traced.

    Attributes
    ----------
    nodes : tuple of Node
    outputs : tuple of int
        Numbers of the nodes that are the result: the score; of a derivative several.
    """

    __slots__ = ("nodes", "outputs")

    def __init__(
        self,
        nodes: tuple[Node, ...],
        outputs: tuple[int, ...],
        arguments: tuple[Argument, ...],
        learned: tuple[int, ...] = (),
        name: str = "",
    ) -> None:
        self.nodes, self.outputs = nodes, outputs
        # why repr: 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        of = repr(([tuple(node) for node in nodes], outputs, [tuple(x) for x in arguments]))
        super().__init__(of, arguments, learned, name)

    def __repr__(self) -> str:
        return f"Graph({self.name}, {len(self.nodes)} nodes, {self.digest[:8]})"

    def learning(self, numbers: tuple[int, ...]) -> Graph:
        """The same function with the gradients of these arguments wanted."""
        return Graph(self.nodes, self.outputs, self.arguments, numbers, self.name)

    def learns_all(self) -> Graph:
        """The same function with every gradient wanted that there may be."""
        return self.learning(tuple([n for n, x in enumerate(self.arguments) if x.differentiable]))
