"""The library for JAX: attention under jit, grad, vmap, remat, scan and shard_map. Nothing else imports jax.

Compiled programs call the kernels through ``jax.experimental.buffer_callback``, which hands over buffers and
the stream; a typed FFI handler made with ctypes would be exportable, but takes twice as long a call.

>>> import jax, jax.numpy as jnp, cupy_flash.jax
>>> q = k = v = jnp.ones((1, 4, 128, 64))
>>> o = jax.jit(lambda q: cupy_flash.jax.attention(q, k, v, causal=True))(q)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from .api import execute
from .arrays import CPU, ITEM_BYTES, ArrayView, contiguous
from .errors import InvalidArguments, Unsupported, names_its_options
from .problem import Options, Problem, describe, lift

__all__ = ["attention", "dot_product_attention"]

# Outputs of a call: name, rank and dtype of each.
_Results: TypeAlias = tuple[tuple[str, int, str], ...]
_INPUTS = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks")
_GRADIENTS = ("q", "k", "v", "bias", "sinks")


class _Static(NamedTuple):
    """What a compiled call holds fixed; the callbacks are made once for each."""

    options: Options
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    deterministic: bool = False


# ---------------------------------------------------------------------- from buffers to a call


def _run(direction: str, static: _Static, ctx: Any, outs: Any, ins: Any, results: _Results) -> None:
    """Run one call per index of the axes that vmap put in front, into the outputs that XLA allocated."""
    buffers, ranks = (*ins, *outs), (*static.ranks, *(rank for _, rank, _ in results))
    shapes = tuple([tuple(b.shape[b.ndim - rank :]) for b, rank in zip(buffers, ranks, strict=True)])
    kind, ordinal = ins[0].__dlpack_device__()
    if kind == 1:
        device, pointers = CPU, [np.asarray(b).__array_interface__["data"][0] for b in buffers]
    else:
        device, pointers = ("cuda", ordinal), [b.__cuda_array_interface__["data"][0] for b in buffers]
    # A context knows its stream on a GPU only, and raises elsewhere.
    stream = None if kind == 1 else ctx.stream
    for index in range(math.prod(ins[0].shape[: ins[0].ndim - ranks[0]])):
        if index:
            dtypes = (*static.dtypes, *(dtype for _, _, dtype in results))
            steps = (math.prod(shape) * ITEM_BYTES[x] for shape, x in zip(shapes, dtypes, strict=True))
            pointers = [p + step for p, step in zip(pointers, steps, strict=True)]
        residues = tuple([p % 256 for p in pointers])
        problem, places = _described(direction, static, results, shapes, residues, device)
        views = {name: view._replace(pointer=pointers[i]) for name, (i, view) in places.items()}
        execute(problem, views, stream)


@functools.lru_cache(maxsize=4096)
def _described(
    direction: str,
    static: _Static,
    results: _Results,
    shapes: tuple[tuple[int, ...], ...],
    residues: tuple[int, ...],
    device: tuple[str, int],
) -> tuple[Problem, dict[str, tuple[int, ArrayView]]]:
    """A call, and by name the number of each buffer and how to see it, but for its address.

    why cached: a compiled program repeats its calls, and all that changes is where XLA put the arrays.
    """
    kinds = zip(shapes, (*static.dtypes, *(dtype for _, _, dtype in results)), residues, strict=True)
    buffers = [
        ArrayView(pointer, shape, contiguous(shape), dtype, device, "jax", False, None)
        for shape, dtype, pointer in kinds
    ]
    given = dict(zip(static.names, buffers, strict=False))
    problem, views, _ = describe(direction, given, static.options, deterministic=static.deterministic)
    for (name, rank, _), view in zip(results, buffers[len(given) :], strict=True):
        if name in ("o", "dq", "dk", "dv"):
            view = lift(view, static.options.layout, rank)
        elif name != "dsinks":
            view = view.lifted(4 if name == "dbias" else 3)
        views[name] = view
    numbers = {name: i for i, name in enumerate((*static.names, *(name for name, _, _ in results)))}
    return problem, {name: (numbers[name], view) for name, view in views.items()}


def _encoded(x: Any) -> Any:
    """As XLA hands it over. why: bfloat16 has no type code in the array interfaces; 16 bits have."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _call(
    direction: str, static: _Static, inputs: list[Any], results: tuple[tuple[str, Any], ...]
) -> tuple[Any, ...]:
    """Put the call into the program being traced; results are (name, shape and dtype)."""
    wire = [
        jax.ShapeDtypeStruct(x.shape, jnp.uint16 if x.dtype == jnp.bfloat16 else x.dtype) for _, x in results
    ]
    described = tuple((name, len(x.shape), x.dtype.name) for name, x in results)
    call = buffer_callback(_callback(direction, static, described), tuple(wire), vmap_method="broadcast_all")
    outs = call(*map(_encoded, inputs))
    return tuple(
        jax.lax.bitcast_convert_type(out, jnp.bfloat16) if x.dtype == jnp.bfloat16 else out
        for out, (_, x) in zip(outs, results, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _callback(direction: str, static: _Static, results: _Results) -> Callable[..., None]:
    """The callback of a call. why cached: JAX compiles anew for every new function object."""

    def callback(ctx: Any, outs: Any, *ins: Any) -> None:
        _run(direction, static, ctx, outs, ins, results)

    return callback


# ---------------------------------------------------------------------- differentiation


def _static(arrays: dict[str, Any], options: Options, deterministic: bool = False) -> _Static:
    return _Static(
        options,
        tuple(arrays),
        tuple("bool" if x.dtype == bool else x.dtype.name for x in arrays.values()),
        tuple(x.ndim for x in arrays.values()),
        deterministic,
    )


def _rows(q: Any, layout: str) -> tuple[int, ...]:
    """Shape of the LSE."""
    shape = tuple(q.shape[:-1])
    return shape if layout == "bhsd" or len(shape) == 1 else (*shape[:-2], shape[-1], shape[-2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attend(arrays: dict[str, Any], options: Options, deterministic: bool) -> tuple[Any, Any]:
    del deterministic
    q, v = arrays["q"], arrays["v"]
    acc = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    results = (
        ("o", jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)),
        ("lse", jax.ShapeDtypeStruct(_rows(q, options.layout), acc)),
    )
    o, lse = _call("forward", _static(arrays, options), list(arrays.values()), results)
    return o, lse


def _attend_forward(arrays: dict[str, Any], options: Options, deterministic: bool) -> tuple[Any, Any]:
    o, lse = _attend(arrays, options, deterministic)
    return (o, lse), (arrays, o, lse)


def _attend_backward(
    options: Options, deterministic: bool, saved: tuple[Any, Any, Any], cotangents: tuple[Any, Any]
) -> tuple[dict[str, Any]]:
    arrays, o, lse = saved
    do, dlse = cotangents
    inputs = {"do": do, **arrays, "o": o, "lse": lse, "dlse": dlse}
    wanted = [name for name in _GRADIENTS if name in arrays]
    results = tuple(
        ("d" + name, jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)) for name in wanted
    )
    grads = _call("backward", _static(inputs, options, deterministic), list(inputs.values()), results)
    return ({**dict.fromkeys(arrays), **dict(zip(wanted, grads, strict=True))},)


_attend.defvjp(_attend_forward, _attend_backward)
# why: outside of a jit JAX would trace the callback anew at each call.
_attend_at_once = jax.jit(_attend, static_argnums=(1, 2))


# ---------------------------------------------------------------------- public


@names_its_options
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | int | None = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    precision: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """`cupy_flash.attention` as a JAX function: gradients of q, k, v, bias and sinks, through o and lse.

    Parameters
    ----------
    q, k, v, causal, window, align, mask, bias, scale, softcap, alibi_slopes, sinks, dropout, layout
        As in `cupy_flash.attention`; every option that is not an array is static under jit.
    seed : int, optional
        As in `cupy_flash.attention`; static, so that each new seed compiles again.
    precision, return_lse
        As in `cupy_flash.attention`.
    deterministic : bool
        As in `cupy_flash.attention_backward`.

    Returns
    -------
    Array, or (Array, Array) with return_lse

    Raises
    ------
    InvalidArguments, Unsupported
        As in `cupy_flash.attention`, while tracing.

    Notes
    -----
    jit with sharded inputs gathers them first; `jax.shard_map` keeps each device to its own. A program that
    contains this call can neither be exported nor stored in the persistent compilation cache.
    """
    given = dict(zip(_INPUTS, (q, k, v, mask, bias, alibi_slopes, sinks), strict=True))
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    options = Options(
        bool(causal),
        None if window is None else (window[0], window[1]),
        align,
        None if scale is None else float(scale),
        softcap,
        float(dropout),
        seed,
        layout,
        precision,
    )
    # The call describes itself again with real pointers; here the same checks speak before anything compiles.
    views = {name: _shape_of(x) for name, x in arrays.items()}
    describe("forward", views, options)
    o, lse = _attend_at_once(arrays, options, bool(deterministic))
    return (o, lse) if return_lse else o


def _shape_of(x: Any) -> ArrayView:
    """A view without memory, for checks while tracing."""
    dtype = "bool" if x.dtype == bool else x.dtype.name
    return ArrayView(0, x.shape, contiguous(x.shape), dtype, CPU, "jax", False, None)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` by this library: same signature, layout and rules.

    Parameters
    ----------
    query, key, value : Array, shape (batch, seqlen, heads, head_dim), or without batch
    bias : Array, optional
        Added to the scores; broadcasts to (batch, heads, seqlen_q, seqlen_k).
    mask : Array of bool, optional
        True = may attend.
    scale : float, optional
    is_causal : bool
        Aligned top-left.
    query_seq_lengths, key_value_seq_lengths : Array of int, shape (batch,), optional
        Rows beyond them are not attended to; rows of queries beyond them are 0.
    local_window_size : int or (int, int), optional
        Keys seen before and after a query.
    implementation : None
        There is one; anything else raises.
    return_residual : bool
        Also return the log-sum-exp, shape (batch, seqlen_q, heads).

    Returns
    -------
    Array, or (Array, Array) with return_residual

    Raises
    ------
    Unsupported
        An implementation is named.
    InvalidArguments
        As in `attention`.

    Notes
    -----
    A query that sees no key gives 0; JAX's own XLA implementation gives the mean of the values.
    """
    if implementation is not None:
        raise Unsupported(f"implementation={implementation!r} is not ours.", hint="implementation=None")
    if query.ndim not in (3, 4):
        raise InvalidArguments(f"query has rank {query.ndim}.", hint="(batch, seqlen, heads, head_dim)")
    rows, columns = query.shape[-3], key.shape[-3]
    for lengths, extent, axis in ((query_seq_lengths, rows, -1), (key_value_seq_lengths, columns, -2)):
        if lengths is not None:
            inside = jnp.arange(extent) < jnp.asarray(lengths)[..., None]
            inside = jnp.expand_dims(inside, (axis, -3))
            mask = inside if mask is None else mask & inside
    window = local_window_size
    if isinstance(window, int):
        window = (window, window)
    o, lse = attention(
        query, key, value, causal=is_causal, window=window, align="top_left", mask=mask, bias=bias,
        scale=scale, layout="bshd", return_lse=True,
    )  # fmt: skip
    return (o, jnp.swapaxes(lse, -1, -2)) if return_residual else o
