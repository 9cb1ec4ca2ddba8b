"""Second derivatives in torch: operators for J and H, and autograd functions that connect them.

J is the tangent of attention, B its gradient, H the directional derivative of B. J is linear in the tangents
and B is its transpose, so the derivatives of J and B need only J, B and H; H has no derivative.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..api import adopted
from ..call.tangents import TANGENTS
from ..derivatives.second_order import run_hvp, run_jvp
from ..derivatives.with_jvp import run_with_jvp
from ..errors import UnsupportedError
from ..namespace import NAMESPACE
from .call import SCHEMA, TENSORS, Call, adopted_call, arguments, call_of
from .vmap import directions_at_once

__all__ = ["Backward", "Tangent", "attend_with_tangents", "directions", "tangents_of"]

_PRIMALS = tuple(TENSORS.index(name[1:]) for name in TANGENTS)
_N = len(TANGENTS)
_ALONG = ", ".join(f"Tensor? {name}" for name in TANGENTS)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_operators: Any = getattr(torch.ops, NAMESPACE)
_library.define(f"attention_jvp(Tensor o, Tensor lse, {_ALONG}, {SCHEMA}) -> (Tensor, Tensor)")
_library.define(f"attention_with_jvp({_ALONG}, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"attention_hvp(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, Tensor do_, Tensor dlse_, {_ALONG}, "
    f"{SCHEMA}) -> ({', '.join(['Tensor'] * _N)})"
)


def _jvp(o: Any, lse: Any, *rest: Any) -> tuple[Any, Any]:
    call = call_of(rest[_N:])
    with torch.no_grad():
        raw, packing = adopted_call(call, o=o, lse=lse)
        return run_jvp(raw, _named(rest[:_N]), call.options, packing)


def _with_jvp(*values: Any) -> tuple[Any, ...]:
    call = call_of(values[_N:])
    with torch.no_grad():
        raw, packing = adopted_call(call)
        results, result_tangents = run_with_jvp(raw, _named(values[:_N]), call.options, packing)
    return (*results, *result_tangents)


def _hvp(do: Any, dlse: Any, o: Any, lse: Any, o_dot: Any, lse_dot: Any, *rest: Any) -> tuple[Any, ...]:
    call = call_of(rest[_N:])
    with torch.no_grad():
        do = o.new_zeros(o.shape) if do is None else do.to(o.dtype)
        raw, packing = adopted_call(call, do=do, dlse=dlse, o=o, lse=lse)
        grads = run_hvp(raw, _named(rest[:_N]), call.options, (o_dot, lse_dot), packing)[:_N]
    front = directions(rest[:_N], rest[_N:])
    return tuple(o.new_empty((*front, 0)) if grad is None else grad for grad in grads)


def _named(tangents: tuple[Any, ...]) -> Any:
    return adopted(**dict(zip(TANGENTS, tangents, strict=True)))


for _device in ("CPU", "CUDA"):
    _library.impl("attention_jvp", _jvp, _device)
    _library.impl("attention_hvp", _hvp, _device)
    _library.impl("attention_with_jvp", _with_jvp, _device)


def _have_directions(directed: tuple[Any, ...], dims: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    """Whether tangents, the last ones of `directed`, have an axis of directions besides the mapped axis."""
    pairs = zip(directed[-_N:], dims[-_N:], _PRIMALS, strict=True)
    return any(
        x is not None and x.dim() > values[position].dim() + (dim is not None) for x, dim, position in pairs
    )


def directions(tangents: tuple[Any, ...], primals: tuple[Any, ...]) -> tuple[int, ...]:
    """The length of the axis of directions as a tuple; empty if the tangents have no such axis."""
    for x, position in zip(tangents, _PRIMALS, strict=True):
        if x is not None and x.dim() > primals[position].dim():
            return (x.shape[0],)
    return ()


@torch.library.register_fake(f"{NAMESPACE}::attention_jvp", lib=_library)
def _fake_jvp(o: Any, lse: Any, *rest: Any) -> tuple[Any, Any]:
    front = directions(rest[:_N], rest[_N:])
    return o.new_empty((*front, *o.shape)), lse.new_empty((*front, *lse.shape))


@torch.library.register_fake(f"{NAMESPACE}::attention_hvp", lib=_library)
def _fake_hvp(_do: Any, _dlse: Any, o: Any, _lse: Any, _o: Any, _l: Any, *rest: Any) -> tuple[Any, ...]:
    front, inputs = directions(rest[:_N], rest[_N:]), (rest[_N + position] for position in _PRIMALS)
    return tuple(o.new_empty((*front, 0)) if x is None else x.new_empty((*front, *x.shape)) for x in inputs)


_jvp_operator = _operators.attention_jvp.default
_hvp_operator = _operators.attention_hvp.default
torch.library.register_vmap(
    f"{NAMESPACE}::attention_jvp",
    directions_at_once(_jvp_operator, 2, 2 + _N, _have_directions),
    lib=_library,
)
torch.library.register_vmap(
    f"{NAMESPACE}::attention_hvp",
    directions_at_once(_hvp_operator, 4, 6 + _N, _have_directions),
    lib=_library,
)


def tangents_of(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs at the positions of differentiable arrays; refuse a floating-point one elsewhere."""
    for position, x in enumerate(inputs[: len(TENSORS)]):
        if x is not None and position not in _PRIMALS and x.dtype.is_floating_point:
            raise UnsupportedError(
                f"{TENSORS[position]} has no derivative.", hint=f"{TENSORS[position]}.detach()"
            )
    return tuple(inputs[position] for position in _PRIMALS)


