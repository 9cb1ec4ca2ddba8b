"""Heads that lie more than 2**31 elements apart: every kernel finds them, in either direction of the offset.

The arrays are windows into memory that is reserved but, where nothing lies, never touched.
"""

from __future__ import annotations

import numpy as np
import pytest

import cupy_flash
from tests.checks import Device

pytestmark = [pytest.mark.simulator, pytest.mark.slow]

# why: past 2**31 elements a 32-bit product of head and stride wraps, signed or (from head 2) unsigned.
FAR = 2**31 + 2**7


def far_apart(x: np.ndarray) -> np.ndarray:
    """The same values, its heads FAR elements apart."""
    _, heads, rows, columns = x.shape
    try:
        memory = np.zeros((heads - 1) * FAR + rows * columns + 8, x.dtype)
    except MemoryError:
        pytest.skip("this machine does not reserve 8 GiB of memory that nobody touches")
    start = -memory.ctypes.data % 16 // x.itemsize
    strides = tuple(n * x.itemsize for n in (0, FAR, columns, 1))
    view = np.lib.stride_tricks.as_strided(memory[start:], x.shape, strides)
    view[...] = x
    return view


@pytest.mark.parametrize("device", ["sm_61", "sm_80"], indirect=True)
def test_heads_beyond_31_bits(device: Device) -> None:
    del device
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 3, 16, 32)).astype(np.float16) for _ in range(4))
    expected, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    grads = cupy_flash.attention_backward(do, q, k, v, expected, lse, causal=True, reproducible="run")

    out = far_apart(np.zeros_like(expected))
    far = [far_apart(x) for x in (do, q, k, v)]
    cupy_flash.attention(*far[1:], causal=True, out=out)
    np.testing.assert_array_equal(out, expected)
    far_grads = cupy_flash.attention_backward(*far, out, lse, causal=True, reproducible="run")
    for ours, theirs in zip(far_grads[:3], grads[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
