"""The operators torch knows: cupy_flash::attention and its backward, with shapes for tracing and autograd.

why one pair for padded and packed arrays: autograd, fake shapes and schemas are the same but for the offsets.
"""

from __future__ import annotations

from typing import Any

import torch

from ..api import attention, attention_backward
from ..errors import Unsupported
from ..varlen import attention_varlen, attention_varlen_backward

__all__ = ["attend", "attend_under_functorch", "refuse_forward_mode"]

_ARRAYS = "Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
_ARRAYS += "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt? left, SymInt? right, SymInt? align, "
    "bool bottom_right, float? scale, float? softcap, float dropout, int? seed, str layout, str? precision"
)
_ARRAY_NAMES = tuple(part.split()[-1] for part in _ARRAYS.split(","))
_OPTION_NAMES = tuple(part.split()[-1] for part in _OPTIONS.split(","))
# Positions of the forward operator's arguments whose gradient is computed.
_DIFFERENTIABLE = {"q": 0, "k": 1, "v": 2, "bias": 4, "sinks": 6}

_library = torch.library.Library("cupy_flash", "DEF")
_library.define(f"attention(Tensor q, Tensor k, Tensor v, {_ARRAYS}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor? do, Tensor? dlse, bool deterministic, Tensor q, Tensor k, Tensor v, "
    f"Tensor o, Tensor lse, {_ARRAYS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _keywords(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords of our functions from an operator's arguments."""
    named = dict(zip(_ARRAY_NAMES, (None if x is None else x.detach() for x in arrays), strict=True))
    named |= zip(_OPTION_NAMES, options, strict=True)
    named["window"] = (named.pop("left"), named.pop("right"))
    if named.pop("bottom_right"):
        named["align"] = "bottom_right"
    if named["seed"] is not None:
        named["seed"] %= 2**64
    if named["cu_seqlens_q"] is None:
        for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
            del named[name]
    else:
        del named["layout"]
    return named


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    named = _keywords(rest[: len(_ARRAY_NAMES)], rest[len(_ARRAY_NAMES) :])
    function = attention_varlen if "cu_seqlens_q" in named else attention
    o, lse = function(q.detach(), k.detach(), v.detach(), return_lse=True, **named)
    return o, lse


def _backward(do: Any, dlse: Any, deterministic: bool, *rest: Any) -> tuple[Any, ...]:
    q, k, v, o, lse = (x.detach() for x in rest[:5])
    named = _keywords(rest[5 : 5 + len(_ARRAY_NAMES)], rest[5 + len(_ARRAY_NAMES) :])
    do = torch.zeros_like(o) if do is None else do.detach().to(o.dtype)
    dlse = None if dlse is None else dlse.detach()
    function = attention_varlen_backward if "cu_seqlens_q" in named else attention_backward
    grads = function(do, q, k, v, o, lse, dlse=dlse, deterministic=deterministic, **named)
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _device)
    _library.impl("attention_backward", _backward, _device)


def _rows(q: Any, layout: str, packed: bool) -> tuple[int, ...]:
    """Shape of the LSE."""
    *batch, a, b = q.shape[:-1] if q.dim() > 2 else (None, *q.shape[:-1])
    if q.dim() == 2:
        return (b,)
    return (*batch, b, a) if packed or layout == "bshd" else (*batch, a, b)


@torch.library.register_fake("cupy_flash::attention", lib=_library)
def _fake_forward(q: Any, _k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    packed = rest[_ARRAY_NAMES.index("cu_seqlens_q")] is not None
    layout = rest[len(_ARRAY_NAMES) + _OPTION_NAMES.index("layout")]
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(_rows(q, layout, packed), dtype=acc)


@torch.library.register_fake("cupy_flash::attention_backward", lib=_library)
def _fake_backward(_do: Any, _dlse: Any, _deterministic: bool, *rest: Any) -> tuple[Any, ...]:
    q, k, v = rest[:3]
    named = dict(zip(_ARRAY_NAMES, rest[5:], strict=False))
    extra = (named["bias"], named["sinks"])
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        *(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in extra),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    first_option = 3 + len(_ARRAY_NAMES)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:first_option])
    ctx.options = inputs[first_option:]
    ctx.count = len(inputs)
    ctx.set_materialize_grads(False)


class _FirstDerivative(torch.autograd.Function):
    """Hands gradients on, and raises when they are differentiated again, where torch would see no graph."""

    @staticmethod
    def forward(_ctx: Any, count: int, *grads_and_inputs: Any) -> tuple[Any, ...]:
        return tuple(grad.view_as(grad) for grad in grads_and_inputs[:count])

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> None:
        raise Unsupported("attention has no second derivative.", hint="create_graph=False")


def _differentiate(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    results: list[Any] = [None] * ctx.count
    if do is None and dlse is None:
        return tuple(results)
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = torch.ops.cupy_flash.attention_backward.default(
        do, dlse, deterministic, *ctx.saved_tensors, *ctx.options
    )
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        grads = _FirstDerivative.apply(len(grads), *grads, do, dlse, *ctx.saved_tensors)
    for grad, position in zip(grads, _DIFFERENTIABLE.values(), strict=True):
        if ctx.needs_input_grad[position]:
            results[position] = grad
    return tuple(results)


torch.library.register_autograd(
    "cupy_flash::attention", _differentiate, setup_context=_setup_context, lib=_library
)

attend = torch.ops.cupy_flash.attention.default


class _Function(torch.autograd.Function):
    """The same operator for torch.func, whose transforms do not see an operator's registered autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, Any]:
        o, lse = attend(*inputs)
        return o, lse

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)


def attend_under_functorch(*inputs: Any) -> tuple[Any, Any]:
    """`attend`, differentiable by torch.func.grad and its relatives."""
    o, lse = _Function.apply(*inputs)
    return o, lse


def refuse_forward_mode(*tensors: Any) -> None:
    """Raise if a tangent of forward-mode differentiation would be dropped in silence."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported(
                "attention has no forward-mode derivative.", hint="reverse mode: torch.func.vjp or backward()"
            )
