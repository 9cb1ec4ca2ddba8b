"""The specification of second order: tangents of attention and of its gradients, in plain FP64 NumPy, O(S^2).

`_dot` marks a derivative in one direction, given by the tangents of q, k, v, bias and sinks. `along` computes
that of every intermediate of `reference.forward`; J and H follow from them. Finite differences check both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..cpu.threads import on_one_blas_thread
from .reference import (
    Forward,
    Gradients,
    Options,
    Reference,
    canonical,
    canonical_rows,
    forward,
    restore,
    restore_rows,
    sum_groups,
    sum_to_shape,
)

__all__ = ["reference_hvp", "reference_jvp"]


class Directional(NamedTuple):
    """Derivatives of the intermediates of the forward pass in one direction; shapes as in `Forward`."""

    q: np.ndarray
    k: np.ndarray  # repeated for grouped heads
    v: np.ndarray  # repeated for grouped heads
    capped: np.ndarray  # of scale q k^T, before softcap
    slope: np.ndarray  # g'(scale q k^T), 1 without softcap
    curvature: np.ndarray  # g''(scale q k^T), 0 without softcap
    p: np.ndarray
    p_sink: np.ndarray
    o: np.ndarray
    lse: np.ndarray


@on_one_blas_thread
def reference_jvp(
    q: Any, k: Any, v: Any, *, dq: Any = None, dk: Any = None, dv: Any = None,
    dbias: Any = None, dsinks: Any = None, **options: Any,
) -> Reference:  # fmt: skip
    """Compute the tangents of O and LSE in FP64.

    Parameters
    ----------
    q, k, v : array
        As in `reference_attention`.
    dq, dk, dv, dbias, dsinks : array, optional
        Tangents of q, k, v, bias and sinks, shaped like these; None is 0.
    **options
        The fields of `Options` except score.

    Returns
    -------
    Reference
        Derivatives of o and lse; 0 in a row that sees no key.
    """
    chosen = Options(**options)
    dots = along(forward(q, k, v, chosen), chosen, dq, dk, dv, dbias, dsinks)
    rank = np.ndim(q)
    return Reference(restore(dots.o, rank, chosen.layout), restore_rows(dots.lse, rank))


@on_one_blas_thread
def reference_hvp(
    do: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, dq: Any = None, dk: Any = None, dv: Any = None,
    dbias: Any = None, dsinks: Any = None, **options: Any,
) -> Gradients:  # fmt: skip
    """Compute the derivative of `reference_backward` in FP64, with constant do and dlse.

    Parameters
    ----------
    do, q, k, v, dlse : array
        As in `reference_backward`.
    dq, dk, dv, dbias, dsinks
        As in `reference_jvp`.
    **options
        The fields of `Options` except score.

    Returns
    -------
    Gradients
        Derivatives of the gradients.
    """
    chosen = Options(**options)
    at = forward(q, k, v, chosen)
    dots = along(at, chosen, dq, dk, dv, dbias, dsinks)
    rank, layout = np.ndim(q), chosen.layout
    do4 = canonical(do, layout).astype(np.float64)
    dlse3 = np.zeros(at.lse.shape) if dlse is None else canonical_rows(dlse).astype(np.float64)

    dp = (do4 @ at.v.swapaxes(-1, -2)) * at.dropout
    dp_dot = (do4 @ dots.v.swapaxes(-1, -2)) * at.dropout
    delta = (do4 * at.o).sum(axis=-1, keepdims=True) - dlse3[..., None]
    delta_dot = (do4 * dots.o).sum(axis=-1, keepdims=True)
    ds = at.p * (dp - delta)
    ds_dot = dots.p * (dp - delta) + at.p * (dp_dot - delta_dot)
    raw = ds * dots.slope
    raw_dot = ds_dot * dots.slope + ds * dots.curvature * dots.capped
    dq_dot = at.scale * (raw_dot @ at.k + raw @ dots.k)
    dk_dot = at.scale * (raw_dot.swapaxes(-1, -2) @ at.q + raw.swapaxes(-1, -2) @ dots.q)
    dv_dot = (dots.p * at.dropout).swapaxes(-1, -2) @ do4
    dsinks_dot = -(dots.p_sink * delta + at.p_sink * delta_dot).sum(axis=(0, 2, 3))
    return Gradients(
        restore(dq_dot, rank, layout),
        restore(sum_groups(dk_dot, at.group), rank, layout),
        restore(sum_groups(dv_dot, at.group), rank, layout),
        None if chosen.bias is None else sum_to_shape(ds_dot, np.shape(chosen.bias)),
        None if chosen.sinks is None else dsinks_dot,
    )


def along(at: Forward, chosen: Options, dq: Any, dk: Any, dv: Any, dbias: Any, dsinks: Any) -> Directional:
    """Differentiate every intermediate of the forward pass in a direction."""
    if chosen.score is not None:
        raise ValueError("the specification of second order has no score functions: compare with differences")
    heads_k = at.k.shape[1] // at.group

    def tangent(x: Any, like: np.ndarray) -> np.ndarray:
        if x is None:
            return np.zeros(like.shape)
        x4 = canonical(x, chosen.layout).astype(np.float64)
        return np.repeat(x4, like.shape[1] // heads_k, axis=1) if x4.shape[1] != like.shape[1] else x4

    q_dot, k_dot, v_dot = tangent(dq, at.q), tangent(dk, at.k), tangent(dv, at.v)
    products = at.scale * (q_dot @ at.k.swapaxes(-1, -2) + at.q @ k_dot.swapaxes(-1, -2))
    slope, curvature = np.ones(products.shape), np.zeros(products.shape)
    if chosen.softcap is not None:  # g(t) = c tanh(t / c)
        tanh = at.capped / chosen.softcap
        slope = 1 - tanh**2
        curvature = -2 * tanh * slope / chosen.softcap
    scores = slope * products
    if dbias is not None:
        scores = scores + np.asarray(dbias).astype(np.float64)
    # A masked score stays at -inf: its weight is 0 and has no derivative.
    scores = np.where(at.p > 0, scores, 0.0)
    sink = np.zeros((1, at.q.shape[1], 1, 1))
    if dsinks is not None:
        sink[:] = np.asarray(dsinks, np.float64).reshape(1, -1, 1, 1)

    mean = (at.p * scores).sum(axis=-1, keepdims=True) + at.p_sink * sink
    p = at.p * (scores - mean)
    p_sink = at.p_sink * (sink - mean)
    o = (p * at.dropout) @ at.v + (at.p * at.dropout) @ v_dot
    return Directional(q_dot, k_dot, v_dot, products, slope, curvature, p, p_sink, o, mean[..., 0])
