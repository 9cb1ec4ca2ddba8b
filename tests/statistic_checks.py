"""How results of attention_statistics are held to FP64."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.testing import reference
from tests.cases import Case
from tests.checks import Device

__all__ = ["assert_close", "check_statistics"]


def assert_close(made: Any, q: np.ndarray, k: np.ndarray, places: int, **options: Any) -> None:
    """Hold every result to FP64: a weight is off by at most the errors of its score and of its LSE."""
    exact = testing.reference_statistics(q, k, top_k=places, **options)
    state = reference.forward(q, k, np.zeros((*k.shape[:-1], 1)), reference.Options(**options))
    p = state.p.reshape(state.p.shape[4 - q.ndim :])
    seen = np.isfinite(state.lse)
    norms = [np.linalg.norm(x, axis=-1).max(initial=0) for x in (state.q, state.k)]
    rest = (state.lse[seen], state.added[np.isfinite(state.added)])
    size = abs(state.scale) * norms[0] * norms[1] + sum(np.abs(x).max(initial=0) for x in rest) + 8
    acc = made.entropy.dtype
    off = 2 * float(np.finfo(acc).eps) * size
    least = 1e-37  # weights below may be 0, each of those that a key receives
    for name in ("key_sum", "key_max", "entropy", "top_weights"):
        ours, theirs = getattr(made, name), getattr(exact, name)
        if ours is None and name == "top_weights":
            return  # which kernels do not list
        assert ours.shape == theirs.shape, name
        assert ours.dtype == acc, name
        room = off * (theirs + (name == "entropy")) + least * (p.shape[-2] if name == "key_sum" else 1)
        assert (np.abs(ours - theirs) <= room).all(), (name, np.abs(ours - theirs).max(), room.max())
    # Of nearly equal weights any order is right; the weights are those of the keys.
    found = np.where(made.top_keys >= 0, np.take_along_axis(p, np.maximum(made.top_keys, 0), -1), 0.0) \
        if p.shape[-1] else np.zeros(made.top_keys.shape)  # fmt: skip
    assert (np.abs(found - exact.top_weights) <= 2 * off * exact.top_weights + least).all()
    once = np.sort(made.top_keys, axis=-1)
    assert ((once[..., 1:] != once[..., :-1]) | (once[..., 1:] < 0)).all(), "a key is listed twice"


def check_statistics(case: Case, device: Device) -> None:
    """Hold what kernels count of a case to FP64, of arrays among NaN, without lse and with it."""
    arrays = case.inputs()
    options = {n: x for n, x in case.options(arrays).items() if n not in ("dropout", "seed")}
    on_device = device.arrays(options)
    q, k, v = (device.hostile(arrays[name], case.style).view for name in "qkv")
    lse = cupy_flash.attention(q, k, v, return_lse=True, **on_device)[1]
    for known in (None, lse):
        made = cupy_flash.attention_statistics(
            q, k, known, want=("key_sum", "key_max", "entropy"), **on_device
        )
        host = [x if x is None or isinstance(x, np.ndarray) else x.get() for x in made]
        assert_close(cupy_flash.AttentionStatistics(*host), arrays["q"], arrays["k"], 1, **options)
