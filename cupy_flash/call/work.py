"""FLOPs of a pass: for reports, the choice of threads, torch's counter and the benchmarks."""

from __future__ import annotations

__all__ = ["flops"]

# Matrix products of a pass over head_dim and over head_dim_v; and those of each direction of its tangents.
# What a kernel computes twice counts once, as is usual.
_PRODUCTS = {
    "forward": (1, 1, 0, 0),  # S = Q K^T, P V
    "backward": (3, 2, 0, 0),  # S, dQ, dK; dP, dV
    "jvp": (1, 0, 2, 2),  # S; two of dotS, two of dotO
    "forward and jvp": (1, 1, 2, 2),
    "hvp": (1, 1, 6, 2),  # S, dP; two each of dotS, dotdQ and dotdK, dotdP and dotdV
}


def flops(direction: str, pairs: int, head_dim: int, head_dim_v: int, directions: int = 1) -> int:
    """FLOPs of the matrix products of a pass, over a number of pairs of a query and a key."""
    once, once_v, each, each_v = _PRODUCTS[direction]
    return 2 * pairs * ((once + directions * each) * head_dim + (once_v + directions * each_v) * head_dim_v)
