"""Every bad call gets the right one of the three errors, said well, before anything happens."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import CubinNotFoundError, InvalidArgumentsError, RaggedMask, UnsupportedError, cpu, testing
from cupy_flash.call import outputs
from cupy_flash.call.describe import MAX_SEQLEN, describe
from cupy_flash.call.given import Options
from cupy_flash.call.operands import AXES
from cupy_flash.cpu.core import family
from cupy_flash.dispatch import memo
from tests.cases import Case
from tests.cpu.fake_cupy import MEMORY, FakeCuda

pytestmark = pytest.mark.usefixtures("device")

F32 = np.float32


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


Q, K = (2, 4, 6, 8), (2, 2, 6, 8)


def call(**changes: Any) -> Any:
    """Call attention on good inputs of shape Q and K but for these changes."""
    given = {"q": ones(*Q), "k": ones(*K), "v": ones(*K)} | changes
    return cupy_flash.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def call_backward(**changes: Any) -> Any:
    """Call attention_backward on good inputs but for these changes."""
    given = {"do": ones(*Q), "q": ones(*Q), "k": ones(*K), "v": ones(*K), "o": ones(*Q), "lse": ones(2, 4, 6)}
    given |= changes
    positional = [given.pop(name) for name in ("do", "q", "k", "v", "o", "lse")]
    return cupy_flash.attention_backward(*positional, **given)


@pytest.fixture(autouse=True)
def nothing_happens() -> Iterator[None]:
    """Fail if a refused call allocated a result or started to compute."""
    with (
        mock.patch.object(outputs, "empty", side_effect=AssertionError("allocated")),
        mock.patch.object(cpu, "forward", side_effect=AssertionError("computed")),
        mock.patch.object(cpu, "backward", side_effect=AssertionError("computed")),
        mock.patch.object(family.Core, "run", side_effect=AssertionError("computed")),
        mock.patch.object(memo, "_KNOWN", {}),  # what these calls leave there computes nothing
    ):
        yield


def refuses(error: type[Exception], first_line: str, function: Callable[..., Any], **changes: Any) -> str:
    """Assert how a call is refused, and return the text."""
    inputs = {name: x for name, x in changes.items() if isinstance(x, np.ndarray) and x.dtype != object}
    before = {name: x.copy() for name, x in inputs.items()}
    with pytest.raises((InvalidArgumentsError, UnsupportedError, CubinNotFoundError, Exception)) as caught:
        function(**changes)
    text = str(caught.value)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {text}"
    lines = text.splitlines()
    assert re.search(first_line, lines[0]), text
    assert lines[0][-1] in ".?", f"the first line is a sentence: {text}"
    assert len(lines) > 1, f"no way out is given: {text}"
    assert lines[-1].startswith("Try: "), text
    assert len(lines[-1]) > len("Try: x"), text
    for line in lines[1:-1]:
        assert line.startswith("  "), text
    for name, x in inputs.items():
        same = x.tobytes() == before[name].tobytes()
        assert same, f"{name} was written"
    return text


FORWARD: list[tuple[str, str, dict[str, Any]]] = [
    # (what, first line, the change)
    ("rank 1", r"q has rank 1\b", {"q": ones(8)}),
    ("rank 5", r"q has rank 5\b", {"q": ones(1, *Q)}),
    ("rank 0", r"q has rank 0\b", {"q": np.array(1.0, F32)}),
    ("ranks differ", r"k has rank 3, q 4", {"k": ones(2, 6, 8)}),
    ("integers", r"q has dtype int64", {"q": ones(*Q, dtype=np.int64), "k": ones(*K, dtype=np.int64)}),
    ("int8", r"q has dtype int8", {"q": ones(*Q, dtype=np.int8)}),
    ("booleans", r"q has dtype bool", {"q": ones(*Q, dtype=bool)}),
    ("complex", r"q has dtype complex64", {"q": ones(*Q, dtype=np.complex64)}),
    ("long double", r"q has dtype (long|float128)", {"q": ones(*Q, dtype=np.longdouble)}),
    ("objects", r"q has dtype object", {"q": np.ones(Q, object)}),
    ("strings", r"q has dtype str", {"q": np.full(Q, "a")}),
    ("dtypes differ", r"k has dtype float16, q has float32", {"k": ones(*K, dtype=np.float16)}),
    ("v differs", r"v has dtype float64, q has float32", {"v": ones(*K, dtype=np.float64)}),
    ("foreign byte order", r"q has the foreign byte order", {"q": ones(*Q, dtype=">f4")}),
    ("not an array", r"q is a list, not an array", {"q": [[1.0]]}),
    ("None", r"k is None, not an array", {"k": None}),
    ("a number", r"v is a float, not an array", {"v": 1.0}),
    ("a matrix", r"q is a matrix, whose rules differ", {"q": ones(6, 8).view(np.matrix)}),
    ("a masked array", r"q is a MaskedArray, whose rules differ", {"q": np.ma.masked_array(ones(*Q))}),
    ("heads not a multiple", r"3 heads of q are not a multiple of 2", {"q": ones(2, 3, 6, 8)}),
    (
        "more heads of k",
        r"2 heads of q are not a multiple of 4",
        {"q": ones(*K), "k": ones(*Q), "v": ones(*Q)},
    ),
    ("no heads of k", r"4 heads of q .* 0 of k", {"k": ones(2, 0, 6, 8), "v": ones(2, 0, 6, 8)}),
    ("heads of v", r"k has 2 heads, v has 4", {"v": ones(*Q)}),
    ("batch sizes", r"batch sizes 2, 3, 3 differ", {"k": ones(3, 2, 6, 8), "v": ones(3, 2, 6, 8)}),
    ("keys and values", r"k has 6 keys, v has 7", {"v": ones(2, 2, 7, 8)}),
    ("head dims", r"q has head_dim 8, k has 9", {"k": ones(2, 2, 6, 9)}),
    ("head dim 0", r"head_dim is 0", {"q": ones(2, 4, 6, 0), "k": ones(2, 2, 6, 0)}),
    ("head dim 0 of v", r"head_dim is 0|v has head_dim 0", {"v": ones(2, 2, 6, 0)}),
    ("mask of floats", r"mask has dtype float32", {"mask": ones(6, 6)}),
    ("mask of integers", r"mask has dtype int64", {"mask": ones(6, 6, dtype=np.int64)}),
    ("mask too long", r"mask of shape \(6, 7\)", {"mask": ones(6, 7, dtype=bool)}),
    ("mask of key heads", r"mask of shape \(2, 2, 6, 6\)", {"mask": ones(2, 2, 6, 6, dtype=bool)}),
    ("mask of rank 5", r"mask of shape \(1, 1, 1, 6, 6\)", {"mask": ones(1, 1, 1, 6, 6, dtype=bool)}),
    ("mask is a list", r"mask is a list", {"mask": [True]}),
    ("empty mask", r"mask of shape \(6, 0\)", {"mask": ones(6, 0, dtype=bool)}),
    ("bias of booleans", r"bias has dtype bool", {"bias": ones(6, 6, dtype=bool)}),
    ("bias of integers", r"bias has dtype int32", {"bias": ones(6, 6, dtype=np.int32)}),
    ("bias too long", r"bias of shape \(3, 1, 1, 6\)", {"bias": ones(3, 1, 1, 6)}),
    ("bias is a number", r"bias is a float", {"bias": 1.0}),
    ("slopes of heads of k", r"alibi_slopes has shape \(2,\)", {"alibi_slopes": ones(2)}),
    (
        "slopes of another dtype",
        r"alibi_slopes has dtype float64",
        {"alibi_slopes": ones(4, dtype=np.float64)},
    ),
    ("slopes of rank 3", r"alibi_slopes has shape \(2, 4, 1\)", {"alibi_slopes": ones(2, 4, 1)}),
    ("sinks of heads of k", r"sinks has shape \(2,\)", {"sinks": ones(2)}),
    ("sinks of another dtype", r"sinks has dtype float16", {"sinks": ones(4, dtype=np.float16)}),
    ("sinks is a number", r"sinks is a float", {"sinks": 0.0}),
    ("scale nan", r"scale is nan", {"scale": float("nan")}),
    ("scale infinite", r"scale is inf", {"scale": float("inf")}),
    ("scale a string", r"scale is '0.1'", {"scale": "0.1"}),
    ("scale an array", r"scale has shape \(2,\), and q \(2, 4, 6, 8\)", {"scale": ones(2)}),
    ("softcap 0", r"softcap is 0", {"softcap": 0.0}),
    ("softcap negative", r"softcap is -1", {"softcap": -1.0}),
    ("softcap nan", r"softcap is nan", {"softcap": float("nan")}),
    ("scale beyond float32", r"scale is 1e\+39, beyond 3\.4e\+38", {"scale": 1e39}),
    ("softcap beyond float32", r"softcap is 1e\+39, beyond", {"softcap": 1e39}),
    ("softcap that is 0 in float32", r"1 / softcap is 1e\+50, beyond", {"softcap": 1e-50}),
    ("scale beyond the softcap", r"scale / softcap is 1e\+40, beyond", {"scale": 1e5, "softcap": 1e-35}),
    ("window negative", r"window's left bound is -1", {"window": (-1, 0)}),
    ("window negative right", r"window's right bound is -2", {"window": (0, -2)}),
    ("window a number", r"window is 5", {"window": 5}),
    ("window of three", r"window is \(1, 2, 3\)", {"window": (1, 2, 3)}),
    ("window of floats", r"window's left bound is 1\.5", {"window": (1.5, 0)}),
    ("window of booleans", r"window's left bound is True", {"window": (True, 0)}),
    ("causal a string", r"causal is 'yes'", {"causal": "yes"}),
    ("causal an array", r"causal is ", {"causal": ones(2)}),
    ("align unknown", r"align is 'left'", {"align": "left", "causal": True}),
    ("align a float", r"align is 1\.5", {"align": 1.5, "causal": True}),
    ("align a boolean", r"align is True", {"align": True, "causal": True}),
    ("align huge", r"align is 1180591620717411303424", {"align": 2**70, "causal": True}),
    ("align beyond any sequence", r"align is -1099511627776", {"align": -(2**40), "causal": True}),
    ("dropout 1", r"dropout is 1", {"dropout": 1.0, "seed": 0}),
    ("dropout negative", r"dropout is -0\.1", {"dropout": -0.1, "seed": 0}),
    ("dropout nan", r"dropout is nan", {"dropout": float("nan"), "seed": 0}),
    ("dropout a string", r"dropout is 'a'", {"dropout": "a"}),
    ("dropout without seed", r"dropout is 0\.1 but there is no seed", {"dropout": 0.1}),
    ("seed negative", r"seed is -1", {"dropout": 0.1, "seed": -1}),
    ("seed too large", r"seed is 18446744073709551616", {"dropout": 0.1, "seed": 2**64}),
    ("seed a float", r"seed is 1\.0", {"dropout": 0.1, "seed": 1.0}),
    ("layout", r"layout is 'sbhd'", {"layout": "sbhd"}),
    ("layout None", r"layout is None", {"layout": None}),
    ("precision", r"precision is 'bf16'", {"precision": "bf16"}),
    ("tile of one", r"tuning.tile is \(64,\)", {"tuning": cupy_flash.Tuning(tile=(64,))}),
    ("tile a number", r"tuning.tile is 64", {"tuning": cupy_flash.Tuning(tile=64)}),
    ("tile of zero", r"tuning.tile is \(0, 64\)", {"tuning": cupy_flash.Tuning(tile=(0, 64))}),
    ("tile of floats", r"tuning.tile is \(64\.0, 64\.0\)", {"tuning": cupy_flash.Tuning(tile=(64.0, 64.0))}),
]


@pytest.mark.parametrize(("message", "changes"), [x[1:] for x in FORWARD], ids=[x[0] for x in FORWARD])
class TestBothDirections:
    """What attention refuses, attention_backward refuses in the same words."""

    def test_forward(self, message: str, changes: dict[str, Any]) -> None:
        refuses(InvalidArgumentsError, message, call, **changes)

    def test_backward(self, message: str, changes: dict[str, Any]) -> None:
        refuses(InvalidArgumentsError, message, call_backward, **changes)


BACKWARD: list[tuple[str, str, dict[str, Any]]] = [
    ("do of another shape", r"do has shape \(2, 4, 5, 8\)", {"do": ones(2, 4, 5, 8)}),
    ("do of another dtype", r"do has dtype float64", {"do": ones(*Q, dtype=np.float64)}),
    ("do of another rank", r"do has rank 3", {"do": ones(4, 6, 8)}),
    ("do None", r"do is None", {"do": None}),
    ("o of another shape", r"o has shape \(2, 4, 6, 7\)", {"o": ones(2, 4, 6, 7)}),
    ("o None", r"o is None", {"o": None}),
    ("lse of another shape", r"lse has shape \(2, 4, 6, 1\)", {"lse": ones(2, 4, 6, 1)}),
    ("lse of another layout", r"lse has shape \(2, 6, 4\)", {"lse": ones(2, 6, 4)}),
    ("lse of another dtype", r"lse has dtype float64", {"lse": ones(2, 4, 6, dtype=np.float64)}),
    ("lse None", r"lse is None", {"lse": None}),
    ("dlse of another shape", r"dlse has shape \(4, 6\)", {"dlse": ones(4, 6)}),
    ("dlse of another dtype", r"dlse has dtype float16", {"dlse": ones(2, 4, 6, dtype=np.float16)}),
]


@pytest.mark.parametrize(("message", "changes"), [x[1:] for x in BACKWARD], ids=[x[0] for x in BACKWARD])
def test_backward(message: str, changes: dict[str, Any]) -> None:
    refuses(InvalidArgumentsError, message, call_backward, **changes)


@pytest.mark.parametrize("function", [call, call_backward])
@pytest.mark.parametrize(
    "option",
    [{"causal": True}, {"window": (1, 1)}, {"alibi_slopes": ones(4)}],
    ids=["causal", "window", "alibi"],
)
@pytest.mark.parametrize("keys", [0, 9])
def test_unequal_lengths_without_align(
    keys: int, option: dict[str, Any], function: Callable[..., Any]
) -> None:
    """Both spellings are offered, with who means which."""
    k = ones(2, 2, keys, 8)
    name = next(iter(option))
    text = refuses(
        InvalidArgumentsError,
        f"{name} with 6 queries and {keys} keys is ambiguous",
        function,
        k=k,
        v=k,
        **option,
    )
    assert 'align="top_left"' in text
    assert 'align="bottom_right"' in text


def test_the_inputs_are_shown_as_a_table() -> None:
    text = refuses(
        InvalidArgumentsError, r"k has 2 heads, v has 4 heads|k has 2 heads, v has 4", call, v=ones(*Q)
    )
    rows = text.splitlines()[1:-1]
    assert [row.split()[0] for row in rows] == ["q", "k", "v"]
    assert all(row.endswith("float32") for row in rows)
    assert len({row.index("float32") for row in rows}) == 1, "columns are aligned"
    assert "(2, 4, 6, 8)" in rows[0]


def last_line(function: Callable[..., Any], message: str, **changes: Any) -> str:
    """What a refused call is told to try."""
    return refuses(InvalidArgumentsError, message, function, **changes).splitlines()[-1]


# ---- shapes that would fit in another way


@pytest.mark.parametrize("function", [call, call_backward])
@pytest.mark.parametrize(
    ("layout", "other", "q", "k"),
    [("bhsd", "bshd", (2, 100, 8, 64), (2, 120, 4, 64)), ("bshd", "bhsd", (2, 8, 100, 64), (2, 4, 120, 64))],
)
def test_a_swapped_layout(
    layout: str, other: str, q: tuple[int, ...], k: tuple[int, ...], function: Callable[..., Any]
) -> None:
    given = {"q": ones(*q), "k": ones(*k), "v": ones(*k), "layout": layout}
    hint = last_line(function, "100 heads of q are not a multiple of 120 of k", **given)
    assert f'; or layout="{other}", if these arrays are ' in hint
    assert AXES[other] in hint
    hint = last_line(function, "7 heads of q are not a multiple of 120", **(given | {"q": ones(2, 7, 7, 64)}))
    assert "layout=" not in hint, "neither layout fits"


def test_a_swapped_layout_of_a_cache() -> None:
    hint = last_line(
        cupy_flash.attention_with_kv_cache, "1 heads of q are not a multiple of 1024 of k_cache",
        q=ones(2, 1, 8, 64), k_cache=ones(2, 1024, 8, 64), v_cache=ones(2, 1024, 8, 64),
        cache_seqlens=np.array([5, 5], np.int32),
    )  # fmt: skip
    assert 'layout="bshd", if these arrays are (batch, seq, heads, head_dim)' in hint


def test_packed_sequences_have_one_layout() -> None:
    cut = np.array([0, 4], np.int32)
    given = {"q": ones(4, 7, 8), "k": ones(4, 3, 8), "v": ones(4, 3, 8)}
    text = refuses(
        InvalidArgumentsError, "7 heads of q are not a multiple of 3", cupy_flash.attention_varlen,
        **given, cu_seqlens_q=cut, cu_seqlens_k=cut,
    )  # fmt: skip
    assert "layout=" not in text


def test_unequal_lengths_that_are_equal_in_the_other_layout() -> None:
    """Grouped heads of swapped arrays look like fewer keys than queries."""
    k = ones(2, 12, 2, 8)
    given = {"q": ones(2, 12, 8, 8), "k": k, "v": k, "causal": True}
    hint = last_line(call, "causal with 8 queries and 2 keys is ambiguous", **given)
    assert hint.endswith('; or layout="bshd", if these arrays are (batch, seq, heads, head_dim)')
    assert "layout=" not in last_line(call, "causal with 6 queries and 9 keys", k=ones(2, 2, 9, 8),
                                      v=ones(2, 2, 9, 8), causal=True)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_a_mask_of_zeros_and_ones(dtype: Any) -> None:
    hint = last_line(call, "mask has dtype", q=ones(2, 4, 5, 8), mask=ones(2, 6, dtype=dtype))
    assert hint.startswith("Try: mask.astype(bool)[:, None, None, :], if ")
    hint = last_line(call, "mask has dtype", mask=ones(6, 6, dtype=dtype))
    assert hint.startswith("Try: mask.astype(bool), if ")


def test_a_mask_over_batch_and_keys() -> None:
    hint = last_line(call, r"mask of shape \(2, 6\) does not broadcast", mask=ones(2, 6, dtype=bool))
    assert hint.startswith("Try: mask[:, None, None, :], if ")
    hint = last_line(call, r"mask of shape \(3, 6\) does not broadcast", mask=ones(3, 6, dtype=bool))
    assert "None" not in hint


def test_a_mask_of_floats() -> None:
    """As a bias, zeros and ones of pairs would give other results in silence."""
    hint = last_line(call, "mask has dtype float32", mask=ones(6, 6))
    assert hint.startswith("Try: bias= for additive scores; mask.astype(bool), if 1 is a pair that may ")


def test_a_mask_of_each_sequence_without_an_axis_of_heads() -> None:
    hint = last_line(call, "does not broadcast", mask=ones(2, 6, 6, dtype=bool))
    assert hint.startswith("Try: mask[:, None], if it holds the pairs of each sequence; or (batch")


def test_arguments_of_a_backward_pass_in_another_order() -> None:
    hint = last_line(call_backward, "o has rank 3, q 4", o=ones(2, 4, 6), lse=ones(*Q))
    assert hint == "Try: the same rank for do, q, k, v, o"


def test_complex_numbers_are_not_cast_to_their_real_parts() -> None:
    z = ones(*Q, dtype=np.complex64)
    assert last_line(call, "q has dtype complex64", q=z) == 'Try: "Complex inputs" in docs/recipes.md'


def test_a_window_of_one_number() -> None:
    hint = last_line(call, "window is 16, not a pair", window=16)
    assert "window=(16, 0)" in hint
    assert "window=(16, 16)" in hint
    assert "window=(128, 0)" in last_line(call, "window is -1, not a pair", window=-1)


# ---- arrays in other things


class Labelled:
    """What xarray and pandas have in common."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    @property
    def values(self) -> np.ndarray:
        raise AssertionError("reading may compute")

    def __array__(self) -> np.ndarray:
        return self._values


