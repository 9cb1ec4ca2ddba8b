"""Attention over a part of the keys, whose results are then combined with those over other parts.

Partial results keep the accumulator dtype: rounding each to 16 bits would make the error of the
combined result up to 1.4 times that of one call.
"""

from __future__ import annotations

from typing import Any

from ..api import Gradients, adopted, run_backward, run_forward
from ..call.given import split
from ..varlen import pack, split_packed

__all__ = ["attention", "attention_backward", "attention_varlen", "attention_varlen_backward"]


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """O and LSE, as in `api.attention`."""
    arrays, values = split(options)
    raw = adopted(q=q, k=k, v=v, **arrays)
    return run_forward(raw, values, True, unrounded=True)


def attention_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **options: Any) -> Gradients[Any]:
    """Gradients, as in `api.attention_backward`."""
    arrays, values = split(options)
    raw = adopted(do=do, q=q, k=k, v=v, o=o, lse=lse, **arrays)
    return run_backward(raw, values, unrounded=True)


def attention_varlen(q: Any, k: Any, v: Any, *cuts: Any, **options: Any) -> Any:
    """O and LSE, as in `varlen.attention_varlen`; `cuts` are the offsets of q and k."""
    arrays, values, packing = split_packed(options)
    raw = adopted(q=q, k=k, v=v, **arrays)
    packed = pack(raw, (cuts[0], cuts[1]), *packing)
    return run_forward(raw, values, True, None, packed, unrounded=True)


def attention_varlen_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *cuts: Any, **options: Any
) -> Gradients[Any]:
    """Gradients, as in `varlen.attention_varlen_backward`."""
    arrays, values, packing = split_packed(options)
    raw = adopted(do=do, q=q, k=k, v=v, o=o, lse=lse, **arrays)
    return run_backward(raw, values, pack(raw, (cuts[0], cuts[1]), *packing), unrounded=True)
