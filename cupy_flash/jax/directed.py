"""Passes of second order (jvp, hvp) inside a compiled program, by the functions of `cupy_flash`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from ..call.arrays import CPU, ArrayView
from ..call.describe import OFFSETS
from ..call.given import Options
from ..call.options import WITH_GRADIENT
from ..derivatives.second_order import hvp_into, jvp_into
from ..device.run import Driver
from ..dispatch.backends import driver_of
from ..errors import UnsupportedError
from ..varlen import pack
from .buffers import view_of
from .call import vary_alike
from .ffi import is_exporting
from .run import READ, read_on_host, values_of

__all__ = ["directed"]

# Names of the tangents of results.
_RESULT_TANGENTS = {"o": "do_of_jvp", "lse": "dlse_of_jvp"}


class _Pass(NamedTuple):
    """Static parameters of a compiled call."""

    direction: str  # {"jvp", "hvp"}
    options: Options
    longest: tuple[int, int] | None  # longest lengths of packed sequences; None for a batch
    # Names, dtypes and ranks of the inputs; the last `along` ones are tangents, such as "dq".
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    along: int  # number of tangents
    # Name, rank and dtype of each result; for "hvp" also of the tangents of o and lse, its intermediates.
    results: tuple[tuple[str, int, str], ...]


def directed(
    direction: str,
    options: Options,
    longest: tuple[int, int] | None,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    along: tuple[str, ...],
) -> list[Any]:
    """Add a pass to the program being traced.

    Parameters
    ----------
    direction : {"jvp", "hvp"}
    options, longest
        As in `call.forward`.
    names : tuple of str
        Names of the arrays.
    args : tuple of array
        The arrays, o, lse, for "hvp" do and dlse, and the tangents.
    along : tuple of str
        Names of the arrays that the tangents belong to.
    """
    given = ("o", "lse") if direction == "jvp" else ("o", "lse", "do", "dlse")
    every = (*names, *given, *("d" + name for name in along))
    arrays = dict(zip(every, args, strict=True))
    of = [n for n in names if direction == "hvp" and n in WITH_GRADIENT]
    written = {"d" + name: arrays[name] for name in of}
    # why intermediates are results: on a GPU XLA allocates all memory.
    written |= {_RESULT_TANGENTS[name]: arrays[name] for name in ("o", "lse")}
    results = tuple((name, x.ndim, x.dtype.name) for name, x in written.items())
    static = _Pass(
        direction, options, longest, every, tuple(x.dtype.name for x in args), tuple(x.ndim for x in args),
        len(along), results,
    )  # fmt: skip
    wire = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written.values())
    if is_exporting():
        raise UnsupportedError(
            "a program with forward mode or second derivatives cannot be exported.",
            hint="jax.grad, once, or jax.jit in the process that runs it",
        )
    call = buffer_callback(_callback(static), wire, vmap_method="expand_dims")
    return list(vary_alike(*call(*args), over=args))[: len(of) or None]


@functools.lru_cache(maxsize=1024)
def _callback(static: _Pass) -> Callable[..., None]:
    """The callback of a pass. why cached: JAX recompiles for every new function object."""

    def callback(ctx: Any, outs: Any, *ins: Any) -> None:
        kinds = [*zip(static.names, static.ranks, static.dtypes, strict=True), *static.results]
        views = [view_of(b, dtype) for b, (_, _, dtype) in zip((*ins, *outs), kinds, strict=True)]
        # On a CPU the context has no stream, and raises.
        stream = None if views[0].device == CPU else ctx.stream
        _over_axes(static, views, [rank for _, rank, _ in kinds], stream)

    return callback


def _over_axes(static: _Pass, views: list[ArrayView], ranks: list[int], stream: int | None) -> None:
    """Compute once per index of the leading axes, which vmap adds; an axis of length 1 is broadcast.

    The last of these axes becomes the axis of directions if only tangents differ along it.
    """
    fixed = len(static.names) - static.along
    lead = views[-1].shape[: len(views[-1].shape) - ranks[-1]]
    together = bool(lead) and all(x.shape[len(lead) - 1] == 1 for x in views[:fixed])
    for index in np.ndindex(*lead[: len(lead) - together]):
        at = [_at(x, index) for x in views]
        if together:
            at[:fixed] = [_at(x, (0,)) for x in at[:fixed]]
        _compute(static, at, stream)


def _at(view: ArrayView, index: tuple[int, ...]) -> ArrayView:
    """Index the leading axes; an axis of length 1 is broadcast."""
    axes = len(index)
    steps = zip(index, view.shape, view.strides, strict=False)
    offset = sum(stride * (i if n != 1 else 0) for i, n, stride in steps)
    return view._replace(
        pointer=view.pointer + offset * view.item_bytes, shape=view.shape[axes:], strides=view.strides[axes:]
    )


def _compute(static: _Pass, views: list[ArrayView], stream: int | None) -> None:
    """Compute one call, which may have several directions."""
    count, device = len(static.names), views[0].device
    given = dict(zip(static.names[: count - static.along], views, strict=False))
    tangents = dict(zip(static.names[count - static.along :], views[count - static.along :], strict=False))
    results = {name: view for (name, _, _), view in zip(static.results, views[count:], strict=True)}
    driver = driver_of(device, "jax")
    numbers = {name: given.pop(name) for name in READ if name in given}
    known = {n: read_on_host(x.pointer, x.shape, x.dtype, device, driver, stream) for n, x in numbers.items()}
    options = static.options._replace(**values_of(known))
    packing = None
    if static.longest is not None:
        for view in results.values():
            _clear(view, driver, stream)  # for rows outside of all sequences
        cuts = {name: given.pop(name) for name in OFFSETS if name in given}
        both = cuts["cu_seqlens_q"], cuts.get("cu_seqlens_k", cuts["cu_seqlens_q"])
        packing = pack(given, both, static.longest, cuts.get("seqused_k"), traced=device != CPU)
    result_tangents = {"d" + name: results.pop(here) for name, here in _RESULT_TANGENTS.items()}
    of_results = {name: x for name, x in given.items() if name not in ("do", "dlse")}
    jvp_into(result_tangents, of_results, tangents, options, packing, stream=stream)
    if static.direction == "hvp":
        hvp_into(results, given, tangents, options, result_tangents, packing, stream=stream)


def _clear(view: ArrayView, driver: Driver | None, stream: int | None) -> None:
    if driver is None or stream is None:
        view.numpy()[...] = 0
    else:
        driver.clear(view.pointer, math.prod(view.shape) * view.item_bytes, view.device[1], stream)
