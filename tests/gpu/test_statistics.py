"""attention_statistics on a GPU: the simulator's cases, each result alone, packed sequences, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError
from tests.cases import Case
from tests.checks import Device
from tests.simulator.simple_kernels import FEATURE_CASES, VARIANT_CASES
from tests.statistic_checks import SUMS, check_packed, check_statistics

pytestmark = pytest.mark.gpu


# CuPy has no bfloat16.
CASES = [case for case in (*VARIANT_CASES, *FEATURE_CASES) if "bfloat16" not in (case.dtype, case.bias_dtype)]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_of_the_simulator(case: Case, device: Device) -> None:
    check_statistics(case, device)


DTYPES = ("float16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("want", SUMS)
def test_each_result_alone(want: str, dtype: str, device: Device) -> None:
    case = Case(
        dtype=dtype, batch=1, lengths=(70, 133), heads=(4, 2), causal=True, align="bottom_right", sinks=True
    )
    check_statistics(case, device, (want,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("known", [False, True], ids=["alone", "with lse"])
def test_packed_sequences(known: bool, dtype: str, device: Device) -> None:
    check_packed(device, dtype, known=known)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"want": "top_k"}, "lists no largest weights"),
        ({"want": "key_sum", "cache_seqlens": 30}, "counts no weights over a cache"),
    ],
    ids=["top_k", "cache"],
)
def test_what_no_kernel_counts_is_refused(asked: dict[str, Any], why: str, device: Device) -> None:
    q = device.array(np.ones((1, 2, 40, 64), np.float16))
    with pytest.raises(UnsupportedError, match=rf"(?s){why}.*\nTry: "):
        cupy_flash.attention_statistics(q, q, **asked)