class Convertible:
    def __array__(self) -> np.ndarray:
        return ones(*Q)


class Described:
    __array_interface__ = ones(*Q).__array_interface__


class Sparse:
    def toarray(self) -> np.ndarray:
        raise AssertionError("reading may compute")


@pytest.mark.parametrize(
    ("thing", "hint"),
    [
        (Labelled(ones(*Q)), "Try: q.values, the array without its labels"),
        (Convertible(), "Try: numpy.asarray(q)"),
        (Described(), "Try: numpy.asarray(q)"),
        (memoryview(ones(*Q)), "Try: numpy.asarray(q)"),
        (Sparse(), "Try: q.toarray()"),
        ([[1.0]], "Try: numpy.asarray(q)"),
        ({"q": 1}, "Try: a NumPy, CuPy, torch or JAX array"),
    ],
)
def test_a_thing_with_an_array_inside(thing: Any, hint: str) -> None:
    assert last_line(call, f"q is a {type(thing).__name__}, not an array", q=thing).startswith(hint)


def test_an_array_of_another_library_is_called_by_both_names() -> None:
    array = type("Array", (Convertible,), {"__module__": "dask.array.core"})
    assert last_line(call, "q is a dask Array, not an array", q=array()) == "Try: numpy.asarray(q)"


@pytest.mark.parametrize(("name", "dtype"), [("mask", bool), ("bias", np.float32)])
def test_what_is_masked_of_a_mask_is_left_out(name: str, dtype: Any) -> None:
    kept = np.tri(6, dtype=bool)
    masked = np.ma.masked_array(ones(6, 6, dtype=dtype), ~kept)
    hint = last_line(call, f"{name} is a MaskedArray", **{name: masked}).removeprefix("Try: ")
    left = eval(hint.partition(", ")[0], {"numpy": np, name: masked})
    assert type(left) is np.ndarray
    assert (left == np.where(kept, 1, 0 if name == "mask" else -np.inf)).all()