def attend_with_tangents(call: Call) -> tuple[Any, Any] | None:
    """O and LSE of dual tensors, with their tangents, in one pass.

    None under another transform, and if autograd records a graph of it.
    """
    functorch: Any = torch._C._functorch
    if torch.compiler.is_compiling() or functorch.get_dynamic_layer_stack_depth() > 1:
        return None
    if any(x is not None and functorch.is_batchedtensor(x) for x in call.tensors):
        return None
    duals = [(None, None) if x is None else torch.autograd.forward_ad.unpack_dual(x) for x in call.tensors]
    for x in (x for dual in duals for x in dual if x is not None):
        inner = functorch.get_unwrapped(x) if functorch.is_functorch_wrapped_tensor(x) else x
        if functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x):
            return None
        if torch.is_grad_enabled() and inner.requires_grad:
            return None
    primals, tangents = zip(*duals, strict=True)
    compute: Any = _operators.attention_with_jvp.default
    # why: after the graph break that leads here, torch.compile would resume inside.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        compute = dynamo.disable(compute)
    o, lse, *result_tangents = compute(*tangents_of(tangents), *arguments(call._replace(tensors=primals)))
    make_dual = torch.autograd.forward_ad.make_dual
    return make_dual(o, result_tangents[0]), make_dual(lse, result_tangents[1])


def _per_argument(grads: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """One gradient per argument of the operator, from those of the differentiable arrays; others are None."""
    every: list[Any] = [None] * len(values)
    for position, grad in zip(_PRIMALS, grads, strict=True):
        if values[position] is not None:
            every[position] = grad
    return tuple(every)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...] = ()) -> None:
    """Save tensors for reverse and forward mode, and other values on the context."""
    tensors = (*inputs, *output)
    held = [isinstance(x, torch.Tensor) for x in tensors]
    ctx.rest = [None if there else x for x, there in zip(tensors, held, strict=True)]
    ctx.held = held
    saved = [x for x, there in zip(tensors, held, strict=True) if there]
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)
    ctx.set_materialize_grads(False)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """The inputs and outputs that `_save` saved."""
    saved = iter(ctx.saved_tensors)
    return tuple(next(saved) if there else x for x, there in zip(ctx.rest, ctx.held, strict=True))


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


