"""Sinks of +-inf and NaN on simulated kernels, as tests/cpu/test_infinities.py states them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checks import Device
from tests.cpu.test_infinities import check_lse_without_weights, check_sinks, check_sinks_over_a_cache

pytestmark = pytest.mark.simulator

# Architecture, dtype, lengths and head dim: every kernel of the forward pass that reads sinks.
DENSE = [
    ("sm_61", np.float32, 40, 70, 8),
    ("sm_61", np.float64, 5, 7, 8),
    ("sm_80", np.float16, 33, 70, 64),
    ("sm_80", np.float32, 33, 70, 32),
    ("sm_80", np.float64, 33, 40, 32),
    ("sm_80", ml_dtypes.bfloat16, 5, 40, 320),
    ("sm_90a", np.float16, 33, 70, 64),
    ("sm_90a", np.float32, 130, 70, 64),  # whose two heads have the 256 rows that f16x3 wants
    ("sm_90a", np.float16, 33, 40, 512),
]


@pytest.mark.parametrize(("device", "dtype", "queries", "keys", "dim"), DENSE, indirect=["device"])
def test_sinks(device: Device, dtype: Any, queries: int, keys: int, dim: int) -> None:
    check_sinks(dtype, queries, keys, dim, by_band=True)
    if dim <= 256:
        check_sinks(dtype, queries, keys, dim)


CACHED = [
    ("sm_61", np.float32, 1, 40, 8),
    ("sm_80", np.float16, 1, 40, 64),
    ("sm_80", np.float16, 3, 2000, 64),  # in splits
    ("sm_80", np.float16, 1, 40, 512),
    ("sm_90a", np.float16, 20, 40, 64),
]


@pytest.mark.parametrize(("device", "dtype", "queries", "keys", "dim"), CACHED, indirect=["device"])
def test_sinks_over_a_cache(device: Device, dtype: Any, queries: int, keys: int, dim: int) -> None:
    check_sinks_over_a_cache(dtype, queries, keys, dim)


@pytest.mark.parametrize("device", ["sm_61", "sm_80", "sm_90a"], indirect=True)
@pytest.mark.parametrize("lse", [-np.inf, np.inf])
def test_infinite_lse_has_no_weights(device: Device, lse: float) -> None:
    check_lse_without_weights(lse)
