"""Short calls on a CPU that repeat an earlier one, compared and run by compiled code.

After a linear layer the CPU caches hold its weights, and to fetch what Python executes for a call of 64
queries takes as long as the arithmetic. `kernels_cpu/repeat.cpp` takes a tenth of that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..call.arrays import contiguous
from ..call.given import Options
from ..dispatch.memo import Prepared
from ..dispatch.repeat import conditions, constants_beside, repeated
from .eager import OBSERVERS

__all__ = ["guard", "repeated_in_core", "repeating_in_core"]

# Allocates a tensor by sizes, strides and dtype. torch.compile's own programs do it so; it is not in torch's
# documentation, and without it calls are repeated by `repeat`.
_empty: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cpu", None)


class _Exchange(ctypes.Structure):
    """DLPack's table of functions of a library."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
        *[(name, ctypes.c_void_p) for name in ("allocate", "share", "adopt", "view_of", "stream")],
    )  # fmt: skip


# Compares tensors with earlier ones in a single call: class, dtype, device, sizes, strides, requires_grad,
# transforms and modes. torch.compile guards its graphs with it. The class is not in torch's documentation;
# without it calls are found by their keys.
_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def guard(
    tensors: tuple[Any, ...], shapes: list[list[int | None]], strides: list[list[int | None]]
) -> Callable[..., bool] | None:
    """Whether tensors are like these, but where sizes and strides are None; None if torch has no guards."""
    if _guards is None:
        return None
    try:
        check: Callable[..., bool] = _guards(
            *tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides
        ).check
    except TypeError:  # the class has another signature in this torch
        return None
    return check


@functools.cache
def _view_of() -> int:
    """The address of torch's function that describes a tensor; 0 if this torch has none."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None or _empty is None:
        return 0
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )(table, b"dlpack_exchange_api")
    exchange = _Exchange.from_address(pointer)
    return (exchange.view_of or 0) if exchange.major == 1 else 0


def repeated_in_core(function: str, *given: Any) -> Any:
    """As `repeated`, for a call that torch may be tracing."""
    if torch.compiler.is_compiling():
        return None
    return repeated(function, *given)


def repeating_in_core(
    tensors: tuple[Any, ...],
    given: tuple[Any, ...],
    options: Options,
    call: Prepared,
    in_rows: bool,
    name: str = "",
) -> Callable[..., Any] | None:
    """A builtin function that repeats a call that autograd does not record; None unless the core computes it.

    Parameters
    ----------
    tensors : tuple of Tensor
        q, k and v, and the mask or bias if there is one.
    given : tuple
        The arguments of `repeated_in_core` after q, k and v.
    options : Options
        Their values.
    call : Prepared
    in_rows : bool
        Whether `options` and `call` are for q, k, v and o transposed to rows before heads.
    name : str
        "mask" or "bias" if it is among the tensors.
    """
    view_of = _view_of()
    array = tensors[3] if name else None
    constants = constants_beside(array, given)
    if not view_of or constants is None or tensors[0].device.type != "cpu":
        return None
    free: list[list[int | None]] = [[None] * x.dim() for x in tensors]
    are_alike = guard(tensors, free, free)
    if are_alike is None:
        return None
    from ..cpu.core.repeat import Added, Condition, Way, keys_of  # why here: see `prepare_backend`

    held = [Condition.now(observer) for observer in OBSERVERS]
    held += [
        *conditions(),
        Condition.now(vars(torch.autograd.forward_ad).get, "_current_level"),
        Condition.now(torch.get_num_threads),
    ]
    if any(x.requires_grad for x in tensors):
        held.append(Condition.now(torch.is_grad_enabled))
    q = tensors[0]
    (_, shape, dtype), *_ = call.results
    strides = contiguous(shape)
    if in_rows:
        shape, strides = ((x[0], x[2], x[1], x[3]) for x in (shape, strides))
    result = shape, strides, getattr(torch, dtype)
    way = Way(
        view_of, "bhsd" if in_rows else options.layout, tuple([tuple(x.shape) for x in tensors[:3]]),
        q.stride(), *keys_of(options), Added.of(name, array, given) if name else None,
        type=torch.Tensor, dtype=q.dtype, options=constants, are_alike=are_alike, conditions=tuple(held),
        allocate=_empty, result=result, elements_before=torch.Tensor.storage_offset,
    )  # fmt: skip
    return call.repeating("torch", way)
