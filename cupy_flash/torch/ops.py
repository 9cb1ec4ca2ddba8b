"""Operators registered in torch: cupy_flash::attention and its backward, with fake shapes and autograd.

why one pair for padded and packed arrays: autograd, fake shapes and schemas differ only in the offsets.
why not for every call: passing 24 arguments through torch's dispatcher costs many times as much as eager.py.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ..call.adopt.torch import has_tangent
from ..call.opaque import opaque
from ..errors import UnsupportedError
from ..namespace import NAMESPACE
from .call import GRADIENTS, NAMES, SCHEMA, TENSORS, Call, arguments, backward, call_of, forward
from .inputs import check_one_device
from .second_order import Backward, Tangent, attend_with_tangents, tangents_of
from .shapes import check_shapes
from .vmap import one_by_one

__all__ = [
    "attend",
    "differentiate",
    "fake_forward",
    "first_derivative_only",
    "in_forward_mode",
    "library",
    "lse_shape",
    "operator",
    "operators",
]

_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
_REPRODUCIBLE = NAMES.index("reproducible") - len(TENSORS)  # its position among the options

# Torch caches compiled graphs on disk by the names of their operators: after a release, a changed schema
# needs a new name.
library = torch.library.Library(NAMESPACE, "DEF")
operators: Any = getattr(torch.ops, NAMESPACE)
library.define(f"attention({SCHEMA}) -> (Tensor, Tensor)")
library.define(
    f"attention_backward(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, {SCHEMA}) -> "
    f"({', '.join(['Tensor'] * len(GRADIENTS))})"
)


def _forward(*values: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        o, lse = forward(call_of(values), want_lse=True)
    return o, lse


def _backward(do: Any, dlse: Any, o: Any, lse: Any, *values: Any) -> tuple[Any, ...]:
    with torch.no_grad():
        do = None if do is None else do.to(o.dtype)
        grads = backward(call_of(values), do, dlse, o, lse)
    return tuple(o.new_empty(0) if grad is None else grad for grad in grads)


for _device in ("CPU", "CUDA"):
    library.impl("attention", _forward, _device)
    library.impl("attention_backward", _backward, _device)


def lse_shape(q: Any, layout: str, packed: bool) -> tuple[int, ...]:
    """The shape of the LSE of queries q."""
    *batch, a, b = q.shape[:-1] if q.dim() > 2 else (None, *q.shape[:-1])
    if q.dim() == 2:
        return (b,)
    return (*batch, b, a) if packed or layout == "bshd" else (*batch, a, b)


def _keep_out_of_decompositions() -> None:
    """Make torch's inductor call the operator instead of decomposing it.

    why: with CI set in the environment, inductor refuses operators with a decomposition (see textbook.py).
    why here: importing inductor is slow, so torch does it late, and computes these shapes before it compiles.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is not None:
        lowering.FALLBACK_ALLOW_LIST.add(f"{NAMESPACE}::attention")


@torch.library.register_fake(f"{NAMESPACE}::attention", lib=library)
def fake_forward(*values: Any) -> tuple[Any, Any]:
    """Empty results of the operator, for their shapes."""
    _keep_out_of_decompositions()
    given = dict(zip(NAMES, values, strict=True))
    tensors, layout = {name: given[name] for name in TENSORS}, given["layout"]
    check_one_device(**tensors)
    check_shapes(tensors, layout, (given["max_seqlen_q"], given["max_seqlen_k"]))
    q, v, packed = tensors["q"], tensors["v"], tensors["cu_seqlens_q"] is not None
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(q, layout, packed), dtype=acc)


@torch.library.register_fake(f"{NAMESPACE}::attention_backward", lib=library)
def _fake_backward(do: Any, dlse: Any, o: Any, lse: Any, *values: Any) -> tuple[Any, ...]:
    check_one_device(**dict(zip(TENSORS, values, strict=False)), do=do, dlse=dlse, o=o, lse=lse)
    inputs = (values[position] for position in GRADIENTS)
    return tuple(o.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    saved = (*output, *inputs[: len(TENSORS)])
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)
    ctx.options = inputs[len(TENSORS) :]
    ctx.set_materialize_grads(False)


class _FirstDerivative(torch.autograd.Function):
    """Pass gradients through, and raise if they are differentiated again, where torch has no graph."""

    @staticmethod
    def forward(ctx: Any, count: int, what: str, *grads_and_inputs: Any) -> tuple[Any, ...]:
        ctx.what = what
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads_and_inputs[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise UnsupportedError(f"{ctx.what} derivative.", hint="create_graph=False")


def first_derivative_only(
    grads: tuple[Any, ...], inputs: tuple[Any, ...], order: str = "second", of: str = "attention"
) -> tuple[Any, ...]:
    """The gradients; if autograd records them, connected to their inputs to refuse the next derivative.

    order, of: the derivative and the function that the error names.
    """
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        grads = _FirstDerivative.apply(len(grads), f"{of} has no {order}", *grads, *inputs)
    return grads


def _differentiate(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    results: list[Any] = [None] * len(NAMES)
    if do is None and dlse is None:
        return tuple(results)
    options = list(ctx.options)
    if options[_REPRODUCIBLE] is None and torch.are_deterministic_algorithms_enabled():
        options[_REPRODUCIBLE] = "run"
    saved = ctx.saved_tensors
    recorded = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    grads = (Backward.apply if recorded else differentiate)(do, dlse, *saved, *options)
    for grad, position in zip(grads, GRADIENTS, strict=True):
        if ctx.needs_input_grad[position]:
            results[position] = grad
    return tuple(results)


torch.library.register_autograd(
    f"{NAMESPACE}::attention", _differentiate, setup_context=_setup_context, lib=library
)

operator = operators.attention.default
differentiate = operators.attention_backward.default


torch.library.register_vmap(f"{NAMESPACE}::attention", one_by_one(operator), lib=library)
torch.library.register_vmap(f"{NAMESPACE}::attention_backward", one_by_one(differentiate), lib=library)


class _Function(torch.autograd.Function):
    """The operator for torch.func, whose transforms ignore the registered autograd of an operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, Any]:
        o, lse = operator(*inputs)
        return o, lse

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Any, Any]:
        o, lse, *saved = ctx.saved_tensors
        o, lse = Tangent.apply(o, lse, *tangents_of(dots), *saved, *ctx.options)
        return o, lse


@functools.partial(
    opaque,
    why="attention inside grad, vjp or jvp of torch.func is no part of a compiled program. "
    "Try: fullgraph=False; or torch.autograd.grad, or .backward(), of a compiled function",
)
def _by_function(*values: Any) -> tuple[Any, Any]:
    o, lse = _Function.apply(*values)
    return o, lse


def attend(call: Call) -> tuple[Any, Any]:
    """O and LSE by the operator, differentiable also by torch.func (grad, vjp, jvp)."""
    dual = in_forward_mode(*call.tensors)
    if dual and (results := attend_with_tangents(call)) is not None:
        return results
    differentiated = dual or _is_differentiated()
    o, lse = (_by_function if differentiated else operator)(*arguments(call))
    return o, lse


def _is_differentiated() -> bool:
    """Whether a transform of torch.func around the call differentiates: grad, vjp, jvp, but not vmap."""
    stack: Any = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in _DERIVATIVES for level in stack)


# why: torch.compile cannot trace it, and guards its programs by the stack of transforms anyway.
_is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_forward_mode(*tensors: Any) -> bool:
    """Whether any tensor has a tangent of forward-mode differentiation."""
    if torch.autograd.forward_ad._current_level < 0:
        return False
    return any(x is not None and has_tangent(x) for x in tensors)
