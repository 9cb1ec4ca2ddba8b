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
from ..call.cache_problem import check_values, describe_cache
from ..call.options import DIFFERENTIABLE, Options
from ..call.problem import OFFSETS, Problem, describe
from ..device.abi import SEED
from ..device.run import Driver
from ..errors import Unsupported
from ..prepare import lifted
from ..ready import OnCore, OnCpu, OnDevice, chosen_by_environment, driver_of, ready
from ..varlen import check_packing, pack
from .buffers import address

__all__ = ["NUMBERS", "READ", "Cached", "alike", "backward", "described", "forward", "over_cache", "rows_of"]

# Outputs of a call: name, rank and dtype of each.
_Results: TypeAlias = tuple[tuple[str, int, str], ...]
_GRADIENTS = ("q", "k", "v", *DIFFERENTIABLE)
# Options that may be traced: arrays of one number, which the host reads when the program runs.
NUMBERS = ("scale", "softcap")
# All that the host reads; a seed is two words, the lower one first, as JAX may have no integers of 64 bits.
READ = (*NUMBERS, "seed")


class _Static(NamedTuple):
    """What a compiled call holds fixed; the callbacks are made once for each."""

    options: Options
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    deterministic: bool = False
    longest: tuple[int, int] | None = None  # of packed sequences
    cached: Cached | None = None


class Cached(NamedTuple):
    """What a call over a KV cache holds fixed besides.

    Attributes
    ----------
    flags : tuple
        What `describe_cache` takes after the options.
    check : bool or None
        As in `attention_with_kv_cache`.
    """

    flags: tuple[bool, int | None, bool]
    check: bool | None

    def checked(self, device: tuple[str, int]) -> bool:
        """Whether the host looks at lengths and tables."""
        if device != CPU and self.check:
            raise Unsupported(
                "check=True on a GPU, where nothing but this call would know lengths and tables.",
                hint="check=None, or cupy_flash.attention_with_kv_cache outside of jit",
            )
        return device == CPU and self.check is not False


def _run(direction: str, static: _Static, ctx: Any, outs: Any, ins: Any, results: _Results) -> None:
    """Run one call per index of the axes that vmap put in front, into the outputs that XLA allocated."""
    # Behind the inputs come the zeros that outputs of packed sequences begin as: they are those outputs.
    ins = ins[: len(static.names)]
    buffers, ranks = (*ins, *outs), (*static.ranks, *(rank for _, rank, _ in results))
    dtypes = (*static.dtypes, *(dtype for _, _, dtype in results))
    shapes = tuple([tuple(b.shape[b.ndim - rank :]) for b, rank in zip(buffers, ranks, strict=True)])
    kind, ordinal = ins[0].__dlpack_device__()
    device = CPU if kind == 1 else ("cuda", ordinal)
    pointers = [address(b, dtype, device == CPU) for b, dtype in zip(buffers, dtypes, strict=True)]
    # A context knows its stream on a GPU only, and raises elsewhere.
    stream = None if kind == 1 else ctx.stream
    for index in range(math.prod(ins[0].shape[: ins[0].ndim - ranks[0]])):
        if index:
            steps = (math.prod(shape) * ITEM_BYTES[x] for shape, x in zip(shapes, dtypes, strict=True))
            pointers = [p + step for p, step in zip(pointers, steps, strict=True)]
        residues = tuple([p % 64 for p in pointers])
        driver = driver_of(device)
        environment = chosen_by_environment(driver, device)
        held = {
            name: _held(pointers[i], shapes[i], static.dtypes[i], device, driver, stream)
            for i, name in enumerate(static.names)
            if name in READ
        }
        seed = int.from_bytes(bytes(held.pop("seed", b"")), "little")
        read = tuple((name, float(x[0])) for name, x in held.items())
        call, problem, places = _ready(
            direction, static, results, shapes, residues, device, driver, environment, read
        )
        views = {name: view._replace(pointer=pointers[i]) for name, (i, view) in places.items()}
        if static.longest and device == CPU:
            check_packing(views, (views["q"].shape[2], views["k"].shape[2]), static.longest)
        if static.cached and static.cached.checked(device):
            check_values(problem, _as_given(views, problem))
        addresses = {name: view.pointer for name, view in views.items()} | {SEED: seed}
        if isinstance(call, OnDevice):
            call.run(addresses, "jax", stream)
        elif isinstance(call, OnCore):
            call.run(addresses, views)
        else:
            call.run({name: view.numpy() for name, view in views.items()}, seed)


def _as_given(views: dict[str, ArrayView], problem: Problem) -> dict[str, ArrayView]:
    """The views of a call over a cache by the names that its caller gave."""
    assert problem.cache is not None
    if not problem.cache.indexed:
        return views
    return {"cache_batch_idx" if name == "block_table" else name: x for name, x in views.items()}


