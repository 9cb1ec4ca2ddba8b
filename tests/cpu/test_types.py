"""The type of an array goes in and comes out: mypy reads this file with the library, pytest runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, get_type_hints

import numpy as np
import pytest

import cupy_flash

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value: Any, _kind: Any) -> Any:
        return value


Floats: TypeAlias = "np.ndarray[tuple[int, int, int, int], np.dtype[np.float32]]"
Rows: TypeAlias = "np.ndarray[tuple[int, int, int], np.dtype[np.float32]]"


def four() -> Floats:
    return np.ones((1, 2, 5, 8), np.float32)


def test_attention() -> None:
    q = four()
    assert_type(cupy_flash.attention(q, q, q, causal=True, layout="bhsd"), Floats)
    o, lse = cupy_flash.attention(q, q, q, window=(3, None), return_lse=True)
    assert_type(o, Floats)
    gradients = cupy_flash.attention_backward(q, q, q, q, o, lse, window=(3, None))
    assert_type(gradients.dq, Floats)
    dq, *_ = gradients
    assert_type(dq, Floats)
    assert_type(cupy_flash.merge(o, lse, o, lse)[0], Floats)
    asked: bool = bool(q.size)
    either = cupy_flash.attention(q, q, q, return_lse=asked)
    assert isinstance(either, tuple)


def test_a_configuration() -> None:
    flash = cupy_flash.FlashAttention(cupy_flash.causal_config(8))
    q = four()
    assert_type(flash(q, q, q), Floats)
    o, lse = flash(q, q, q, return_lse=True)
    assert_type(o, Floats)
    assert_type(flash.backward(q, q, q, q, o, lse).dv, Floats)


def test_packed_and_cached() -> None:
    x: Rows = np.ones((5, 2, 8), np.float32)
    cuts = np.array([0, 5], np.int32)
    assert_type(cupy_flash.attention_varlen(x, x, x, cuts, cuts, max_seqlen_q=5), Rows)
    o, lse = cupy_flash.attention_varlen(x, x, x, cuts, cuts, return_lse=True)
    assert_type(o, Rows)
    assert_type(cupy_flash.attention_varlen_backward(x, x, x, x, o, lse, cuts, cuts).dk, Rows)
    q, cache = four(), np.ones((1, 2, 16, 8), np.float32)
    assert_type(cupy_flash.attention_with_kv_cache(q, cache, cache, cache_seqlens=9, causal=True), Floats)


def test_what_is_no_array_or_no_option_is_an_error_to_mypy_too() -> None:
    q = four()
    with pytest.raises(cupy_flash.InvalidArgumentsError):
        cupy_flash.attention([1.0], [1.0], [1.0])  # type: ignore[call-overload]
    with pytest.raises(cupy_flash.InvalidArgumentsError):
        cupy_flash.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    with pytest.raises(cupy_flash.InvalidArgumentsError):
        cupy_flash.attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]
    with pytest.raises(cupy_flash.InvalidArgumentsError):
        cupy_flash.attention(q, q, q, causal=True, align="left")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", [name for name in cupy_flash.__all__ if name[0].islower()])
def test_every_parameter_has_a_type(name: str) -> None:
    hints = get_type_hints(getattr(cupy_flash, name))
    assert "return" in hints
    assert len(hints) > 1