# ---- out


@pytest.mark.parametrize(
    ("message", "out"),
    [
        (r"out has shape \(2, 4, 6, 9\)", ones(2, 4, 6, 9)),
        (r"out has dtype float64", ones(*Q, dtype=np.float64)),
        (r"out is a list", []),
    ],
)
def test_out_of_another_kind(message: str, out: Any) -> None:
    refuses(InvalidArgumentsError, message, call, out=out)


def test_out_that_cannot_be_written() -> None:
    out = ones(*Q)
    out.flags.writeable = False
    refuses(InvalidArgumentsError, "out is read-only", call, out=out)
    refuses(InvalidArgumentsError, "out is read-only", call, out=np.broadcast_to(ones(8), Q))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_out_that_overlaps_an_input(name: str) -> None:
    memory = ones(4000)
    out = memory[: 2 * 4 * 6 * 8].reshape(Q)
    shape = {"q": Q, "k": K, "v": K, "bias": (6, 6)}[name]
    for start in (0, 2 * 4 * 6 * 8 - 1):
        other = memory[start : start + int(np.prod(shape))].reshape(shape)
        refuses(InvalidArgumentsError, f"out overlaps {name} in memory", call, **{name: other, "out": out})


def test_out_that_overlaps_itself() -> None:
    strided = np.lib.stride_tricks.as_strided
    for strides in ((0, 192, 32, 4), (768, 192, 4, 4), (768, 192, 28, 4), (768, 192, 32, 0)):
        out = strided(ones(4000), Q, strides)
        refuses(InvalidArgumentsError, "out overlaps itself: strides", call, out=out)


