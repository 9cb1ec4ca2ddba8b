"""Arguments that are not plain tensors and numbers: accepted where torch accepts them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..call.adopt.torch import lost_derivative, refuse_wrapper
from ..call.checks import of_integers
from ..call.compound import QuantizedArray
from ..call.head_scale import scale_shape, times
from ..call.options import PARAMETERS
from ..call.public_names import public_name, type_phrase
from ..errors import InvalidArgumentsError, UnsupportedError
from .call import TENSORS, Call

__all__ = [
    "as_operands",
    "cast_by_context",
    "causal_alignment",
    "check_one_device",
    "check_parts",
    "check_tensors",
    "drawn_seed",
    "dtypes_of_mask",
    "is_sharded",
    "refuse_lost_gradients",
    "scaled",
    "scaled_queries",
    "widen",
    "widened",
]

# Wrappers that operators do not accept, except DTensors in attention. Other wrappers dispatch by themselves.
_CLOSED = ("DTensor", "MaskedTensor", "NestedTensor")


def is_sharded(x: Any) -> bool:
    """Whether this is a DTensor."""
    return type(x).__name__ == "DTensor"


def drawn_seed() -> torch.Tensor:
    """A seed from torch's CPU generator, as a tensor.

    why device: on another default device, reading it would wait for the GPU, or fail (meta).
    """
    return torch.randint(2**62, (), device="cpu")


def check_tensors(needed: tuple[str, ...] = (), **named: Any) -> None:
    """Refuse arguments that are not strided tensors; None is allowed except for those in `needed`."""
    _check(needed, named, str)


def check_parts(needed: tuple[str, ...] = (), **named: Any) -> None:
    """`check_tensors` for the arrays that compound options consist of."""
    _check(needed, named, public_name)


def _check(needed: tuple[str, ...], named: dict[str, Any], say: Callable[[str], str]) -> None:
    for name, x in named.items():
        if x is None and name not in needed:
            continue
        if not isinstance(x, torch.Tensor):
            raise InvalidArgumentsError(
                f"{say(name)} is {type_phrase(x)}, not a torch tensor.",
                hint=_tensor_of(x, say(name)),
            )
        if type(x).__name__ in _CLOSED:
            refuse_wrapper(x, say(name))
        if x.is_nested or x.layout is not torch.strided:
            hint = (
                "attention_varlen over its values and offsets" if x.is_nested else f"{say(name)}.to_dense()"
            )
            what = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
            raise InvalidArgumentsError(f"{say(name)} is {what}.", hint=hint)


def _tensor_of(x: Any, name: str) -> str:
    """The hint that says how to convert an argument to a tensor."""
    if isinstance(x, torch.fx.Proxy):
        return (
            "torch.export.export, which traces operators; or torch.fx.wrap of a function that makes this call"
        )
    if type(x).__name__ == "BlockMask":
        return f"cupy_flash.torch.attention(q, k, v, mask={name})"
    if isinstance(x, QuantizedArray):
        return "cupy_flash.attention, which records no gradients, on the same values"
    if name == "mask.bounds":
        return "cupy_flash.Spans(torch.as_tensor(mask.bounds))"
    if name.startswith("mask."):  # an array of a BlockMask or a RaggedMask
        return "type(mask)(*map(torch.as_tensor, mask))"
    if of_integers(x):
        return f"torch.as_tensor({name}, dtype=torch.int32)"
    if isinstance(x, (np.ndarray, np.generic, list, tuple, int, float)):
        return f"torch.as_tensor({name}); or cupy_flash.attention, which takes arrays of NumPy"
    if name == "mask" and callable(x):
        return "mask=cupy_flash.mask(f), made once, where f is your function"
    if hasattr(x, "__dlpack__"):
        return f"torch.from_dlpack({name}); or cupy_flash.attention, which takes arrays of other libraries"
    return "a torch tensor"


def check_one_device(**named: Any) -> None:
    """Refuse tensors on different devices; needed where torch computes only shapes."""
    q = named["q"]
    for name, x in named.items():
        if x is not None and x.device != q.device:
            name = public_name(name)
            on_q = f"torch.zeros_like({name}, device=q.device)" if x.is_meta else f"{name}.to(q.device)"
            raise InvalidArgumentsError(f"{name} is on {x.device}, q on {q.device}.", hint=on_q)


def causal_alignment(bias: Any) -> str | None:
    """The alignment of a CausalBias of torch; None for any other object."""
    if type(bias).__module__ != "torch.nn.attention.bias":
        return None
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"


def _by_options(call: Call, name: str, align: str) -> Call:
    """The call with a CausalBias replaced by the options causal and align."""
    at = TENSORS.index(name)
    bias, options = call.tensors[at], call.options
    rows = -3 if options.layout == "bshd" else -2
    lengths = call.tensors[0].shape[rows], call.tensors[1].shape[rows]
    if call.tensors[TENSORS.index("cu_seqlens_q")] is not None:
        raise InvalidArgumentsError(
            f"{name} is a CausalBias.", hint=f'{name}=None, causal=True, align="{align}"'
        )
    if lengths != (bias.seq_len_q, bias.seq_len_kv):
        raise InvalidArgumentsError(
            f"{name} is a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys; "
            f"there are {lengths[0]} and {lengths[1]}.",
            hint=f'{name}=None, causal=True, align="{align}"',
        )
    if options.align not in (None, align):
        raise InvalidArgumentsError(
            f"{name} is a CausalBias aligned {align!r}, and align is {options.align!r}.",
            hint=f"{name}=None, causal=True",
        )
    tensors = (*call.tensors[:at], None, *call.tensors[at + 1 :])
    return call._replace(tensors=tensors, options=options._replace(causal=True, align=align))


def as_operands(call: Call) -> Call:
    """The call with only tensors that an operator accepts; refuse other objects."""
    for name in ("mask", "bias"):
        align = causal_alignment(call.tensors[TENSORS.index(name)])
        if align is not None:
            call = _by_options(call, name, align)
    others = {name: x for name, x in zip(TENSORS, call.tensors, strict=True) if not is_sharded(x)}
    check_parts(("q", "k", "v"), **others)
    return call


def scaled_queries(call: Call) -> Call:
    """The call with q multiplied by the scale tensor, so that the scale gets a gradient."""
    q, *others = call.tensors
    product = scaled(q, call.options.scale, call.options.layout)
    return call._replace(tensors=(product, *others), options=call.options._replace(scale=1.0))


def scaled(q: Any, scale: Any, layout: str) -> Any:
    """Q times a scale tensor of one element or one per head."""
    one = scale.numel() == 1
    return times(q, scale.reshape(() if one else scale_shape(tuple(scale.shape), tuple(q.shape), layout)))


def cast_by_context(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """q, k and v in the dtype of torch.autocast, if that is enabled; float64 is not cast.

    Callers multiply q by a scale tensor before, as in torch's function under autocast: one rounding, not two.
    """
    # why here: an operator's registered autocast has one fixed dtype per device, not the user's.
    device = q.device.type if isinstance(q, torch.Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple([x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)])


def dtypes_of_mask(query: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes that torch accepts for a mask of this query; with torch.autocast also 16-bit floats."""
    dtypes = torch.bool, torch.float32, query.dtype
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        return *dtypes, torch.float16, torch.bfloat16
    return dtypes


def widen(given: dict[str, Any], q: Any) -> None:
    """Replace 16-bit parameters among the arrays of a call by wider ones."""
    for name in PARAMETERS:
        if name in given:
            given[name] = widened(given[name], q)


def widened(x: Any, q: Any) -> Any:
    """A 16-bit parameter, as 16-bit models have it, in float32, or float64 as q; the cast is recorded."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
        return x
    return x.to(torch.float64 if getattr(q, "dtype", None) == torch.float64 else torch.float32)


def refuse_lost_gradients(**named: Any) -> None:
    """Refuse tensors that require a gradient or have a tangent, because none is computed for them."""
    for name, x in named.items():
        if isinstance(x, torch.Tensor) and lost_derivative(x):
            raise UnsupportedError(f"{name} has no gradient.", hint=f"{name}.detach()")
