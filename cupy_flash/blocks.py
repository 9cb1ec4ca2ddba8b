"""Make block masks from a function or from lists, without an S x S array."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .call.blocks import NOTHING, PARTIAL, SIZES, WHOLE, BlockMask
from .call.checks import integer, length
from .call.public_names import type_phrase
from .call.signature import takes
from .errors import InvalidArgumentsError
from .program.function import Bound, Program, widened

__all__ = ["BlockMask", "block_mask", "block_mask_of_lists", "filled", "table_of_lists"]

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

# Pairs per call of a mask function. why: a megabyte of booleans, and few calls.
PAIRS = 2**20


@takes()
def block_mask(
    function: Function | Program | Bound,
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int,
    *,
    block: int | tuple[int, int] = 128,
) -> BlockMask:
    """Make the `BlockMask` of a mask function, which is evaluated on a few blocks at a time.

    Parameters
    ----------
    function : callable or cupy_flash.mask(...)
        Called with b, h, i, j, NumPy arrays of int64 that broadcast to (queries, keys); returns booleans that
        broadcast with them, True where query i may attend to key j. Bind the arrays of a mask function by a
        call, ``f(table)``; integers in them become int64.
    batch, heads : int or None
        Sizes of q. None: the function does not use b (or h), and is evaluated once, for 0.
    q_len, kv_len : int
        Numbers of queries and keys.
    block : int or (int, int)
        Queries and keys per block: 16, 32, 64, 128 or 256.

    Returns
    -------
    BlockMask
        NumPy arrays: a table of (batch or 1, heads or 1, blocks, blocks) codes, and the bits of partial
        blocks; equal blocks share them.

    Raises
    ------
    InvalidArgumentsError
        Invalid lengths or sizes, or a function that does not return booleans of that shape.

    Examples
    --------
    >>> import cupy_flash
    >>> made = cupy_flash.block_mask(lambda b, h, i, j: j <= i, None, None, 64, 64, block=32)
    >>> made.table.tolist()
    [[[[2, 0], [1, 2]]]]
    """
    sizes = _sizes(block)
    lengths = length(q_len, "q_len"), length(kv_len, "kv_len")
    lead = tuple(1 if n is None else length(n, name) for n, name in ((batch, "batch"), (heads, "heads")))
    arguments: tuple[Any, ...] = ()
    if isinstance(function, Bound):
        function, arguments = function
    if isinstance(function, Program):
        if not function.masks:
            hint = "cupy_flash.mask(lambda b, h, i, j: ...)"
            raise InvalidArgumentsError(f"{function!r} returns scores, not which pairs are kept.", hint=hint)
        function = function.in_python()
    evaluate = _checked_function(function, arguments)
    made = _Builder(lead, lengths, sizes)
    for b, h, m in np.ndindex(*made.table.shape[:3]):
        for first, stop in made.strips():
            kept = evaluate(b, h, *made.positions(m, first, stop))
            made.put((b, h, m), first, kept)
    return made.finished()


def block_mask_of_lists(
    mask_block_cnt: Any,
    mask_block_idx: Any,
    full_block_cnt: Any = None,
    full_block_idx: Any = None,
    *,
    q_len: int,
    kv_len: int,
    block: int | tuple[int, int] = 128,
    function: Function | Program | None = None,
    args: Sequence[Any] = (),
) -> BlockMask:
    """Make a `BlockMask` from counts and indices, as in FlashAttention-4's BlockSparseTensors.

    Parameters
    ----------
    mask_block_cnt : array of int, shape (batch or 1, heads or 1, blocks of queries)
        Number of partial blocks of keys of each block of queries.
    mask_block_idx : array of int, shape (batch or 1, heads or 1, blocks of queries, at most blocks of keys)
        Their indices, in any order; entries after the count are not read.
    full_block_cnt, full_block_idx : array of int, optional
        The same for full blocks; both or neither.
    q_len, kv_len, block, args
        As in `block_mask`.
    function : callable or cupy_flash.mask(...), optional
        As in `block_mask`, evaluated on the partial blocks. Without one they are full.

    Returns
    -------
    BlockMask

    Raises
    ------
    InvalidArgumentsError
        Arrays that are not integers or not in main memory, shapes that do not fit, a block that does not
        exist or is listed twice; and as in `block_mask`.
    """
    sizes = _sizes(block)
    lengths = length(q_len, "q_len"), length(kv_len, "kv_len")
    codes = table_of_lists(
        {
            "mask_block_cnt": mask_block_cnt,
            "mask_block_idx": mask_block_idx,
            "full_block_cnt": full_block_cnt,
            "full_block_idx": full_block_idx,
        },
        (-(-lengths[0] // sizes[0]), -(-lengths[1] // sizes[1])),
        PARTIAL if function is not None else WHOLE,
    )
    if function is None:
        return BlockMask(codes, _Builder(codes.shape[:2], lengths, sizes).finished().bits)
    function = function.in_python() if isinstance(function, Program) else function
    return filled(codes, lengths, sizes, _checked_function(function, args))


def table_of_lists(lists: dict[str, Any], blocks: tuple[int, int], partial: int) -> Array:
    """The table for counts and indices; `partial` is the code of partial blocks.

    Parameters
    ----------
    lists : dict of str to array or None
        Counts and indices of partial blocks, then of full ones, by the public names of the arguments.
    blocks : (int, int)
        Blocks of queries and of keys.
    partial : int
    """
    names = list(lists)
    table = np.full((1, 1, *blocks), NOTHING, np.int32)
    for count_name, index_name, code in ((names[0], names[1], partial), (names[2], names[3], WHOLE)):
        if lists[count_name] is None and lists[index_name] is None:
            continue
        count, index = (
            _integers(lists[count_name], count_name, 3),
            _integers(lists[index_name], index_name, 4),
        )
        if count.shape != index.shape[:3] or count.shape[2] != blocks[0] or index.shape[3] > blocks[1]:
            raise InvalidArgumentsError(
                f"{count_name} has shape {count.shape} and {index_name} {index.shape}, "
                f"for {blocks[0]} blocks of queries and {blocks[1]} of keys.",
                hint=f"(batch, heads, {blocks[0]}) and (batch, heads, {blocks[0]}, up to {blocks[1]})",
            )
        if count.size and not 0 <= count.min() <= count.max() <= index.shape[3]:
            wrong = count.min() if count.min() < 0 else count.max()
            hint = f"counts from 0 to {index.shape[3]}, the length of the last axis of {index_name}"
            raise InvalidArgumentsError(f"{count_name} holds {wrong}.", hint=hint)
        used = np.arange(index.shape[3]) < count[..., None]
        named = index[used]
        if named.size and not 0 <= named.min() <= named.max() < blocks[1]:
            wrong = named.min() if named.min() < 0 else named.max()
            hint = f"numbers of blocks from 0 to {blocks[1] - 1}"
            raise InvalidArgumentsError(f"{index_name} holds {wrong}.", hint=hint)
        try:
            lead = np.broadcast_shapes(table.shape[:2], count.shape[:2])
        except ValueError:
            hint = "the same batch and heads, or 1"
            raise InvalidArgumentsError(
                f"{count_name} has shape {count.shape}, the other table {table.shape}.", hint=hint
            ) from None
        listed = np.zeros((*count.shape, blocks[1]), np.int32)
        np.add.at(listed, (*np.nonzero(used)[:3], named), 1)
        twice = (listed > 1) | ((listed > 0) & (table != NOTHING))
        if twice.any():
            b, h, m, n = (int(x[0]) for x in np.nonzero(twice))
            raise InvalidArgumentsError(
                f"block {n} of keys is listed twice for block {m} of queries of batch {b}, head {h}.",
                hint="each block once, in part or as a whole",
            )
        table = np.where(listed > 0, np.int32(code), np.broadcast_to(table, (*lead, *blocks)))
    return table


def filled(codes: Array, lengths: tuple[int, int], sizes: tuple[int, int], evaluate: Function) -> BlockMask:
    """A mask whose blocks with the code PARTIAL are evaluated by calling `evaluate`.

    Parameters
    ----------
    codes : array of int32, shape (batch or 1, heads or 1, blocks of queries, blocks of keys)
    lengths, sizes : (int, int)
    evaluate : callable
        Returns the visible pairs for b, h, and positions of queries (m, 1) and keys (1, n).
    """
    made = _Builder(codes.shape[:2], lengths, sizes)
    made.table[codes == WHOLE] = WHOLE
    for b, h, m, n in np.argwhere(codes == PARTIAL).tolist():
        made.put((b, h, m), n, evaluate(b, h, *made.positions(m, n, n + 1)))
    return made.finished()


class _Builder:
    """A block mask under construction, block by block."""

    def __init__(self, lead: tuple[int, ...], lengths: tuple[int, int], sizes: tuple[int, int]) -> None:
        self._lengths, self._sizes = lengths, sizes
        counts = (-(-n // size) for n, size in zip(lengths, sizes, strict=True))
        self.table = np.full((*lead, *counts), NOTHING, np.int32)
        self._codes: dict[bytes, int] = {}

    def strips(self) -> Iterator[tuple[int, int]]:
        """Ranges of key blocks on which the function is evaluated at once."""
        rows, columns = self._sizes
        step, count = max(1, PAIRS // (rows * columns)), self.table.shape[3]
        for first in range(0, count, step):
            yield first, min(first + step, count)

    def positions(self, m: int, first: int, stop: int) -> tuple[Array, Array]:
        """Positions of queries (rows, 1) of a block, and of keys (1, columns) of several blocks."""
        (rows, columns), (q_len, kv_len) = self._sizes, self._lengths
        i = np.arange(m * rows, min((m + 1) * rows, q_len), dtype=np.int64)
        return i[:, None], np.arange(first * columns, min(stop * columns, kv_len), dtype=np.int64)[None]

    def put(self, row: tuple[int, int, int], first: int, kept: Array) -> None:
        """Store the visible pairs of a block of queries and several key blocks, starting at block `first`."""
        rows, columns = self._sizes
        count = -(-kept.shape[1] // columns)
        room = (0, rows - kept.shape[0]), (0, count * columns - kept.shape[1])
        # why pad twice, with False and True: positions past the lengths must not make a block partial.
        some = np.pad(kept, room).reshape(rows, count, columns)
        every = np.pad(kept, room, constant_values=True).reshape(rows, count, columns).all(axis=(0, 2))
        codes = np.where(every, WHOLE, NOTHING)
        for n in np.nonzero(some.any(axis=(0, 2)) & ~every)[0]:
            bits = np.packbits(some[:, n], axis=-1, bitorder="little").tobytes()
            codes[n] = self._codes.setdefault(bits, PARTIAL + len(self._codes))
        self.table[row][first : first + count] = codes

    def finished(self) -> BlockMask:
        """The finished mask."""
        rows, columns = self._sizes
        bits = np.frombuffer(b"".join(self._codes), np.uint8)
        return BlockMask(self.table, bits.reshape(len(self._codes), rows, columns // 8).copy())


def _checked_function(function: Any, args: Sequence[Any]) -> Function:
    """Wrap a function of NumPy arrays: check that it returns booleans, and broadcast them."""
    hint = "block_mask(lambda b, h, i, j: j <= i, batch, heads, q_len, kv_len)"
    if not callable(function):
        raise InvalidArgumentsError(f"block_mask() is given {type_phrase(function)}.", hint=hint)

    arguments = tuple(map(widened, args))
    try:
        inspect.signature(function).bind(*"bhij", *arguments)
    except ValueError:
        pass  # a function in C that does not say what it takes
    except TypeError as error:
        raise InvalidArgumentsError(
            f"the function of a block mask is called with b, h, i, j: {error}.", hint=hint
        ) from None

    def evaluate(b: int, h: int, i: Array, j: Array) -> Array:
        kept = np.asarray(function(np.int64(b), np.int64(h), i, j, *arguments))
        shape = (i.shape[0], j.shape[1])
        try:
            if kept.dtype == np.bool_:
                return np.broadcast_to(kept, shape)
        except ValueError:
            pass
        raise InvalidArgumentsError(
            f"the function of a block mask gives {kept.dtype} of shape {kept.shape}.",
            hint=f"booleans that broadcast to {shape}: queries, keys",
        )

    return evaluate


def _integers(values: Any, name: str, rank: int) -> Array:
    """Check counts or indices, and add missing leading axes."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or not rank - 2 <= array.ndim <= rank:
        raise InvalidArgumentsError(
            f"{name} is of dtype {array.dtype} and shape {array.shape}.",
            hint=f"integers, {'(batch, heads, blocks)' if rank == 3 else '(batch, heads, blocks, blocks)'}",
        )
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def _sizes(block: Any) -> tuple[int, int]:
    """Queries and keys per block, checked."""
    both = block if isinstance(block, (tuple, list)) else (block, block)
    if len(both) != 2 or any(integer(size) not in SIZES for size in both):
        sizes = ", ".join(map(str, SIZES))
        raise InvalidArgumentsError(f"block is {block!r}.", hint=f"queries and keys of a block, of {sizes}")
    return int(both[0]), int(both[1])
