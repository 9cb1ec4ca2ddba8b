"""attention as a JAX function, and a drop-in for `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp

from ..call.arrays import CPU, ArrayView, contiguous
from ..call.checks import flag
from ..call.given import Options, split
from ..call.options import RecordedOptions
from ..call.signature import takes
from ..errors import InvalidArgumentsError, UnsupportedError
from .attend import attend
from .numbers import as_arrays, fixed, fixed_options, split_scale, static_size, symbolic, types_of
from .run import READ, described

if TYPE_CHECKING:
    from jax import Array
    from typing_extensions import Unpack

__all__ = ["attend_to", "attention", "check", "dot_product_attention", "refuse_ragged"]


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[RecordedOptions]
) -> Array: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[RecordedOptions]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[RecordedOptions]
) -> Array | tuple[Array, Array]: ...
@takes(RecordedOptions)
def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Unpack[RecordedOptions]) -> Any:
    """`cupy_flash.attention` as a JAX function: gradients of q, k, v, bias and sinks, through o and lse.

    Parameters
    ----------
    q, k, v : Array
        As in `cupy_flash.attention`.
    scale, softcap : float or Array of shape (), optional
        As in `cupy_flash.attention`. As arrays they may be traced. scale has a gradient; a gradient of
        softcap raises. The host reads them in every call, and waits for them on a GPU. A scale per head,
        of shape (heads_q,) or (batch, heads_q), is multiplied into q, which is rounded to its dtype.
    align : {"top_left", "bottom_right"}, int or Array of int of shape (), optional
        As in `cupy_flash.attention`. As an array it may be traced; the host reads it like scale.
    seed : int, Array of int of shape (), or key of `jax.random`, optional
        As in `cupy_flash.attention`. It may be traced, and a new one does not recompile: the host reads it in
        every call, and waits for it on a GPU. A key of any kind gives 64 random bits; an integer drops the
        same weights as in every other library, a traced one modulo 2**64.
    score : cupy_flash.score(...), optional
        As in `cupy_flash.attention`; make it once, because it is static under jit, like a mask function. With
        its arrays, ``f(table)``, it is a pytree, which jit, grad and vmap transform as an argument. Arguments
        in ``learned`` have gradients, but neither forward mode nor second derivatives.
    {options: As in `cupy_flash.attention`; every option that is not an array is static under jit.}
    return_lse : bool
        As in `cupy_flash.attention`.

    Returns
    -------
    Array, or (Array, Array) with return_lse

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `cupy_flash.attention`, while tracing; UnsupportedError also for a third derivative.

    Notes
    -----
    Differentiable twice, in forward mode too (`jax.jvp`, `jax.hessian`), on GPUs too. It is linear in v:
    `jax.linear_transpose` by v alone is supported.
    Under `jax.checkpoint` the backward pass computes o and lse again, unless the policy saves them by their
    name: ``policy=jax.checkpoint_policies.save_only_these_names("cupy_flash")``.
    jit with sharded inputs gathers them first; `jax.shard_map` keeps each device to its own. A program that
    contains this call can be exported (see `export_target`), without second order, and is not stored in the
    persistent compilation cache.
    """
    return attend_to({"q": q, "k": k, "v": v}, {**options}, return_lse)


def attend_to(given: dict[str, Any], options: dict[str, Any], return_lse: bool) -> Any:
    """Compute attention of the arrays in `given`, with the caller's options."""
    lengths = options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None)
    optional, values = split(options)
    refuse_ragged(optional)
    arrays = as_arrays({**given, **optional})
    values = fixed_options(arrays, split_scale(arrays, values))
    longest = None
    if "cu_seqlens_q" in arrays:
        longest_q, longest_k = (
            _rows(arrays[name], name) if length is None else fixed(length)
            for length, name in zip(lengths, "qk", strict=True)
        )
        longest = longest_q, longest_k
    check(arrays, values, longest)
    o, lse = attend(arrays, values, longest)
    return (o, lse) if flag(return_lse, "return_lse") else o


def _rows(x: Any, name: str) -> int:
    """The default of max_seqlen_q and max_seqlen_k: all rows."""
    return static_size(x.shape[0], f"rows of {name}", f"max_seqlen_{name}=") if x.ndim else 0


def refuse_ragged(arrays: dict[str, Any]) -> None:
    """Refuse a RaggedMask, whose size depends on lengths."""
    if "ragged_mask" in arrays:
        raise UnsupportedError(
            "the size of a RaggedMask depends on lengths, and a JAX program has fixed sizes.",
            hint="mask= of (sequences, heads or 1, max_seqlen_q, max_seqlen_k)",
        )


