"""Axes of torch's attention: any number of leading axes, and heads and rows in either memory order.

Leading axes are flattened to the batch axis of `attention`; large broadcast arrays are not expanded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ..errors import InvalidArgumentsError

__all__ = ["are_in_rows", "broadcast_batches", "over_batches", "swap_heads_and_rows"]

Tensor: TypeAlias = torch.Tensor


def are_in_rows(query: Tensor) -> bool:
    """Whether (batch, heads, rows, features) is stored as (batch, rows, heads, features), as in most models.

    Torch's result has the memory order of the query, so that ``o.transpose(1, 2).flatten(2)`` is a view.
    """
    if query.dim() != 4:
        return False
    _, heads, rows, _ = query.stride()
    known: Any = bool
    if torch.compiler.is_compiling():
        # why: for sizes unknown at compile time it is False (heads before rows). Old torch lacks it.
        from torch.fx.experimental import symbolic_shapes

        known = getattr(symbolic_shapes, "guard_or_false", bool)
    return known(heads > 0) and known(heads < rows)  # type: ignore[no-any-return]


def swap_heads_and_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with the axes of heads and rows swapped."""
    return tuple([x.transpose(1, 2) for x in tensors])


def broadcast_batches(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Query, key and value with equal rank, and the shape to which their leading axes broadcast.

    Heads are broadcast too if not `grouped`, except that equal numbers of heads of key and value are kept.
    """
    rank = max(x.dim() for x in (query, key, value))
    if min(x.dim() for x in (query, key, value)) < 2:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise InvalidArgumentsError(
            f"query, key and value have shapes {shapes}.", hint="(..., heads, seqlen, head_dim)"
        )
    if rank == 2:
        return [query, key, value], ()
    # why: the code below takes about as long as everything else in a short call.
    if rank == query.dim() == key.dim() == value.dim():
        like_query = all(x.shape[:-3] == query.shape[:-3] for x in (key, value))
        if like_query and (grouped or query.shape[-3] == key.shape[-3] == value.shape[-3]):
            return [query, key, value], tuple(query.shape[:-3])
    lifted = [x[(None,) * (rank - x.dim())] for x in (query, key, value)]
    heads = [x.shape[-3] for x in lifted]
    batch = tuple([_broadcast(lengths) for lengths in zip(*(x.shape[:-3] for x in lifted), strict=True)])
    all_heads = heads[0] if grouped else _broadcast(heads)
    if -1 in (all_heads, *batch):
        raise InvalidArgumentsError(
            f"{heads[0]} heads of query, {heads[1]} of key, {heads[2]} of value; "
            f"leading axes {[tuple(x.shape[:-3]) for x in lifted]}.",
            hint="enable_gqa=True if heads of query share those of key; leading axes that broadcast",
        )
    if not grouped:
        heads = [all_heads, *(heads[1:] if heads[1] == heads[2] else (all_heads, all_heads))]
    return [x.expand(*x.shape[:-3], n, *x.shape[-2:]) for x, n in zip(lifted, heads, strict=True)], batch


def _broadcast(lengths: Sequence[int]) -> int:
    """The length to which lengths of one axis broadcast; -1 if they do not.

    why not torch.broadcast_shapes: under torch.compile its error cannot be caught, and would replace ours.
    """
    first, *others = [n for n in lengths if n != 1] or [1]
    return first if all(n == first for n in others) else -1


def over_batches(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    qkv: list[Tensor],
    mask: Tensor | None,
    batch: tuple[int, ...],
) -> Tensor:
    """Apply a function of one batch axis over all leading axes, in as few calls as memory allows.

    Parameters
    ----------
    attend : callable
        Takes q, k and v with one leading axis of equal length, and a mask that broadcasts to it.
    qkv : list of Tensor
        The tensors that `broadcast_batches` returns with `batch`.
    mask : Tensor, optional
        Broadcasts to (*batch, heads, seqlen_q, seqlen_k).
    """
    if len(batch) < 2:
        q, k, v = (x if x.shape[:-3] == batch else x.expand(*batch, *x.shape[len(batch) :]) for x in qkv)
        return attend(q, k, v, mask)
    operands = (*qkv, None if mask is None else _with_batch_axes(mask, batch))
    return _stacked(attend, operands, batch, _loop_axes(operands, batch))


def _with_batch_axes(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask with all axes of the batch, of length 1 where it is broadcast."""
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    lead = tuple(mask.shape[:-3])
    if len(lead) != len(batch) or any(n not in (1, whole) for n, whole in zip(lead, batch, strict=True)):
        raise InvalidArgumentsError(
            f"attn_mask has leading axes {lead}, query, key and value {batch}.",
            hint="a mask whose axes before the heads are of these lengths, or 1",
        )
    if not mask.requires_grad:  # why: the gradient of an expanded mask differs along the expanded axis
        for axis, step in enumerate(mask.stride()):
            if step == 0 and mask.shape[axis] > 1:
                mask = mask.narrow(axis, 0, 1)
    return mask


def _loop_axes(operands: tuple[Tensor | None, ...], batch: tuple[int, ...]) -> tuple[bool, ...]:
    """Which leading axes to loop over, so that the others can be flattened to one axis of every operand.

    An operand that is broadcast along some of the flattened axes, but not all, must be expanded in memory.
    That is allowed up to the total size of the operands; within this limit, the fewest calls are chosen.
    """
    there = [x for x in operands if x is not None]
    given = sum([x.numel() for x in there])

    def copied_elements(loops: tuple[bool, ...]) -> int:
        def is_partly_broadcast(x: Tensor) -> bool:
            joined = zip(x.shape, batch, loops, strict=False)
            return len({n == 1 for n, whole, loop in joined if whole != 1 and not loop}) > 1

        size: int = math.prod(batch) * sum(
            [math.prod(x.shape[len(batch) :]) for x in there if is_partly_broadcast(x)]
        )
        return size

    # why not min(): torch.compile does not support it with a key.
    fewest, chosen = math.inf, (False,) * len(batch)
    for loops in itertools.product(*((False, True) if n > 1 else (False,) for n in batch)):
        calls = math.prod([n for n, loop in zip(batch, loops, strict=True) if loop])
        if calls < fewest and copied_elements(loops) <= given:
            fewest, chosen = calls, loops
    return chosen


def _stacked(
    attend: Any, operands: tuple[Any, ...], batch: tuple[int, ...], loops: tuple[bool, ...]
) -> Tensor:
    """The stacked results of a loop over the first marked axis, or of one call over all remaining axes."""
    if True in loops:
        at = loops.index(True)
        rest = (*batch[:at], *batch[at + 1 :]), (*loops[:at], *loops[at + 1 :])
        # why unbind: its gradient is one array; separate selections each have a zero-filled gradient.
        parts = [
            (x if x is None else x.squeeze(at),) * batch[at]
            if x is None or x.shape[at] == 1
            else x.unbind(at)
            for x in operands
        ]
        return torch.stack([_stacked(attend, part, *rest) for part in zip(*parts, strict=True)], at)
    o: Tensor
    if not batch:
        o = attend(*operands)
        return o
    joined: list[Any] = [x if x is None else _flattened(x, batch) for x in operands]
    o = attend(*(x.expand(math.prod(batch), *x.shape[1:]) for x in joined[:3]), joined[3])
    return o.reshape(*batch, *o.shape[1:])


def _flattened(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A tensor with its leading axes flattened to one, of length 1 if it is broadcast along all of them."""
    count = len(batch)
    if math.prod(x.shape[:count]) != 1:
        x = x.expand(*batch, *x.shape[count:])
    return x.flatten(0, count - 1)
