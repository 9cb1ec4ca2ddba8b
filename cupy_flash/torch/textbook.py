"""Decomposition of the operator into torch's own operators, for exporters such as torch.onnx.export.

It is the textbook formula with a full score matrix; options that it does not support are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import register_decomposition

from ..errors import UnsupportedError
from .call import NAMES, TENSORS
from .ops import fake_forward, operator

__all__ = ["attention_by_textbook"]

_KNOWN = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks")


# why: fake tensors with symbolic sizes would compute their shapes by the decomposition without this.
register_decomposition(operator, type="meta")(fake_forward)


@register_decomposition(operator)  # type: ignore[untyped-decorator]
def attention_by_textbook(*values: Any) -> tuple[Any, Any]:
    """O and LSE from the operator's arguments."""
    given = dict(zip(NAMES, values, strict=True))
    odd = [name for name in TENSORS if given[name] is not None and name not in _KNOWN]
    if odd or given["dropout"]:
        raise UnsupportedError(
            f"{(*odd, 'dropout')[0]} cannot be written in torch's own operators, which this exporter needs.",
            hint="mask= or bias= for what attends to what; model.eval() before the export",
        )
    dtype, rank = given["q"].dtype, given["q"].dim()
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    swapped = given["layout"] == "bshd" and rank > 2
    # why four axes: so many may a mask, a bias or slopes have, whatever the rank of q.
    q, k, v = (given[name].to(acc)[(None,) * (4 - rank)] for name in ("q", "k", "v"))
    if swapped:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    scores = (q * scale) @ k.transpose(-2, -1)
    if given["softcap"] is not None:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    if given["bias"] is not None:
        scores = scores + given["bias"].to(acc)
    i = torch.arange(q.shape[-2], device=q.device)[:, None] + (given["align"] or 0)
    j = torch.arange(k.shape[-2], device=q.device)
    if given["alibi_slopes"] is not None:
        scores = scores - given["alibi_slopes"][..., None, None] * (i - j).abs()
    seen = [] if given["mask"] is None else [given["mask"]]
    seen += [j <= i] if given["causal"] else []
    seen += [] if given["left"] is None else [j >= i - given["left"]]
    seen += [] if given["right"] is None else [j <= i + given["right"]]
    for pairs in seen:
        scores = torch.where(pairs, scores, -torch.inf)
    # A fully masked row has the result 0.
    top = scores.amax(-1, keepdim=True)
    sinks = None if given["sinks"] is None else given["sinks"][:, None, None]
    top = top if sinks is None else torch.maximum(top, sinks)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks - top)
    o = (weights @ v) / torch.where(total == 0, 1.0, total)
    lse = (top + torch.log(total)).squeeze(-1)
    own = (0,) * (4 - rank)
    return (o.transpose(-3, -2) if swapped else o)[own].to(dtype), lse[own]
