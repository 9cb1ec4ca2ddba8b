"""Candidate tiles of kernels: cells for the tables of the families, and a context to try one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import cupy_flash.plan.families
from cupy_flash.dispatch import memo
from cupy_flash.plan.catalog import SHORT, architecture
from cupy_flash.plan.families import flash_tiles, hopper

from ..work import Case

KERNELS = ("flash_forward", "flash_backward", "hopper_forward", "hopper_backward")
Cell = tuple[int | str, ...]


class Question(NamedTuple):
    """A cell of a tile table, for which candidates are measured.

    Attributes
    ----------
    kernel : str
        One of `KERNELS`.
    arch : str
    dtype : str
        Name in NumPy.
    head_dim : int
    mask : {"band", "any"}
        Kind of kernel; "any" is measured with a softcap.
    causal : bool
    """

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    mask: str = "band"
    causal: bool = True

    @property
    def passes(self) -> str:
        return self.kernel.partition("_")[2]

    @property
    def classes(self) -> tuple[int, int]:
        d = next(d for d, v in flash_tiles.HEAD_DIMS if d == v and self.head_dim <= d)
        return d, d

    @property
    def kind(self) -> str:
        return "16-bit" if self.dtype in ("float16", "bfloat16") else "tf32"

    def case(self, seqlen: int) -> Case:
        """The case to measure: 16384 tokens and 2048 features in all, as in the papers."""
        heads = max(1, 2048 // self.head_dim)
        batch = max(1, 16384 // seqlen)
        return Case(batch, heads, seqlen, self.head_dim, self.dtype, self.causal, self.passes)


def cells(question: Question) -> list[Cell]:
    """Candidate cells, that of the table first, without those that exceed shared memory."""
    d, _ = question.classes
    limit = architecture(question.arch).shared_bytes
    item = 2 if question.kind == "16-bit" else 4
    found: list[Cell] = []
    if question.kernel == "flash_forward":
        loops = (1, 2) if question.mask == "band" and item == 2 else (1,)
        for m, n, threads, in_registers, blocks, loop in product(
            (64, 128), (16, 32, 64, 128), (128, 256), (1, 0), (1, 2), loops
        ):
            rows_of_a_warp = m * 32 // threads
            if item * (m * d + 2 * n * d) * blocks <= limit and rows_of_a_warp in (16, 32):
                found.append(tuple(flash_tiles.ForwardTile(m, n, threads, in_registers, blocks, loop)))
    elif question.kernel == "flash_backward":
        for m, n, threads, slots, v_in_registers in product(
            (16, 32, 64, 128), (32, 64, 128), (128, 256), (1, 2), (0, 1)
        ):
            # 8 * m: LSE and delta, which 16-bit kernels load with Q.
            streams = (2 + slots) * m * d + (8 * m if item == 2 else 0)
            fits = item * ((2 - v_in_registers) * n * d + streams + 2 * m * n) <= limit
            if fits and (slots == 2 if item == 2 else not v_in_registers):
                found.append((m, n, threads, slots, v_in_registers))
    elif question.kernel == "hopper_forward":
        turns = now(question)[2]
        for m, n in product((128, 192), range(48, 193, 16)):
            if 2 * (m * d + 4 * n * d) + 1024 <= limit:
                found.append((m, n, turns))
    else:
        # why the same m: the passes before and after, of the other family, use the same tiles of queries.
        for m, n in product((int(now(question)[0]),), (64, 128)):
            tiles = 2 * (2 * n * d + 4 * m * d + 2 * m * n) + 4 * (m * d + 4 * m) + 1024
            if tiles <= limit:
                found.append((m, n))
    present = now(question)
    # Large tiles first: they have the least traffic, and the caller may cut the list.
    found.sort(key=lambda cell: -int(cell[0]) * int(cell[1]))
    return [present, *(cell for cell in found if cell != present)]


def _rows(question: Question) -> tuple[dict[Any, Any], Any, int, int]:
    """The table of an mma.sync kernel, its key, and the row and column of the cell."""
    if question.passes == "forward":
        table, key = flash_tiles.FORWARD, (question.kind,)
    else:
        table, key = flash_tiles.BACKWARD, (question.kind, "dqkv")
    # If there is only one kind of kernel, it supports any mask.
    key = (*key, question.mask if (*key, question.mask) in table else "any")
    column = flash_tiles.column(architecture(question.arch))
    return table, key, flash_tiles.HEAD_DIMS.index(question.classes), column


def _override(question: Question) -> tuple[int, str, str, tuple[int, int]]:
    """The key of a cell for one architecture, which overrides that of `_rows`."""
    _, key, _, _ = _rows(question)
    return architecture(question.arch).capability, key[0], key[-1], question.classes


def now(question: Question) -> Cell:
    """The present cell of the table.

    Raises
    ------
    ValueError
        There is none: the family does not support this.
    """
    if question.kernel.startswith("hopper"):
        table = hopper._FORWARD if question.passes == "forward" else hopper._BACKWARD
        if question.classes not in table or question.kind != "16-bit":
            raise ValueError(f"{question.kernel} has no head_dim {question.head_dim} in {question.dtype}")
        return table[question.classes][("band", "any").index(question.mask)]
    rows, key, row, column = _rows(question)
    cell = rows[key][row][column] if key in rows else None
    if question.passes == "forward":
        cell = flash_tiles.FORWARD_OF.get(_override(question), cell)
    if cell is None:
        raise ValueError(f"{question} is not compiled at all")
    return tuple(cell)


@contextmanager
def applied(question: Question, cell: Cell) -> Iterator[None]:
    """Plan with this cell in the table, and prefer this family, inside this context."""
    every = cupy_flash.plan.families.FAMILIES
    family = next(f for f in every if question.kernel.partition("_")[0] == f.NAME)
    with ExitStack() as stack:
        if family.NAME == "hopper":
            table = hopper._FORWARD if question.passes == "forward" else hopper._BACKWARD
            both = list(table[question.classes])
            both[("band", "any").index(question.mask)] = cell
            stack.enter_context(mock.patch.dict(table, {question.classes: tuple(both)}))
        elif question.passes == "forward":
            tile = {_override(question): flash_tiles.ForwardTile(*cell)}  # type: ignore[arg-type]
            stack.enter_context(mock.patch.dict(flash_tiles.FORWARD_OF, tile))
        else:
            rows, key, row, column = _rows(question)
            changed = [list(r) for r in rows[key]]
            changed[row][column] = type(rows[key][row][column])(*cell)
            stack.enter_context(mock.patch.dict(rows, {key: tuple(map(tuple, changed))}))
        stack.enter_context(preferred(family.NAME))
        yield


@contextmanager
def preferred(name: str) -> Iterator[None]:
    """Prefer this family in plans inside this context."""
    every = cupy_flash.plan.families.FAMILIES
    first = sorted(every, key=lambda family: name != family.NAME)
    with mock.patch.object(cupy_flash.plan.families, "FAMILIES", tuple(first)):
        memo.forget()
        try:
            yield
        finally:
            memo.forget()


def options(question: Question) -> dict[str, Any]:
    """Options for which a call needs this kind of kernel."""
    return {"softcap": 30.0} if question.mask == "any" else {}


def line(question: Question, cell: Cell) -> str:
    """The cell as a line of the table."""
    return f"({', '.join(map(str, cell))}),  # {SHORT[question.dtype]} {question.classes} {question.mask}"
