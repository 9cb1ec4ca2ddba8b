"""Score functions with autograd: gradients of q, k, v, bias, sinks and bound tensors that require grad."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch

from ..api import adopted, run_backward, run_forward
from ..call.arrays import ArrayView
from ..call.given import Packing, split
from ..call.opaque import opaque
from ..call.options import WITH_GRADIENT
from ..call.public_names import public_name
from ..derivatives.second_order import run_hvp, run_jvp
from ..errors import UnsupportedError
from ..varlen import pack, split_packed
from .call import deterministic
from .eager import are_plain_memory
from .inputs import cast_by_context, check_parts, drawn_seed, refuse_lost_gradients, scaled, widen
from .ops import first_derivative_only, in_forward_mode

__all__ = ["attend_by_function"]

_ARGUMENT = "bound["
# Arguments of `pack` after the arrays: offsets, longest lengths, lengths in use. None if not packed.
Packed: TypeAlias = tuple[Any, ...] | None


_kept_out = functools.partial(
    opaque,
    why="a call with a score or mask function is no part of a compiled program. "
    "Try: fullgraph=False; or an equivalent bias, boolean array or Spans",
)


@_kept_out
def attend_by_function(
    q: Any, k: Any, v: Any, options: dict[str, Any], return_lse: bool, cuts: tuple[Any, Any] | None = None
) -> Any:
    """The result of a call with a score or mask function, with autograd; a graph break in torch.compile.

    Parameters
    ----------
    q, k, v : Tensor
    options : dict of str to object
        The given options, with a score or mask function among them.
    return_lse : bool
    cuts : (Tensor, Tensor), optional
        Offsets of packed queries and keys.
    """
    arrays, values, lengths = (*split(options), ()) if cuts is None else split_packed(options)
    tensors = {"q": q, "k": k, "v": v, **arrays}
    widen(tensors, q)
    check_parts(("q", "k", "v"), **tensors)
    refuse_lost_gradients(softcap=values.softcap, dropout=values.dropout)
    if isinstance(values.scale, torch.Tensor):
        tensors["q"] = scaled(q, values.scale, "bshd" if cuts else values.layout)
        values = values._replace(scale=1.0)
    tensors |= zip("qkv", cast_by_context(tensors["q"], k, v), strict=True)
    if q.is_meta:
        raise UnsupportedError(
            "q is on device meta, and a score function computes on numbers.",
            hint="q.new_empty(*q.shape[:-1], v.shape[-1]), the shape of the result",
        )
    if not are_plain_memory(*tensors.values()) or in_forward_mode(*tensors.values()):
        raise UnsupportedError(
            "score functions are not supported under torch.func or tracing, nor in forward mode.",
            hint="the call outside of torch.func, of forward mode and of programs that are traced",
        )
    if values.dropout and values.seed is None:
        values = values._replace(seed=int(drawn_seed()))
    wanted = [name for name, x in tensors.items() if x.requires_grad] if torch.is_grad_enabled() else []
    for name in wanted:
        if name not in WITH_GRADIENT and not name.startswith(_ARGUMENT):
            raise UnsupportedError(
                f"{public_name(name)} has no gradient.",
                hint=f"{public_name(name)}.detach(), or what it adds as a bias",
            )
    arguments = [name for name in tensors if name.startswith(_ARGUMENT)]
    learned = tuple(n for n, name in enumerate(arguments) if name in wanted)
    values = values._replace(score=values.score.learning(learned))
    packed = None if cuts is None else (cuts, *lengths)
    if not wanted:
        raw, packing = _adopted(packed, **tensors)
        return run_forward(raw, values, return_lse, None, packing)
    return _Recorded.apply(tuple(tensors), values, return_lse, packed, *tensors.values())


def _adopted(packed: Packed, **tensors: Any) -> tuple[dict[str, ArrayView], Packing | None]:
    """Views of the tensors by name, and the packing of packed sequences, or None."""
    raw = adopted(**tensors)
    return raw, None if packed is None else pack(raw, *packed)


class _Recorded(torch.autograd.Function):
    """One call in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        values: Any,
        want_lse: bool,
        packed: Packed,
        *tensors: Any,
    ) -> Any:
        raw, packing = _adopted(packed, **dict(zip(names, tensors, strict=True)))
        o, lse = run_forward(raw, values, True, None, packing)
        ctx.save_for_backward(*tensors, o, lse)
        ctx.names, ctx.values, ctx.packed = names, values, packed
        ctx.set_materialize_grads(False)
        return (o, lse) if want_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        if do is None and dlse is None:
            return (None,) * (4 + len(ctx.names))
        *tensors, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        grads = _gradients(ctx.names, deterministic(ctx.values), ctx.packed, do, dlse, o, lse, *tensors)
        return None, None, None, None, *grads


@_kept_out
def _gradients(*inputs: Any) -> Any:
    """Apply `_Gradients`; a graph break in a backward pass that compiled autograd traces."""
    return _Gradients.apply(*inputs)


class _Gradients(torch.autograd.Function):
    """The gradients of a call, differentiable once more; o and lse depend on the arrays."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        values: Any,
        packed: Packed,
        do: Any,
        dlse: Any,
        o: Any,
        lse: Any,
        *tensors: Any,
    ) -> tuple[Any, ...]:
        given = dict(zip(names, tensors, strict=True))
        raw, packing = _adopted(packed, do=do, **given, o=o, lse=lse, dlse=dlse)
        found = run_backward(raw, values, packing)
        ctx.save_for_backward(do, dlse, o, lse, *tensors)
        ctx.names, ctx.values, ctx.packed = names, values, packed
        ctx.set_materialize_grads(False)
        by_name = {name[1:]: grad for name, grad in found._asdict().items()}
        by_name |= {f"{_ARGUMENT}{n}]": grad for n, grad in enumerate(found.dscore or ())}
        return tuple(by_name.get(name) for name in names)

    @staticmethod
    def backward(ctx: Any, *along: Any) -> Any:
        """J for do and dlse, H for the arrays, as in second_order.py; the cotangents are the direction."""
        do, dlse, o, lse, *tensors = saved = ctx.saved_tensors
        tangents = {f"d{name}": x for name, x in zip(ctx.names, along, strict=True) if x is not None}
        if not tangents:
            return (None,) * (7 + len(ctx.names))
        if ctx.values.score.learned:
            raise UnsupportedError(
                "the arguments of a score function have no second derivative.",
                hint="those that require grad detached, or create_graph=False",
            )
        given = dict(zip(ctx.names, tensors, strict=True))
        with torch.no_grad():
            along_views = adopted(**tangents)
            raw, packing = _adopted(ctx.packed, **given, o=o, lse=lse)
            j = run_jvp(raw, along_views, ctx.values, packing)
            raw, packing = _adopted(ctx.packed, do=do, **given, o=o, lse=lse, dlse=dlse)
            h = run_hvp(raw, along_views, ctx.values, j, packing)
        by_name = {name[1:]: grad for name, grad in h._asdict().items()}
        grads = (j[0], None if dlse is None else j[1], *(by_name.get(name) for name in ctx.names))
        of_do, of_dlse, *others = first_derivative_only(grads, (*saved, *along), "third")
        return None, None, None, of_do, of_dlse, None, None, *others