def test_out_that_interleaves_with_an_input_without_touching_it() -> None:
    """Not refused: q and out are columns of one array."""
    both = ones(2, 4, 6, 16)
    with mock.patch.object(cpu, "forward") as numpy, mock.patch.object(family.Core, "run") as core:
        call(q=both[..., :8], out=both[..., 8:])
    assert numpy.called != core.called


# ---- unknown keywords


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("softmax_scale", "scale=..."),
        ("is_causal", "causal=..."),
        ("attn_mask", "mask=..."),
        ("dropout_p", "dropout=..."),
        ("window_size", "window=..."),
        ("windw", "window=..."),
        ("score_mod", "score=..."),
        ("mask_mod", "mask=..."),
        ("block_mask", "mask=..."),
        ("enable_gqa", "may have fewer heads"),
        ("return_softmax_lse", "return_lse=..."),
        ("return_attn_probs", "return_lse=..."),
        ("attention_mask", "mask=..."),
        ("alibi", "alibi_slopes=..."),
        ("zzz", "one of causal"),
        ("kernel", "one of causal"),
    ],
)
def test_unknown_keyword(wrong: str, right: str) -> None:
    text = refuses(InvalidArgumentsError, rf"attention\(\) has no option '{wrong}'", call, **{wrong: 1})
    assert right in text.splitlines()[-1]


