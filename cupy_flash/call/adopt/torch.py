"""Adopt torch tensors, and refuse those that are not plain memory: lazy, wrapped or traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ...errors import InvalidArgumentsError, UnsupportedError
from ..arrays import TORCH_DTYPES, ArrayView
from ..options import WITH_GRADIENT
from ..public_names import public_name, type_phrase

__all__ = ["has_tangent", "lost_derivative", "refuse_wrapper", "torch_adopter"]


def torch_adopter(kind: Any) -> Callable[[Any, str], ArrayView]:
    """The adopting function for a class of tensors; wrapper classes are refused, as they have no address."""
    if kind.__module__ == "torch.nn.attention.bias":
        return _refuse_causal_bias
    plain = sys.modules["torch"].Tensor.__torch_dispatch__
    return from_torch if kind.__torch_dispatch__ is plain else refuse_wrapper


@lru_cache(maxsize=256)
def _of_torch(dtype: Any, device: Any) -> tuple[str, tuple[str, int] | None]:
    """Our names for a torch dtype and device; None for a device that is not supported.

    why cached: converting both to strings takes as long as the rest of adopting.
    """
    name = str(dtype)
    at = (device.type, device.index or 0) if device.type in ("cpu", "cuda") else None
    return TORCH_DTYPES.get(name, name), at


def lost_derivative(x: Any) -> str:
    """The verb of the error for a tensor whose derivative would be lost; empty if there is none."""
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        return "requires grad"
    # why the level: it is negative outside of forward mode, and reading it is the cheaper test
    if sys.modules["torch.autograd.forward_ad"]._current_level >= 0:
        return "has a tangent" * (sys.modules["torch"]._C._is_fwd_grad_enabled() and has_tangent(x))
    return ""


def has_tangent(x: Any) -> bool:
    """Whether a tensor has a tangent of the forward mode that is on; also one batched by a vmap inside it."""
    torch = sys.modules["torch"]
    functorch, below_autograd = torch._C._functorch, torch._C.DispatchKey.ADInplaceOrView
    if torch._C._dispatch_tls_is_dispatch_key_excluded(below_autograd):
        return False  # an operator that a dispatch mode calls has no dual tensors, and torch cannot split one
    while functorch.is_batchedtensor(x):  # of which torch does not split a dual tensor
        x = functorch.get_unwrapped(x)
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def from_torch(x: Any, name: str = "") -> ArrayView:
    if lost := lost_derivative(x):
        name = public_name(name)
        detached = f"{name}.detach()" + ", or a call inside torch.no_grad()" * x.requires_grad
        if x.element_size() == 1:
            raise UnsupportedError(f"{name} {lost}, and float8 has no gradients.", hint=detached)
        recorders = "cupy_flash.torch.attention, or attention_varlen there, which do; or "
        recorded = recorders * (name in (*WITH_GRADIENT, "scale"))
        raise InvalidArgumentsError(
            f"{name} is a torch tensor that {lost}, and this function records none.",
            hint=f"{recorded}{detached}",
        )
    try:
        pointer, shape, strides = x.data_ptr(), tuple(x.shape), x.stride()
        room = x.untyped_storage().nbytes()  # why: a view of freed memory still has an address
    except RuntimeError:  # sparse, nested, or wrapped by torch.func
        raise _no_memory(x, name) from None
    dtype, device = _of_torch(x.dtype, x.device)
    if device is None:
        raise _unsupported_device(x, name)
    if x.is_neg():
        name = public_name(name)
        raise InvalidArgumentsError(
            f"{name} is a lazy view of torch: its values are those in memory, negated.",
            hint=f"{name}.resolve_neg(), which copies",
        )
    if not (pointer and room) and x.numel():
        raise _no_memory(x, name)
    return ArrayView(pointer, shape, strides, dtype, device, "torch", False, x)


def _unsupported_device(x: Any, name: str) -> InvalidArgumentsError:
    """The error for a tensor on an unsupported device."""
    name = public_name(name)
    if x.is_meta:
        return InvalidArgumentsError(
            f"{name} is a torch tensor on device meta, which has a shape and no numbers.",
            hint=f'torch.zeros_like({name}, device="cpu"); or, for the shape of the result, '
            "cupy_flash.torch.attention of tensors that are all on meta",
        )
    return InvalidArgumentsError(f"{name} is a torch tensor on device {x.device}.", hint=f'{name}.to("cpu")')


def _no_memory(x: Any, name: str) -> InvalidArgumentsError:
    """The error for a plain torch tensor that is not strided memory, with the reason."""
    torch, name = sys.modules["torch"], public_name(name)
    kind, hint = "is a torch tensor without memory", "a tensor of numbers"
    if x.is_nested:
        kind, hint = "is a nested tensor", _PACKED
    elif x.layout is not torch.strided:
        kind, hint = f"has the layout {x.layout}", f"{name}.to_dense()"
    elif x._is_zerotensor():
        kind, hint = "is a lazy tensor of zeros", f"torch.zeros({name}.shape)"
    elif torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        kind, hint = "is being traced or transformed by torch", _OPERATORS
    elif not x.untyped_storage().nbytes():
        kind, hint = "has lost its memory: its storage was resized to 0", f"{name}.clone() before that"
    return InvalidArgumentsError(f"{name} {kind}.", hint=hint)


_PACKED = "cupy_flash.torch.attention if it is jagged, or attention_varlen over its values and offsets"
_OPERATORS = "cupy_flash.torch, whose functions torch can trace and transform, except attention_statistics"
# Wrapper classes of torch -> where to find their values.
_UNWRAPPED = {
    "DTensor": "cupy_flash.torch.attention, {}.to_local(), or cupy_flash.torch.ring_attention",
    "FakeTensor": _OPERATORS,
    "FunctionalTensor": _OPERATORS,
    "MaskedTensor": "{}.get_data(), and mask= for what to leave out",
    "NestedTensor": _PACKED,
}


def refuse_wrapper(x: Any, name: str) -> ArrayView:
    """Refuse a tensor that wraps others."""
    name = public_name(name)
    raise InvalidArgumentsError(
        f"{name} is {type_phrase(x)}, which holds no memory itself.",
        hint=_UNWRAPPED.get(type(x).__name__, "the torch.Tensor inside of it").format(name),
    )


def _refuse_causal_bias(x: Any, name: str) -> ArrayView:
    name, align = public_name(name), "top_left" if x.variant.name == "UPPER_LEFT" else "bottom_right"
    raise InvalidArgumentsError(
        f"{name} is a CausalBias, which stands for a pattern and holds no numbers.",
        hint=f'{name}=None, causal=True, align="{align}"; cupy_flash.torch.attention takes it as it is',
    )
