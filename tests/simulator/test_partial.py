"""Partial results of 16-bit kernels, left as floats: their bits, rounded, are those of a whole call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_flash
from cupy_flash.dispatch import memo
from cupy_flash.parallel import partial
from tests.cases import numpy_dtype
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED


class Kind(NamedTuple):
    """A kernel: the architecture it is chosen on, the dtype and head dims of a call, and further options."""

    arch: str
    kernel: str
    dtype: str
    head_dims: tuple[int, int]
    options: dict[str, Any]


KINDS = (
    Kind("sm_80", "flash_forward", "bfloat16", (40, 35), {}),
    Kind("sm_75", "flash_forward", "float16", (64, 64), {"softcap": 9.0}),
    Kind("sm_80", "flash_forward_wide", "float16", (320, 289), {}),
    Kind("sm_80", "flash_combine_chunks", "float16", (64, 57), {"reproducible": "batch"}),
    Kind("sm_90a", "flash_forward_sm90", "bfloat16", (64, 56), {}),
    Kind("sm_90a", "flash_forward_sm90", "float16", (128, 128), {"softcap": 9.0}),
    Kind("sm_90a", "flash_forward_sm90", "float16", (256, 248), {}),
    Kind("sm_90a", "flash_forward_sm90", "bfloat16", (192, 128), {"softcap": 9.0}),
    Kind("sm_90a", "flash_forward_wide_sm90", "float16", (512, 504), {}),
    Kind("sm_61", "simple_forward", "float16", (40, 33), {"dropout": 0.3, "seed": 5}),
)
# dQ is summed in an order that repeats: atomic additions take another one each time.
REPEATED = {"reproducible": "run"}
BACKWARD = (
    Kind("sm_80", "flash_backward_dqkv", "bfloat16", (40, 35), REPEATED),
    Kind("sm_80", "flash_backward_dq", "float16", (64, 64), {"softcap": 9.0, **REPEATED}),
    Kind("sm_75", "flash_backward", "float16", (128, 121), REPEATED),
    Kind("sm_80", "flash_backward_wide", "float16", (320, 289), {}),
    Kind("sm_90a", "flash_backward_sm90", "bfloat16", (64, 56), REPEATED),
    Kind("sm_90a", "flash_backward_wide_dq_sm90", "float16", (256, 248), {}),
    Kind("sm_61", "simple_backward", "float16", (40, 33), {"dropout": 0.3, "seed": 5}),
)


def _random(kind: Kind, lengths: tuple[int, int], heads: tuple[int, int], batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    d, dv = kind.head_dims
    shapes = ((heads[0], lengths[0], d), (heads[1], lengths[1], d), (heads[1], lengths[1], dv))
    return [rng.standard_normal((batch, *shape)).astype(numpy_dtype(kind.dtype)) for shape in shapes]


def _compare(floats: Any, rounded: Any) -> None:
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats.astype(rounded.dtype), rounded)
    assert np.mean(floats != rounded.astype(np.float32)) > 0.5, "they are rounded"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.kernel} {kind.arch} {kind.head_dims}")
def test_floats_round_to_the_whole_call(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, a tile that ends early, and rows that see no key."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{kind.arch}")
    qkv = _random(kind, (70, 2100 if kind.kernel == "flash_combine_chunks" else 90), (2, 1), 1)
    options = {"causal": True, "align": -5, **kind.options}
    if kind.kernel == "flash_combine_chunks":
        options |= {"causal": False}
    assert kind.kernel in str(cupy_flash.explain(*qkv, **options))
    floats, lse = partial.attention(*qkv, **options)
    o, lse_of_whole = cupy_flash.attention(*qkv, return_lse=True, **options)
    _compare(floats, o)
    np.testing.assert_array_equal(lse, lse_of_whole)


def test_wide_heads_on_hopper_take_a_variant_that_stores_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90a")
    q, k, v = _random(KINDS[6], (20, 30), (1, 1), 1)
    for attention, kernel in ((cupy_flash.attention, "flash_forward_sm90_f16_d256"),
                              (partial.attention, "flash_forward_sm90_floats_f16_d256")):  # fmt: skip
        memo.forget()
        attention(q, k, v)
        assert next(name for name in memo.kernels() if name.startswith("flash_forward")).startswith(kernel)


@pytest.mark.parametrize("kind", BACKWARD, ids=lambda kind: f"{kind.kernel} {kind.arch} {kind.head_dims}")
def test_float_shares_of_gradients_round_to_the_whole_call(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{kind.arch}")
    q, k, v = _random(kind, (70, 90), (2, 1), 1)
    options = {"causal": True, "align": -5, **kind.options}
    assert kind.kernel in str(cupy_flash.explain(q, k, v, direction="backward", **options))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    do = np.random.default_rng(2).standard_normal(o.shape).astype(o.dtype)
    floats = partial.attention_backward(do, q, k, v, o, lse, **options)
    whole = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    for name in ("dq", "dk", "dv"):
        _compare(getattr(floats, name), getattr(whole, name))


def test_kernel_that_only_rounds_leaves_shares_to_the_next_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90a")
    kind = Kind("sm_90a", "flash_backward_dqkv", "float16", (128, 121), {"dropout": 0.3, "seed": 5})
    q, k, v = _random(kind, (30, 40), (2, 1), 1)
    assert f"{kind.kernel}_f16_d128_any" in str(
        cupy_flash.explain(q, k, v, direction="backward", **kind.options)
    )
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **kind.options)
    do = np.random.default_rng(2).standard_normal(o.shape).astype(o.dtype)
    memo.forget()
    floats = partial.attention_backward(do, q, k, v, o, lse, **kind.options)
    assert any(name.startswith(f"{kind.kernel}_f16_d192v128_any") for name in memo.kernels())
    whole = cupy_flash.attention_backward(do, q, k, v, o, lse, **kind.options)
    for name in ("dq", "dk", "dv"):
        found, rounded = getattr(floats, name), getattr(whole, name)
        assert found.dtype == np.float32
        assert np.mean(found != found.astype(np.float16)) > 0.5, "they are rounded"
        np.testing.assert_allclose(found, rounded.astype(np.float32), rtol=2e-3, atol=4e-3)
