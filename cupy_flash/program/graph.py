"""`Graph`: a traced function, as nodes in topological order."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

__all__ = ["MOST_ARGUMENTS", "POSITIONS", "Argument", "Body", "Graph", "Node"]

# Batch, query head, query and key, each within its sequence: the arguments of a function after the score.
POSITIONS = ("b", "h", "i", "j")
# Most arguments of a function on a GPU. why: params have 4 KB; an argument takes 72 bytes, its gradient 64.
MOST_ARGUMENTS = 16


class Node(NamedTuple):
    """One value in the graph."""

    # "s" (the score), one of `POSITIONS`, "constant", "load" (an element of an argument), "to_float" or
    # "to_int" (conversions, inserted by tracing), or a name in `operations.OPERATIONS`.
    op: str
    # {"float", "int", "bool"}: a float has the accumulator's dtype; an int has 32 bits, see `ranges` for
    # exceptions.
    kind: str
    operands: tuple[int, ...] = ()  # numbers of the operand nodes; for a load its indices
    # The value of a constant; for a load the number of the argument; else None.
    value: float | int | None = None


class Argument(NamedTuple):
    """The kind of an argument, known when a function is traced: dtype and number of axes."""

    dtype: str
    rank: int  # number of axes

    @property
    def kind(self) -> str:
        """The kind of its elements, as in `Node`."""
        return "float" if "float" in self.dtype else "bool" if self.dtype == "bool" else "int"

    @property
    def differentiable(self) -> bool:
        """Whether it may have a gradient."""
        return self.kind == "float"


class Body:
    """A function for arguments of certain kinds: what kernels are compiled for.

    Two are equal if digest and learned arguments are equal.

    Parameters
    ----------
    of : str
        A text that identifies the function, to be hashed.

    Attributes
    ----------
    arguments : tuple of Argument
    learned : tuple of int
        Numbers of the arguments that need a gradient.
    name : str
        Its name in messages.
    digest : str
        Hash of what is compiled, so not of name and learned arguments.
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
        """A short description for messages."""
        learned = f", {len(self.learned)} learned" if self.learned else ""
        count = len(self.arguments)
        return f"score({self.name}, {count} argument{'s' * (count != 1)}{learned})"


class Graph(Body):
    """A traced function; outputs are numbers of nodes: the score, for a derivative several."""

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
        # why repr: 1, 1.0 and True compare equal, and so do 0.0 and -0.0.
        of = repr(([tuple(node) for node in nodes], outputs, [tuple(x) for x in arguments]))
        super().__init__(of, arguments, learned, name)

    def __repr__(self) -> str:
        return f"Graph({self.name}, {len(self.nodes)} nodes, {self.digest[:8]})"

    def learning(self, numbers: tuple[int, ...]) -> Graph:
        """The same function with these arguments learned."""
        return Graph(self.nodes, self.outputs, self.arguments, numbers, self.name)

    def learns_all(self) -> Graph:
        """The same function with all floating arguments learned."""
        return self.learning(tuple([n for n, x in enumerate(self.arguments) if x.differentiable]))
