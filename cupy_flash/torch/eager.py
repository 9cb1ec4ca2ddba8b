"""Calls outside of compilation and transforms: straight to the library, recorded as cheaply as torch can."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call, backward, forward
from .ops import first_derivative_only

__all__ = ["attend_eagerly", "is_plain"]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


def is_plain(call: Call) -> bool:
    """Whether nobody but autograd needs to see the operator: no compiler, transform, mode or subclass."""
    return (
        not torch.compiler.is_compiling()
        and not _transforms()
        and not _dispatch_modes()
        and _tracing_state() is None
        and _PLAIN.issuperset(map(type, call.tensors))
        and call.tensors[0].device.type != "meta"
    )


def attend_eagerly(call: Call, want_lse: bool) -> Any:
    """O, or O and LSE if that is wanted; recorded if a gradient will be."""
    if torch.is_grad_enabled():
        q, k, v, _, bias, _, sinks, *_ = call.tensors
        if (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ):
            return _record(q, k, v, bias, sinks, call, want_lse)
    return forward(call, want_lse)


class _Recorded(torch.autograd.Function):
    """One call in autograd's graph.

    why the old form, with the context in forward: for setup_context torch binds a signature at each call,
    which takes longer than everything else here.
    """

    @staticmethod
    def forward(
        ctx: Any, _q: Any, _k: Any, _v: Any, _bias: Any, _sinks: Any, call: Call, want_lse: bool
    ) -> Any:
        o, lse = forward(call, want_lse=True)
        ctx.save_for_backward(*call.tensors, o, lse)
        ctx.options, ctx.longest, ctx.deterministic = call[1:]
        ctx.set_materialize_grads(False)
        return (o, lse) if want_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        if do is None and dlse is None:
            return (None,) * 7
        *tensors, o, lse = saved = ctx.saved_tensors
        deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
        call = Call(tuple(tensors), ctx.options, ctx.longest, deterministic)
        with torch.no_grad():
            grads = backward(call, do, dlse, o, lse)
        return *first_derivative_only(grads, (do, dlse, *saved)), None, None


# why not _Recorded.apply: it first looks for wrappers of torch.func, for 4 us; is_plain has excluded them.
_record = super(torch.autograd.Function, _Recorded).apply