def test_an_unknown_keyword_is_told_of_options_only() -> None:
    text = refuses(InvalidArgumentsError, r"attention_backward\(\) has no option 'zzz'", call_backward, zzz=1)
    assert "one of dlse, causal" in text.splitlines()[-1]
    assert "layout" not in last_line(call_backward, "has no option 'out'", out=1).partition(",")[0]


def test_missing_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="missing"):
        cupy_flash.attention(ones(*Q), ones(*K))


@pytest.mark.parametrize(
    ("function", "count", "option", "headline", "likely", "unlikely"),
    [
        ("attention", 3, True, "takes only q, k, v by position", "causal", "mask"),
        ("attention", 3, ones(6, 6), "takes only q, k, v by position", "mask", "causal"),
        ("attention_backward", 6, True, "takes only do, q, k, v, o, lse by position", "causal", "mask"),
        ("attention_with_kv_cache", 3, ones(2), "q, k_cache, v_cache by position", "cache_seqlens", "causal"),
        ("merge", 4, "bshd", "takes only o_a, lse_a, o_b, lse_b by position", "layout", "causal"),
    ],
)
def test_options_by_position_are_a_type_error(
    function: str, count: int, option: Any, headline: str, likely: str, unlikely: str
) -> None:
    def by_position() -> None:
        getattr(cupy_flash, function)(*[ones(*Q)] * count, option)

    hint = refuses(TypeError, rf"{function}\(\) .*{headline}", by_position).splitlines()[-1]
    assert f" {likely}=..." in hint
    assert f" {unlikely}=..." not in hint


