"""Conversion of flex_attention's BlockMask to ours."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ..blocks import filled, table_of_lists
from ..call.blocks import PARTIAL, SIZES, BlockMask
from ..call.opaque import opaque
from ..call.public_names import type_phrase
from ..errors import InvalidArgumentsError
from ..program.function import Bound, Program

__all__ = ["block_mask", "has_function", "ours"]

# Converted masks. why cached: a model passes one mask to all of its layers, and evaluating mask_mod is slow.
_MADE: weakref.WeakKeyDictionary[Any, BlockMask | None] = weakref.WeakKeyDictionary()
_LARGEST = 2**30


def ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with torch's BlockMask converted to ours."""
    mask = options.get("mask")
    if mask is None or isinstance(mask, torch.Tensor):
        return {**options}
    return {**options, "mask": _converted(mask)}


def _converted(mask: Any) -> Any:
    """A mask with torch's BlockMask converted; None for torch's BlockMask that masks nothing."""
    if type(mask) is tuple:  # a named tuple is a single mask
        return tuple([_converted(x) for x in mask])
    if type(mask).__name__ == "BlockMask" and not isinstance(mask, BlockMask):
        return _of_torch(mask)
    return mask


def has_function(options: Mapping[str, Any]) -> bool:
    """Whether the options have a score or mask function."""
    return options.get("score") is not None or _holds_function(options.get("mask"))


def _holds_function(mask: Any) -> bool:
    if type(mask) is tuple:
        return any(_holds_function(x) for x in mask)
    return isinstance(mask, (Program, Bound))


def block_mask(of_torch: Any) -> BlockMask:
    """Convert a `torch.nn.attention.flex_attention.BlockMask` to a `cupy_flash.BlockMask`.

    `attention` also accepts torch's mask and converts it once. Under torch.compile the conversion is a graph
    break; convert the mask before to avoid it.

    Parameters
    ----------
    of_torch : torch.nn.attention.flex_attention.BlockMask
        Its mask_mod is evaluated on the (query, key) pairs of partial blocks.

    Returns
    -------
    BlockMask
        With tensors on the device of torch's block lists.

    Raises
    ------
    InvalidArgumentsError
        Another type, block sizes other than 16, 32, 64, 128 and 256, lists that
        `cupy_flash.block_mask_of_lists` refuses, or torch's mask that masks nothing, which has no lengths.
    """
    made = _of_torch(of_torch)
    if made is None:
        raise InvalidArgumentsError(
            "the BlockMask is one block without a mask: every query sees every key.", hint="mask=None"
        )
    return made


@functools.partial(
    opaque,
    why="torch's BlockMask is converted outside of compiled programs. "
    "Try: mask=cupy_flash.torch.block_mask(mask), made before; or fullgraph=False",
)
def _of_torch(of_torch: Any) -> BlockMask | None:
    """The converted mask, cached by object; None if it masks nothing, for any lengths."""
    if type(of_torch).__name__ != "BlockMask" or not hasattr(of_torch, "mask_mod"):
        raise InvalidArgumentsError(
            f"block_mask() is given {type_phrase(of_torch)}.",
            hint="a BlockMask of torch's create_block_mask; of functions: cupy_flash.block_mask",
        )
    if of_torch not in _MADE:
        _MADE[of_torch] = None if _masks_nothing(of_torch) else _made(of_torch)
    return _MADE[of_torch]


def _masks_nothing(of_torch: Any) -> bool:
    """Whether this is torch's default mask, which masks nothing: one block larger than any sequence."""
    if tuple(of_torch.BLOCK_SIZE) != (_LARGEST, _LARGEST):
        return False
    # why here: a caller that has such a mask has imported the module already
    from torch.nn.attention.flex_attention import noop_mask

    return of_torch.mask_mod is noop_mask and bool((of_torch.kv_num_blocks == 1).all())


def _made(of_torch: Any) -> BlockMask:
    sizes, lengths = tuple(of_torch.BLOCK_SIZE), tuple(of_torch.seq_lengths)
    if any(size not in SIZES for size in sizes):
        hint = f"BLOCK_SIZE=128, or others of {', '.join(map(str, SIZES))}"
        raise InvalidArgumentsError(f"the BlockMask has blocks of {sizes[0]} x {sizes[1]}.", hint=hint)
    device = of_torch.kv_indices.device
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = {
        name: None if x is None else x.cpu().numpy()
        for name, x in ((name, getattr(of_torch, name)) for name in names)
    }
    counts = (-(-lengths[0] // sizes[0]), -(-lengths[1] // sizes[1]))
    codes = table_of_lists(lists, counts, PARTIAL)
    mask_mod = of_torch.mask_mod
    # why vmap twice: a mask_mod takes scalar indices.
    pairs = torch.vmap(torch.vmap(mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))

    def evaluate(b: int, h: int, i: Any, j: Any) -> Any:
        at = [torch.as_tensor(x, device=device) for x in (b, h, i[:, 0], j[0])]
        return pairs(*at).to(torch.bool).cpu().numpy()

    made = filled(codes, lengths, sizes, evaluate)
    return BlockMask(*(torch.from_numpy(x).to(device) for x in made))
