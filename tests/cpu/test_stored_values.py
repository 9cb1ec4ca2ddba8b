"""What is stored where a dtype cannot hold it: NaN, infinities, too large numbers, -0; results, rounded."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, quantized, testing
from tests.public import cached, dequantized, int4_parts, nvfp4_parts

pytestmark = pytest.mark.usefixtures("every_library")

DIM = 64
ORDINARY = np.linspace(3, -3, DIM, dtype=np.float32)
# Of an ordinary row, what stands where.
ROWS: dict[str, list[tuple[int | slice, float]]] = {
    "NaN in the lower half of a byte": [(0, np.nan)],
    "NaN in the upper half of a byte": [(31, np.nan)],
    "NaN last": [(-1, np.nan)],
    "NaN beside NaN": [(slice(2, 4), np.nan), (33, -np.nan)],
    "a group of NaN": [(slice(0, 32), np.nan)],
    "infinities": [(1, np.inf), (40, -np.inf)],
    "both in a group": [(1, np.inf), (2, -np.inf), (3, np.nan)],
    "too large": [(5, 1e30), (6, -1e30), (40, 7e4)],
    "the largest": [(5, 3.4e38), (6, -3.4e38)],
    "too small": [(slice(0, 32), -1e-9), (3, 1e-9), (slice(32, 64), 0.0)],
    "-0": [(4, -0.0), (5, 0.0), (slice(32, 64), -0.0)],
}


def row_of(name: str) -> np.ndarray:
    row = ORDINARY.copy()
    for at, value in ROWS[name]:
        row[at] = value
    return row


def stored(row: np.ndarray, caches: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """What a call makes of caches (1, 1, 4, ...) of keys and values when a row becomes key 1 of both."""
    for x in caches.values():
        x.view(np.uint8)[...] = 85
    one = row[None, None, None]
    given = {"q": np.zeros((1, 1, 1, DIM), row.dtype), "k": one, "v": np.zeros_like(one), "cache_seqlens": 1}
    cached(**given, **caches, **options)
    for name, x in caches.items():
        others = np.delete(x, 1, axis=2).view(np.uint8)
        assert (others == 85).all(), f"{name}: keys beside the new one"
    return {name: x[0, 0, 1] for name, x in caches.items() if name.startswith("k")}


@pytest.mark.parametrize("name", ROWS)
def test_int8(name: str) -> None:
    """NaN as 0, what is too large as 127 or -127."""
    row, unit = row_of(name), np.full(1, 0.05, np.float32)
    caches = {f"{x}_cache": np.empty((1, 1, 4, DIM), np.int8) for x in "kv"}
    found = stored(row, caches, k_scale=unit, v_scale=unit)["k_cache"]
    number = np.where(np.isnan(row), 0, row.astype(np.float64)) / unit
    np.testing.assert_array_equal(found, np.rint(np.clip(number, -127, 127)))


@pytest.mark.parametrize("name", ROWS)
def test_float8(name: str) -> None:
    """NaN as NaN, what is too large as 448 or -448, -0 as -0."""
    row, unit = row_of(name), np.full(1, 0.05, np.float32)
    caches = {f"{x}_cache": np.empty((1, 1, 4, DIM), ml_dtypes.float8_e4m3fn) for x in "kv"}
    found = stored(row, caches, k_scale=unit, v_scale=unit)["k_cache"]
    wanted = np.clip(row.astype(np.float64) / unit, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found)[~np.isnan(row)], np.signbit(row)[~np.isnan(row)])


@pytest.mark.parametrize("make", [quantized.int8, quantized.float8])
@pytest.mark.parametrize("name", ROWS)
def test_a_cache_in_8_bits_is_what_its_scale_stores(name: str, make: Any) -> None:
    """The largest number of a head gets the largest code, as if there were no NaN."""
    row, of_int8 = row_of(name), make is quantized.int8
    ((((codes,),),), scale, *_) = make(row[None, None, None])
    sizes = np.abs(np.clip(row, -(2.0**126), 2.0**126))
    np.testing.assert_allclose(scale, [np.nanmax(sizes) / (127 if of_int8 else 448)], rtol=1e-6)
    of_codes = np.dtype(np.int8 if of_int8 else ml_dtypes.float8_e4m3fn)
    caches = {f"{x}_cache": np.empty((1, 1, 4, DIM), of_codes) for x in "kv"}
    found = stored(row, caches, k_scale=scale, v_scale=scale)["k_cache"]
    np.testing.assert_array_equal(codes.view(of_codes).astype(np.float32), found.astype(np.float32))


@pytest.mark.parametrize("make", [quantized.int8, quantized.float8])
def test_a_cache_in_8_bits_has_a_scale_per_head(make: Any) -> None:
    largest = 127 if make is quantized.int8 else 448
    x = np.ones((2, 3, 5, 4), np.float16)
    x[:, 1], x[:, 2] = 0, 7
    x[1, 2, 3, 1] = -14
    whole, turned = make(x), make(x.swapaxes(1, 2), layout="bshd")
    np.testing.assert_allclose(whole.scale, [1 / largest, 1, 14 / largest], rtol=1e-6)
    np.testing.assert_array_equal(turned.scale, whole.scale)
    np.testing.assert_array_equal(turned.codes, whole.codes.swapaxes(1, 2))
    assert not whole.codes[:, 1].any()
    # Beyond the range of the scale numbers are clamped, or 0, without a warning.
    np.testing.assert_allclose(make(np.full((1, 1, 1, 2), 1e300)).scale, [2.0**126 / largest], rtol=1e-6)
    assert not make(np.full((1, 1, 1, 2), 1e-300)).codes.any()
    for given, options in ((x[0], {}), (x, {"layout": "bsd"})):
        with pytest.raises(InvalidArgumentsError, match=r"x has shape \([\d, ]*\) and layout is '"):
            make(given, **options)


def test_every_number_of_float8_and_what_is_half_way_between() -> None:
    """Ties to even, also below the least normal number."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    one = np.ones(1, np.float32)
    for row in np.resize(np.concatenate([values, -values]), (8, DIM)):
        caches = {f"{x}_cache": np.empty((1, 1, 4, DIM), ml_dtypes.float8_e4m3fn) for x in "kv"}
        found = stored(row, caches, k_scale=one, v_scale=one)["k_cache"]
        np.testing.assert_array_equal(found.view(np.uint8), row.astype(found.dtype).view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", ROWS)
def test_nvfp4(name: str, dtype: Any) -> None:
    """NaN as 0, the others of its group as without it; what is too large as 2688."""
    with np.errstate(over="ignore"):
        row = row_of(name).astype(dtype)
    caches = {f"{x}_cache": np.empty((1, 1, 4, DIM // 2), np.uint8) for x in "kv"}
    caches |= {f"{x}_block_scale": np.empty((1, 1, 4, DIM // 16), np.uint8) for x in "kv"}
    found = stored(row, caches)
    of_row = nvfp4_parts(row)
    clean = nvfp4_parts(np.clip(np.where(np.isnan(row), 0, row), -2688, 2688))
    for made, wanted, part in zip(of_row, clean, ("k_cache", "k_block_scale"), strict=True):
        np.testing.assert_array_equal(made, wanted)
        np.testing.assert_array_equal(found[part], made)
    through = testing.kv_cache.through_e2m1(row.astype(np.float64)[None, None])[0, 0]
    np.testing.assert_array_equal(dequantized(*of_row, dtype="float64"), through)


@pytest.mark.parametrize("units", ["float16", "float32"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", ROWS)
def test_int4(name: str, dtype: Any, units: str) -> None:
    """NaN as the lowest of its group, others as without it; what is too large as the limit of the units."""
    with np.errstate(over="ignore"):
        row = row_of(name).astype(dtype)
    caches = {f"{x}_cache": np.empty((1, 1, 4, DIM // 2), np.uint8) for x in "kv"}
    caches |= {f"{x}_{y}": np.empty((1, 1, 4, 2), units) for x in "kv" for y in ("scale", "zero")}
    found = stored(row, caches)
    limit = 65504 if units == "float16" else 2.0**126
    groups = np.clip(row.astype(np.promote_types(dtype, np.float32)), -limit, limit).reshape(2, 32)
    lowest = np.where(np.isnan(groups), np.inf, groups).min(-1, keepdims=True)
    clean = np.where(np.isnan(groups), np.where(np.isinf(lowest), 0, lowest), groups)
    of_row = int4_parts(row, group=32, dtype=units)
    wanted = int4_parts(clean.reshape(DIM), group=32, dtype=units)
    for made, right, part in zip(of_row, wanted, ("k_cache", "k_scale", "k_zero"), strict=True):
        np.testing.assert_array_equal(made, right)
        np.testing.assert_array_equal(found[part], made)
    assert np.isfinite(dequantized(*of_row)).all()
    if dtype == np.float64:  # in float32 what lies half way between two codes may be either
        through = testing.kv_cache.through_codes(row[None, None], *of_row[1:])[0, 0]
        np.testing.assert_allclose(dequantized(*of_row, dtype="float64"), through, rtol=1e-12)


# ---- results


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_results_half_way_between_two_numbers(dtype: Any, queries: int) -> None:
    """Ties to even: the mean of neighbours, by vectors of features and behind the last one."""
    first, last = (int(np.array(x, dtype).view(np.uint16)) for x in (2**-14, 2**14))
    bits = np.random.default_rng(0).integers(first, last, (1, 64, 1, 67))
    v = np.concatenate([bits, bits + 1], 2).astype(np.uint16).view(dtype)
    v[:, ::2] = -v[:, ::2]
    q, k = np.zeros((1, 64, queries, 8), dtype), np.zeros((1, 64, 2, 8), dtype)
    wanted = v.astype(np.float32).mean(2, keepdims=True).astype(dtype)
    np.testing.assert_array_equal(cupy_flash.attention(q, k, v), np.repeat(wanted, queries, 2))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_every_nan_stays_one_as_bfloat16(bits: int) -> None:
    """Rounded as a number, one of all bits would become 0."""
    q, k, v = (np.zeros((1, 1, n, 16), np.float32) for n in (20, 19, 19))
    bias = np.zeros((20, 19), ml_dtypes.bfloat16)
    o, lse = cupy_flash.attention(q, k, v, bias=bias, return_lse=True)
    do = np.full(q.shape, bits, np.uint32).view(np.float32)
    assert np.isnan(cupy_flash.attention_backward(do, q, k, v, o, lse, bias=bias).dbias).all()
