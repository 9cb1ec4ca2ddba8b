"""Published rates of GPUs, for the cost model, per clock and multiprocessor unless stated otherwise."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """One kind of GPU.

    Attributes
    ----------
    name : str
        A part of its name in the driver.
    arch : str
    multiprocessors : int
    gigahertz : float
        Boost clock of the data sheet; under load a GPU may be slower.
    mma : dict of str to float
        FLOP of mma.sync by kind of operand, with FP32 accumulators and without sparsity.
    wgmma : dict of str to float
        The same for wgmma; empty where there is none.
    ffma : float
        FLOP of FP32 multiply-adds.
    hbm, l2 : float
        Bytes per second of the whole GPU. l2 is an estimate where the vendor does not publish it.
    """

    name: str
    arch: str
    multiprocessors: int
    gigahertz: float
    mma: dict[str, float]
    wgmma: dict[str, float]
    ffma: float
    hbm: float
    l2: float

    @property
    def doubles(self) -> float:
        """FP64 instructions of a lane per clock; tensor cores have twice the multiply-adds of FP64 units."""
        return self.mma["64-bit"] / 4


# Equal on all of these GPUs: special functions (ex2), and bytes of shared memory.
EXPS = 16
SHARED_BYTES = 128
# Warp shuffles are 32 lanes wide, and one multiprocessor serves one warp per clock.
SHUFFLES = 1

_TURING = {"16-bit": 1024.0}
_A100 = {"16-bit": 2048.0, "tf32": 1024.0, "64-bit": 128.0}
_CONSUMER = {"16-bit": 512.0, "tf32": 256.0}
# 8-bit floats since Ada: twice 16 bits. GeForce halves both where accumulators are FP32.
_GEFORCE = {"8-bit": 1024.0, **_CONSUMER}
# why twice: the 8-bit kernel uses products with block scales there, at twice the rate of others, as measured
# on an RTX 5090 (flashinfer #4149). For the RTX PRO, which does not halve the others, there is none.
_GEFORCE_50 = {**_GEFORCE, "8-bit": 2048.0}
_ADA_PRO = {"8-bit": 2048.0, "16-bit": 1024.0, "tf32": 512.0}
_HOPPER = {"8-bit": 8192.0, "16-bit": 4096.0, "tf32": 2048.0}
# mma.sync reaches about 62 % of wgmma's rate on Hopper (micro-benchmarks of arXiv:2402.13499).
# why not for FP64: it has no wgmma, and the published 67 TFLOP/s of an H100 are those of mma.sync.
_HOPPER_MMA = {kind: 0.62 * rate for kind, rate in _HOPPER.items()} | {"64-bit": 256.0}

# Sources: the vendor's data sheets and white papers; tensor rate = peak / (multiprocessors x boost clock).
GPUS = (
    Gpu("T4", "sm_75", 40, 1.59, _TURING, {}, 128, 0.32e12, 1.3e12),
    Gpu("A100", "sm_80", 108, 1.41, _A100, {}, 128, 1.94e12, 5.0e12),
    Gpu("RTX 3090", "sm_86", 82, 1.70, _CONSUMER, {}, 256, 0.94e12, 2.5e12),
    Gpu("RTX 4090", "sm_89", 128, 2.52, _GEFORCE, {}, 256, 1.01e12, 5.0e12),
    Gpu("L40S", "sm_89", 142, 2.52, _ADA_PRO, {}, 256, 0.86e12, 5.0e12),
    Gpu("H100", "sm_90", 132, 1.83, _HOPPER_MMA, _HOPPER, 256, 3.35e12, 5.5e12),
    Gpu("H200", "sm_90", 132, 1.83, _HOPPER_MMA, _HOPPER, 256, 4.8e12, 5.5e12),
    Gpu("RTX 5090", "sm_120", 170, 2.41, _GEFORCE_50, {}, 256, 1.79e12, 7.0e12),
    Gpu("RTX PRO 6000 Blackwell", "sm_120", 188, 2.62, _ADA_PRO, {}, 256, 1.79e12, 7.0e12),
)


def known(name: str) -> Gpu | None:
    """The row with a name that is part of the driver's name of a GPU; None if there is none."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)
