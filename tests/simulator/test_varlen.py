"""Packed sequences on simulated kernels: each within the error budget, nothing past the last offset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from tests.checks import Device

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.sampled(64),
    pytest.mark.parametrize("device", ["sm_61", "sm_75", "sm_80"], indirect=True),
]

# 32 is as wide as a tile of the tensor-core kernels; rows of 33 start on 2-byte boundaries.
HEAD_DIMS = {"plain": 33, "causal": 32, "window": 33}
LENGTHS_Q, LENGTHS_K = (5, 0, 70, 1), (7, 4, 0, 65)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (9, 4), "align": "top_left", "softcap": 4.0},
}


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


# Shared with tests/gpu.
def check_sequences(
    device: Device,
    head_dim: int,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    options: dict[str, Any],
    deterministic: bool,
) -> None:
    rng = np.random.default_rng(0)
    cu_q, cu_k = map(offsets, lengths)
    rows_q, rows_k = cu_q[-1] + 3, cu_k[-1] + 2
    q, do = (rng.standard_normal((rows_q, 4, head_dim)).astype(np.float16) for _ in range(2))
    k, v = (rng.standard_normal((rows_k, 2, head_dim)).astype(np.float16) for _ in range(2))
    dlse = rng.standard_normal((4, rows_q)).astype(np.float32)
    there = [device.array(x) for x in (q, k, v)]
    cu = [device.array(x) for x in (cu_q, cu_k)]
    o, lse = cupy_flash.attention_varlen(*there, *cu, return_lse=True, **options)
    grads = cupy_flash.attention_varlen_backward(
        device.array(do),
        *there,
        o,
        lse,
        *cu,
        dlse=device.array(dlse),
        reproducible="run" if deterministic else None,
        **options,
    )
    o, lse, dq, dk, dv = map(testing.to_numpy, (o, lse, *grads[:3]))
    for past in (o[cu_q[-1] :], dq[cu_q[-1] :], dk[cu_k[-1] :], dv[cu_k[-1] :]):
        assert not past.any()
    for b in range(len(lengths[0])):
        i, j = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if not lengths[0][b]:
            assert not dk[j].any()
            continue
        results = {"o": o[i], "lse": lse[:, i], "dq": dq[i], "dk": dk[j], "dv": dv[j]}
        testing.assert_within_budget(
            results, q[i], k[j], v[j], do=do[i], dlse=dlse[:, i], layout="bshd", **options
        )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_sequence_is_within_the_budget(feature: str, deterministic: bool, device: Device) -> None:
    check_sequences(device, HEAD_DIMS[feature], (LENGTHS_Q, LENGTHS_K), FEATURES[feature], deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_not_in_use_are_not_there(deterministic: bool, device: Device) -> None:
    """With seqused_k each sequence of k ends early; kernels read how early by themselves."""
    del device
    rng = np.random.default_rng(0)
    lengths_q, lengths_k, used = (5, 0, 70, 1), (7, 4, 9, 135), (3, 0, 9, 70)
    cu_q, cu_k, cu_used = offsets(lengths_q), offsets(lengths_k), offsets(used)
    q, do = (rng.standard_normal((cu_q[-1], 4, 32)).astype(np.float16) for _ in range(2))
    k, v = (rng.standard_normal((cu_k[-1], 2, 32)).astype(np.float16) for _ in range(2))
    kept = np.concatenate([np.arange(start, start + n) for start, n in zip(cu_k[:-1], used, strict=True)])
    lost = np.setdiff1d(np.arange(len(k)), kept)
    k[lost], v[lost] = np.nan, np.nan
    options: dict[str, Any] = {"causal": True, "align": "bottom_right"}
    given = {"seqused_k": np.array(used, np.int32), **options}
    o, lse = cupy_flash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **given)
    grads = cupy_flash.attention_varlen_backward(
        do, q, k, v, o, lse, cu_q, cu_k, reproducible="run" if deterministic else None, **given
    )
    for name in ("dk", "dv"):
        assert not getattr(grads, name)[lost].any()
    for b in (0, 2, 3):
        i, j = slice(cu_q[b], cu_q[b + 1]), kept[cu_used[b] : cu_used[b + 1]]
        results = {"o": o[i], "lse": lse[:, i], "dq": grads.dq[i], "dk": grads.dk[j], "dv": grads.dv[j]}
        testing.assert_within_budget(results, q[i], k[j], v[j], do=do[i], layout="bshd", **options)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 4), (4, 0)], ids=str)
def test_rows_of_no_sequence_are_nobodys(lengths: tuple[int, int], device: Device) -> None:
    """Arrays have more rows than sequences, which may all be empty."""
    q = k = np.ones((9, 2, HEAD_DIMS["causal"]), np.float16)
    cuts = [offsets((n,)) for n in lengths]
    longest = {"max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1]}
    o, lse = cupy_flash.attention_varlen(q, k, k, *cuts, return_lse=True, **longest)
    gradients = cupy_flash.attention_varlen_backward(o, q, k, k, o, lse, *cuts, **longest)
    for x in (
        o[: lengths[0]],
        gradients.dq[: lengths[0]],
        gradients.dk[: lengths[1]],
        gradients.dv[: lengths[1]],
    ):
        assert not x.any()
    assert np.isneginf(lse[:, : lengths[0]]).all()
