"""One call as a value, run by the library: what the eager path and the operators of torch share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..api import Gradients, adopted, run_backward, run_forward
from ..call.operands import Views
from ..call.options import Options, Packing
from ..errors import InvalidArguments, Unsupported
from ..varlen import pack

__all__ = ["OPTIONS", "TENSORS", "Call", "arguments", "backward", "call_of", "forward"]

TENSORS = (
    "q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
)  # fmt: skip
# Options as an operator's schema can spell them, in the order of its arguments.
OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt? left, SymInt? right, SymInt? align, "
    "bool bottom_right, float? scale, float? softcap, float dropout, Tensor? seed, str layout, "
    "str? precision, bool deterministic"
)


class Call(NamedTuple):
    """What is asked for.

    Attributes
    ----------
    tensors : tuple of Tensor or None
        By the names in TENSORS; with offsets the sequences are packed.
    options : Options
    longest : (int or None, int or None)
        Longest lengths of packed queries and keys.
    deterministic : bool
        Of the gradients.
    """

    tensors: tuple[Any, ...]
    options: Options
    longest: tuple[int | None, int | None] = (None, None)
    deterministic: bool = False


def _adopted(call: Call, **more: Any) -> tuple[Views, Packing | None]:
    """The arrays of a call by name, and the packing of packed ones."""
    *padded, cut_q, cut_k, used = call.tensors
    raw = adopted(**dict(zip(TENSORS, padded, strict=False)), **more)
    return raw, None if cut_q is None else pack(raw, (cut_q, cut_k), call.longest, used)


def forward(call: Call, want_lse: bool) -> Any:
    """O, or O and LSE."""
    raw, packing = _adopted(call)
    return run_forward(raw, call.options, want_lse, packing=packing)


def backward(call: Call, do: Any, dlse: Any, o: Any, lse: Any) -> Gradients[Any]:
    """Every gradient of a call, from those of its results; either of these may be None, not both."""
    do = o.new_zeros(o.shape) if do is None else do
    raw, packing = _adopted(call, do=do, dlse=dlse, o=o, lse=lse)
    return run_backward(raw, call.options, call.deterministic, packing)


def arguments(call: Call) -> tuple[Any, ...]:
    """The arguments of the operator."""
    q, k, options = *call.tensors[:2], call.options
    packed = call.tensors[TENSORS.index("cu_seqlens_q")] is not None
    left, right = options.window or (None, None)
    align, bottom_right = options.align, False
    if align == "bottom_right" and packed:
        align, bottom_right = None, True
    elif align == "bottom_right":
        rows = q.dim() - 2 if options.layout == "bhsd" or q.dim() == 2 else q.dim() - 3
        align = k.shape[rows] - q.shape[rows]
    elif align == "top_left":
        align = 0
    elif isinstance(align, str):
        raise InvalidArguments(f"align is {align!r}.", hint='align="top_left", "bottom_right" or an integer')
    scale, softcap = options.scale, options.softcap
    seed: Any = options.seed
    if seed is not None and not isinstance(seed, torch.Tensor):
        if seed >= 2**63:
            raise Unsupported(f"seed is {seed}; torch's programs hold 63 bits.", hint="seed % 2**63")
        # why a tensor: a number would be a constant of the compiled program, and each new one compile again.
        seed = torch.full((), seed, dtype=torch.int64)
    return (
        *call.tensors, *call.longest, bool(options.causal), left, right, align, bottom_right,
        None if scale is None else float(scale), None if softcap is None else float(softcap),
        float(options.dropout), seed, options.layout, options.precision, call.deterministic,
    )  # fmt: skip


def call_of(values: tuple[Any, ...]) -> Call:
    """The call whose arguments these are."""
    tensors, values = values[: len(TENSORS)], values[len(TENSORS) :]
    longest, values, last = values[:2], values[2:-3], values[-3:]
    causal, left, right, align, bottom_right, scale, softcap, dropout, seed = values
    layout, precision, deterministic = last
    align = "bottom_right" if bottom_right else align
    seed = None if seed is None else int(seed)
    options = Options(causal, (left, right), align, scale, softcap, dropout, seed, layout, precision)
    return Call(tensors, options, (longest[0], longest[1]), deterministic)