def check(arrays: dict[str, Any], options: Options, longest: tuple[int, int] | None = None) -> None:
    """Check a call while tracing, so that errors raise before compilation instead of at run time.

    With symbolic sizes errors raise at run time.
    """
    if arrays["q"].dtype == jnp.float8_e4m3fn:
        raise UnsupportedError(
            "float8_e4m3fn has no gradient, and this function must have one.",
            hint="cupy_flash.attention outside of jit, with cupy_flash.QuantizedArray(x, scale) for scales",
        )
    if symbolic(arrays.values()):
        return
    kinds = [(name, x.shape, x.dtype.name) for name, x in arrays.items() if name not in READ]
    call = tuple(kinds), longest, options, types_of((longest, *options))
    try:
        _check(*call)
    except TypeError:  # an unhashable option
        _check.__wrapped__(*call)


@functools.lru_cache(maxsize=1024)
def _check(
    kinds: tuple[tuple[str, tuple[int, ...], str], ...],
    longest: tuple[int, int] | None,
    options: Options,
    _types: tuple[type, ...],
) -> None:
    """`check`, cached by names, shapes and dtypes."""
    views = {
        name: ArrayView(0, shape, contiguous(shape), dtype, CPU, "jax", False, None)
        for name, shape, dtype in kinds
    }
    described("forward", views, options, longest)


def _lifted(x: Any, rank: int) -> Any:
    """Add leading axes of length 1 up to this rank."""
    return jnp.expand_dims(x, range(rank - x.ndim))


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
    """`jax.nn.dot_product_attention` in this library: same signature, layout and rules.

    Parameters
    ----------
    query, key, value : Array, shape (batch, seqlen, heads, head_dim), or without batch
    bias : Array, optional
        Added to the scores; broadcasts to (batch, heads, seqlen_q, seqlen_k).
    mask : Array of bool, optional
        True = may attend.
    scale : float, optional
    is_causal : bool
        Causal, aligned top-left.
    query_seq_lengths, key_value_seq_lengths : Array of int, shape (batch,), optional; without batch (1,)
        Keys beyond them are masked; output rows of queries beyond them are 0.
    local_window_size : int or (int, int), optional
        Keys seen before and after a query.
    implementation : {None, "xla", "cudnn"}
        Accepted without effect.
    return_residual : bool
        Also return the log-sum-exp of the scores, masked and scaled, with the natural logarithm: shape
        (batch, seqlen_q, heads), in the dtype of query, without a gradient, -inf for a query that sees no
        key. `attention` with return_lse returns it in float32, with a gradient, (batch, heads, seqlen_q).

    Returns
    -------
    Array, or (Array, Array) with return_residual

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `attention`; also an implementation that JAX does not have.

    Notes
    -----
    A query that sees no key has output 0 and residual -inf; JAX's own XLA implementation returns the mean of
    the values and a large negative number.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise InvalidArgumentsError(
            f"implementation is {implementation!r}.", hint='implementation=None, "xla" or "cudnn"'
        )
    query, key, value = as_arrays({"query": query, "key": key, "value": value}).values()
    mask = None if mask is None else jnp.asarray(mask)
    for name, x in (("query", query), ("key", key)):
        if x.ndim not in (3, 4):
            raise InvalidArgumentsError(f"{name} has rank {x.ndim}.", hint="(batch, seqlen, heads, head_dim)")
    rows, columns = query.shape[-3], key.shape[-3]
    batch = query.shape[:-3] or (1,)
    for name, lengths, extent, axis in (
        ("query_seq_lengths", query_seq_lengths, rows, -1),
        ("key_value_seq_lengths", key_value_seq_lengths, columns, -2),
    ):
        if lengths is not None:
            ends = jnp.asarray(lengths)
            # why: one length would be broadcast to all sequences
            if ends.shape != batch or not jnp.issubdtype(ends.dtype, jnp.integer):
                raise InvalidArgumentsError(
                    f"{name} has shape {ends.shape} and dtype {ends.dtype.name}.",
                    hint=f"integers of shape {batch}, one per sequence",
                )
            inside = jnp.expand_dims(jnp.arange(extent)[None] < ends[:, None], (axis, -3))
            mask = inside if mask is None else _lifted(mask, inside.ndim) & _lifted(inside, mask.ndim)
    window = local_window_size
    if isinstance(window, int):
        window = (window, window)
    o, lse = attention(
        query, key, value, causal=flag(is_causal, "is_causal"), window=window, align="top_left", mask=mask,
        bias=bias, scale=scale, layout="bshd", return_lse=True,
    )  # fmt: skip
    if not flag(return_residual, "return_residual"):
        return o
    return o, jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(o.dtype))