class Tangent(torch.autograd.Function):
    """J: (o, lse, tangents, arguments of the operator) -> tangents of o and lse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, Any]:
        """Run the operator."""
        o, lse = _jvp_operator(*inputs)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        """Save everything."""
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        """B for the tangents, because it is the transpose of J; H for the arrays."""
        *inputs, o_dot, lse_dot = _saved(ctx)
        o, lse, along, values = inputs[0], inputs[1], inputs[2 : 2 + _N], tuple(inputs[2 + _N :])
        if do is None and dlse is None:
            return (None,) * len(inputs)
        grads: tuple[Any, ...] = (None,) * _N
        if any(ctx.needs_input_grad[2 : 2 + _N]):
            grads = Backward.apply(do, dlse, o, lse, *values)
            grads = tuple(None if x is None else grad for x, grad in zip(along, grads, strict=True))
        second: tuple[Any, ...] = (None,) * _N
        if any(ctx.needs_input_grad[2 + _N :]):
            second = _SecondGradient.apply(do, dlse, o, lse, o_dot, lse_dot, *along, *values)
        return (None, None, *grads, *_per_argument(second, values))

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Any, Any]:
        """J applied to the tangents of the tangents; refuse tangents of the arrays."""
        inputs = _saved(ctx)[:-2]
        if any(dot is not None for dot in dots[2 + _N :]):
            raise UnsupportedError(
                "attention has no forward-mode derivative of its forward-mode derivative.",
                hint="torch.func.jacfwd(torch.func.jacrev(f)), reverse mode inside; or torch.func.hessian",
            )
        o, lse = Tangent.apply(*inputs[:2], *dots[2 : 2 + _N], *inputs[2 + _N :])
        return o, lse


class Backward(torch.autograd.Function):
    """B: (do, dlse, o, lse, arguments of the operator) -> gradients; o and lse depend on the arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, ...]:
        """Run the operator."""
        return tuple(_operators.attention_backward.default(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:  # noqa: ARG004
        """Save everything."""
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *along: Any) -> tuple[Any, ...]:
        """J for do and dlse, H for the arrays."""
        do, dlse, o, lse, *values = _saved(ctx)
        along = tuple(
            None if values[position] is None else x for position, x in zip(_PRIMALS, along, strict=True)
        )
        if all(x is None for x in along):
            return (None,) * (4 + len(values))
        o_dot, lse_dot = Tangent.apply(o, lse, *along, *values)
        second: tuple[Any, ...] = (None,) * _N
        if any(ctx.needs_input_grad[4:]):
            second = _SecondGradient.apply(do, dlse, o, lse, o_dot, lse_dot, *along, *values)
        return (
            None if do is None else o_dot, None if dlse is None else lse_dot, None, None,
            *_per_argument(second, tuple(values)),
        )  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Any, ...]:
        """B of the tangents of do and dlse, and H."""
        do, dlse, o, lse, *values = _saved(ctx)
        along = tangents_of(dots[4:])
        first: tuple[Any, ...] = (None,) * _N
        if dots[0] is not None or dots[1] is not None:
            first = Backward.apply(*dots[:2], o, lse, *values)
        second: tuple[Any, ...] = (None,) * _N
        if any(x is not None for x in along):
            o_dot, lse_dot = Tangent.apply(o, lse, *along, *values)
            second = _SecondGradient.apply(do, dlse, o, lse, o_dot, lse_dot, *along, *values)
        return tuple(map(_sum, first, second))


class _SecondGradient(torch.autograd.Function):
    """H: (do, dlse, o, lse, tangents of o and lse, tangents, arguments of the operator) -> tangents of B."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, ...]:
        """Run the operator."""
        return tuple(_hvp_operator(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        """There is none."""
        raise _no_third_derivative()

    @staticmethod
    def jvp(_ctx: Any, *_: Any) -> Any:
        """There is none."""
        raise _no_third_derivative()


def _no_third_derivative() -> UnsupportedError:
    return UnsupportedError("attention has no third derivative.", hint="at most two derivatives of each call")
