"""Finite differences: check a gradient without a second implementation of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["gradient_check"]


def gradient_check(
    f: Callable[..., Any],
    inputs: Sequence[Any],
    gradients: Sequence[Any],
    *,
    cotangent: Any = None,
    step: float = 1e-5,
    tolerance: float = 1e-7,
    at_most: int = 200,
    seed: int = 0,
) -> None:
    """Compare the gradients of ``sum(cotangent * f(*inputs))`` with central differences in float64.

    Parameters
    ----------
    f : callable
        Takes float64 arrays shaped like the inputs, returns an array or a number.
    inputs : sequence of array
        Point of the derivative; converted to float64.
    gradients : sequence of array or None
        One per input; None is not checked.
    cotangent : array, optional
        Shaped like the result of f; default ones.
    step : float
        Step of the difference. The error of a central difference is about ``step ** 2`` times the
        third derivative plus 1e-16 over ``step``; the default balances them.
    tolerance : float
        Largest allowed difference, relative to the largest element of that gradient or 1.
    at_most : int
        Elements checked per input, drawn without replacement if there are more.
    seed : int
        Seed of that draw.

    Raises
    ------
    AssertionError
        The message names the input, the element and both values.
    """
    points = [np.array(x, np.float64) for x in inputs]
    if len(points) != len(gradients):
        raise ValueError(f"{len(points)} inputs but {len(gradients)} gradients")
    generator = np.random.default_rng(seed)

    def objective() -> float:
        result = np.asarray(f(*points), np.float64)
        return float(np.sum(result if cotangent is None else result * cotangent))

    for number, (point, gradient) in enumerate(zip(points, gradients, strict=True)):
        if gradient is None:
            continue
        gradient = np.asarray(gradient, np.float64)
        if gradient.shape != point.shape:
            raise AssertionError(f"gradient {number} has shape {gradient.shape}, its input {point.shape}")
        allowed = tolerance * max(1.0, float(np.abs(gradient).max(initial=0.0)))
        chosen = generator.permutation(point.size)[:at_most]
        for flat in chosen:
            at = np.unravel_index(flat, point.shape)
            middle = point[at]
            point[at] = middle + step
            above = objective()
            point[at] = middle - step
            below = objective()
            point[at] = middle
            expected = (above - below) / (2 * step)
            if not abs(gradient[at] - expected) <= allowed:
                raise AssertionError(
                    f"gradient {number} at {tuple(int(n) for n in at)} is {gradient[at]:.9g}, "
                    f"finite differences say {expected:.9g} (allowed {allowed:.1e})"
                )