# ---- devices and libraries


class OnGpu:
    """An array of an unknown library on a CUDA device, as its protocols show it."""

    def __init__(self, shape: tuple[int, ...], device: int = 0) -> None:
        self.shape = shape
        self.device = device
        self.numbers = None
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4", "data": (MEMORY * (device + 1), False), "version": 3,
            "strides": None,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)


class Foreign:
    """An array of an unknown library on the CPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_mixed_libraries(cuda: FakeCuda) -> None:
    refuses(InvalidArgumentsError, "k is a dlpack array, q a numpy array", call, k=Foreign(ones(*K)))
    refuses(InvalidArgumentsError, "mask is a dlpack array", call, mask=Foreign(ones(6, 6, dtype=bool)))
    refuses(InvalidArgumentsError, "out is a dlpack array", call, out=Foreign(ones(*Q)))
    refuses(InvalidArgumentsError, "k is a dlpack array", call, k=OnGpu(K))


def test_devices_differ(cuda: FakeCuda) -> None:
    text = refuses(
        InvalidArgumentsError,
        r"v is on cuda:1, q on cuda:0",
        call,
        q=OnGpu(Q),
        k=OnGpu(K),
        v=OnGpu(K, device=1),
    )
    assert "on cuda:1" in text


def test_unknown_device() -> None:
    class OnTpu(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (99, 0)

    refuses(InvalidArgumentsError, "q is on DLPack device type 99:0", call, q=OnTpu(ones(*Q)))


def test_a_gpu_array_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = refuses(UnsupportedError, "CuPy, which is not installed", call, q=OnGpu(Q), k=OnGpu(K), v=OnGpu(K))
    assert "cupy" in text.splitlines()[-1]


# ---- what the CPU, or the architecture, cannot do


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_tensor_core_precision_on_the_cpu(precision: str) -> None:
    refuses(UnsupportedError, f"precision='{precision}' needs tensor cores", call, precision=precision)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_precision_of_another_dtype(dtype: Any) -> None:
    given = {"q": ones(*Q, dtype=dtype), "k": ones(*K, dtype=dtype), "v": ones(*K, dtype=dtype)}
    refuses(InvalidArgumentsError, "precision='ieee' is for float32", call, precision="ieee", **given)


def test_a_tile_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_80")
    text = refuses(UnsupportedError, r"tile|fits", call, tuning=cupy_flash.Tuning(tile=(13, 17)))
    assert "13" in text
    refuses(UnsupportedError, r"tile|fits", call_backward, tuning=cupy_flash.Tuning(tile=(13, 17)))


def test_a_head_dim_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_80")
    wide = ones(1, 1, 2, 1000)
    text = refuses(UnsupportedError, r"fits|head", call, q=wide, k=wide, v=wide)
    assert "1000" in text


def test_an_unknown_driver_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulatr")
    refuses(InvalidArgumentsError, "CUPY_FLASH_DRIVER is 'simulatr'", call)


def test_an_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_12")
    refuses(UnsupportedError, "sm_12", call)


# ---- the other functions


def test_merge() -> None:
    o, lse = ones(*Q), ones(2, 4, 6)
    for message, changes in (
        (r"o_a has shape .*, o_b has", {"o_b": ones(2, 4, 7, 8)}),
        (r"o_a has dtype float32, o_b has float64", {"o_b": ones(*Q, dtype=np.float64)}),
        (r"lse_a has shape", {"lse_b": ones(2, 4, 1)}),
        (r"lse_.* has dtype", {"lse_a": ones(2, 4, 6, dtype=np.float16)}),
        (r"lse_a has shape \(6, 4\)", {"lse_a": ones(6, 4), "lse_b": ones(6, 4)}),
        (r"lse_a has shape \(\)", {"o_a": ones(6), "o_b": ones(6), "lse_a": ones(), "lse_b": ones()}),
        (r"o_a is a list", {"o_a": []}),
        (r"o_a has dtype int64", {"o_a": ones(*Q, dtype=int), "o_b": ones(*Q, dtype=int)}),
        (r"layout is 'x'", {"layout": "x"}),
    ):
        given = {"o_a": o, "lse_a": lse, "o_b": o, "lse_b": lse} | changes
        refuses(InvalidArgumentsError, message, cupy_flash.merge, **given)


def test_configurations() -> None:
    for head_dim in (0, -1, 1.5, True, "64"):
        refuses(InvalidArgumentsError, "head_dim is", cupy_flash.default_config, head_dim=head_dim)
    refuses(InvalidArgumentsError, "config is an int", cupy_flash.FlashAttention, config=3)
    made = "FlashAttention(AttentionConfig(head_dim=64"
    for said, given, hint in (
        (r"FlashAttention\(\) has no option 'causal'", {"causal": True}, f"{made}, causal=True))"),
        (r"FlashAttention\(\) has no option 'head_dim'", {"head_dim": 32}, "AttentionConfig(head_dim=32))"),
        (r"FlashAttention\(\) has no option 'zzz'", {"zzz": 1}, f"{made}))"),
        (r"FlashAttention\(\) takes one configuration, 0 were given", {}, f"{made}))"),
    ):
        assert last_line(cupy_flash.FlashAttention, said, **given).endswith(hint)
    config = cupy_flash.AttentionConfig
    hint = last_line(config, r"AttentionConfig\(\) is given no head_dim", dropout=0.1)
    assert hint == "Try: AttentionConfig(head_dim=64, dropout=0.1)"
    hint = last_line(
        config, r"AttentionConfig\(\) has no option 'softmax_scale'", head_dim=8, softmax_scale=1
    )
    assert hint == "Try: scale=..."
    assert list(inspect.signature(config).parameters)[:2] == ["head_dim", "causal"]
    flash = cupy_flash.FlashAttention(cupy_flash.causal_config(8))
    given = {"q": ones(*Q), "k": ones(*K), "v": ones(*K)}
    refuses(InvalidArgumentsError, "causal is held by the configuration", flash, **given, causal=False)
    refuses(
        InvalidArgumentsError,
        "q has head_dim 9, the configuration 8",
        flash,
        **(given | {"q": ones(2, 4, 6, 9)}),
    )


def far(*shape: int, strides: tuple[int, ...] | None = None, dtype: Any = F32) -> np.ndarray:
    """An array of a shape that no memory holds, which nobody may read."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides or (0,) * len(shape))


