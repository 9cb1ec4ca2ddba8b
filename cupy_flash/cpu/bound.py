"""When a softmax needs no running maximum."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LOG2_E = 1.4426950408889634
BOUND_BITS = 30.0


def bounded(q: Array, k: Array, scale: float, values: tuple[Array, ...]) -> bool:
    """Whether exp(scale q k) and what it multiplies stay far inside the range of float32.

    By Cauchy-Schwarz no score exceeds scale * max |q| * max |k|. While that is below BOUND_BITS
    doublings, weights exp(S) lie within 2**+-30. Without subtracting a maximum they have the same
    relative accuracy, and the passes over a tile that find and subtract it, a quarter of the
    time, fall away. Ordinary inputs are bounded; all others take the online softmax.

    Parameters
    ----------
    q, k : array (..., rows, d)
    scale : float
    values : tuple of array
        What the weights multiply (v, and dO backwards): must leave 2**30 room on either side.

    Returns
    -------
    bool
        False if anything is NaN or infinite.
    """
    with np.errstate(all="ignore"):
        bits = abs(scale) * LOG2_E * _longest_row(q) * _longest_row(k)
        # Comparisons with NaN are false.
        return bits <= BOUND_BITS and all(map(_moderate, values))


def _longest_row(x: Array) -> float:
    """Return the largest Euclidean norm of the rows."""
    x = x if x.dtype.itemsize >= 4 else x.astype(np.float32)
    return float(np.sqrt(np.einsum("...d,...d->...", x, x).max(initial=0)))


def _moderate(x: Array) -> bool:
    """Whether the largest magnitude is far from overflow and underflow."""
    return x.size > 0 and 1e-12 <= max(float(x.max()), -float(x.min())) <= 1e12


def _base_2_is_faster() -> bool:
    """Whether NumPy's exp2 runs in vector instructions, as it does with AVX-512 only.

    Within the bound it then takes two thirds of the time of exp; elsewhere several times as much.
    """
    found = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    return "X86_V4" in found or "AVX512_SKX" in found


# exp(x) = bounded_exp(BOUNDED_UNIT * x)
BOUNDED_UNIT, bounded_exp = (LOG2_E, np.exp2) if _base_2_is_faster() else (1.0, np.exp)
