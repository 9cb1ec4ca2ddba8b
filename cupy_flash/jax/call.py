"""Calls inside compiled programs, forward and backward; `primitives` makes them differentiable.

Compiled programs call the kernels through ``jax.experimental.buffer_callback``, which passes buffers and the
stream; exported programs call them through `ffi`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

from ..call.arrays import CPU
from ..call.codes import CODE_SCALES, kind_of_codes
from ..call.functions import learned_by
from ..call.given import Options
from ..call.options import WITH_GRADIENT
from .buffers import address, device_of
from .ffi import foreign, is_exporting
from .numbers import accumulator
from .run import Cached, Config, run

__all__ = [
    "backward", "differentiable", "forward", "over_cache", "results_of", "results_over_cache", "rows_of",
    "vary_alike", "written",
]  # fmt: skip


def _call(arrays: dict[str, Any], results: dict[str, Any], direction: str, **fixed: Any) -> dict[str, Any]:
    """Add a call to the program being traced.

    Parameters
    ----------
    arrays : dict of str to Array
    results : dict of str to ShapeDtypeStruct
        A result with the name of an array is that array, written in place.
    direction, **fixed
        As in `Config`.
    """
    names, inputs, wire = tuple(arrays), list(arrays.values()), tuple(results.values())
    config = Config(
        direction,
        names=names,
        dtypes=tuple(x.dtype.name for x in inputs),
        ranks=tuple(x.ndim for x in inputs),
        results=tuple((name, len(x.shape), x.dtype.name) for name, x in results.items()),
        **fixed,
    )
    # Kernels never write rows that belong to no sequence, so XLA provides zeros as the outputs.
    packed = config.longest or (config.cached and config.cached.packing)
    zeros = [jnp.zeros(x.shape, x.dtype) for name, x in results.items() if packed and name not in names]
    aliases = {len(inputs) + i: i for i in range(len(zeros))}
    aliases |= {names.index(name): i for i, name in enumerate(results) if name in names}
    if is_exporting():
        call = foreign(config, wire, aliases)
    else:
        call = buffer_callback(
            _callback(config), wire, vmap_method="broadcast_all", input_output_aliases=aliases
        )
    return dict(zip(results, vary_alike(*call(*inputs, *zeros), over=inputs), strict=True))


def _varies_over(x: Any) -> frozenset[str]:
    """Axes of the mesh of a shard_map along which devices hold different values of x."""
    kind = jax.typeof(x)
    # The name depends on the version of JAX.
    axes: Any = getattr(kind, "vma", None) or getattr(getattr(kind, "mat", None), "varying", ())
    return frozenset(axes)


def vary_alike(*arrays: Any, over: Any = ()) -> tuple[Any, ...]:
    """Cast arrays to device-varying along all mesh axes along which any of them or of `over` varies.

    why: JAX takes the results of a callback to be the same on all devices. And if an input is the same on
    all, its gradient has to be summed over devices, which is the derivative of this cast.
    """
    axes = frozenset[str]().union(*map(_varies_over, (*arrays, *over)))
    lax: Any = jax.lax  # older JAX has no pcast, newer no pvary
    cast = functools.partial(lax.pcast, to="varying") if hasattr(lax, "pcast") else lax.pvary
    missing = [tuple(sorted(axes - _varies_over(x))) for x in arrays]
    return tuple(cast(x, some) if some else x for x, some in zip(arrays, missing, strict=True))


@functools.lru_cache(maxsize=1024)
def _callback(config: Config) -> Callable[..., None]:
    """The callback of a call. why cached: JAX recompiles for every new function object."""
    _, dtypes = config.of_buffers()

    def callback(ctx: Any, outs: Any, *ins: Any) -> None:
        # After the inputs come zeros, which are the same memory as the outputs of packed sequences.
        buffers = (*ins[: len(config.names)], *outs)
        device = device_of(ins[0])
        pointers = [address(b, dtype, device) for b, dtype in zip(buffers, dtypes, strict=True)]
        # A context has a stream on a GPU only, and raises elsewhere.
        stream = None if device == CPU else ctx.stream
        run(config, [tuple(b.shape) for b in buffers], pointers, device, stream)

    return callback


def rows_of(q: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of the LSE, from the shape of q."""
    shape = tuple(q[:-1])
    return shape if layout == "bhsd" or len(shape) == 1 else (*shape[:-2], shape[-1], shape[-2])


