"""attention_with_jvp in the core and in NumPy: what attention and attention_jvp give, in one call."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError
from cupy_flash.derivatives import with_jvp
from tests.cases import DTYPES, Case
from tests.cpu.test_second_order import CASES, MANY, assert_close, results_of, tangents_of

pytestmark = [pytest.mark.usefixtures("cpu_family"), pytest.mark.sampled(24)]


def both(case: Case, arrays: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    """Results and tangents of one call."""
    qkv = [arrays[name] for name in "qkv"]
    results, moved = cupy_flash.derivatives.value_and_jvp(*qkv, **tangents, **case.options(arrays))
    return dict(zip(("o", "lse", "do", "dlse"), (*results, *moved), strict=True))


def one_after_the_other(case: Case, arrays: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    qkv, how = [arrays[name] for name in "qkv"], case.options(arrays)
    results = cupy_flash.attention(*qkv, return_lse=True, **how)
    moved = cupy_flash.derivatives.jvp(*qkv, *results, **tangents, **how)
    return dict(zip(("o", "lse", "do", "dlse"), (*results, *moved), strict=True))


def check(case: Case, directions: tuple[int, ...] = ()) -> None:
    arrays = case.inputs()
    tangents = tangents_of(arrays, directions)
    actual, expected = both(case, arrays, tangents), one_after_the_other(case, arrays, tangents)
    unseen = np.isneginf(expected["lse"])
    np.testing.assert_array_equal(np.isneginf(actual["lse"]), unseen)
    for results in (actual, expected):
        results["lse"] = np.where(unseen, 0, results["lse"])
    assert_close(actual, expected, 1e3 if case.dtype == "float64" else 16, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_together_is_one_after_the_other(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_tiles(dtype: str) -> None:
    """Maxima that rise from one block of keys to the next, and jobs of several panels."""
    case = dataclasses.replace(MANY, dtype=dtype, lengths=(70, 400), head_dims=(24, 17))
    check(case)
    check(dataclasses.replace(case, softcap=None, bias=None, mask=None, dropout=0.0))


def test_more_directions_than_a_job_has() -> None:
    check(dataclasses.replace(MANY, lengths=(70, 300)), (6,))


@pytest.mark.parametrize("style", ["values alone", "rising", "no key"])
def test_rows_whose_sums_are_peculiar(style: str) -> None:
    case = Case(dtype="float64", lengths=(40, 500), heads=(2, 1), sinks=True)
    if style == "no key":
        case = dataclasses.replace(case, window=(3, 3), align=-100)
    arrays = case.inputs()
    if style == "rising":  # every block has a higher maximum
        arrays["k"] *= np.linspace(0, 40, 500)[:, None]
    tangents = tangents_of(arrays)
    if style == "values alone":
        tangents = {"dv": tangents["dv"]}
    assert_close(both(case, arrays, tangents), one_after_the_other(case, arrays, tangents), 1e4, "float64")


def test_packed_sequences() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dq, dk, dv = (rng.standard_normal((100, 2, 16)) for _ in range(6))
    cuts = np.int32([0, 10, 10, 90])
    how: dict[str, Any] = {"causal": True, "align": "bottom_right"}
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, return_lse=True, **how)
    do, dlse = cupy_flash.derivatives.jvp(
        q, k, v, o, lse, cu_seqlens_q=cuts, cu_seqlens_k=cuts, dq=dq, dk=dk, dv=dv, **how
    )
    together = cupy_flash.derivatives.value_and_jvp(
        q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, dq=dq, dk=dk, dv=dv, **how
    )
    for actual, expected in zip((*together[0], *together[1]), (o, lse, do, dlse), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_packed_sequences_in_several_directions_and_keys_in_use() -> None:
    """Rows of no sequence are 0, in each of the directions."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((50, 2, 8)) for _ in range(3))
    dq, dv = (rng.standard_normal((3, 50, 2, 8)) for _ in range(2))
    cuts, used = np.int32([0, 20, 45]), np.int32([5, 25])
    results, moved = cupy_flash.derivatives.value_and_jvp(
        q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, dq=dq, dv=dv, seqused_k=used
    )
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, seqused_k=used, return_lse=True)
    np.testing.assert_allclose(results[0], o, atol=1e-12)
    np.testing.assert_allclose(results[1], lse, atol=1e-12)
    assert not moved[0][:, 45:].any()
    for n in range(3):
        do, dlse = cupy_flash.derivatives.jvp(
            q, k, v, o, lse, cu_seqlens_q=cuts, cu_seqlens_k=cuts, dq=dq[n], dv=dv[n], seqused_k=used
        )
        np.testing.assert_allclose(moved[0][n], do, atol=1e-12)
        np.testing.assert_allclose(moved[1][n], dlse, atol=1e-12)


def test_what_is_refused_is_refused_before_anything_is_computed() -> None:
    case = Case(lengths=(8, 8))
    arrays = case.inputs()
    qkv = [arrays[name] for name in "qkv"]
    with mock.patch.object(with_jvp, "compute") as compute:
        with pytest.raises(InvalidArgumentsError, match="no tangent is given"):
            cupy_flash.derivatives.value_and_jvp(*qkv)
        with pytest.raises(InvalidArgumentsError, match="dk has shape"):
            cupy_flash.derivatives.value_and_jvp(*qkv, dk=arrays["k"][:, :, 1:])
        with pytest.raises(InvalidArgumentsError, match="no sinks"):
            cupy_flash.derivatives.value_and_jvp(*qkv, dsinks=np.ones(2, np.float32))
    assert not compute.called


def test_results_are_those_of_attention() -> None:
    """To the last bit of their dtype where the core computes both, or NumPy does."""
    case = Case(dtype="float32", lengths=(100, 300), heads=(4, 2), causal=True, align="bottom_right")
    arrays = case.inputs()
    (o, lse), _ = cupy_flash.derivatives.value_and_jvp(
        *(arrays[n] for n in "qkv"), dv=arrays["v"], causal=True, align="bottom_right"
    )
    expected = cupy_flash.attention(*(arrays[n] for n in "qkv"), causal=True, align="bottom_right",
                                    return_lse=True)  # fmt: skip
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    assert results_of(case, arrays)["o"].shape == o.shape
