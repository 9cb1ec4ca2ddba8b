"""The passes of second order inside a compiled program: on the CPU, by the functions of `cupy_flash`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from ..call.arrays import CPU, ArrayView, contiguous
from ..call.options import Options
from ..call.problem import OFFSETS
from ..errors import Unsupported
from ..second_order import hvp_into, jvp_into
from ..varlen import pack
from .buffers import address
from .call import alike
from .run import NUMBERS

__all__ = ["directed"]


class _Pass(NamedTuple):
    """What a compiled call holds fixed.

    Attributes
    ----------
    direction : {"jvp", "hvp"}
    names, dtypes, ranks
        Of the inputs; the last `along` are tangents, as "dq".
    results : tuple of (str, int, str)
        Name, rank and dtype of each.
    """

    direction: str
    options: Options
    longest: tuple[int, int] | None
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    along: int
    results: tuple[tuple[str, int, str], ...]


def directed(
    direction: str,
    options: Options,
    longest: tuple[int, int] | None,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    along: tuple[str, ...],
) -> list[Any]:
    """Put a pass into the program being traced.

    Parameters
    ----------
    direction : {"jvp", "hvp"}
    options, longest
        As of `call.forward`.
    names : tuple of str
        Of the arrays.
    args : tuple of array
        The arrays, o, lse, for "hvp" do and dlse, and the tangents.
    along : tuple of str
        Arrays whose tangents these are.
    """
    given = ("o", "lse") if direction == "jvp" else ("o", "lse", "do", "dlse")
    every = (*names, *given, *("d" + name for name in along))
    arrays = dict(zip(every, args, strict=True))
    of = ("o", "lse") if direction == "jvp" else [n for n in names if n in ("q", "k", "v", "bias", "sinks")]
    results = tuple(("d" + name, arrays[name].ndim, arrays[name].dtype.name) for name in of)
    static = _Pass(
        direction, options, longest, every, tuple(_dtype(x) for x in args), tuple(x.ndim for x in args),
        len(along), results,
    )  # fmt: skip
    wire = tuple(jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in of)
    call = buffer_callback(_callback(static), wire, vmap_method="expand_dims")
    return list(alike(*call(*args), over=args))


def _dtype(x: Any) -> str:
    return "bool" if x.dtype == bool else str(x.dtype.name)


@functools.lru_cache(maxsize=1024)
def _callback(static: _Pass) -> Callable[..., None]:
    """The callback of a pass. why cached: JAX compiles anew for every new function object."""

    def callback(_ctx: Any, outs: Any, *ins: Any) -> None:
        if ins[0].__dlpack_device__()[0] != 1:
            raise Unsupported(
                f"attention_{static.direction} inside of JAX computes on the CPU only.",
                hint="jax.default_device(jax.devices('cpu')[0])",
            )
        kinds = [*zip(static.names, static.ranks, static.dtypes, strict=True), *static.results]
        views = [_seen(b, dtype) for b, (_, _, dtype) in zip((*ins, *outs), kinds, strict=True)]
        _over_axes(static, views, [rank for _, rank, _ in kinds])

    return callback


def _seen(buffer: Any, dtype: str) -> ArrayView:
    shape = tuple(buffer.shape)
    pointer = address(buffer, dtype, True)
    # why numpy: what this computes with in between is not JAX's.
    return ArrayView(pointer, shape, contiguous(shape), dtype, CPU, "numpy", False, buffer)


def _over_axes(static: _Pass, views: list[ArrayView], ranks: list[int]) -> None:
    """Compute once per index of the axes that vmap put in front; length 1 stands for all of an axis.

    The last of these becomes the axis of directions if nothing but tangents differs along it.
    """
    fixed = len(static.names) - static.along
    lead = views[-1].shape[: len(views[-1].shape) - ranks[-1]]
    together = bool(lead) and all(x.shape[len(lead) - 1] == 1 for x in views[:fixed])
    for index in np.ndindex(*lead[: len(lead) - together]):
        at = [_at(x, index) for x in views]
        if together:
            at[:fixed] = [_at(x, (0,)) for x in at[:fixed]]
        _compute(static, at)


def _at(view: ArrayView, index: tuple[int, ...]) -> ArrayView:
    """An element of the first axes, along which length 1 stands for all."""
    axes = len(index)
    steps = zip(index, view.shape, view.strides, strict=False)
    offset = sum(stride * (i if n != 1 else 0) for i, n, stride in steps)
    return view._replace(
        pointer=view.pointer + offset * view.item_bytes, shape=view.shape[axes:], strides=view.strides[axes:]
    )


def _compute(static: _Pass, views: list[ArrayView]) -> None:
    """One call, perhaps of several directions."""
    count = len(static.names)
    given = dict(zip(static.names[: count - static.along], views, strict=False))
    tangents = dict(zip(static.names[count - static.along :], views[count - static.along :], strict=False))
    results = {name: view for (name, _, _), view in zip(static.results, views[count:], strict=True)}
    read: dict[str, float] = {name: float(given.pop(name).numpy()) for name in NUMBERS if name in given}
    if "seed" in given:
        read["seed"] = int.from_bytes(given.pop("seed").numpy().tobytes(), "little")
    options = static.options._replace(**read)
    packing = None
    if static.longest is not None:
        for view in results.values():
            view.numpy()[...] = 0  # rows of no sequence
        cuts = {name: given.pop(name) for name in OFFSETS if name in given}
        both = cuts["cu_seqlens_q"], cuts.get("cu_seqlens_k", cuts["cu_seqlens_q"])
        packing = pack(given, both, static.longest, cuts.get("seqused_k"))
    if static.direction == "jvp":
        jvp_into(results, given, tangents, options, packing)
    else:
        hvp_into(results, given, tangents, options, None, packing)
