"""Calls outside of compilation and transforms: run without the dispatcher, recorded at the least cost."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .call import GRADIENTS, Call, arguments, backward, deterministic, forward
from .ops import differentiate, first_derivative_only
from .second_order import Backward

__all__ = [
    "OBSERVERS",
    "are_plain_memory",
    "are_tensors",
    "attend_eagerly",
    "gradients",
    "in_batches",
    "is_plain",
    "is_transformed",
    "recorded",
]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_leaves = operator.itemgetter(*GRADIENTS)
# Functions whose results tell whether a transform of torch.func, a dispatch mode or a trace observes calls.
OBSERVERS = _transforms, _dispatch_modes, _tracing_state = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._get_tracing_state,
)


def in_batches(x: Any) -> bool:
    """Whether a gradient is a batch of several, from is_grads_batched."""
    # why programs first: compiled autograd reads backward passes, and cannot read this function
    if x is None or torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))


def are_tensors(call: Call) -> bool:
    """Whether q, k and v are tensors, and every array is None or of one of torch's own tensor classes."""
    q, k, v, *_ = call.tensors
    return _PLAIN.issuperset(map(type, call.tensors)) and not (q is None or k is None or v is None)


def is_plain(*tensors: Any) -> bool:
    """Whether only autograd needs to observe the call: no compiler, and `are_plain_memory`."""
    return not torch.compiler.is_compiling() and are_plain_memory(*tensors)


def is_transformed() -> bool:
    """Whether a transform of torch.func, a dispatch mode or a trace observes calls."""
    return bool(_transforms() or _dispatch_modes() or _tracing_state() is not None)


def are_plain_memory(*tensors: Any) -> bool:
    """Whether kernels can read these tensors from memory now.

    No transform, mode, subclass or meta device; and no lazy negation or zero tensor, whose memory does not
    hold its values: only torch's dispatcher resolves those.
    """
    if (
        is_transformed()
        or not _PLAIN.issuperset(map(type, tensors))
        or (tensors[0] is not None and tensors[0].is_meta)
    ):
        return False
    for x in tensors:  # noqa: SIM110  (any() with a generator takes twice as long)
        if x is not None and (x.is_neg() or x._is_zerotensor()):
            return False
    return True


def attend_eagerly(call: Call, want_lse: bool) -> Any:
    """O, or O and LSE with want_lse; recorded in autograd's graph if an input requires grad."""
    if torch.is_grad_enabled():
        leaves = _leaves(call.tensors)
        for x in leaves:
            if x is not None and x.requires_grad:
                return _record(*leaves, call, want_lse)
    return forward(call, want_lse)


class _Recorded(torch.autograd.Function):
    """One call in autograd's graph.

    why the old style, with the context in forward: for setup_context torch binds a signature at each call,
    which takes longer than everything else here.
    """

    @staticmethod
    def forward(ctx: Any, *leaves_and_call: Any) -> Any:
        *_, call, want_lse = leaves_and_call
        o, lse = forward(call, want_lse=True)
        ctx.save_for_backward(*call.tensors, o, lse)
        ctx.options, ctx.longest = call[1:]
        ctx.set_materialize_grads(False)
        return (o, lse) if want_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        if do is None and dlse is None:
            return (None,) * (len(GRADIENTS) + 2)
        *tensors, o, lse = ctx.saved_tensors
        call = Call(tuple(tensors), ctx.options, ctx.longest)
        return *gradients(call, do, dlse, o, lse, ctx.needs_input_grad), None, None


def gradients(call: Call, do: Any, dlse: Any, o: Any, lse: Any, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    """The gradients of a recorded call, in the order of GRADIENTS."""
    call = call._replace(options=deterministic(call.options))
    batched, again = in_batches(do) or in_batches(dlse), torch.is_grad_enabled()
    # why saved tensors are checked again: hooks may have packed them, and return lazy views
    if is_plain(do, dlse, o, lse, *call.tensors) and not batched and not again:
        return backward(call, do, dlse, o, lse)
    # a batch of gradients, traced, or to be differentiated again
    function = Backward.apply if again and not batched else differentiate
    grads: Any = function(do, dlse, o, lse, *arguments(call))
    grads = tuple(g if w else None for g, w in zip(grads, wanted, strict=False))
    if batched:
        grads = first_derivative_only(grads, (do, dlse, *call.tensors, o, lse))
    return tuple(grads)


def recorded(function: Any) -> Any:
    """The `apply` of an autograd function, for calls where `is_plain` holds.

    why not its own apply: that first searches for wrappers of torch.func, which takes 4 us; `is_plain` has
    excluded them.
    """
    of_all: Any = super(torch.autograd.Function, function)
    return of_all.apply


_record = recorded(_Recorded)
