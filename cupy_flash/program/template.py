"""`Template`: a score or mask function given as C text, and what is checked without a compiler."""

from __future__ import annotations

import re

from ..errors import InvalidArgumentsError, UnsupportedError
from .graph import Argument, Body

__all__ = ["Template", "check_text", "only_in_python", "refuse_gradients"]

_EXAMPLES = {
    "score": "template <class T> T score(T s, int b, int h, int i, int j) { return s; }",
    "mask": "inline bool mask(int b, int h, int i, int j) { return j <= i; }",
}
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)


class Template(Body):
    """A function in C, for arguments of certain kinds.

    Attributes
    ----------
    text : str
        As given.
    entry : {"score", "mask"}
        The function that the text defines: a template on scores, or a mask.
    """

    __slots__ = ("entry", "text")

    def __init__(self, text: str, entry: str, arguments: tuple[Argument, ...]) -> None:
        self.text, self.entry = text, entry
        of = repr((entry, text, [tuple(x) for x in arguments]))
        super().__init__(of, arguments, (), f"{entry} in C")


def check_text(text: str, entry: str) -> None:
    """Refuse text that does not define the function, or includes files."""
    if not re.search(rf"\b{entry}\s*\(", text):
        raise InvalidArgumentsError(f"the text in C defines no {entry}(...).", hint=_EXAMPLES[entry])
    if (found := _INCLUDE.search(text)) is not None:
        # why: compiled kernels are cached by a hash of the text, which would miss changes of the file.
        line = text.count("\n", 0, found.start()) + 1 + found[0].count("\n")
        raise InvalidArgumentsError(
            "the text in C includes a file.",
            reasons=[(f"line {line}", found[0].strip())],
            hint="the definitions that it needs, copied into the text",
        )


def refuse_gradients() -> UnsupportedError:
    """The error for a function in C with learned arguments."""
    return UnsupportedError(
        "the arguments of a score function in C have no gradients: its text is not differentiated.",
        hint="the function in Python; or no learned=, in torch x.detach()",
    )


def only_in_python(where: str) -> UnsupportedError:
    """The error for a function in C where no compiled kernel runs it."""
    return UnsupportedError(
        f"a score function in C is compiled into kernels of GPUs, and {where}.",
        hint="the same function in Python, cupy_flash.score(lambda s, b, h, i, j, ...: ...); or arrays of a "
        "GPU; or the environment variable CUPY_FLASH_DRIVER=simulator",
    )
