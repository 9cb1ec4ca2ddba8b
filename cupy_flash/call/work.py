"""FLOPs of a pass: for reports, the choice of threads, torch's counter and the benchmarks."""

from __future__ import annotations

__all__ = ["flops"]

# Matrix products of each pass that sum over or result in head_dim features, and head_dim_v: Q K^T and P V;
# S, dQ and dK, dP and dV; S and two of dotS, two of dotO; S and two each of dotS, dotdQ and dotdK, dP, dotdP
# and dotdV. What a kernel computes twice counts once, as is usual.
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "jvp": (3, 2), "hvp": (7, 3)}


def flops(direction: str, pairs: int, head_dim: int, head_dim_v: int) -> int:
    """FLOPs of the matrix products of a pass, over a number of pairs of a query and a key."""
    of_head_dim, of_head_dim_v = _PRODUCTS[direction]
    return 2 * pairs * (of_head_dim * head_dim + of_head_dim_v * head_dim_v)
