"""PTX, as NVRTC writes it, to a `Kernel`: what is declared, and a list of labels, scopes and instructions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Global",
    "Instruction",
    "Kernel",
    "Label",
    "Local",
    "Registers",
    "Scope",
    "Unknown",
    "parts",
    "read",
]


class Unknown(ValueError):
    """PTX that this reader, or no instruction of ours, knows. It is never guessed at."""


class Instruction(NamedTuple):
    """One instruction.

    Attributes
    ----------
    opcode : str
        With its modifiers: "ld.shared.v4.b32".
    operands : tuple of str
        As they stand there; vectors and addresses in their brackets.
    guard : str
        The predicate that it depends on, such as "%p1" or "!%p1"; "" if it has none.
    line : int
        Of the PTX file.
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str
    line: int


class Label(NamedTuple):
    """A place to branch to."""

    name: str


class Scope(NamedTuple):
    """A brace: names declared between two of them are known there only."""

    opens: bool


class Registers(NamedTuple):
    """A declaration; "%r<9>" stands for %r0 to %r8."""

    type: str
    names: tuple[str, ...]


class Local(NamedTuple):
    """An array in the local memory of a thread."""

    name: str
    align: int
    size: int


class Global(NamedTuple):
    """A variable of the module; `values` are its numbers as PTX writes them, () for zeros."""

    name: str
    type: str
    align: int
    length: int | None
    values: tuple[str, ...]


Item = Instruction | Label | Scope | Registers | Local


@dataclass
class Kernel:
    """The one entry of a PTX file."""

    name: str
    param_bytes: int
    max_threads: int
    body: list[Item] = field(default_factory=list)
    globals: dict[str, Global] = field(default_factory=dict)


def parts(text: str) -> list[str]:
    """What stands between commas that are in no bracket."""
    found, depth, start = [], 0, 0
    for place, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*found, last] if last else found


_COMMENT = re.compile(r"//[^\n]*")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*((?:\.\w+[^{\n]*\s*)*)\{", re.DOTALL)
_PARAM = re.compile(r"\s*\.param \.align \d+ \.b8 \w+\[(\d+)\]\s*")
_MAX_THREADS = re.compile(r"\.maxntid (\d+)")
_GLOBAL = re.compile(
    r"\.(?:global|const) \.align (?P<align>\d+) \.(?P<type>\w+) (?P<name>\w+)"
    r"(?P<length>\[\d*\])?(?: = (?P<values>[^;]*))?;"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<debug>\.(?:loc|file)\b[^\n]*)|(?P<label>[\w$%]+):(?!:)|(?P<brace>[{}])|(?P<statement>[^;]*?);)",
    re.DOTALL,
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]")
_INSTRUCTION = re.compile(r"(?:@(?P<guard>!?[%\w$]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL)


def read(text: str) -> Kernel:
    """Read a PTX file with one entry that takes one struct.

    Raises
    ------
    Unknown
        With the line.
    """
    text = _COMMENT.sub("", text)  # newlines stay: lines are those of the file
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1 or ".func" in text:
        raise Unknown(f"{len(entries)} entries, and functions: one entry without functions is what is read")
    (entry,) = entries
    param = _PARAM.fullmatch(entry[2])
    if param is None:
        raise Unknown(f"{entry[1]} takes {entry[2].strip()!r}: one struct is what is read")
    threads = _MAX_THREADS.search(entry[3])
    kernel = Kernel(entry[1], int(param[1]), int(threads[1]) if threads else 1024)
    for found in _GLOBAL.finditer(text, 0, entry.start()):
        kernel.globals[found["name"]] = _global(found)
    _read_body(text, entry.end(), kernel.body)
    return kernel


def _global(found: re.Match[str]) -> Global:
    values = tuple(parts((found["values"] or "").strip("{} ")))
    length = found["length"]
    count = None if length is None else int(length[1:-1] or len(values))
    return Global(found["name"], found["type"], int(found["align"]), count, values)


def _read_body(text: str, start: int, body: list[Item]) -> None:
    """Everything up to the brace that ends the entry."""
    depth, line, counted = 1, 1, 0
    while True:
        token = _TOKEN.match(text, start)
        if token is None:
            raise Unknown(f"line {text.count(chr(10), 0, start) + 1}: {text[start : start + 80]!r}")
        start = token.end()
        kind = token.lastgroup or ""
        line += text.count("\n", counted, token.start(kind))
        counted = token.start(kind)
        if kind == "brace":
            depth += 1 if token["brace"] == "{" else -1
            if depth == 0:
                return
            body.append(Scope(token["brace"] == "{"))
        elif kind == "label":
            body.append(Label(token["label"]))
        elif kind == "statement" and token["statement"]:
            item = _statement(token["statement"].strip(), line)
            if item is not None:
                body.append(item)


def _statement(text: str, line: int) -> Item | None:
    if text.startswith(".pragma"):
        return None
    if found := _REGISTERS.fullmatch(text):
        return Registers(found[1], tuple(parts(found[2])))
    if found := _LOCAL.fullmatch(text):
        return Local(found[2], int(found[1]), int(found[3]))
    found = _INSTRUCTION.fullmatch(text)
    if found is None or text.startswith("."):
        raise Unknown(f"line {line}: {text[:80]!r}")
    return Instruction(found["opcode"], tuple(parts(found["operands"])), found["guard"] or "", line)


_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) \d+(?:.*inlined_at (\d+) (\d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+) "(?:[^"]*/include/|[^"]*/)?([^"]+)"', re.MULTILINE)


def source_lines(text: str, line: int) -> str:
    """The lines of the CUDA sources, from the inside out, of a line of PTX; "?" if it has none."""
    chain: Sequence[tuple[str, str]] = ()
    for row in text.splitlines()[:line]:
        if (found := _LOC.match(row)) is None:
            continue
        here = (found[1], found[2])
        if found[3] is None:
            chain = [here]
        else:  # the call that it is inlined at is named by a .loc before
            call = (found[3], found[4])
            chain = [here, *(chain[chain.index(call) :] if call in chain else [call])]
    names = dict(_FILE.findall(text))
    return " < ".join(f"{names.get(file, file)}:{number}" for file, number in chain) or "?"