def packed(**changes: Any) -> Any:
    """Call attention_varlen on one sequence but for these changes."""
    given = {"q": ones(1, 2, 8), "k": ones(1, 2, 8), "v": ones(1, 2, 8)} | changes
    return cupy_flash.attention_varlen(**{"cu_seqlens_q": ends(1), "cu_seqlens_k": ends(1)} | given)


def cached(**changes: Any) -> Any:
    """Call attention_with_kv_cache on one sequence but for these changes."""
    given = {"q": ones(1, 2, 1, 8), "k_cache": ones(1, 2, 4, 8), "v_cache": ones(1, 2, 4, 8)} | changes
    return cupy_flash.attention_with_kv_cache(**{"cache_seqlens": 1} | given)


def ends(length: int) -> np.ndarray:
    return np.array([0, length], np.int32)


FAR_SLOTS = far(2, 1, 4, 8, strides=(2**36, 32, 32, 4))
BEYOND: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "queries": (call, {"q": far(MAX_SEQLEN + 1, 8), "k": ones(6, 8), "v": ones(6, 8)}),
    "keys": (call, {"q": ones(6, 8), "k": far(MAX_SEQLEN + 1, 8), "v": far(MAX_SEQLEN + 1, 8)}),
    "claimed queries": (packed, {"max_seqlen_q": MAX_SEQLEN + 1}),
    "claimed keys": (packed, {"max_seqlen_k": MAX_SEQLEN + 1}),
    "pairs of a ragged mask": (
        packed,
        {
            "q": far(2**16, 2, 8),
            "k": far(2**15, 2, 8),
            "v": far(2**15, 2, 8),
            "cu_seqlens_q": ends(2**16),
            "cu_seqlens_k": ends(2**15),
            "mask": RaggedMask(far(2**31, strides=(1,), dtype=bool)),
        },
    ),
    "queries over a cache": (cached, {"q": far(1, 2, MAX_SEQLEN + 1, 8)}),
    "keys of a cache": (
        cached,
        dict.fromkeys(("k_cache", "v_cache"), far(1, 2, MAX_SEQLEN + 1, 8)),
    ),
    "keys of pages": (
        cached,
        {
            **dict.fromkeys(("k_cache", "v_cache"), far(1, 2, 2**16, 8)),
            "block_table": np.zeros((1, 2**15), np.int32),
        },
    ),
    "places of chosen keys": (
        cached,
        {
            "q": ones(2, 2, 1, 8),
            "k_cache": FAR_SLOTS,
            "v_cache": FAR_SLOTS,
            "indices": np.zeros((2, 1, 1), np.int32),
        },
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_kernels_count_in_31_bits(name: str) -> None:
    function, given = BEYOND[name]
    with pytest.raises(UnsupportedError, match="beyond 31 bits") as caught:
        function(**given)
    assert "Try: " in str(caught.value)


def test_the_longest_sequence_is_described() -> None:
    q, k = far(MAX_SEQLEN, 8), ones(6, 8)
    assert describe("forward", {"q": q, "k": k, "v": k}, Options())[0].seqlen_q == MAX_SEQLEN
    assert describe("forward", {"q": k, "k": q, "v": q}, Options())[0].seqlen_k == MAX_SEQLEN


def test_naive_attention_refuses_the_same() -> None:
    for _, message, changes in FORWARD:
        if not changes.keys() & {"dropout", "seed", "precision", "tuning"}:
            given = {"q": ones(*Q), "k": ones(*K), "v": ones(*K)} | changes
            refuses(InvalidArgumentsError, message, cupy_flash.naive_attention, **given)


def test_good_calls_get_past_these_guards() -> None:
    """The fixtures above would notice a call that was not refused."""
    with pytest.raises(AssertionError, match="allocated"):
        call()
    with pytest.raises(AssertionError, match="computed"):
        call(out=testing.dead(Q, F32).view)
    with pytest.raises(AssertionError, match="allocated"):
        call_backward()
    assert Case().inputs()["q"].ndim == 4
