"""Axes as torch's attention takes them: any number of leading ones, and heads and rows in either order.

Leading axes are the one batch of `attention`; what is broadcast is not written out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ..errors import InvalidArgumentsError

__all__ = ["are_in_rows", "over_batches", "together", "turned"]

Tensor: TypeAlias = torch.Tensor


def are_in_rows(query: Tensor) -> bool:
    """Whether (batch, heads, rows, features) is (batch, rows, heads, features) in memory, as models have it.

    A result of torch has the order of its query, so that ``o.transpose(1, 2).flatten(2)`` copies nothing.
    """
    if query.dim() != 4:
        return False
    _, heads, rows, _ = query.stride()
    known: Any = bool
    if torch.compiler.is_compiling():
        # why: sizes that only a run of the program tells; heads come first then. Old torch lacks it.
        from torch.fx.experimental import symbolic_shapes

        known = getattr(symbolic_shapes, "guard_or_false", bool)
    return known(heads > 0) and known(heads < rows)  # type: ignore[no-any-return]


def turned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with rows before heads, or the other way round."""
    return tuple([x if x is None else x.transpose(1, 2) for x in tensors])


def together(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> tuple[list[Tensor], tuple[int, ...]]:
    """The three with as many axes each, and the shape to which their leading ones broadcast.

    Heads are broadcast, but those of key and value stay one where that is what both have.
    """
    rank = max(x.dim() for x in (query, key, value))
    if min(x.dim() for x in (query, key, value)) < 2:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise InvalidArgumentsError(
            f"query, key and value have shapes {shapes}.", hint="(..., heads, seqlen, head_dim)"
        )
    if rank == 2:
        return [query, key, value], ()
    # why: what follows, in Python, takes about as long as all else of a short call.
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
    """The length to which those of an axis broadcast; -1 if they do not.

    why not torch.broadcast_shapes: torch.compile shows its error, which cannot be caught there, and not ours.
    """
    first, *others = [n for n in lengths if n != 1] or [1]
    return first if all(n == first for n in others) else -1


def over_batches(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    qkv: list[Tensor],
    mask: Tensor | None,
    batch: tuple[int, ...],
) -> Tensor:
    """What a function of one batch gives over all leading axes, in as few calls as memory allows.

    Parameters
    ----------
    attend : callable
        Of q, k, v with one leading axis of one length, and of a mask that broadcasts.
    qkv : list of Tensor
        As `together` gives them, with `batch`.
    mask : Tensor, optional
        Broadcasts to (*batch, heads, seqlen_q, seqlen_k).
    """
    if len(batch) < 2:
        q, k, v = (x if x.shape[:-3] == batch else x.expand(*batch, *x.shape[len(batch) :]) for x in qkv)
        return attend(q, k, v, mask)
    operands = (*qkv, None if mask is None else _as_wide(mask, batch))
    return _in_turn(attend, operands, batch, _looped(operands, batch))


def _as_wide(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask with an axis for each of the batch, of length 1 where it does not change along it."""
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    lead = tuple(mask.shape[:-3])
    if len(lead) != len(batch) or any(n not in (1, whole) for n, whole in zip(lead, batch, strict=True)):
        raise InvalidArgumentsError(
            f"attn_mask has leading axes {lead}, query, key and value {batch}.",
            hint="a mask whose axes before the heads are of these lengths, or 1",
        )
    if not mask.requires_grad:  # the gradient of an expanded tensor differs along the axis where it does not
        for axis, step in enumerate(mask.stride()):
            if step == 0 and mask.shape[axis] > 1:
                mask = mask.narrow(axis, 0, 1)
    return mask


def _looped(operands: tuple[Tensor | None, ...], batch: tuple[int, ...]) -> tuple[bool, ...]:
    """Which leading axes to loop over, so that the rest of them is one axis of every operand.

    Axes of which an operand has some and is broadcast along others become one only if it is written out. That
    is done where it takes no more than was given; else the fewest calls that do without win.
    """
    there = [x for x in operands if x is not None]
    given = sum([x.numel() for x in there])

    def written_out(loops: tuple[bool, ...]) -> int:
        def mixed(x: Tensor) -> bool:
            joined = zip(x.shape, batch, loops, strict=False)
            return len({n == 1 for n, whole, loop in joined if whole != 1 and not loop}) > 1

        size: int = math.prod(batch) * sum([math.prod(x.shape[len(batch) :]) for x in there if mixed(x)])
        return size

    # why not min(): torch.compile does not read it with a key.
    fewest, chosen = math.inf, (False,) * len(batch)
    for loops in itertools.product(*((False, True) if n > 1 else (False,) for n in batch)):
        calls = math.prod([n for n, loop in zip(batch, loops, strict=True) if loop])
        if calls < fewest and written_out(loops) <= given:
            fewest, chosen = calls, loops
    return chosen


def _in_turn(
    attend: Any, operands: tuple[Any, ...], batch: tuple[int, ...], loops: tuple[bool, ...]
) -> Tensor:
    """The results of one call after the other, or of one over all axes that are left."""
    if True in loops:
        at = loops.index(True)
        rest = (*batch[:at], *batch[at + 1 :]), (*loops[:at], *loops[at + 1 :])
        # why unbind: its gradient is one array, that of many selections as many arrays of zeros.
        parts = [
            (x if x is None else x.squeeze(at),) * batch[at]
            if x is None or x.shape[at] == 1
            else x.unbind(at)
            for x in operands
        ]
        return torch.stack([_in_turn(attend, part, *rest) for part in zip(*parts, strict=True)], at)
    o: Tensor
    if not batch:
        o = attend(*operands)
        return o
    joined: list[Any] = [x if x is None else _as_one(x, batch) for x in operands]
    o = attend(*(x.expand(math.prod(batch), *x.shape[1:]) for x in joined[:3]), joined[3])
    return o.reshape(*batch, *o.shape[1:])


def _as_one(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A tensor with its leading axes as one, of length 1 if it is broadcast along all of them."""
    count = len(batch)
    if math.prod(x.shape[:count]) != 1:
        x = x.expand(*batch, *x.shape[count:])
    return x.flatten(0, count - 1)
