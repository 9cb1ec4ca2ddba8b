"""attention_with_kv_cache as a JAX function, which returns the updated caches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..call.arrays import CPU, ArrayView, contiguous
from ..call.cache.describe import check_one_length
from ..call.cache.parts import cache_parts
from ..call.cache.selected import Selection
from ..call.checks import flag, integer
from ..call.compound import LatentCache, QuantizedCache
from ..call.given import CacheCall, Options, Packing, split_of_cache
from ..call.head_scale import scale_shape, times
from ..call.options import CacheOptions
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from ..shared_prefix import Prefix
from .call import vary_alike, written
from .functional import attention, refuse_ragged
from .numbers import (
    accumulator,
    as_arrays,
    fixed,
    fixed_options,
    is_array,
    one_int32,
    own_promotion,
    static_size,
    symbolic,
    types_of,
)
from .primitives import attention_over_cache
from .run import READ, Cached, described

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_with_kv_cache"]


@own_promotion()
@takes(CacheOptions)
def attention_with_kv_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any = None,
    *,
    cache_seqlens: Any,
    return_lse: bool = False,
    **options: Unpack[CacheOptions],
) -> Any:
    """`cupy_flash.attention_with_kv_cache` as a JAX function: under jit, scan and vmap, without gradients.

    Parameters
    ----------
    q, k_cache, v_cache : Array or QuantizedCache; k_cache also LatentCache
        As in `cupy_flash.attention_with_kv_cache`. They are not written to: with k and v, the
        results include new caches. If they are donated to jit (``donate_argnums``), and in the carry of a
        scan, the new ones reuse their memory, and only new keys are written; elsewhere XLA copies them.
    cache_seqlens : Array of int32, shape (batch,), or an integer for all, which may be traced
        Keys of each sequence in the cache before this call; other lengths do not recompile.
    cu_seqlens_q, cu_seqlens_k_new : Array of int32, optional
        As in `cupy_flash.attention_with_kv_cache`; they may be traced, and other lengths do not recompile.
        On a CPU wrong ones raise when the program runs.
    max_seqlen_q, max_seqlen_k : int, optional
        Static under jit. Default: all rows of q, and the capacity of a sequence.
    scale, softcap : float or Array of shape (), optional
        As in `cupy_flash.jax.attention`, scale also per head; without gradients here.
    mask
        As in `cupy_flash.attention_with_kv_cache`; a `cupy_flash.RaggedMask` raises: its size depends on
        lengths, and a program is compiled for fixed sizes.
    rotary : Rotary, optional
        As in `cupy_flash.attention_with_kv_cache`; a pytree; its flags are static under jit.
    tuning : Tuning, optional
        Static under jit; without workspace. check validates lengths and tables when the program runs.
        Default: on a CPU; on a GPU True raises.
    {options: As in `cupy_flash.attention_with_kv_cache`; every option that is not an array is static under
    jit.}
    return_lse : bool
        As in `cupy_flash.attention_with_kv_cache`.

    Returns
    -------
    o : Array
    lse : Array
        Only with return_lse.
    k_cache, v_cache : Array or QuantizedCache
        Only with k and v, in the form given; arrays of a `cupy_flash.QuantizedCache` may be donated, too. For
        latents one `cupy_flash.LatentCache`.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError, CubinNotFoundError
        As in `cupy_flash.attention_with_kv_cache`, while tracing; wrong lengths and tables raise when the
        program runs. UnsupportedError also for a gradient.

    Examples
    --------
    >>> import functools, jax, jax.numpy as jnp, cupy_flash.jax
    >>> @functools.partial(jax.jit, donate_argnames="caches")
    ... def step(q, k, v, caches, length):
    ...     o, *caches = cupy_flash.jax.attention_with_kv_cache(q, *caches, cache_seqlens=length, k=k, v=v)
    ...     return o, caches
    >>> caches = list(jnp.zeros((2, 1, 8, 128, 64)))  # capacity 128 keys, 8 heads
    >>> q, k, v = jnp.ones((3, 1, 8, 1, 64))
    >>> for length in range(3):
    ...     o, caches = step(q, k, v, caches, length)
    >>> o.shape, float(caches[0][0, 0, :, 0].sum())
    ((1, 8, 1, 64), 3.0)
    """
    flat = cache_parts(k_cache, v_cache, options)
    if flat.pop("workspace", None) is not None:
        raise UnsupportedError(
            "tuning has a workspace, and XLA manages its own memory.",
            hint="tuning._replace(workspace=None), or cupy_flash.attention_with_kv_cache",
        )
    columns = k_cache.head_dim_v if isinstance(k_cache, LatentCache) else None
    flat = {name: jnp.asarray(x) if is_array(x) else x for name, x in flat.items()}
    if getattr(flat.get("scale"), "ndim", 0):
        layout = "bshd" if flat.get("cu_seqlens_q") is not None else flat.get("layout", "bhsd")
        q = jnp.asarray(q)
        factor = scale_shape(flat["scale"].shape, q.shape, layout)
        scale = flat["scale"].reshape(factor).astype(accumulator(q.dtype))
        q, flat["scale"] = times(q.astype(scale.dtype), scale).astype(q.dtype), 1.0
    want_lse, appends = flag(return_lse, "return_lse"), flat.get("k") is not None
    shared = Prefix.of_cache(q, flat["k_cache"], flat["v_cache"], flat)
    cache_seqlens = _lengths(cache_seqlens)
    whole = {**flat, "cache_seqlens": cache_seqlens}
    own = flat if shared is None else {"q": q, **shared.behind(flat)}
    if shared is not None and shared.may_hold_queries(q, flat):
        # why traced but not run: this checks the tables
        jax.eval_shape(lambda: _over_cache(q, cache_seqlens, {**shared.behind(flat)}, True, columns))
        own |= shared.rotated(jnp, jnp.asarray(q), flat["k_cache"], whole)
    rows = q if shared is None else own.pop("q")
    o, *rest = _over_cache(rows, cache_seqlens, {**own}, want_lse or shared is not None, columns)
    lse = rest.pop(0) if want_lse or shared is not None else None
    if shared is not None:
        first = shared.before_cache(jnp, attention, jnp.asarray(q), flat["k_cache"], whole)
        o, lse = shared.merge(jnp, first, (o, lse), o.dtype)
    names = written(flat) if columns is None else ("k_cache",)
    made = dict(zip(names, rest, strict=True)) if appends else {}
    given = (("k", k_cache),) if columns is not None else (("k", k_cache), ("v", v_cache))
    caches = [_as_given(name, x, made) for name, x in given] if appends else []
    results = (o, *[lse] * want_lse, *caches)
    return results if len(results) > 1 else o


def _lengths(cache_seqlens: Any) -> Any:
    """cache_seqlens as an array; one integer for all as int32 of shape ()."""
    if isinstance(cache_seqlens, (int, np.integer)):
        check_one_length(int(cache_seqlens))
    lengths = as_arrays({"cache_seqlens": cache_seqlens})["cache_seqlens"]
    if lengths.ndim:
        return lengths
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InvalidArgumentsError(
            f"cache_seqlens is {cache_seqlens!r}.", hint="an int32 array (batch,), or one integer for all"
        )
    return one_int32(lengths)


def _as_given(letter: str, cache: Any, made: dict[str, Any]) -> Any:
    """A cache after appending, in the type that the caller passed."""
    codes = made[f"{letter}_cache"]
    if isinstance(cache, LatentCache):
        return cache._replace(latents=_as_given(letter, cache.latents, made))
    if not isinstance(cache, QuantizedCache):
        return codes
    parts = (
        ("scale", f"{letter}_scale"),
        ("zero", f"{letter}_zero"),
        ("block_scale", f"{letter}_block_scale"),
    )
    return cache._replace(codes=codes, **{part: made[name] for part, name in parts if name in made})


def _over_cache(
    q: Any, cache_seqlens: Any, options: dict[str, Any], want_lse: bool, columns: int | None
) -> tuple[Any, ...]:
    """The call without a prefix, with flat options: o, LSE if asked for, and the arrays that it writes.

    columns: for latents, the number of columns that are the values; else None.
    """
    if columns is not None:
        # why: slicing an array copies in JAX; the callback makes a view instead.
        del options["v_cache"]
    if options.get("indices") is not None:
        return _over_selected_keys(q, cache_seqlens, options, want_lse, columns)
    check = options.pop("check", None)
    optional, values, call = split_of_cache(options)
    given = {"q": q, "cache_seqlens": cache_seqlens, **optional}
    arrays = as_arrays(given)
    packing = _packing(arrays, call.longest)
    if cache_seqlens.ndim == 0:
        batch = packing.batch if packing else arrays["q"].shape[0]
        arrays["cache_seqlens"] = jnp.broadcast_to(cache_seqlens, (batch,))
    look = None if check is None else flag(check, "tuning.check")
    # why flags: static arguments are keys, and 1 == True as a key.
    call = CacheCall(*map(fixed, call))._replace(
        interleaved=flag(call.interleaved, "rotary.interleaved"),
        unrotated=flag(call.unrotated, "rotary.on_read"),
        rotates_last=flag(call.rotates_last, "rotary.last"),
        longest=None,  # the packing has it
    )
    cached = Cached(call, want_lse, look, packing, columns)
    values = fixed_options(arrays, values)
    try:
        hash((values, cached))
    except TypeError:  # an unhashable option
        _check(arrays, values, cached)
    made: tuple[Any, ...] = _attend(arrays, values, cached, types_of((*values, *call)))
    return made


def _over_selected_keys(
    q: Any, cache_seqlens: Any, options: dict[str, Any], want_lse: bool, columns: int | None
) -> tuple[Any, ...]:
    """The call with indices, in which each query is a sequence of its own."""
    if options.get("check"):
        raise UnsupportedError(
            "tuning.check is True together with indices, which a JAX program cannot check.",
            hint="tuning=None, or cupy_flash.attention_with_kv_cache outside of jit",
        )
    arrays = {name: x for name, x in options.items() if hasattr(x, "shape")} | {"q": jnp.asarray(q)}
    if cache_seqlens.ndim:
        arrays["cache_seqlens"] = cache_seqlens
    _packing(arrays, options.get("max_seqlen_q"))
    call = Selection.of(jnp, arrays["q"], cache_seqlens, options, _stand_ins(arrays))
    o, *lse = _over_cache(call.q, call.lengths, {"v_cache": None, **call.options}, want_lse, columns)
    o, rows = call.results(o, *lse)
    return (o, rows) if want_lse else (o,)


def _packing(arrays: dict[str, Any], longest: Any) -> Packing | None:
    """Describe packed queries; max_seqlen_q defaults to all rows. Return None for a batch."""
    refuse_ragged(arrays)
    if "cu_seqlens_q" not in arrays:
        if longest is not None or "seqused_q" in arrays:
            name = "max_seqlen_q" if longest is not None else "seqused_q"
            raise InvalidArgumentsError(f"{name} is given without cu_seqlens_q.", hint="cu_seqlens_q")
        return None
    cut, q = arrays["cu_seqlens_q"], arrays["q"]
    if cut.ndim != 1 or not cut.shape[0] or cut.dtype != jnp.int32 or q.ndim != 3:
        raise InvalidArgumentsError(
            f"cu_seqlens_q has shape {cut.shape} and dtype {cut.dtype}, q shape {q.shape}.",
            hint="(sequences + 1,) of int32, and q of (rows, heads, head_dim)",
        )
    batch = static_size(cut.shape[0], "offsets in cu_seqlens_q", "a fixed number of sequences") - 1
    if longest is not None and ((n := integer(longest)) is None or n < 0):
        raise InvalidArgumentsError(
            f"max_seqlen_q is {longest!r}.", hint="an integer, at least 0, static under jit"
        )
    if longest is None:
        longest = static_size(q.shape[0], "rows of q", "max_seqlen_q=")
    return Packing(batch, int(longest), 0, False)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _attend(
    arrays: dict[str, Any], options: Options, cached: Cached, _types: tuple[type, ...]
) -> tuple[Any, ...]:
    """The traced call. why jit: as in `attend.attend`; also, checks run once per shapes and options."""
    _check(arrays, options, cached)
    given = dict(zip(arrays, vary_alike(*arrays.values()), strict=True))
    return attention_over_cache(given, options, cached)


def _check(arrays: dict[str, Any], options: Options, cached: Cached) -> None:
    """Refuse while tracing what the call would refuse, unless sizes are symbolic."""
    if symbolic(arrays.values()):
        return
    views = _stand_ins({name: x for name, x in arrays.items() if name not in READ})
    described("decode", views, options, cached=cached)


def _stand_ins(arrays: dict[str, Any]) -> dict[str, ArrayView]:
    """Views of arrays being traced: shapes and dtypes without addresses."""
    return {
        name: ArrayView(0, x.shape, contiguous(x.shape), x.dtype.name, CPU, "jax", False, None)
        for name, x in arrays.items()
    }
