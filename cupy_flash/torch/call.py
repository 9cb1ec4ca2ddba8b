"""A call as a value, and functions that run it: shared by the eager path and the operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..api import adopted, run_backward, run_forward
from ..call.checks import pair
from ..call.given import Options, Packing, split
from ..call.operands import Views
from ..call.options import WITH_GRADIENT, CompiledOptions
from ..call.values import checked_seed
from ..errors import InvalidArgumentsError, UnsupportedError
from ..varlen import pack
from .schema import arguments_of, array_names, schema

__all__ = [
    "ARGUMENTS",
    "GRADIENTS",
    "NAMES",
    "NO_GRADIENTS",
    "SCHEMA",
    "TENSORS",
    "Call",
    "adopted_call",
    "arguments",
    "backward",
    "call_of",
    "deterministic",
    "forward",
]

_ARRAYS = array_names(CompiledOptions)
TENSORS = ("q", "k", "v", *_ARRAYS, "cu_seqlens_q", "cu_seqlens_k")
# Positions in TENSORS: of arrays with a gradient, in the order of `Gradients`, and of options without one.
GRADIENTS = tuple(map(TENSORS.index, WITH_GRADIENT))
NO_GRADIENTS = tuple(TENSORS.index(name) for name in _ARRAYS if name not in WITH_GRADIENT)
# The arguments of the operator after its tensors, in order.
ARGUMENTS = arguments_of(
    CompiledOptions,
    {
        "window": "SymInt? left, SymInt? right",
        "align": "SymInt? align, bool bottom_right",
        # why a tensor: a number would be a constant of the compiled graph, and each new seed recompile it.
        "seed": "Tensor? seed",
    },
)
NAMES = (*TENSORS, *(argument.name for argument in ARGUMENTS))
SCHEMA = schema([f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in TENSORS], ARGUMENTS)


class Call(NamedTuple):
    """The arguments of a call."""

    # Tensors in the order of TENSORS, None if not given. The sequences are packed if cu_seqlens_q is given.
    tensors: tuple[Any, ...]
    options: Options  # the options that are not arrays
    # Length of the longest packed sequence of queries and of keys; None if not given.
    longest: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(
        cls, q: Any, k: Any, v: Any, options: dict[str, Any], cuts: tuple[Any, Any] = (None, None)
    ) -> Call:
        """A call of q, k, v and the given options; packed if `cuts` has offsets of queries and keys."""
        longest = options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None)
        arrays, values = split(options)
        return cls((q, k, v, *[arrays.get(name) for name in _ARRAYS], *cuts), values, longest)


def deterministic(options: Options) -> Options:
    """Options of a backward pass; reproducible if torch.use_deterministic_algorithms is on."""
    if options.reproducible is None and torch.are_deterministic_algorithms_enabled():
        return options._replace(reproducible="run")
    return options


def adopted_call(call: Call, **more: Any) -> tuple[Views, Packing | None]:
    """The arrays of a call by name, and the packing of packed sequences, or None."""
    # why no keyword argument for each: most are None, and a short call spends its time on such arguments
    named = {name: x for name, x in zip(TENSORS, call.tensors, strict=True) if x is not None}
    cuts = named.pop("cu_seqlens_q", None), named.pop("cu_seqlens_k", None)
    used = named.pop("seqused_k", None), named.pop("seqused_q", None)
    raw = adopted(**named, **more)
    return raw, None if cuts[0] is None else pack(raw, cuts, call.longest, *used)


def forward(call: Call, want_lse: bool) -> Any:
    """O, or O and LSE."""
    raw, packing = adopted_call(call)
    return run_forward(raw, call.options, want_lse, packing=packing)


def backward(call: Call, do: Any, dlse: Any, o: Any, lse: Any) -> tuple[Any, ...]:
    """The gradients of a call, in the order of GRADIENTS, from do and dlse; one of them may be None."""
    do = o.new_zeros(o.shape) if do is None else do
    raw, packing = adopted_call(call, do=do, dlse=dlse, o=o, lse=lse)
    return run_backward(raw, call.options, packing)[: len(GRADIENTS)]


def arguments(call: Call) -> tuple[Any, ...]:
    """The arguments of the operator."""
    options = call.options
    left, right = pair(options.window)
    align, bottom_right = _position(call)
    values: dict[str, Any] = {
        "left": left, "right": right, "align": align, "bottom_right": bottom_right,
        "seed": _held(options.seed), "max_seqlen_q": call.longest[0], "max_seqlen_k": call.longest[1],
    }  # fmt: skip
    for argument in ARGUMENTS:
        if argument.name not in values:
            values[argument.name] = argument.of(getattr(options, argument.name))
    return (*call.tensors, *[values[argument.name] for argument in ARGUMENTS])


def _position(call: Call) -> tuple[Any, bool]:
    """Values of align (the position of query 0) and bottom_right; (None, True) if packed and bottom-right."""
    q, k, options = *call.tensors[:2], call.options
    align = options.align
    if align == "bottom_right":
        if call.tensors[TENSORS.index("cu_seqlens_q")] is not None:
            return None, True
        rows = q.dim() - 2 if options.layout == "bhsd" or q.dim() == 2 else q.dim() - 3
        return k.shape[rows] - q.shape[rows], False
    if align == "top_left":
        return 0, False
    if isinstance(align, str):
        raise InvalidArgumentsError(
            f"align is {align!r}.", hint='align="top_left", "bottom_right" or an integer'
        )
    return align, False


def _held(seed: Any) -> torch.Tensor | None:
    """The seed as a tensor, or None."""
    if seed is None or isinstance(seed, torch.Tensor):
        return seed
    if not isinstance(seed, int):
        seed = checked_seed(seed)
    if seed >= 2**63:
        raise UnsupportedError(f"seed is {seed}; seeds of torch have 63 bits.", hint="seed % 2**63")
    return torch.full((), seed, dtype=torch.int64, device="cpu")


def call_of(values: tuple[Any, ...]) -> Call:
    """The call from the arguments of the operator."""
    tensors, values = values[: len(TENSORS)], values[len(TENSORS) :]
    given = {argument.name: value for argument, value in zip(ARGUMENTS, values, strict=True)}
    longest = given.pop("max_seqlen_q"), given.pop("max_seqlen_k")
    given["window"] = given.pop("left"), given.pop("right")
    if given.pop("bottom_right"):
        given["align"] = "bottom_right"
    if given["seed"] is not None:
        given["seed"] = int(given["seed"])
    return Call(tensors, Options(**given), longest)