def _with_numbers(options: Options, read: dict[str, float]) -> Options:
    return options._replace(
        scale=read.get("scale", options.scale), softcap=read.get("softcap", options.softcap)
    )


def _held(
    pointer: int,
    shape: tuple[int, ...],
    dtype: str,
    device: tuple[str, int],
    driver: Driver | None,
    stream: int | None,
) -> np.ndarray[Any, Any]:
    """What an array holds; on a GPU this waits for the stream."""
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if device == CPU or driver is None or stream is None:
        held = ctypes.string_at(pointer, nbytes)
    else:
        held = driver.read(pointer, nbytes, device[1], stream)
    return np.frombuffer(held, dtype)


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
    """A call, what it computes, and by name the number of each buffer and how to see it, but for its address.

    why cached: a compiled program repeats its calls, and all that changes is where XLA put the arrays.
    """
    kinds = zip(shapes, (*static.dtypes, *(dtype for _, _, dtype in results)), residues, strict=True)
    buffers = [
        ArrayView(pointer, shape, contiguous(shape), dtype, device, "jax", False, None)
        for shape, dtype, pointer in kinds
    ]
    given = {name: x for name, x in zip(static.names, buffers, strict=False) if name not in READ}
    options = _with_numbers(static.options, dict(read))
    if static.cached:
        problem, views = describe_cache(given, options, *static.cached.flags)
    else:
        problem, views = described(direction, given, options, static.longest, static.deterministic)
    for (name, _, _), view in zip(results, buffers[len(static.names) :], strict=True):
        if name not in views:  # a cache is seen as its input is, which it is
            views[name] = lifted(name, view, options.layout)
    places = {name: i for i, name in enumerate((*static.names, *(name for name, _, _ in results)))}
    for name, source in (("cu_seqlens_k", "cu_seqlens_q"), ("block_table", "cache_batch_idx")):
        if name in views:
            places.setdefault(name, places.get(source, 0))
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


def _call(
    direction: str, static: _Static, inputs: list[Any], results: tuple[tuple[str, Any], ...]
) -> tuple[Any, ...]:
    """Put the call into the program being traced; results are (name, shape and dtype).

    A result that has the name of an input is that input, written to.
    """
    wire = tuple(x for _, x in results)
    kinds = tuple((name, len(x.shape), x.dtype.name) for name, x in results)
    # Rows that belong to no sequence are never written: their memory is XLA's zeros.
    zeros = [jnp.zeros(x.shape, x.dtype) for x in wire] if static.longest else []
    aliases = {len(inputs) + i: i for i in range(len(zeros))}
    aliases |= {static.names.index(name): i for i, (name, _) in enumerate(results) if name in static.names}
    call = buffer_callback(
        _callback(direction, static, kinds), wire, vmap_method="broadcast_all", input_output_aliases=aliases
    )
    return alike(*call(*inputs, *zeros), over=inputs)


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
    arrays: dict[str, Any],
    options: Options,
    longest: tuple[int, int] | None = None,
    deterministic: bool = False,
    cached: Cached | None = None,
) -> _Static:
    return _Static(
        options,
        tuple(arrays),
        tuple("bool" if x.dtype == bool else x.dtype.name for x in arrays.values()),
        tuple(x.ndim for x in arrays.values()),
        deterministic,
        longest,
        cached,
    )


def rows_of(q: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of the LSE, from that of q."""
    shape = tuple(q[:-1])
    return shape if layout == "bhsd" or len(shape) == 1 else (*shape[:-2], shape[-1], shape[-2])


def forward(
    arrays: dict[str, Any], options: Options, longest: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """O and LSE; `arrays` by the names of the options of `attention`, without derivative."""
    results = tuple(zip(("o", "lse"), _results_of(arrays, options), strict=True))
    o, lse = _call("forward", _static(arrays, options, longest), list(arrays.values()), results)
    return o, lse


def over_cache(arrays: dict[str, Any], options: Options, cached: Cached) -> dict[str, Any]:
    """O, LSE if it is wanted, and the caches if keys are appended, by name."""
    o, lse = _results_of(arrays, options)
    written = [(name, arrays[name]) for name in ("k_cache", "v_cache") if "k" in arrays]
    results = tuple(
        (name, jax.ShapeDtypeStruct(x.shape, x.dtype))
        for name, x in (("o", o), *[("lse", lse)] * cached.flags[2], *written)
    )
    outs = _call("decode", _static(arrays, options, cached=cached), list(arrays.values()), results)
    return {name: out for (name, _), out in zip(results, outs, strict=True)}


def _results_of(arrays: dict[str, Any], options: Options) -> tuple[Any, Any]:
    """Shapes and dtypes of O and LSE."""
    q, v = arrays["q"], arrays["v_cache" if "v_cache" in arrays else "v"]
    acc = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return (
        jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(rows_of(q.shape, options.layout), acc),
    )


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
