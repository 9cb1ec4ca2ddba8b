"""8-bit floats on a GPU, as bits in uint8: Hopper's kernel within the error budget, others refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import Unsupported, driver, testing
from tests.float8_cases import Float8Case

pytestmark = pytest.mark.gpu

ALL = ("heads", "heads", "heads")
CAUSAL = (("causal", True), ("align", "bottom_right"))
CASES = (
    Float8Case((4, 2), (700, 900), (64, 64), scales=ALL, options=CAUSAL),
    Float8Case((4, 2), (777, 1500), (128, 128), scales=ALL, sinks=True),
    Float8Case((4, 1), (300, 4000), (128, 128), scales=ALL, options=(("softcap", 8.0),)),
    Float8Case((2, 2), (300, 900), (256, 256), scales=ALL, options=CAUSAL),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_budget(case: Float8Case, cupy: Any) -> None:
    """Sums of up to 256 products in the tensor cores' accumulator, which the simulator has in float."""
    qkv, options = case.inputs()
    bits = [cupy.asarray(x.view(np.uint8)) for x in qkv]
    arrays = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out = cupy.empty((*qkv[0].shape[:3], case.head_dims[1]), np.float16)
    if driver.arch(0) != "sm_90":
        with pytest.raises(Unsupported, match="no kernel fits"):
            cupy_flash.attention(*bits, out=out, **arrays)
        return
    cupy_flash.attention(*bits, out=out, **arrays)
    testing.assert_within_budget({"o": out}, *qkv, precision="e4m3", **options)
