"""The worst case of mma.sync kernels: no warp of a scheduler overlaps other instructions with products.

Instruction counts are from SASS, clocks of products from published rates. The best case is that of the cost
model, where products of another warp hide all other instructions.
"""

from __future__ import annotations

from typing import NamedTuple

from .rates import Gpu

__all__ = ["LEAST", "WAITING", "Waiting", "worst"]

# Shorter stretches of instructions overlap with the products before them.
LEAST = 16
_FLOP = 2 * 16 * 8 * 16  # of HMMA.16816


class Waiting(NamedTuple):
    """Counts of one warp for a whole block of keys, in the 16-bit band kernel.

    Attributes
    ----------
    products : int
    plain : (int, int)
        Instructions in stretches above `LEAST`, compiled by NVRTC 12.9 and 13.5.
    threshold : (int, int)
        The same for a candidate that rescales O only if a maximum rises by more than 8 in log2.
    """

    products: int
    plain: tuple[int, int]
    threshold: tuple[int, int]


# By target and head dim. No kernel has the candidate: its counts are from an experiment.
WAITING = {
    ("sm_80", 64): Waiting(256, (460, 458), (489, 487)),
    ("sm_80", 128): Waiting(256, (357, 359), (301, 305)),
    ("sm_86", 64): Waiting(128, (302, 302), (291, 291)),
    ("sm_86", 128): Waiting(128, (278, 278), (228, 228)),
    ("sm_120", 64): Waiting(128, (276, 266), (274, 283)),
    ("sm_120", 128): Waiting(128, (324, 333), (206, 233)),
}


def worst(products: int, waiting: int, gpu: Gpu) -> float:
    """The remaining share of the rate of mma.sync; a scheduler has a quarter of a multiprocessor's rate."""
    clocks = products * _FLOP / (gpu.mma["16-bit"] / 4)
    return clocks / (clocks + waiting)
