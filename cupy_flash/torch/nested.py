"""Nested tensors of torch's jagged layout, computed as packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgumentsError
from .call import TENSORS, Call
from .eager import are_plain_memory

__all__ = ["are_nested", "are_ragged_rows", "nested_like", "packed"]


def are_nested(call: Call) -> bool:
    """Whether the queries are a nested tensor."""
    return isinstance(call.tensors[0], torch.Tensor) and call.tensors[0].is_nested


def are_ragged_rows(x: Any) -> bool:
    """Whether x is jagged, (batch, heads, ragged length, features), as torch's own function accepts."""
    jagged = isinstance(x, torch.Tensor) and x.is_nested and x.layout is torch.jagged
    return jagged and x.dim() == 4 and getattr(x, "_ragged_idx", 0) == 2


def _in_rows(x: Any, name: str, layout: str) -> Any:
    """The tensor as (batch, ragged length, heads, features); refuse any other nesting."""
    axes = (
        "(batch, heads, ragged length, features)"
        if layout == "bhsd"
        else "(batch, ragged length, heads, ...)"
    )
    if not isinstance(x, torch.Tensor) or not x.is_nested:
        raise InvalidArgumentsError(
            f"{name} is not a nested tensor, and q is.", hint="all three nested, or none"
        )
    if x.layout is not torch.jagged:
        raise InvalidArgumentsError(
            f"{name} is a nested tensor of layout {x.layout}.",
            hint="torch.nested.nested_tensor(..., layout=torch.jagged)",
        )
    inside: Any = x
    axis = 2 if layout == "bhsd" else 1
    if x.dim() != 4 or inside._ragged_idx != axis:
        raise InvalidArgumentsError(
            f"{name} is a NestedTensor of {x.dim()} axes, of which axis {inside._ragged_idx} is ragged.",
            hint=f'{axes} for layout="{layout}"',
        )
    inside = inside.transpose(1, 2) if layout == "bhsd" else inside
    if inside.lengths() is not None:
        turned = ".transpose(1, 2)" * (layout == "bhsd")  # torch copies only what is ragged in axis 1
        raise InvalidArgumentsError(
            f"{name} is a NestedTensor with holes.", hint=f"{name}{turned}.contiguous(){turned}"
        )
    return inside


def _in_a_program(x: Any) -> bool:
    """Whether the values of the offsets are unknown: in a compiled or traced program."""
    return torch.compiler.is_compiling() or not are_plain_memory(x.offsets())


def _alike(a: Any, b: Any) -> bool:
    """Whether two tensors have the same offsets, or offsets of equal values.

    Values are compared if the tensors do not share offsets, which on a GPU waits for the stream.
    """
    # torch's symbolic lengths of ragged axes are equal if the offsets are the same tensor.
    if a.shape[1] == b.shape[1]:
        return True
    if _in_a_program(a) or _in_a_program(b) or a.shape[0] != b.shape[0]:
        return False
    return bool((a.offsets() == b.offsets()).all())


def _check_alike(k: Any, v: Any, turned: str) -> None:
    """Refuse keys and values with different offsets."""
    if _alike(k, v):
        return
    if _in_a_program(k) or _in_a_program(v):
        raise InvalidArgumentsError(
            "k and v have different offsets, whose values a program does not read.",
            hint=f"v=torch.nested.nested_tensor_from_jagged(v{turned}.values(), k{turned}.offsets()){turned}",
        )
    raise InvalidArgumentsError(
        "k and v are ragged by different lengths.",
        [(name, str(x.offsets().diff().tolist())) for name, x in (("k", k), ("v", v))],
        hint="as many values as keys in each sequence",
    )


def packed(call: Call) -> Call:
    """The call with nested q, k and v as packed rows and offsets."""
    tensors = dict(zip(TENSORS, call.tensors, strict=True))
    rows = {name: _in_rows(tensors[name], name, call.options.layout) for name in ("q", "k", "v")}
    if tensors["cu_seqlens_q"] is not None:
        raise InvalidArgumentsError(
            "q is a nested tensor, which has its own offsets.",
            hint='cupy_flash.torch.attention(q, k, v, layout="bshd")',
        )
    _check_alike(rows["k"], rows["v"], ".transpose(1, 2)" * (call.options.layout == "bhsd"))
    cut_q = rows["q"].offsets().to(torch.int32)
    cut_k = cut_q if _alike(rows["q"], rows["k"]) else rows["k"].offsets().to(torch.int32)
    tensors |= {name: x.values() for name, x in rows.items()}
    tensors |= {"cu_seqlens_q": cut_q, "cu_seqlens_k": cut_k}
    # None if torch has not cached it; the operator then reads the offsets.
    longest = rows["q"]._maybe_max_seqlen, rows["k"]._maybe_max_seqlen
    return call._replace(
        tensors=tuple(tensors[name] for name in TENSORS),
        options=call.options._replace(layout="bshd"),
        longest=longest,
    )


def nested_like(q: Any, layout: str, rows: Any) -> Any:
    """Packed rows as a nested tensor with the offsets and axes of q."""
    inside = q.transpose(1, 2) if layout == "bhsd" else q
    made = torch.nested.nested_tensor_from_jagged(
        rows,
        offsets=inside.offsets(),
        min_seqlen=inside._maybe_min_seqlen,
        max_seqlen=inside._maybe_max_seqlen,
    )
    return made.transpose(1, 2) if layout == "bhsd" else made
