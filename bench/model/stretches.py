"""The worst case of mma.sync: all warps of a scheduler meet what stands between products at once.

Instructions from SASS, clocks of products from the published rates. The best case is the cost model's, where
all of it runs under the products of another warp.
"""

from __future__ import annotations

from typing import NamedTuple

from .rates import Gpu

__all__ = ["LEAST", "WAITING", "Waiting", "worst"]

# Shorter stretches run under the products before them.
LEAST = 16
_FLOP = 2 * 16 * 8 * 16  # of HMMA.16816


class Waiting(NamedTuple):
    """Of a warp and a whole block of keys, 16 bits and kind band.

    Attributes
    ----------
    products : int
    plain : (int, int)
        Instructions in stretches above `LEAST`, by NVRTC 12.9 and 13.5.
    threshold : (int, int)
        The same of the candidate that rescales O only where a maximum rises by more than 8 in log2.
    """

    products: int
    plain: tuple[int, int]
    threshold: tuple[int, int]


# By target and head dim. The candidate is in no kernel: counted from one that was not kept.
WAITING = {
    ("sm_80", 64): Waiting(256, (481, 480), (489, 487)),
    ("sm_80", 128): Waiting(256, (357, 359), (301, 305)),
    ("sm_86", 64): Waiting(128, (302, 302), (291, 291)),
    ("sm_86", 128): Waiting(128, (278, 278), (228, 228)),
    ("sm_120", 64): Waiting(128, (276, 266), (274, 283)),
    ("sm_120", 128): Waiting(128, (324, 333), (206, 233)),
}


def worst(products: int, waiting: int, gpu: Gpu) -> float:
    """Part of the rate of mma.sync that is left: a scheduler has a quarter of a multiprocessor's products."""
    clocks = products * _FLOP / (gpu.mma["16-bit"] / 4)
    return clocks / (clocks + waiting)
