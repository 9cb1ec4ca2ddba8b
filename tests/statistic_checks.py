"""How results of attention_statistics are held to FP64."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.testing import reference
from tests.cases import Case
from tests.checks import Device

__all__ = ["SUMS", "assert_close", "check_packed", "check_statistics", "on_host"]

# What kernels count: all but top_k.
SUMS = ("key_sum", "key_max", "entropy")


def assert_close(made: Any, q: np.ndarray, k: np.ndarray, places: int, **options: Any) -> None:
    """Hold every result that is there to FP64.

    A weight is off by at most the errors of its score and of its LSE. A score is a sum of head_dim terms,
    whose roundings are a random walk, as in `testing.error_budget`; they stay where large terms cancel.
    """
    exact = testing.reference_statistics(q, k, top_k=places, **options)
    state = reference.forward(q, k, np.zeros((*k.shape[:-1], 1)), reference.Options(**options))
    p = state.p.reshape(state.p.shape[4 - q.ndim :])
    seen = np.isfinite(state.lse)
    norms = [np.linalg.norm(x, axis=-1).max(initial=0) for x in (state.q, state.k)]
    rest = [state.lse[seen], state.added[np.isfinite(state.added)]]
    if "score" in options:  # scores by a function have no bound but themselves
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.log(state.p) + state.lse[..., None]
        rest.append(scores[np.isfinite(scores)])
    terms = max(2.0, q.shape[-1] ** 0.5) * abs(state.scale) * norms[0] * norms[1]
    size = terms + 2 * (sum(np.abs(x).max(initial=0) for x in rest) + 8)
    there = [name for name in made._fields if getattr(made, name) is not None]
    acc = next(getattr(made, name).dtype for name in there)
    off = float(np.finfo(acc).eps) * size
    least = 1e-37  # weights below may be 0, each of those that a key receives
    for name in there:
        if name == "top_keys":
            continue
        ours, theirs = getattr(made, name), getattr(exact, name)
        assert ours.shape == theirs.shape, name
        assert ours.dtype == acc, name
        room = off * (theirs + (name == "entropy")) + least * (p.shape[-2] if name == "key_sum" else 1)
        assert (np.abs(ours - theirs) <= room).all(), (name, np.abs(ours - theirs).max(), room.max())
    if "top_keys" not in there:
        return
    # Of nearly equal weights any order is right; the weights are those of the keys.
    found = np.where(made.top_keys >= 0, np.take_along_axis(p, np.maximum(made.top_keys, 0), -1), 0.0) \
        if p.shape[-1] else np.zeros(made.top_keys.shape)  # fmt: skip
    assert (np.abs(found - exact.top_weights) <= 2 * off * exact.top_weights + least).all()
    once = np.sort(made.top_keys, axis=-1)
    assert ((once[..., 1:] != once[..., :-1]) | (once[..., 1:] < 0)).all(), "a key is listed twice"


def on_host(made: cupy_flash.AttentionStatistics) -> cupy_flash.AttentionStatistics:
    """The same with arrays of NumPy."""
    return cupy_flash.AttentionStatistics(*(None if x is None else testing.to_numpy(x) for x in made))


def check_statistics(case: Case, device: Device, want: tuple[str, ...] = SUMS) -> None:
    """Hold what kernels count of a case to FP64, of arrays among NaN, without lse and with it."""
    arrays = case.inputs()
    options = {n: x for n, x in case.options(arrays).items() if n not in ("dropout", "seed")}
    on_device = device.arrays(options)
    q, k, v = (device.hostile(arrays[name], case.style).view for name in "qkv")
    lse = cupy_flash.attention(q, k, v, return_lse=True, **on_device)[1]
    for known in (None, lse):
        made = on_host(cupy_flash.attention_statistics(q, k, known, want=want, **on_device))
        assert tuple(name for name in made._fields if getattr(made, name) is not None) == want
        assert_close(made, arrays["q"], arrays["k"], 1, **options)


def check_packed(device: Device, dtype: str, *, known: bool) -> None:
    """Hold what kernels count of packed sequences to FP64 of each alone; known: with the LSE of a call."""
    rng = np.random.default_rng(0)
    cut_q, cut_k = np.array([0, 5, 5, 75, 82], np.int32), np.array([0, 9, 13, 150, 153], np.int32)
    q, k = (rng.standard_normal(shape).astype(dtype) for shape in ((84, 4, 16), (156, 2, 16)))
    used = np.array([8, 4, 130, 3], np.int32)
    options: dict[str, Any] = {"causal": True, "align": "bottom_right", "window": (41, 0)}
    packing = device.arrays({"cu_seqlens_q": cut_q, "cu_seqlens_k": cut_k, "seqused_k": used})
    queries, keys = device.array(q), device.array(k)
    lse = None
    if known:
        lse = cupy_flash.attention_varlen(queries, keys, keys, **packing, return_lse=True, **options)[1]
    made = on_host(cupy_flash.attention_statistics(queries, keys, lse, want=SUMS, **packing, **options))
    covered = np.zeros(len(k), bool)
    for b in range(4):
        of_q, of_k = slice(*cut_q[b : b + 2]), slice(cut_k[b], cut_k[b] + used[b])
        covered[of_k] = True
        one = [x.swapaxes(0, 1)[None] for x in (q[of_q], k[of_k])]
        own = made._replace(
            key_sum=made.key_sum[None, :, of_k], key_max=made.key_max[None, :, of_k],
            entropy=made.entropy[None, :, of_q],
        )  # fmt: skip
        assert_close(own, *one, 1, **options)
    assert not made.key_sum[:, ~covered].any()
    assert not made.key_max[:, ~covered].any()
    assert not made.entropy[:, cut_q[-1] :].any()
