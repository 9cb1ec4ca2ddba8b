"""A scale for each head, (heads,) or (batch, heads): q times it, with the gradients of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, QuantizedArray, Rotary

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 9, 8))
K, V = RNG.standard_normal((2, 2, 2, 9, 8))
DO, DLSE = RNG.standard_normal(Q.shape), RNG.standard_normal(Q.shape[:3])
SCALES = {shape: RNG.standard_normal(shape) for shape in ((4,), (2, 4))}
for _scale in SCALES.values():
    _scale[..., 1] = 0
by_shape = pytest.mark.parametrize("scale", SCALES.values(), ids=str)


def textbook(q: Array, k: Array, v: Array, scale: Array) -> tuple[Array, Array]:
    """Causal attention in FP64."""
    k, v = (x.repeat(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = scale.reshape(-1, q.shape[1], 1, 1) * (q @ k.swapaxes(-1, -2))
    s[..., ~np.tri(*s.shape[-2:], dtype=bool)] = -np.inf
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return p / total @ v, (top + np.log(total))[..., 0]


def turned(layout: str, *arrays: Array) -> list[Array]:
    return [x.swapaxes(1, 2) if layout == "bshd" and x.ndim == 4 else x for x in arrays]


def differences(f: Callable[[Array], float], x: Array) -> Array:
    """The gradient of f by differences."""
    found, step = np.zeros(x.shape), 1e-6
    for at in np.ndindex(x.shape):
        one = np.zeros(x.shape)
        one[at] = step
        found[at] = (f(x + one) - f(x - one)) / (2 * step)
    return found


@by_shape
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_and_gradients_are_the_textbooks(scale: Array, layout: str) -> None:
    q, k, v, do = turned(layout, Q, K, V, DO)
    more: Any = {"scale": scale, "layout": layout, "causal": True}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **more)
    expected, lse_expected = textbook(Q, K, V, scale)
    np.testing.assert_allclose(*turned(layout, o), expected, atol=1e-13)
    np.testing.assert_allclose(lse, lse_expected, atol=1e-13)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=DLSE, **more)

    def loss(q: Array, k: Array, v: Array, scale: Array) -> float:
        o, lse = textbook(q, k, v, scale)
        return float((o * DO).sum() + (lse * DLSE).sum())

    assert grads.dscale.dtype == scale.dtype
    for name, x in {"q": Q, "k": K, "v": V, "scale": scale}.items():
        point = {"q": Q, "k": K, "v": V, "scale": scale}
        of_x = differences(lambda y, name=name, point=point: loss(**{**point, name: y}), x)
        (found,) = turned(layout, getattr(grads, f"d{name}"))
        np.testing.assert_allclose(found, of_x, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_q_times_it_is_rounded_once(dtype: str) -> None:
    """And so is dq; the sums of dscale are of floats, over the rounded gradient of the product."""
    of = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v, do = (x.astype(of) for x in (Q, K, V, DO))
    scale = SCALES[2, 4].astype(np.float32)
    factor = scale[..., None, None]
    product = (q.astype(np.float32) * factor).astype(of)
    o, lse = cupy_flash.attention(q, k, v, scale=scale, return_lse=True)
    plain = cupy_flash.attention(product, k, v, scale=1.0, return_lse=True)
    np.testing.assert_array_equal(o, plain[0])
    np.testing.assert_array_equal(lse, plain[1])
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, scale=scale)
    inner = cupy_flash.attention_backward(do, product, k, v, o, lse, scale=1.0)
    wide = inner.dq.astype(np.float32)
    np.testing.assert_array_equal(grads.dq, (wide * factor).astype(of))
    np.testing.assert_array_equal(grads.dk, inner.dk)
    assert grads.dq.dtype == of
    assert grads.dscale.dtype == np.float32
    np.testing.assert_allclose(grads.dscale, (wide * q.astype(np.float32)).sum((2, 3)), rtol=1e-6)


def test_packed_sequences() -> None:
    """Rows of no sequence hold anything, and add nothing to dscale."""
    scale, cuts = SCALES[4,], np.array([0, 9, 18], np.int32)
    rows = [np.concatenate([*x.swapaxes(1, 2), np.full((3, *x[0, :, 0].shape), np.nan)]) for x in (Q, K, V)]
    q, k, v = (x.copy() for x in rows)
    v[18:] = 0
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts, cuts, scale=scale, return_lse=True)
    dense, dense_lse = cupy_flash.attention(Q, K, V, scale=scale, return_lse=True)
    np.testing.assert_allclose(o[:18].reshape(2, 9, 4, 8).swapaxes(1, 2), dense, atol=1e-13)
    do = np.concatenate([*DO.swapaxes(1, 2), np.zeros((3, 4, 8))])
    grads = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, cuts, cuts, scale=scale)
    expected = cupy_flash.attention_backward(DO, Q, K, V, dense, dense_lse, scale=scale)
    np.testing.assert_allclose(grads.dscale, expected.dscale, atol=1e-12)
    np.testing.assert_allclose(grads.dq[:18].reshape(2, 9, 4, 8).swapaxes(1, 2), expected.dq, atol=1e-12)
    with pytest.raises(InvalidArgumentsError, match=r"scale has shape \(2, 4\)(.|\n)*Try: .*\(heads_q,\)"):
        cupy_flash.attention_varlen(q, k, v, cuts, cuts, scale=SCALES[2, 4])


def over_cache(kind: str) -> dict[str, Any]:
    """A call over a cache with the options that do something to q before its scores."""
    turn = np.cos(np.arange(36, dtype=np.float32)).reshape(9, 4)
    return {
        "plain": {},
        "rotary": {"rotary": Rotary(turn, np.sqrt(1 - turn**2))},
        "prefix": {"prefix": (K[0].astype(np.float32), V[0].astype(np.float32))},
        "packed": {"cu_seqlens_q": np.array([0, 3, 4], np.int32)},
    }[kind]


@pytest.mark.parametrize("kind", ["plain", "rotary", "prefix", "packed"])
def test_over_a_cache(kind: str) -> None:
    q, k, v = (x.astype(np.float32) for x in (Q[:, :, :2], K, V))
    scale = SCALES[2, 4].astype(np.float32)
    if kind == "packed":
        q, scale = q.swapaxes(1, 2).reshape(4, 4, 8), scale[1]
    factor = scale[:, None] if kind == "packed" else scale[..., None, None]
    more: Any = {"cache_seqlens": np.array([4, 9], np.int32), "causal": True, **over_cache(kind)}
    o, lse = cupy_flash.attention_with_kv_cache(q, k, v, scale=scale, return_lse=True, **more)
    expected = cupy_flash.attention_with_kv_cache(q * factor, k, v, scale=1.0, return_lse=True, **more)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


def test_explain_says_that_q_is_multiplied() -> None:
    q, k, v = (x.astype(np.float16) for x in (Q, K, V))
    scale = SCALES[4,].astype(np.float32)
    own = {"cache_seqlens": 5}
    for more in ({}, {"arch": "sm_90a"}, {"arch": "sm_80", "kv_cache": own}):
        text = cupy_flash.explain(q, k, v, scale=scale, **more)
        assert text == cupy_flash.explain(q, k, v, scale=1.0, **more) + text[text.rindex("\n") :]
        assert text.splitlines()[-1].startswith("scale     of each head: q is multiplied by it")
    assert "of each head" in cupy_flash.explain(q, k, v, kv_cache={**own, "scale": scale})


def test_naive_attention_takes_it() -> None:
    scale = SCALES[2, 4]
    naive = cupy_flash.naive_attention(Q, K, V, scale=scale).o
    np.testing.assert_allclose(naive, cupy_flash.attention(Q, K, V, scale=scale), atol=1e-13)


def test_an_array_of_one_number_is_a_number() -> None:
    for scale in (np.array(0.5), np.float32(0.5), np.array([0.5]), np.array([[0.5]])):
        np.testing.assert_array_equal(
            cupy_flash.attention(Q, K, V, scale=scale), cupy_flash.attention(Q, K, V, scale=0.5)
        )
    one, (o, lse) = Q[:, :1], cupy_flash.attention(Q[:, :1], K[:, :1], V[:, :1], return_lse=True)
    grads = cupy_flash.attention_backward(one, one, K[:, :1], V[:, :1], o, lse, scale=np.array([8**-0.5]))
    assert grads.dscale.shape == (1,)


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "shape": (r"scale has shape \(3,\)", lambda: cupy_flash.attention(Q, K, V, scale=np.ones(3))),
    "keys": (r"scale has shape \(4, 9\)", lambda: cupy_flash.attention(Q, K, V, scale=np.ones((4, 9)))),
    "dtype": ("scale has dtype float32, not float64", lambda: cupy_flash.attention(
        Q, K, V, scale=np.ones(4, np.float32))),
    "codes": ("q is a QuantizedArray", lambda: cupy_flash.attention(
        *[QuantizedArray(x.astype(np.uint8), np.ones(x.shape[1], np.float32)) for x in (Q, K, V)],
        scale=np.ones(4, np.float32))),
    "derivatives": (r"takes one number(.|\n)*Try: q \* scale", lambda: cupy_flash.derivatives.jvp(
        Q, K, V, Q, Q[..., 0], dq=Q, scale=np.ones(4))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    says, call = CALLS[name]
    with pytest.raises(InvalidArgumentsError, match=says) as caught:
        call()
    assert "Try: " in str(caught.value)


@pytest.mark.parametrize("options", [{"softcap": np.array([2.0])}, {"dropout": np.array([0.1]), "seed": 1}])
def test_no_other_number_is_an_array_with_axes(options: dict[str, Any]) -> None:
    """Whatever float() does with one: a number, a warning or an error, by the version of NumPy."""
    with pytest.raises(InvalidArgumentsError, match=r"is array\(\[.*, not a number"):
        cupy_flash.attention(Q, K, V, **options)


@pytest.mark.parametrize("shape", [None, 3, "ab", [4], math.prod])
@pytest.mark.parametrize("call", [cupy_flash.attention, cupy_flash.naive_attention, cupy_flash.explain])
def test_what_has_a_shape_of_another_kind_is_no_number(call: Callable[..., Any], shape: Any) -> None:
    with pytest.raises(InvalidArgumentsError, match=r"scale is .*, not a number"):
        call(Q, K, V, scale=SimpleNamespace(shape=shape))


def test_a_list_of_scales_is_told_of_arrays() -> None:
    with pytest.raises(InvalidArgumentsError, match=r"Try: scale=0\.125, or an array of one number per head"):
        cupy_flash.attention(Q, K, V, scale=[1.0, 2.0])


def test_a_layout_that_is_an_array_is_refused() -> None:
    with pytest.raises(InvalidArgumentsError, match="layout is"):
        cupy_flash.explain(Q, K, V, scale=np.ones(4), layout=np.zeros(3, "i4,f4"))
