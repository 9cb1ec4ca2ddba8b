"""Functions for ``attention_fn=`` of flax modules. flax itself is not imported."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..call.checks import flag
from ..errors import InvalidArgumentsError, UnsupportedError
from .functional import attention
from .ring import ring_attention

__all__ = ["attention_fn", "ring_attention_fn"]


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,  # noqa: ARG001  (see the docstring)
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,  # noqa: ARG001  (it always is)
    is_causal: bool = False,
) -> Any:
    """``flax.linen.dot_product_attention`` by this library: the ``attention_fn`` of flax's modules.

    Parameters
    ----------
    query, key, value : Array, shape (..., seqlen, heads, head_dim)
        Any number of batch axes; key and value may have fewer heads.
    bias : Array, optional
        Added to the scores; broadcasts to (..., heads, seqlen_q, seqlen_k).
    mask : Array, optional
        A query sees the keys where it is not 0; broadcasts like bias.
    broadcast_dropout : bool
        Accepted without effect: every weight is dropped independently. With True flax drops the same weights
        in every batch and head, to save random numbers.
    dropout_rng : key of `jax.random`, optional
        Seed of dropout; it may be traced.
    dropout_rate : float
    deterministic : bool
        Without dropout.
    dtype : dtype, optional
        Dtype of the computation and the result. Default: the promoted dtype of query, key and value.
    precision : optional
        As in `jax.numpy.einsum`. "highest" is ``precision="ieee"``; lower ones have no effect.
    module : None
        Anything else raises: attention weights are never stored, so they cannot be sown.
    force_fp32_for_softmax : bool
        Accepted without effect: the softmax is always in float32 at least.
    is_causal : bool
        Causal, aligned top-left.

    Returns
    -------
    Array, shape (..., seqlen_q, heads, head_dim_v)

    Raises
    ------
    UnsupportedError
        A module to sow weights in.
    InvalidArgumentsError
        As in `attention`; also dropout without a dropout_rng.

    Notes
    -----
    The output of a query that sees no key is 0; in flax it is the mean of all values.

    Examples
    --------
    >>> import cupy_flash.jax, jax.numpy as jnp
    >>> cupy_flash.jax.attention_fn(*[jnp.ones((2, 3, 9, 4, 8))] * 3).shape  # two axes of a batch
    (2, 3, 9, 4, 8)
    """
    given = {"causal": flag(is_causal, "is_causal"), "align": "top_left"}
    if bias is not None:
        given["bias"] = _one_batch(_over(bias, query.shape[:-3]), 3)
    return _attend(
        functools.partial(attention, **given), query, key, value, mask, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, dtype=dtype, precision=precision,
        module=module,
    )  # fmt: skip


def ring_attention_fn(axis_name: Any, *, causal: bool = False, **options: Any) -> Callable[..., Any]:
    """Make an `attention_fn` for modules inside `jax.shard_map`, with the sequence split along a mesh axis.

    Parameters
    ----------
    axis_name, **options
        As in `ring_attention`: schedule, parts, seqlen, window, softcap, sinks and others. Layout, dropout,
        seed and mask come from the module.
    causal : bool
        Causal attention; it is also causal if the module asks for it.

    Returns
    -------
    callable
        It takes the arguments of `attention_fn` for this device's rows, and returns their output. A mask is
        that of the whole sequence, for schedules that support one. Dropout is independent on each device,
        and needs an explicit schedule.

    Raises
    ------
    UnsupportedError
        When the returned function is called: a bias, or a module to sow weights in.
    InvalidArgumentsError
        As in `ring_attention` and `attention_fn`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np, cupy_flash.jax
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    >>> cut = jax.sharding.PartitionSpec(None, "rows")
    >>> attend = cupy_flash.jax.ring_attention_fn("rows", causal=True)
    >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=cut, out_specs=cut)
    >>> attend(*[jnp.ones((2, 16, 4, 8))] * 3).shape
    (2, 16, 4, 8)
    """
    signature = inspect.signature(attention_fn)

    # why its signature: flax passes the arguments that it finds there.
    @functools.wraps(attention_fn)
    def attend(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        if given.arguments.pop("bias") is not None:
            raise UnsupportedError(
                "bias is not supported over a sequence in parts.",
                hint='a mask of the whole sequence, with schedule="alltoall" or "allgather"; or alibi_slopes',
            )
        for without_effect in ("broadcast_dropout", "force_fp32_for_softmax"):
            del given.arguments[without_effect]
        is_causal = flag(given.arguments.pop("is_causal"), "is_causal") or causal
        over_parts = functools.partial(ring_attention, axis_name=axis_name, causal=is_causal, **options)
        return _attend(over_parts, **given.arguments)

    return attend


def _attend(
    attend: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    dropout_rng: Any,
    dropout_rate: float,
    deterministic: bool,
    dtype: Any,
    precision: Any,
    module: Any,
) -> Any:
    """Call attention with flax's arguments."""
    if module is not None:
        raise UnsupportedError(
            "attention weights are never stored, and cannot be returned.", hint="sow_weights=False"
        )
    dropout = 0.0 if deterministic else dropout_rate
    if dropout and dropout_rng is None:
        raise InvalidArgumentsError(
            f"dropout_rate is {dropout_rate}, and there is no dropout_rng.",
            hint="deterministic=True, or rngs={'dropout': jax.random.key(0)} of apply",
        )
    if (rank := min(map(jnp.ndim, (query, key, value)))) < 3:
        raise InvalidArgumentsError(f"an array has rank {rank}.", hint="(..., seqlen, heads, head_dim)")
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    batch = query.shape[:-3]
    q, k, v = (_one_batch(jnp.asarray(x, dtype), 3) for x in (query, key, value))
    kept = None if mask is None else _one_batch(_over(mask, batch), 3).astype(bool)
    exact = dtype == jnp.float32 and _is_highest(precision)
    o = attend(
        q, k, v, mask=kept, dropout=dropout, seed=dropout_rng if dropout else None, layout="bshd",
        precision="ieee" if exact else None,
    )  # fmt: skip
    return o.reshape(*batch, *o.shape[-3:])


def _one_batch(x: Any, own: int) -> Any:
    """Merge all axes before the last `own` ones."""
    return x.reshape(math.prod(x.shape[:-own]), *x.shape[-own:])


def _over(x: Any, batch: tuple[int, ...]) -> Any:
    """Broadcast the batch axes of a mask or a bias, or drop them if all have length 1."""
    x = jnp.asarray(x)
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(x.shape[-3:])
    lifted = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    return jnp.broadcast_to(lifted, (*batch, *lifted.shape[-3:]))


def _is_highest(precision: Any) -> bool:
    """Whether precision asks for the most exact products."""
    pair = precision if isinstance(precision, tuple) else (precision,)
    return any(x in (jax.lax.Precision.HIGHEST, "highest", "float32") for x in pair)
