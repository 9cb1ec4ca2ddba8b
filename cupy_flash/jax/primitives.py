"""attention and its derivatives as primitives of JAX, linear in the tangents, each with its transpose.

With F attention, J its tangent, B its gradient and H the derivative of B in a direction:

    derivative of F   J                                          transpose of F   dV of B, by v alone
    derivative of J   J of the other tangent, and `second_jvp`   transpose of J   B
    derivative of B   B of the other gradient, and H             transpose of B   J
    derivative of H   none: it would be the third                transpose of H   H, a Hessian is symmetric

`second_jvp`, the second derivative of the results in two directions, is never computed; its transpose is H.
o and lse count as functions of the arrays.

A derivative that does not exist is the primitive `missing`, linear in the tangents that would need it: a
program that drops it, behind a `stop_gradient`, runs; any other raises when it is compiled or computed.

Arguments of a primitive are residuals, in which it is not linear, then its linear arguments (F: all arrays).
vmap adds a leading axis to all linear arguments, and to the residuals that differ along it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..call.given import Options
from ..errors import UnsupportedError
from ..namespace import NAMESPACE
from .call import (
    backward,
    differentiable,
    forward,
    over_cache,
    results_over_cache,
    rows_of,
    vary_alike,
)
from .directed import directed
from .ffi import exporting
from .numbers import accumulator
from .run import Cached

__all__ = ["attention", "attention_over_cache", "gradients", "missing", "named_results"]


class _Params(NamedTuple):
    """Static parameters of a primitive."""

    options: Options
    longest: tuple[int, int] | None  # longest lengths of packed sequences; None for a batch
    names: tuple[str, ...]  # names of the arrays, which are the first arguments
    # Names of the arrays whose tangents are the linear arguments, if these are tangents.
    along: tuple[str, ...] = ()
    # For each axis of vmap, the outermost first, whether each residual has it.
    mapped: tuple[tuple[bool, ...], ...] = ()
    # For `second_jvp`, names of the arrays whose tangents are among the residuals.
    fixed: tuple[str, ...] = ()
    cached: Cached | None = None  # parameters of attention over a cache; None otherwise
    unrounded: bool = False  # as in `call.forward` and `call.backward`; such calls have no derivatives

    @property
    def arrays(self) -> int:
        """Number of arrays plus o and lse."""
        return len(self.names) + 2

    def wanted(self) -> list[int]:
        """Positions of the arrays that have gradients."""
        return [i for i, name in enumerate(self.names) if name in differentiable(self.options)]

    def with_residuals(self, more: int, **others: Any) -> _Params:
        """A copy with `more` residuals after the arrays, o and lse, which have every axis of vmap."""
        mapped = tuple((*level[: self.arrays], *(True,) * more) for level in self.mapped)
        return self._replace(mapped=mapped, **others)


def _split(args: Any, linear: int) -> tuple[list[Any], list[Any]]:
    """Split arguments into residuals and the last `linear` ones."""
    cut = len(args) - linear
    return list(args[:cut]), list(args[cut:])


def _bind(primitive: Primitive, params: _Params, *args: Any) -> Any:
    return primitive.bind(*vary_alike(*args), params=params)


def _with_axis(x: Any, axis: int, like: Any) -> Any:
    """Broadcast along an axis of `like`, on the same axis of an explicit mesh."""
    where, spec = jax.typeof(like).sharding, jax.typeof(x).sharding.spec
    shape, more = (*x.shape[:axis], like.shape[axis], *x.shape[axis:]), {}
    if (name := where.spec[axis]) is not None:  # older JAX has no out_sharding
        whole = PartitionSpec(*spec[:axis], name, *spec[axis:])
        more["out_sharding"] = NamedSharding(where.mesh, whole)
    return jnp.broadcast_to(jnp.expand_dims(x, axis), shape, **more)


def _with_all_axes(x: Any, residual: int, params: _Params, like: Any) -> Any:
    """Broadcast the tangent of a residual to every axis of vmap, which linear arguments must have."""
    for axis, level in enumerate(params.mapped):
        if not level[residual]:
            x = _with_axis(x, axis, like)
    return x


def _dots(params: _Params, tangents: list[Any], like: Any) -> dict[str, Any]:
    """The non-zero tangents of the arrays, by name; `like` is an array with every axis of vmap."""
    found = {}
    for i, name in enumerate(params.names):
        if type(tangents[i]) is ad.Zero or tangents[i].dtype == jax.dtypes.float0:
            continue
        if name not in differentiable(params.options):
            learned = "; or learned=(...) of cupy_flash.score" if name.startswith("bound") else ""
            raise UnsupportedError(
                f"{name} has no gradient here.", hint=f"jax.lax.stop_gradient({name}){learned}"
            )
        found[name] = _with_all_axes(tangents[i], i, params, like)
    return found


def _added(a: Any, b: Any) -> list[Any]:
    if a is None or b is None:
        return list(a or b or ())
    return [ad.add_tangents(x, y) for x, y in zip(a, b, strict=True)]


def _is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


def _all_or_none(some: list[Any]) -> list[Any] | None:
    """Materialise symbolic zeros of tangents or cotangents; None if all are zero."""
    return None if all(map(_is_zero, some)) else [ad.instantiate_zeros(x) for x in some]


# ---------------------------------------------------------------------------------------------- F


def attention(
    arrays: dict[str, Any], options: Options, longest: tuple[int, int] | None, unrounded: bool = False
) -> tuple[Any, Any]:
    """O and LSE, with derivatives if they are rounded; parameters as in `call.forward`."""
    params = _Params(options, longest, tuple(arrays), unrounded=unrounded)
    o, lse = _bind(_forward_p, params, *arrays.values())
    return o, lse


def named_results(o: Any, lse: Any) -> tuple[Any, Any]:
    """O and LSE by a name for policies of `jax.checkpoint`.

    why here: gradients need these very arrays, and a name that the caller gives to o is one of another array.
    """
    return checkpoint_name(o, NAMESPACE), checkpoint_name(lse, NAMESPACE)


def _forward(*args: Any, params: _Params) -> Any:
    arrays = dict(zip(params.names, args, strict=True))
    return forward(arrays, params.options, params.longest, params.unrounded)


def _forward_shapes(*avals: Any, params: _Params) -> list[Any]:
    given = dict(zip(params.names, avals, strict=True))
    q, v, axes = given["q"], given["v"], len(params.mapped)

    def rows(x: Any) -> Any:
        return (*x[:axes], *rows_of(x[axes:], params.options.layout))

    spec = q.sharding.spec
    return [
        _placed(q, (*q.shape[:-1], v.shape[-1]), (*spec[:-1], None), dtype=_dtype_of(q, params)),
        _placed(q, rows(q.shape), rows(spec), dtype=accumulator(q.dtype)),
    ]


def _dtype_of(aval: Any, params: _Params) -> Any:
    """The dtype of o and of the gradients that belongs to this dtype of an array."""
    return accumulator(aval.dtype) if params.unrounded else aval.dtype


def _placed(aval: Any, shape: Any, spec: Any, **more: Any) -> Any:
    """The abstract value with another shape, and the mesh axis of each of its axes."""
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*spec))
    return aval.update(shape=shape, sharding=sharding, weak_type=False, **more)


def _forward_jvp(primals: Any, tangents: Any, *, params: _Params) -> Any:
    o, lse = named_results(*_bind(_forward_p, params, *primals))
    with_all = params._replace(mapped=tuple((True,) * params.arrays for _ in params.mapped))
    dots = _dots(with_all, tangents, primals[0])
    if not dots:
        return (o, lse), tuple(ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (o, lse))
    return (o, lse), _bind(_jvp_p, with_all._replace(along=tuple(dots)), *primals, o, lse, *dots.values())


def _forward_transpose(cotangents: Any, *args: Any, params: _Params) -> list[Any]:
    """The transpose by v, in which o is linear, and of which lse is independent."""
    unknown = [name for name, x in zip(params.names, args, strict=True) if ad.is_undefined_primal(x)]
    if unknown != ["v"]:
        raise UnsupportedError(
            f"attention is not linear in {', '.join(unknown)}, and cannot be transposed; it is linear in v.",
            hint="jax.vjp, or jax.linear_transpose by v alone",
        )
    at, do = params.names.index("v"), cotangents[0]
    aval = args[at].aval
    if _is_zero(do):
        return [ad.Zero(aval) if i == at else None for i in range(len(args))]
    # why 0: dV does not depend on V.
    arrays = [jnp.zeros(aval.shape, aval.dtype) if i == at else x for i, x in enumerate(args)]
    o, lse = _bind(_forward_p, params, *arrays)
    with_all = params._replace(mapped=tuple((True,) * params.arrays for _ in params.mapped))
    grads = _bind(_backward_p, with_all, *arrays, o, lse, do, jnp.zeros_like(lse))
    dv = grads[_named(params).index("v")]
    return [dv if i == at else None for i in range(len(args))]


# ---------------------------------------------------------------------------------------------- J


def _refuse_learned(params: _Params, all_of_them: bool) -> None:
    """Refuse derivatives by learned arguments of a score function: those in `along`, or all of them."""
    score = params.options.score
    if any(name.startswith("bound") for name in params.along) or (all_of_them and score and score.learned):
        raise UnsupportedError(
            "what a score function learns has neither forward-mode nor second derivatives.",
            hint="the function made without learned=; or jax.grad, once; or a bias instead of the function",
        )


def _jvp(*args: Any, params: _Params) -> Any:
    _refuse_learned(params, all_of_them=False)
    return directed("jvp", params.options, params.longest, params.names, args, params.along)


def _jvp_shapes(*avals: Any, params: _Params) -> list[Any]:
    """Results of J and of `second_jvp`: shaped as o and lse."""
    return [_shaped(avals, params, params.arrays - 2), _shaped(avals, params, params.arrays - 1)]


def _shaped(avals: Any, params: _Params, residual: int) -> Any:
    """The abstract value of a residual with every axis of vmap."""
    aval, linear = avals[residual], avals[-1]
    own = sum(level[residual] for level in params.mapped)
    axes = len(params.mapped)
    shape, spec = (
        (*x[:axes], *y[own:])
        for x, y in ((linear.shape, aval.shape), (linear.sharding.spec, aval.sharding.spec))
    )
    return _placed(aval, shape, spec)


def _jvp_jvp(primals: Any, tangents: Any, *, params: _Params) -> Any:
    results = _bind(_jvp_p, params, *primals)
    residuals, along = _split(primals, len(params.along))
    _, of_along = _split(tangents, len(params.along))
    nonzero = {n: x for n, x in zip(params.along, of_along, strict=True) if not _is_zero(x)}
    by_linear = by_residuals = None
    if nonzero:
        by_linear = _bind(_jvp_p, params._replace(along=tuple(nonzero)), *residuals, *nonzero.values())
    dots = _dots(params, tangents, along[0])
    if dots:
        second_params = params.with_residuals(len(along), along=tuple(dots), fixed=params.along)
        by_residuals = _bind(_second_jvp_p, second_params, *residuals, *along, *dots.values())
    return results, _added(by_linear, by_residuals)


def _jvp_transpose(cotangents: Any, *args: Any, params: _Params) -> list[Any]:
    residuals, along = _split(args, len(params.along))
    given = _all_or_none(list(cotangents))
    if given is None:
        return [None] * len(residuals) + [ad.Zero(x.aval) for x in along]
    grads = dict(
        zip(_named(params), _bind(_backward_p, params._replace(along=()), *residuals, *given), strict=True)
    )
    return [None] * len(residuals) + [grads[name] for name in params.along]


# ---------------------------------------------------------------------------------------------- B


def _named(params: _Params) -> list[str]:
    return [params.names[i] for i in params.wanted()]


def gradients(
    arrays: dict[str, Any],
    results: tuple[Any, Any, Any, Any],
    options: Options,
    longest: tuple[int, int] | None,
    unrounded: bool,
) -> dict[str, Any]:
    """Gradients by the names of their arrays; `results` are o, lse, do and dlse."""
    params = _Params(options, longest, tuple(arrays), unrounded=unrounded)
    return dict(zip(_named(params), _bind(_backward_p, params, *arrays.values(), *results), strict=True))


def _backward(*args: Any, params: _Params) -> Any:
    *given, o, lse, do, dlse = args
    arrays = dict(zip(params.names, given, strict=True))
    grads = backward(arrays, o, lse, do, dlse, params.options, params.longest, params.unrounded)
    return [grads[name] for name in _named(params)]


def _gradient_shapes(*avals: Any, params: _Params) -> list[Any]:
    """Results of B and H: shaped as the arrays with gradients."""
    shapes = [_shaped(avals, params, i) for i in params.wanted()]
    return [x.update(dtype=_dtype_of(x, params)) for x in shapes]


def _backward_jvp(primals: Any, tangents: Any, *, params: _Params) -> Any:
    results = _bind(_backward_p, params, *primals)
    residuals, given = _split(primals, 2)
    by_linear = by_residuals = None
    nonzero = _all_or_none(list(tangents[-2:]))
    if nonzero is not None:
        by_linear = _bind(_backward_p, params, *residuals, *nonzero)
    dots = _dots(params, tangents, given[0])
    if dots:
        hvp_params = params.with_residuals(2, along=tuple(dots))
        by_residuals = _bind(_hvp_p, hvp_params, *residuals, *given, *dots.values())
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, _added(by_linear, by_residuals) or zeros


def _backward_transpose(cotangents: Any, *args: Any, params: _Params) -> list[Any]:
    residuals, given = _split(args, 2)
    dots = {n: x for n, x in zip(_named(params), cotangents, strict=True) if not _is_zero(x)}
    if not dots:
        return [None] * len(residuals) + [ad.Zero(x.aval) for x in given]
    results = _bind(_jvp_p, params._replace(along=tuple(dots)), *residuals, *dots.values())
    return [None] * len(residuals) + list(results)


# ---------------------------------------------------------------------------------------------- H


def _hvp(*args: Any, params: _Params) -> Any:
    _refuse_learned(params, all_of_them=True)
    return directed("hvp", params.options, params.longest, params.names, args, params.along)


def _hvp_jvp(primals: Any, tangents: Any, *, params: _Params) -> Any:
    residuals, _ = _split(primals, len(params.along))
    still, of_along = _split(tangents, len(params.along))
    results = _bind(_hvp_p, params, *primals)
    nonzero = {n: x for n, x in zip(params.along, of_along, strict=True) if not _is_zero(x)}
    by_linear = None
    if nonzero:
        by_linear = _bind(_hvp_p, params._replace(along=tuple(nonzero)), *residuals, *nonzero.values())
    third = missing(_THIRD, (*still[: len(params.names)], *still[-2:]), results)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, _added(by_linear, third) or zeros


def _hvp_transpose(cotangents: Any, *args: Any, params: _Params) -> list[Any]:
    residuals, along = _split(args, len(params.along))
    dots = {n: x for n, x in zip(_named(params), cotangents, strict=True) if not _is_zero(x)}
    if not dots:
        return [None] * len(residuals) + [ad.Zero(x.aval) for x in along]
    results = _bind(_hvp_p, params._replace(along=tuple(dots)), *residuals, *dots.values())
    grads = dict(zip(_named(params), results, strict=True))
    return [None] * len(residuals) + [grads[name] for name in params.along]


# ---------------------------------------------------------------------------------------------- second_jvp


def _second_jvp(*_: Any, params: _Params) -> Any:
    del params
    raise UnsupportedError(
        "attention has no forward-mode derivative of its forward-mode derivative.",
        hint="jax.hessian(f) or jax.jacfwd(jax.jacrev(f)): reverse mode inside",
    )


def _second_jvp_jvp(primals: Any, tangents: Any, *, params: _Params) -> Any:
    results = _bind(_second_jvp_p, params, *primals)
    return results, missing(_THIRD, tangents, results)


def _second_jvp_transpose(cotangents: Any, *args: Any, params: _Params) -> list[Any]:
    residuals, along = _split(args, len(params.along))
    given = _all_or_none(list(cotangents))
    if given is None:
        return [None] * len(residuals) + [ad.Zero(x.aval) for x in along]
    arrays, fixed = residuals[: params.arrays], residuals[params.arrays :]
    hvp_params = params.with_residuals(2, along=params.fixed, fixed=())
    grads = dict(zip(_named(params), _bind(_hvp_p, hvp_params, *arrays, *given, *fixed), strict=True))
    return [None] * len(residuals) + [grads[name] for name in params.along]


# ---------------------------------------------------------------------------------------------- caches


def attention_over_cache(arrays: dict[str, Any], options: Options, cached: Cached) -> tuple[Any, ...]:
    """Results of `call.over_cache`, without derivatives."""
    params = _Params(options, None, tuple(arrays), cached=cached)
    return tuple(_bind(_cache_p, params, *arrays.values()))


def _cache(*args: Any, params: _Params) -> Any:
    assert params.cached is not None
    return list(
        over_cache(dict(zip(params.names, args, strict=True)), params.options, params.cached).values()
    )


def _cache_shapes(*avals: Any, params: _Params) -> list[Any]:
    assert params.cached is not None
    axes, given = len(params.mapped), dict(zip(params.names, avals, strict=True))
    one = {name: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype) for name, x in given.items()}
    q, layout = given["q"], "bshd" if params.cached.packing else params.options.layout
    lead, spec = q.shape[:axes], q.sharding.spec
    specs = {"o": (*spec[:-1], None), "lse": (*spec[:axes], *rows_of(spec[axes:], layout))}
    return [
        _placed(
            q, (*lead, *x.shape), specs[name] if name in specs else given[name].sharding.spec, dtype=x.dtype
        )
        for name, x in results_over_cache(one, params.options, params.cached).items()
    ]


def _cache_jvp(primals: Any, tangents: Any, *, params: _Params) -> Any:
    results = _bind(_cache_p, params, *primals)
    return results, missing(_OF_CACHE, tangents, results)


def _cache_transpose(*_: Any, params: _Params) -> Any:
    del params
    raise UnsupportedError(_OF_CACHE[0], hint=_OF_CACHE[1])


# ---------------------------------------------------------------------------------------------- missing


_THIRD = (
    "attention has no third derivative.",
    "at most two derivatives of each call; jax.jit around them, if nothing comes of the third one",
)
_OF_CACHE = (
    "attention over a cache, which is written in place, has no gradient.",
    "jax.lax.stop_gradient(q), or cupy_flash.jax.attention",
)


def missing(why: tuple[str, str], tangents: Any, results: Any) -> list[Any] | None:
    """Tangents of results that cannot be computed; None if all input tangents are zero."""
    given = [x for x in tangents if not (_is_zero(x) or x.dtype == jax.dtypes.float0)]
    if not given:
        return None
    kinds = tuple(jax.typeof(x) if isinstance(x, jax.Array) else x for x in results)
    return list(_missing_p.bind(*vary_alike(*given), why=why, kinds=kinds))


def _missing_shapes(*_: Any, why: Any, kinds: Any) -> list[Any]:
    del why
    return [x.update(weak_type=False) for x in kinds]


def _missing_compute(*_: Any, why: tuple[str, str], kinds: Any) -> Any:
    del kinds
    raise UnsupportedError(why[0], hint=why[1])


def _missing_jvp(primals: Any, tangents: Any, *, why: Any, kinds: Any) -> Any:
    results = _missing_p.bind(*primals, why=why, kinds=kinds)
    return results, missing(why, tangents, results)


def _missing_transpose(cotangents: Any, *args: Any, why: Any, kinds: Any) -> list[Any]:
    del kinds
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    avals = [args[i].aval for i in linear]
    found = missing(why, cotangents, avals) or map(ad.Zero, avals)
    grads: list[Any] = [None] * len(args)
    for i, x in zip(linear, found, strict=True):
        grads[i] = x
    return grads


def _missing_batched(args: Any, dims: Any, *, why: Any, kinds: Any) -> Any:
    size, name = next(
        (x.shape[dim], jax.typeof(x).sharding.spec[dim])
        for x, dim in zip(args, dims, strict=True)
        if dim is not None
    )
    kinds = tuple(_placed(x, (size, *x.shape), (name, *x.sharding.spec)) for x in kinds)
    return _missing_p.bind(*args, why=why, kinds=kinds), [0] * len(kinds)


# ---------------------------------------------------------------------------------------------- primitives


def _linear_count(name: str, params: _Params) -> int:
    return {"forward": len(params.names), "cache": len(params.names), "backward": 2}.get(
        name, len(params.along)
    )


def _primitive(name: str, compute: Any, shapes: Any, derivative: Any, transpose: Any) -> Primitive:
    primitive = Primitive(f"cupy_flash_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)

    def over_axes(*args: Any, params: _Params) -> Any:
        function: Callable[..., Any] = functools.partial(compute, params=params)
        for level in reversed(params.mapped):
            axes = [0 if there else None for there in level] + [0] * _linear_count(name, params)
            function = jax.vmap(function, in_axes=axes)
        return function(*args)

    @functools.lru_cache(maxsize=256)
    def compiled(params: _Params) -> Any:
        return jax.jit(functools.partial(over_axes, params=params))

    def batched(args: Any, dims: Any, *, params: _Params) -> Any:
        size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
        count = len(args) - _linear_count(name, params)
        level = tuple(dim is not None for dim in dims[:count])
        batch_first = [
            x if dim is None else batching.bdim_at_front(x, dim, size)
            for x, dim in zip(args, dims, strict=True)
        ]
        like = next(x for x, dim in zip(batch_first, dims, strict=True) if dim is not None)
        batch_first[count:] = [
            _with_axis(x, 0, like) if dim is None else x
            for x, dim in zip(batch_first[count:], dims[count:], strict=True)
        ]
        results = _bind(primitive, params._replace(mapped=(level, *params.mapped)), *batch_first)
        return results, [0] * len(results)

    primitive.def_impl(lambda *args, params: compiled(params)(*args))

    def lowered(ctx: Any, *args: Any, params: _Params) -> Any:
        with exporting(ctx):
            return mlir.lower_fun(over_axes, multiple_results=True)(ctx, *args, params=params)

    mlir.register_lowering(primitive, lowered)
    # why not an item assignment: the mock of JAX in the documentation build does not support it.
    ad.primitive_jvps.__setitem__(primitive, derivative)
    ad.primitive_transposes.__setitem__(primitive, transpose)
    batching.primitive_batchers.__setitem__(primitive, batched)
    return primitive


_forward_p = _primitive("forward", _forward, _forward_shapes, _forward_jvp, _forward_transpose)
_jvp_p = _primitive("jvp", _jvp, _jvp_shapes, _jvp_jvp, _jvp_transpose)
_backward_p = _primitive("backward", _backward, _gradient_shapes, _backward_jvp, _backward_transpose)
_hvp_p = _primitive("hvp", _hvp, _gradient_shapes, _hvp_jvp, _hvp_transpose)
_cache_p = _primitive("cache", _cache, _cache_shapes, _cache_jvp, _cache_transpose)
_second_jvp_p = _primitive("second_jvp", _second_jvp, _jvp_shapes, _second_jvp_jvp, _second_jvp_transpose)

_missing_p = Primitive("cupy_flash_missing")
_missing_p.multiple_results = True
_missing_p.def_abstract_eval(_missing_shapes)
_missing_p.def_impl(_missing_compute)
mlir.register_lowering(_missing_p, mlir.lower_fun(_missing_compute, multiple_results=True))
ad.primitive_jvps.__setitem__(_missing_p, _missing_jvp)
ad.primitive_transposes.__setitem__(_missing_p, _missing_transpose)
batching.primitive_batchers.__setitem__(_missing_p, _missing_batched)
