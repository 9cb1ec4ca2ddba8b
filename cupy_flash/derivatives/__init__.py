"""Directional derivatives of attention: tangents of its results, and of its gradients.

All three functions take dense arrays, as `cupy_flash.attention` does; with ``cu_seqlens_q`` and
``cu_seqlens_k`` they take packed sequences, as `cupy_flash.attention_varlen` does. Memory is linear in the
sequence length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..api import Gradients, adopted
from ..call.given import Options, Packing
from ..call.opaque import opaque
from ..call.operands import Views
from ..call.options import SecondGradientOptions, TangentOptions
from ..call.signature import Array, takes
from ..varlen import pack, split_dense_or_packed
from .second_order import run_hvp, run_jvp, tangents_of
from .with_jvp import run_with_jvp

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["hvp", "jvp", "value_and_jvp"]


@takes(TangentOptions)
@opaque
def jvp(
    q: Array, k: Array, v: Array, o: Array, lse: Any, **options: Unpack[TangentOptions]
) -> tuple[Array, Any]:
    """Tangents of the results of `cupy_flash.attention` (forward mode).

    Parameters
    ----------
    q, k, v : array
        As given to `cupy_flash.attention`, or to `cupy_flash.attention_varlen`.
    o, lse : array
        As returned by ``attention(..., return_lse=True)``.
    {options: As given to `cupy_flash.attention` or `cupy_flash.attention_varlen`.}
    {tangents: Tangents of the arrays named after the d, with their shape and dtype; for several directions,
        all tangents have an axis of directions in front, and the weights are computed once. A missing one
        is 0, and its products are not computed. Finite.}

    Returns
    -------
    do : array
        Tangent of o, with its shape and dtype, and an axis of directions in front if there is one. Rows past
        the last offset are 0.
    dlse : array
        Tangent of lse; 0 in a row that sees no key.

    Raises
    ------
    InvalidArgumentsError
        As in `cupy_flash.attention`; also tangents that do not fit their arrays, or none at all.
    UnsupportedError
        No kernel on a GPU fits; each one's reason is given. Also float8 inputs, which have no derivatives,
        and, in `hvp`, a score function with learned arguments.

    Notes
    -----
    With S the scores, P = exp(S - lse), D the dropout (1 / (1 - dropout) or 0) and g the softcap composed
    with the score function ::

        dS   = g'(scale q k^T) * scale (dq k^T + q dk^T) + dbias
        dlse = rowsum(P * dS) + exp(sinks - lse) dsinks
        do   = (D * P * dS) v + (D * P) dv - dlse * o

    The gradient is its transpose: ``<c, jvp(x)> = <backward(c), x>``.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> o, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> do, dlse = cupy_flash.derivatives.jvp(q, k, v, o, lse, dq=np.ones_like(q), causal=True)
    >>> do.shape
    (1, 4, 256, 64)
    """
    raw, tangents, values, packing = _checked_call(options, q=q, k=k, v=v, o=o, lse=lse)
    return run_jvp(raw, tangents, values, packing)


@takes(TangentOptions)
@opaque
def value_and_jvp(
    q: Array, k: Array, v: Array, **options: Unpack[TangentOptions]
) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
    """Results of `cupy_flash.attention` and their tangents, in one pass where that is faster than two.

    Parameters
    ----------
    q, k, v : array
        As given to `cupy_flash.attention`, or to `cupy_flash.attention_varlen`.
    {options: As given to `cupy_flash.attention` or `cupy_flash.attention_varlen`.}
    As in `jvp`.

    Returns
    -------
    (o, lse) : (array, array)
        As returned by ``attention(..., return_lse=True)``.
    (do, dlse) : (array, array)
        As in `jvp`.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `cupy_flash.attention` and `jvp`.

    Notes
    -----
    The compiled CPU core needs one pass of six products, instead of two for `cupy_flash.attention` and five
    for `jvp`. On a GPU and in NumPy both run one after the other.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
    >>> (o, lse), (do, dlse) = cupy_flash.derivatives.value_and_jvp(q, k, v, dv=np.ones_like(v), causal=True)
    >>> do.shape, bool(np.allclose(do, 1, atol=1e-5))
    ((1, 4, 256, 64), True)
    """
    raw, tangents, values, packing = _checked_call(options, q=q, k=k, v=v)
    return run_with_jvp(raw, tangents, values, packing)


@takes(SecondGradientOptions)
@opaque
def hvp(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Any,
    *,
    jvp: tuple[Any, Any] | None = None,
    **options: Unpack[SecondGradientOptions],
) -> Gradients[Array]:
    """The directional derivative of `cupy_flash.attention_backward` (Hessian-vector product).

    The Hessian of ``sum(do * o) + sum(dlse * lse)`` times the direction, as double backward needs it.

    Parameters
    ----------
    do, q, k, v, o, lse : array
        As given to `cupy_flash.attention_backward` or `cupy_flash.attention_varlen_backward`. This function
        has no derivatives with respect to do and dlse: the result is linear in them.
    dlse : array, optional
        As given to `cupy_flash.attention_backward`.
    {options: As given to `cupy_flash.attention` or `cupy_flash.attention_varlen`.}
    {tangents: The direction, as in `jvp`.}
    jvp : (array, array), optional
        The result of `jvp` for this direction; computed here if it is not given.

    Returns
    -------
    Gradients
        Derivatives of dq, dk, dv, and of the gradients of options that were given; with the axis of
        directions in front if there is one. Rows past the last offset, and those of keys not in use, are 0.

    Raises
    ------
    InvalidArgumentsError, UnsupportedError
        As in `jvp`.

    Notes
    -----
    Dot marks a derivative in the direction; oDot and lseDot are ``jvp``, SDot is dS of `jvp`. With
    T = scale q k^T, S = g(T) + bias, dP = D * (do v^T), delta = rowsum(do * o) - dlse ::

        PDot  = P * (SDot - lseDot)
        dS    = P * (dP - delta)
        dSDot = PDot * (dP - delta) + P * (D * (do vDot^T) - rowsum(do * oDot))
        dT, dTDot = g' dS, g' dSDot + g'' TDot dS

        dqDot = scale (dTDot k + dT kDot)
        dkDot = scale (dTDot^T q + dT^T qDot)
        dvDot = (D * PDot)^T do
        dbiasDot = dSDot, summed as dbias is

    Double backward: with cotangents a, b, c of the dq, dk, dv of `cupy_flash.attention_backward`, the
    gradients of do and dlse are ``jvp(dq=a, dk=b, dv=c)``, those of q, k, v ``hvp`` in that direction.
    """
    raw, tangents, values, packing = _checked_call(options, do=do, q=q, k=k, v=v, o=o, lse=lse)
    return run_hvp(raw, tangents, values, jvp, packing)


def _checked_call(options: Any, **named: Any) -> tuple[Views, Views, Options, Packing | None]:
    """The arrays, tangents and values of a call, and its packing if offsets are given."""
    given, values, packed = split_dense_or_packed(options)
    tangents = tangents_of(given)
    raw = adopted(**named, **given)
    return raw, tangents, values, None if packed is None else pack(raw, *packed)