def results_of(arrays: dict[str, Any], layout: str, head_dim_v: int | None = None) -> dict[str, Any]:
    """Shapes and dtypes of O and LSE; `head_dim_v` is given for latents."""
    q = arrays["q"]
    if head_dim_v is None:
        v = arrays["v_cache" if "v_cache" in arrays else "v"]
        head_dim_v = v.shape[-1] * (2 if kind_of_codes(arrays) else 1)  # codes of 4 bits, two to a byte
    return {
        "o": jax.ShapeDtypeStruct((*q.shape[:-1], head_dim_v), q.dtype),
        "lse": jax.ShapeDtypeStruct(rows_of(q.shape, layout), accumulator(q.dtype)),
    }


def _wide(shape: Any) -> Any:
    """The same shape in the accumulator dtype."""
    return jax.ShapeDtypeStruct(shape.shape, accumulator(shape.dtype))


def forward(
    arrays: dict[str, Any],
    options: Options,
    longest: tuple[int, int] | None = None,
    unrounded: bool = False,
) -> tuple[Any, Any]:
    """O and LSE, not differentiable; `arrays` are named as the options of `attention`.

    unrounded: keep o in the accumulator dtype.
    """
    shapes = results_of(arrays, options.layout)
    if unrounded:
        shapes["o"] = _wide(shapes["o"])
    results = _call(arrays, shapes, "forward", options=options, longest=longest, unrounded=unrounded)
    return results["o"], results["lse"]


def written(arrays: dict[str, Any]) -> tuple[str, ...]:
    """Names of the arrays that appending writes, in the order of the results of `over_cache`."""
    names = ("k_cache", "v_cache", *CODE_SCALES.get(kind_of_codes(arrays), ()))
    return tuple(name for name in names if name in arrays)


def results_over_cache(arrays: dict[str, Any], options: Options, cached: Cached) -> dict[str, Any]:
    """Shapes and dtypes of what `over_cache` returns."""
    results = results_of(arrays, "bshd" if cached.packing else options.layout, cached.head_dim_v)
    if not cached.want_lse:
        del results["lse"]
    if "k" in arrays:
        results |= {n: jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in written(arrays)}
    return results


def over_cache(arrays: dict[str, Any], options: Options, cached: Cached) -> dict[str, Any]:
    """O, LSE if wanted, and, if keys are appended, the written caches and scales of codes, by name."""
    results = results_over_cache(arrays, options, cached)
    return _call(arrays, results, "decode", options=options, cached=cached)


def differentiable(options: Options) -> tuple[str, ...]:
    """Names of all arrays that can have gradients."""
    return (*WITH_GRADIENT, *learned_by(options.score))


def backward(
    arrays: dict[str, Any],
    o: Any,
    lse: Any,
    do: Any,
    dlse: Any,
    options: Options,
    longest: tuple[int, int] | None = None,
    unrounded: bool = False,
) -> dict[str, Any]:
    """The gradient of every array that has one, by the name of the array.

    unrounded: keep the gradients of q, k and v in the accumulator dtype; there are no others.
    """
    inputs = {"do": do, **arrays, "o": o, "lse": lse, "dlse": dlse}
    wanted = [name for name in differentiable(options) if name in arrays]
    results = {"d" + n: jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in wanted}
    if unrounded:
        results = {name: _wide(x) for name, x in results.items()}
    grads = _call(inputs, results, "backward", options=options, longest=longest, unrounded=unrounded)
    return dict(zip(wanted, grads.values(), strict=True))
