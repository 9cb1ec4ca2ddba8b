"""attention_statistics as a JAX function, by a callback to `cupy_flash.attention_statistics`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from .. import statistics
from ..call.arrays import ITEM_BYTES
from ..call.options import StatisticsOptions
from ..call.public_names import type_phrase
from ..call.signature import takes
from ..errors import InvalidArgumentsError
from ..statistics import WANTED, AttentionStatistics, kinds_of_results, refuse_gpus, results_of
from .buffers import view_of
from .call import vary_alike
from .ffi import not_exported
from .numbers import fixed, is_array

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_statistics"]


@takes(StatisticsOptions)
def attention_statistics(
    q: Any,
    k: Any,
    lse: Any = None,
    *,
    want: str | Collection[str] = WANTED,
    top_k: int = 8,
    cache_seqlens: Any = None,
    **options: Unpack[StatisticsOptions],
) -> AttentionStatistics:
    """`cupy_flash.attention_statistics` as a JAX function: under jit, scan and vmap, without gradients.

    Parameters
    ----------
    q, k, lse, cache_seqlens
        As in `cupy_flash.attention_statistics`. All arrays may be traced, lengths and offsets, too; gradients
        are stopped.
    want, top_k
        As in `cupy_flash.attention_statistics`; static under jit.
    {options: As in `cupy_flash.attention_statistics`; options that are not arrays are static under jit.}

    Returns
    -------
    AttentionStatistics
        With JAX arrays.

    Raises
    ------
    InvalidArgumentsError
        As in `cupy_flash.attention_statistics`. Wrong arrays or options raise when the program runs, as an
        error of JAX with our message in it.
    UnsupportedError
        As in `cupy_flash.attention_statistics`, when the program runs.
    """
    names = results_of(want, top_k)
    given = {name: fixed(x) if name in _STATIC else x for name, x in options.items()}
    leaves, tree = jax.tree.flatten((q, k, lse, cache_seqlens, given))
    # why by identity: the same offsets given twice mean that queries and keys have the same lengths.
    arrays = {id(x): jnp.asarray(x) for x in leaves if is_array(x)}
    places = list(arrays)
    sources = tuple(places.index(id(x)) if is_array(x) else None for x in leaves)
    values = tuple(None if is_array(x) else (type(x), x) for x in leaves)
    ins = [jax.lax.stop_gradient(x) for x in arrays.values()]
    ins[0] = not_exported(
        ins[0],
        "a program with attention_statistics cannot be exported: Python computes them.",
        "the program without them, or jax.jit in the process that runs it",
    )
    dtypes = tuple(x.dtype.name for x in ins)
    call = _Call(tree, sources, values, dtypes, names, top_k)
    wire = tuple(
        jax.ShapeDtypeStruct(*kind) for kind in _kinds(q, k, cache_seqlens, given, names, top_k).values()
    )
    made = buffer_callback(_callback(call), wire, vmap_method="sequential")(*ins)
    return AttentionStatistics(**dict(zip(names, vary_alike(*made, over=ins), strict=True)))


# Integers that are never traced.
_STATIC = ("window", "max_seqlen_q", "max_seqlen_k")


class _Call(NamedTuple):
    """Static parameters of a compiled call."""

    tree: Any  # PyTreeDef: structure of q, k, lse, cache_seqlens and the options
    sources: tuple[int | None, ...]  # index of the input of each leaf; None for static leaves
    fixed: tuple[tuple[type, Any] | None, ...]  # static leaves, with types, as 1 == True; None for arrays
    dtypes: tuple[str, ...]  # dtypes of the inputs
    names: tuple[str, ...]  # requested results
    top_k: int


def _kinds(
    q: Any, k: Any, cache_seqlens: Any, options: Mapping[str, Any], names: tuple[str, ...], top_k: int
) -> dict[str, Any]:
    """Shape and dtype of each result, from shapes of the inputs."""
    k = getattr(k, "latents", k)
    q, k = (getattr(x, "codes", x) for x in (q, k))
    for name, x, least in (("q", q, 2), ("k", k, 2 if cache_seqlens is None else 4)):
        if len(getattr(x, "shape", ())) < least:
            raise InvalidArgumentsError(
                f"{name} is {type_phrase(x)} of less than {least} axes.", hint=f"{name} as a JAX array"
            )
    cut = options.get("cu_seqlens_q")
    layout = options.get("layout", "bhsd")
    room = None
    if cache_seqlens is not None:
        table, most = options.get("block_table"), options.get("max_seqlen_k")
        capacity = k.shape[1 if layout == "bshd" else 2]
        if table is not None and table.ndim == 2:
            capacity *= table.shape[1]
        capacity = capacity if most is None else min(capacity, most)
        room = q.shape[0] if cut is None else cut.shape[0] - 1, capacity
    layout = layout if cut is None else "bshd"
    return kinds_of_results(names, top_k, q.shape, k.shape, jnp.asarray(q).dtype.name, layout, room)


@functools.lru_cache(maxsize=1024)
def _callback(static: _Call) -> Callable[..., None]:
    """The callback of a call. why cached: JAX recompiles for every new function object."""

    def callback(_: Any, outs: Any, *ins: Any) -> None:
        refuse_gpus({"q": view_of(ins[0], static.dtypes[0])})  # q is the first leaf
        # why np.asarray: what is refused for its dtype, is refused below; one length may have any.
        arrays = [
            view_of(x, dtype).numpy() if dtype in ITEM_BYTES else np.asarray(x)
            for x, dtype in zip(ins, static.dtypes, strict=True)
        ]
        leaves = [
            arrays[source or 0] if x is None else x[1]
            for source, x in zip(static.sources, static.fixed, strict=True)
        ]
        q, k, lse, lengths, options = jax.tree.unflatten(static.tree, leaves)
        if getattr(lengths, "shape", None) == ():
            lengths = int(lengths)
        want = {"top_k" if name.startswith("top_") else name for name in static.names}
        made = statistics.attention_statistics(
            q, k, lse, want=want, top_k=static.top_k, cache_seqlens=lengths, **options
        )
        for out, name in zip(outs, static.names, strict=True):
            result = getattr(made, name)
            view_of(out, result.dtype.name).numpy()[...] = result

    return callback
