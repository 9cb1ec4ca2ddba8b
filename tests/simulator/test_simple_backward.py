"""simple_backward.cu against FP64: every variant and pass, sizes around tiles, every broadcast of a bias."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_flash
from cupy_flash.device import simulator
from cupy_flash.testing import assert_within_budget
from tests.cases import BROADCASTS, Case
from tests.checks import Device, check_backward
from tests.cpu import test_varlen
from tests.simulator.simple_kernels import FEATURE_CASES, LENGTH_CASES, VARIANT_CASES, launch

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]


@pytest.mark.parametrize("case", VARIANT_CASES, ids=str)
def test_every_variant(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("case", LENGTH_CASES, ids=str)
def test_lengths(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features_over_several_tiles(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", BROADCASTS)
def test_dbias_of_every_broadcast(bias: str, dtype: str, device: Device) -> None:
    check_backward(Case(dtype=dtype, lengths=(70, 130), heads=(4, 2), bias=bias, softcap=3.0), device)


@pytest.mark.parametrize("lengths", [(1, 70), (70, 1), (1, 1)])
def test_dbias_of_a_single_row_or_key(lengths: tuple[int, int], device: Device) -> None:
    check_backward(Case(lengths=lengths, bias="bhqk"), device)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_a_bit(policy: str, device: Device) -> None:
    case = Case(lengths=(65, 130), heads=(4, 2), bias="1hqk", sinks=True, dropout=0.1)
    inputs = case.inputs()
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    results = []
    for chosen in ("late", policy):
        with simulator.schedule(chosen):
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, **case.options(inputs))
            gradients = cupy_flash.attention_backward(do, q, k, v, o, lse, **case.options(inputs))
        results.append([gradient.tobytes() for gradient in gradients if gradient is not None])
    assert results[0] == results[1]


@pytest.mark.parametrize("align", [-200, -66, 66, 200])
def test_bands_that_miss_the_keys(align: int, device: Device) -> None:
    """Every gradient is written where no tile is visited, too."""
    check_backward(
        Case(lengths=(130, 70), window=(5, 4), align=align, bias="hq1", sinks=True, dlse=True), device
    )


def test_no_queries_give_zeros(device: Device) -> None:
    inputs = Case(lengths=(0, 70), bias="1h11", sinks=True).inputs()
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    lse = np.zeros((2, 2, 0), np.float32)
    gradients = cupy_flash.attention_backward(
        do, q, k, v, do, lse, bias=inputs["bias"], sinks=inputs["sinks"]
    )
    for name in ("dk", "dv", "dbias", "dsinks"):
        assert not getattr(gradients, name).any(), name


@pytest.mark.parametrize("by", ["mask", "bias"])
def test_masked_pairs_may_hold_nan(by: str, device: Device) -> None:
    """A masked key that is NaN reaches no score gradient, so dv and dk of other keys stay as they are."""
    inputs = Case(lengths=(65, 80)).inputs()
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    keep = np.arange(80) % 3 > 0
    masked = {"mask": keep} if by == "mask" else {"bias": np.where(keep, 0.25, -np.inf).astype(np.float32)}
    o, lse = cupy_flash.attention(q, k, v, softcap=3.0, return_lse=True, **masked)
    clean = cupy_flash.attention_backward(do, q, k, v, o, lse, softcap=3.0, **masked)
    k[:, :, ~keep] = np.resize([np.nan, np.inf], k[:, :, ~keep].shape)
    dirty = cupy_flash.attention_backward(do, q, k, v, o, lse, softcap=3.0, **masked)
    assert np.array_equal(clean.dk, dirty.dk)
    assert np.array_equal(clean.dv, dirty.dv)


def test_keys_in_use() -> None:
    """Keys that are stored but not in use get zero gradients and are never read."""
    inputs = Case(lengths=(65, 130)).inputs()
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    used = np.array([70, 0], np.int32)
    for b, n in enumerate(used):
        k[b, :, n:] = v[b, :, n:] = np.nan
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    launch("forward", {"q": q, "k": k, "v": v}, {"o": o, "lse": lse}, {"seqused_k": used})
    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    results = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    launch("backward", given, results, {"seqused_k": used})
    for b, n in enumerate(used):
        assert not results["dk"][b, :, n:].any()
        assert not results["dv"][b, :, n:].any()
        own = {"dq": results["dq"][b], "dk": results["dk"][b, :, :n], "dv": results["dv"][b, :, :n]}
        assert_within_budget(own, q[b], k[b, :, :n], v[b, :, :n], do=do[b])


@pytest.mark.parametrize("feature", test_varlen.FEATURES)
@pytest.mark.parametrize(("lengths_q", "lengths_k"), test_varlen.LENGTHS)
def test_packed_sequences(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], feature: str, device: Device
) -> None:
    """Forward and every pass of the backward, as on the CPU path."""
    test_varlen.test_packed_is_one_by_one(lengths_q, lengths_k, feature)
