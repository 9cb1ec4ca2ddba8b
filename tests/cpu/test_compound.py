"""Options that are made of several parts: nonsense inside of them is refused as it is anywhere else."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import (
    InvalidArgumentsError,
    QuantizedArray,
    QuantizedCache,
    RaggedMask,
    Rotary,
    Spans,
    Tuning,
)

X = np.ones((1, 2, 4, 8), np.float32)
KEPT = np.ones((4, 4), bool)
# Values of ours, none of which is an array.
VALUES = (
    QuantizedArray(X, np.ones(2, np.float32)), QuantizedCache(X), RaggedMask(KEPT), Rotary(X, X),
    Spans(KEPT), Tuning(),
    cupy_flash.block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, block=16),
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda x: type(x).__name__)
def test_our_own_values_are_no_arrays(value: Any) -> None:
    name = type(value).__name__
    lse = np.zeros((1, 2, 4), np.float32)
    for wrong in (
        lambda: cupy_flash.attention(X, X, X, bias=value),
        lambda: cupy_flash.attention_backward(value, X, X, X, X, lse),
        lambda: cupy_flash.attention_with_kv_cache(X, X, X, cache_seqlens=value),
        lambda: cupy_flash.attention_with_kv_cache(X, X, X, cache_seqlens=1, block_table=value),
        lambda: cupy_flash.attention_with_kv_cache(X, X, X, cache_seqlens=1, prefix=(value, value)),
        lambda: cupy_flash.merge(value, lse, X, lse),
    ):
        with pytest.raises(InvalidArgumentsError, match=rf"is (a )?{name}\b"):
            wrong()


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (("top_left", "bottom_right"), "of which one is a str"),
        ((KEPT, 0.5), "of which one is a float"),
        ((KEPT, X[0, 0, :, :4]), "array of float32"),
        ((KEPT.astype(np.int64), KEPT), "array of int64"),
        ((KEPT, np.ones((3, 4), bool)), "do not combine"),
    ],
)
def test_masks_that_do_not_combine_are_refused(mask: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=says):
        cupy_flash.attention(X, X, X, mask=mask)


@pytest.mark.parametrize("prefix", [(1, 2), ((1,), X[0]), (X[0], "x")])
def test_a_prefix_of_no_arrays_is_refused(prefix: Any) -> None:
    with pytest.raises(
        InvalidArgumentsError, match=r"prefix\[[01]\] is an? (int|tuple|str), and a shared prefix is an array"
    ):
        cupy_flash.attention_with_kv_cache(X, X, X, cache_seqlens=1, prefix=prefix)


def test_a_layout_that_is_an_array_is_refused_beside_a_prefix() -> None:
    with pytest.raises(InvalidArgumentsError, match="layout is array"):
        cupy_flash.attention_with_kv_cache(X, X, X, cache_seqlens=1, prefix=(X[0], X[0]), layout=X)  # type: ignore[arg-type]


class Interface:
    """An array as DLPack alone."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)


def test_slots_by_a_protocol() -> None:
    """Slots and pages differ in rank alone, which such an array does not say by itself."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 4, 8), np.float32)
    given = X.repeat(2, 0), k, v, np.array([4, 3], np.int32), np.array([2, 0], np.int32)
    o = [
        cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=lengths, block_table=slots)
        for q, k, v, lengths, slots in (given, map(Interface, given))
    ]
    np.testing.assert_array_equal(*map(np.from_dlpack, o))
    with pytest.raises(InvalidArgumentsError, match="block_table is an int, not an array"):
        cupy_flash.attention_with_kv_cache(X, k, v, cache_seqlens=4, block_table=7)


def test_explain_names_an_array_that_a_cache_does_not_take() -> None:
    for bias in (np.ones((4, 4), np.float32), np.ones((0, 4), np.float32)):
        with pytest.raises(InvalidArgumentsError, match=r"attention_with_kv_cache\(\) has no option 'bias'"):
            cupy_flash.explain(X, X, X, bias=bias, kv_cache={"cache_seqlens": 4})


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_with_kv_cache"])
@pytest.mark.parametrize("adapter", ["torch", "jax"])
def test_adapters_have_the_same_parameters(adapter: str, name: str) -> None:
    pytest.importorskip(adapter)
    module = importlib.import_module(f"cupy_flash.{adapter}")
    theirs, ours = (inspect.signature(getattr(x, name)).parameters for x in (module, cupy_flash))
    assert theirs.keys() <= ours.keys()


@pytest.mark.parametrize(
    ("name", "most"), [("attention", 22), ("attention_varlen", 28), ("attention_with_kv_cache", 29)]
)
def test_calls_have_few_parameters(name: str, most: int) -> None:
    """What belongs together is one value: who adds a parameter looks for its place in one first."""
    assert len(inspect.signature(getattr(cupy_flash, name)).parameters) <= most
