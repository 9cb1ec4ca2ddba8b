"""simple_forward.cu against FP64: every variant, sizes around tiles, any two features over several tiles."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

import cupy_flash
from cupy_flash.device import simulator
from cupy_flash.testing import assert_within_budget
from tests.cases import Case
from tests.checks import Device, check_forward
from tests.simulator.simple_kernels import FEATURE_CASES, LENGTH_CASES, VARIANT_CASES, launch

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]


@pytest.mark.parametrize("case", VARIANT_CASES, ids=str)
def test_every_variant(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("case", LENGTH_CASES, ids=str)
def test_lengths(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features_over_several_tiles(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_a_bit(policy: str, device: Device) -> None:
    case = Case(lengths=(65, 130), heads=(4, 2), causal=True, align="bottom_right", dropout=0.1, sinks=True)
    inputs = case.inputs()
    results = []
    for chosen in ("late", policy):
        with simulator.schedule(chosen):
            o, lse = cupy_flash.attention(
                *(inputs[name] for name in "qkv"), return_lse=True, **case.options(inputs)
            )
        results.append((o.tobytes(), lse.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("align", [-200, -66, 66, 200])
def test_bands_that_miss_the_keys(align: int, sinks: bool, device: Device) -> None:
    """Whole tiles, or all of them, are outside the band."""
    check_forward(Case(lengths=(130, 70), window=(5, 4), align=align, sinks=sinks), device)


@pytest.mark.parametrize("window", [(2**62, 2**62), (2**40, None), (None, 2**31)])
def test_windows_beyond_32_bits(window: tuple[int | None, int | None], device: Device) -> None:
    check_forward(Case(lengths=(65, 70), window=window, align=-(2**33)), device)


def test_sink_of_minus_infinity_is_none(device: Device) -> None:
    inputs = Case(lengths=(9, 9)).inputs()
    q, k, v = (inputs[name] for name in "qkv")
    mask = np.arange(9)[:, None] > 2
    sinks = np.full(2, -np.inf, np.float32)
    with_sinks = cupy_flash.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    without = cupy_flash.attention(q, k, v, mask=mask, return_lse=True)
    for ours, expected in zip(with_sinks, without, strict=True):
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("by", ["mask", "bias"])
def test_masked_keys_may_hold_nan(by: str, device: Device) -> None:
    inputs = Case(lengths=(65, 80)).inputs()
    q, k, v = (inputs[name] for name in "qkv")
    keep = np.arange(80) % 3 > 0
    masked = {"mask": keep} if by == "mask" else {"bias": np.where(keep, 0.25, -np.inf).astype(np.float32)}
    clean = cupy_flash.attention(q, k, v, softcap=3.0, return_lse=True, **masked)
    k[:, :, ~keep] = np.resize([np.nan, np.inf], k[:, :, ~keep].shape)
    dirty = cupy_flash.attention(q, k, v, softcap=3.0, return_lse=True, **masked)
    for ours, expected in zip(dirty, clean, strict=True):
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_scores_near_overflow(dtype: type, device: Device) -> None:
    inputs = Case(dtype=np.dtype(dtype).name, lengths=(65, 65), head_dims=(64, 64)).inputs()
    q, k, v = inputs["q"] * dtype(60), inputs["k"] * dtype(60), inputs["v"]
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    assert_within_budget({"o": o, "lse": lse}, q, k, v)


def test_keys_in_use() -> None:
    """What lies behind the keys in use is never read, and blocks of a sequence without any write zeros."""
    inputs = Case(lengths=(65, 130)).inputs()
    q, k, v = (inputs[name] for name in "qkv")
    used = np.array([70, 0], np.int32)
    for b, n in enumerate(used):
        k[b, :, n:] = v[b, :, n:] = np.nan
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    launch("forward", {"q": q, "k": k, "v": v}, {"o": o, "lse": lse}, {"seqused_k": used})
    for b, n in enumerate(used):
        assert_within_budget({"o": o[b], "lse": lse[b]}, q[b], k[b, :, :n], v[b, :, :n])


def _far_apart(array: np.ndarray) -> np.ndarray:
    """The same rows more than 2**31 elements apart, in memory of which only the touched pages exist."""
    stride = 2**31 + 5
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, array.shape[2] * stride * array.itemsize, flags=flags)
    flat = np.frombuffer(memory, array.dtype)
    strides = (0, 0, stride * array.itemsize, array.itemsize)
    view = np.lib.stride_tricks.as_strided(flat, array.shape, strides, writeable=True)
    view[...] = array
    return view


def test_strides_beyond_32_bits() -> None:
    inputs = Case(dtype="float16", batch=1, heads=(1, 1), lengths=(3, 3), head_dims=(16, 16)).inputs()
    q, k, v = (_far_apart(inputs[name]) for name in "qkv")
    o, lse = _far_apart(np.zeros_like(inputs["q"])), np.empty((1, 1, 3), np.float32)
    launch("forward", {"q": q, "k": k, "v": v}, {"o": o, "lse": lse})
    assert_within_budget({"o": o, "lse": lse}, *(inputs[name] for name in "qkv"))
