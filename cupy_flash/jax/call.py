"""A call inside a compiled program, and its gradients; without derivative, which `attend` has.

Compiled programs call the kernels through ``jax.experimental.buffer_callback``, which hands over buffers and
the stream; a typed FFI handler made with ctypes would be exportable, but takes twice as long a call.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from ..call.arrays import CPU, ITEM_BYTES, ArrayView, contiguous
from ..call.options import DIFFERENTIABLE, Options
from ..call.problem import OFFSETS, Problem, describe
from ..call.spans import check_spans
from ..device.abi import SEED
from ..device.run import Driver
from ..prepare import lifted
from ..ready import OnCore, OnCpu, OnDevice, chosen_by_environment, driver_of, ready
from ..varlen import check_packing, pack

__all__ = ["NUMBERS", "alike", "backward", "described", "forward", "rows_of"]

# Outputs of a call: name, rank and dtype of each.
_Results: TypeAlias = tuple[tuple[str, int, str], ...]
_GRADIENTS = ("q", "k", "v", *DIFFERENTIABLE)
# Options that may be traced: arrays of one number, which the host reads when the program runs.
NUMBERS = ("scale", "softcap")


class _Static(NamedTuple):
    """What a compiled call holds fixed; the callbacks are made once for each."""

    options: Options
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    deterministic: bool = False
    longest: tuple[int, int] | None = None  # of packed sequences


def _run(direction: str, static: _Static, ctx: Any, outs: Any, ins: Any, results: _Results) -> None:
    """Run one call per index of the axes that vmap put in front, into the outputs that XLA allocated."""
    # Behind the inputs come the zeros that outputs of packed sequences begin as: they are those outputs.
    ins = ins[: len(static.names)]
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
        residues = tuple([p % 64 for p in pointers])
        driver = driver_of(device)
        environment = chosen_by_environment(driver, device)
        read = tuple(
            (name, _number(pointers[i], static.dtypes[i], device, driver, stream))
            for i, name in enumerate(static.names)
            if name in NUMBERS
        )
        call, problem, places = _ready(
            direction, static, results, shapes, residues, device, driver, environment, read
        )
        views = {name: view._replace(pointer=pointers[i]) for name, (i, view) in places.items()}
        if static.longest and device == CPU:
            check_packing(views, (views["q"].shape[2], views["k"].shape[2]), static.longest)
        check_spans(problem.spans, views)
        addresses = {name: view.pointer for name, view in views.items()} | {SEED: problem.seed}
        if isinstance(call, OnDevice):
            call.run(addresses, "jax", stream)
        elif isinstance(call, OnCore):
            call.run(addresses, views)
        else:
            call.run({name: view.numpy() for name, view in views.items()}, problem.seed)


def _with_numbers(options: Options, read: dict[str, float]) -> Options:
    return options._replace(
        scale=read.get("scale", options.scale), softcap=read.get("softcap", options.softcap)
    )


def _number(
    pointer: int, dtype: str, device: tuple[str, int], driver: Driver | None, stream: int | None
) -> float:
    """What an array of one number holds; on a GPU this waits for the stream."""
    nbytes = ITEM_BYTES[dtype]
    if device == CPU or driver is None or stream is None:
        held = ctypes.string_at(pointer, nbytes)
    else:
        held = driver.read(pointer, nbytes, device[1], stream)
    return float(np.frombuffer(held, dtype)[0])


@functools.lru_cache(maxsize=4096)
def _ready(
    direction: str,
    static: _Static,
    results: _Results,
    shapes: tuple[tuple[int, ...], ...],
    residues: tuple[int, ...],
    device: tuple[str, int],
    driver: Driver | None,
    _environment: Hashable,
    read: tuple[tuple[str, float], ...],
) -> tuple[OnCpu | OnCore | OnDevice, Problem, dict[str, tuple[int, ArrayView]]]:
    """A call, what it asks for, and by name the number of each buffer and how to see it, but for its address.

    why cached: a compiled program repeats its calls, and all that changes is where XLA put the arrays.
    """
    kinds = zip(shapes, (*static.dtypes, *(dtype for _, _, dtype in results)), residues, strict=True)
    buffers = [
        ArrayView(pointer, shape, contiguous(shape), dtype, device, "jax", False, None)
        for shape, dtype, pointer in kinds
    ]
    given = {name: x for name, x in zip(static.names, buffers, strict=False) if name not in NUMBERS}
    options = _with_numbers(static.options, dict(read))
    problem, views = described(direction, given, options, static.longest, static.deterministic)
    for (name, _, _), view in zip(results, buffers[len(static.names) :], strict=True):
        views[name] = lifted(name, view, options.layout)
    places = {name: i for i, name in enumerate((*static.names, *(name for name, _, _ in results)))}
    if static.longest and "cu_seqlens_k" not in places:
        places["cu_seqlens_k"] = places["cu_seqlens_q"]
    call = ready(problem, views, driver)
    return call, problem, {name: (places[name], view) for name, view in views.items()}


def described(
    direction: str,
    views: dict[str, ArrayView],
    options: Options,
    longest: tuple[int, int] | None,
    deterministic: bool = False,
) -> tuple[Problem, dict[str, ArrayView]]:
    """A call whose arrays are stand-ins: a batch, or packed sequences, which have longest lengths.

    Without cu_seqlens_k keys are cut as queries are.
    """
    packing = None
    if longest is not None:
        cut_q, used = views["cu_seqlens_q"], views.get("seqused_k")
        cuts = cut_q, views.get("cu_seqlens_k", cut_q)
        views = {name: view for name, view in views.items() if name not in OFFSETS}
        packing = pack(views, cuts, longest, used, traced=True)
    problem, views, _ = describe(direction, views, options, deterministic=deterministic, packing=packing)
    return problem, views


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
    kinds = tuple((name, len(x.shape), x.dtype.name) for name, x in results)
    # Rows that belong to no sequence are never written: their memory is XLA's zeros.
    zeros = [jnp.zeros(x.shape, x.dtype) for x in wire] if static.longest else []
    call = buffer_callback(
        _callback(direction, static, kinds), tuple(wire), vmap_method="broadcast_all",
        input_output_aliases={len(inputs) + i: i for i in range(len(zeros))},
    )  # fmt: skip
    outs = alike(*call(*map(_encoded, inputs), *zeros), over=inputs)
    return tuple(
        jax.lax.bitcast_convert_type(out, jnp.bfloat16) if x.dtype == jnp.bfloat16 else out
        for out, (_, x) in zip(outs, results, strict=True)
    )


def _varies_over(x: Any) -> frozenset[str]:
    """Axes of the mesh of a shard_map along which devices hold different values of x."""
    kind = jax.typeof(x)
    # JAX has called it by both names.
    axes: Any = getattr(kind, "vma", None) or getattr(getattr(kind, "mat", None), "varying", ())
    return frozenset(axes)


def alike(*arrays: Any, over: Any = ()) -> tuple[Any, ...]:
    """Arrays as values of each device's own, along all axes along which any of them or of `over` is.

    why: JAX takes what a callback gives for the same on all devices. And where an input is the same, its
    gradient has to be added up over them, which is the derivative of this cast.
    """
    axes = frozenset[str]().union(*map(_varies_over, (*arrays, *over)))
    lax: Any = jax.lax  # older JAX has no pcast, newer no pvary
    cast = functools.partial(lax.pcast, to="varying") if hasattr(lax, "pcast") else lax.pvary
    missing = [tuple(sorted(axes - _varies_over(x))) for x in arrays]
    return tuple(cast(x, some) if some else x for x, some in zip(arrays, missing, strict=True))


@functools.lru_cache(maxsize=1024)
def _callback(direction: str, static: _Static, results: _Results) -> Callable[..., None]:
    """The callback of a call. why cached: JAX compiles anew for every new function object."""

    def callback(ctx: Any, outs: Any, *ins: Any) -> None:
        _run(direction, static, ctx, outs, ins, results)

    return callback


def _static(
    arrays: dict[str, Any], options: Options, longest: tuple[int, int] | None, deterministic: bool = False
) -> _Static:
    return _Static(
        options,
        tuple(arrays),
        tuple("bool" if x.dtype == bool else x.dtype.name for x in arrays.values()),
        tuple(x.ndim for x in arrays.values()),
        deterministic,
        longest,
    )


def rows_of(q: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of the LSE, from that of q."""
    shape = tuple(q[:-1])
    return shape if layout == "bhsd" or len(shape) == 1 else (*shape[:-2], shape[-1], shape[-2])


def forward(
    arrays: dict[str, Any], options: Options, longest: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """O and LSE; `arrays` by the names of the options of `attention`, without derivative."""
    q, v = arrays["q"], arrays["v"]
    acc = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    results = (
        ("o", jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)),
        ("lse", jax.ShapeDtypeStruct(rows_of(q.shape, options.layout), acc)),
    )
    o, lse = _call("forward", _static(arrays, options, longest), list(arrays.values()), results)
    return o, lse


def backward(
    arrays: dict[str, Any],
    o: Any,
    lse: Any,
    do: Any,
    dlse: Any,
    options: Options,
    deterministic: bool,
    longest: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The gradient of every array that has one, by its name."""
    inputs = {"do": do, **arrays, "o": o, "lse": lse, "dlse": dlse}
    wanted = [name for name in _GRADIENTS if name in arrays]
    results = tuple(
        ("d" + name, jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)) for name in wanted
    )
    static = _static(inputs, options, longest, deterministic)
    grads = _call("backward", static, list(inputs.values()), results)
    return dict(zip(wanted, grads, strict=True))
