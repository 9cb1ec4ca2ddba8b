"""Instructions of the float64 kernels other than products, from SASS, as the simulator cannot count them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ISSUED", "Issued"]


class Issued(NamedTuple):
    """Instructions of one warp for a whole tile; the larger number of both compilers.

    Attributes
    ----------
    instructions : int
        All instructions.
    doubles : int
        FP64 arithmetic without products: mostly e^x.
    pairs : int
        (Query, key) pairs that they compute.
    """

    instructions: int
    doubles: int
    pairs: int


# By target and variant.
ISSUED = {
    ("sm_80", "flash_forward_f64_f64_d64_band_64x32"): Issued(1060, 374, 16 * 32),
    ("sm_80", "flash_forward_f64_f64_d128_band_64x32"): Issued(1555, 406, 16 * 32),
    ("sm_80", "flash_backward_f64_dkv_f64_d64_band_16x128"): Issued(922, 156, 16 * 16),
    ("sm_80", "flash_backward_f64_dq_f64_d64_band_128x32"): Issued(1124, 304, 16 * 32),
    ("sm_90a", "flash_forward_f64_f64_d64_band_64x32"): Issued(1149, 374, 16 * 32),
    ("sm_90a", "flash_forward_f64_f64_d128_band_128x32"): Issued(1712, 406, 16 * 32),
    ("sm_90a", "flash_backward_f64_dkv_f64_d64_band_16x128"): Issued(1126, 156, 16 * 16),
    ("sm_90a", "flash_backward_f64_dq_f64_d64_band_128x32"): Issued(1289, 304, 16 * 32),
}
