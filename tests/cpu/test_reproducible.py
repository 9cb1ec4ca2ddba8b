"""reproducible=: the bits of a row, and of a sequence's gradients, whatever is computed beside them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.cpu.core import isa, locate, sources
from cupy_flash.testing import SameBits, same_bits
from tests.conftest import skip_without_core
from tests.public import cached

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(params=sources.choices(isa.runnable()))
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each library that this CPU runs."""
    skip_without_core()
    one = next(one for one in isa.runnable() if one.name == isa.name_of(request.param))
    if locate.locate(one) is None:
        pytest.skip(f"the library {one.name} is not built")
    monkeypatch.setenv("CUPY_FLASH_CPU", request.param)
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def assert_same(actual: Any, expected: Any) -> None:
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


# ---------------------------------------------------------------------------------------------- kept

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi_query": {"heads": (7, 1), "head_dim": 40},
    "no_group": {"heads": (3, 3), "head_dim": 128, "lengths": (10, 143, 144, 145, 289)},
    "window": {"window": (70, 0), "softcap": 5.0},
    "rows": {"softcap": 3.0, "sinks": np.linspace(-1, 2, 4, dtype=np.float32),
             "alibi_slopes": np.linspace(0.01, 0.5, 4, dtype=np.float32)},
    "odd": {"head_dim": 33, "scale": -0.3, "pages": (1, 3, 17, 18, 48)},
    "paged": {"head_dim": 64, "pages": (7, 18, 23, 32)},
    "chunks": {"heads": (4, 1), "head_dim": 24, "lengths": (575, 576, 577, 1153), "chunks": (1, 577)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_gradients_in_any_company(name: str, dtype: str, core: str) -> None:
    options = dict(CASES[name])
    if dtype == "float64":
        options |= {n: options[n].astype(np.float64) for n in ("sinks", "alibi_slopes") if n in options}
    found = same_bits(cast=lambda x: x.astype(DTYPES[dtype]), **options)
    assert found.same, str(found)
    assert not found.refused


def test_chunks_of_a_long_prompt(core: str) -> None:
    found = same_bits(lengths=(9, 4500), chunks=(2047, 2048, 2049), pages=(48,), heads=(2, 1), head_dim=16)
    assert found.same, str(found)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("keys", [2047, 2048, 2049, 4097])
def test_decode_of_a_token_is_its_row_of_the_prompt(keys: int, threads: int, monkeypatch: Any) -> None:
    """Whoever takes which chunk of its keys; with pages too, a window and padding before the first key."""
    skip_without_core()
    monkeypatch.setattr(cupy_flash.cpu.threads, "allowed", lambda *_: threads)
    q, k, v = normal(1, 4, keys, 16), normal(1, 2, keys, 16, seed=1), normal(1, 2, keys, 16, seed=2)
    for window in (None, (1500, 0)):
        options: dict[str, Any] = {
            "causal": True,
            "window": window,
            "return_lse": True,
            "reproducible": "batch",
        }
        whole = cupy_flash.attention(q[:, :, -40:], k, v, align=keys - 40, **options)
        for t in (keys - 40, keys - 1):
            token = q[:, :, t : t + 1]
            made = cached(token, k, v, cache_seqlens=t + 1, **options)
            for actual, expected in zip(made, whole, strict=True):
                assert_same(actual, expected[:, :, t - keys + 40 : t - keys + 41])


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_gradients_of_a_sequence_do_not_depend_on_the_batch(threads: int, monkeypatch: Any) -> None:
    """Of a sequence alone each part of the rows is a job's; of five, one job has all parts of a head."""
    skip_without_core()
    monkeypatch.setattr(cupy_flash.cpu.threads, "allowed", lambda *_: threads)
    q, do = normal(2, 5, 4, 1100, 16)
    k, v = normal(2, 5, 2, 1100, 16, seed=1)
    sinks, bias = normal(4, seed=2), normal(5, 4, 1, 1100, seed=3)

    def gradients(b: slice, reproducible: Any = "batch", **options: Any) -> Any:
        x = [a[b] for a in (q, k, v)]
        o, lse = cupy_flash.attention(*x, return_lse=True, **options)
        return cupy_flash.attention_backward(do[b], *x, o, lse, reproducible=reproducible, **options)

    five, last = slice(0, 5), slice(4, 5)
    options: dict[str, Any]
    for options in ({"sinks": sinks}, {"causal": True, "window": (150, 0)}):
        all_of_them, alone = gradients(five, **options), gradients(last, **options)
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(all_of_them, name)[4:], getattr(alone, name))
    all_of_them, alone = gradients(five, bias=bias), gradients(last, bias=bias[4:])
    for name in ("dq", "dk", "dv", "dbias"):
        assert_same(getattr(all_of_them, name)[4:], getattr(alone, name))
    all_of_them, alone = gradients(five, None), gradients(last, None)
    assert not np.array_equal(all_of_them.dk[4:], alone.dk), "without the promise parts are cut by the batch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_long_sequence_beside_short_ones(dtype: str, core: str) -> None:
    """Each has as many parts as its own rows want, whether it is packed beside a longer one or alone."""
    starts = np.array([0, 700, 707, 707, 3007, 4107], np.int32)
    q, do = normal(2, 4107, 2, 16).astype(DTYPES[dtype])
    k, v = normal(2, 4107, 1, 16, seed=1).astype(DTYPES[dtype])
    same: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    o, lse = cupy_flash.attention_varlen(q, k, v, starts, starts, return_lse=True, **same)
    packed = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, starts, starts, **same)
    for first, last in pairwise(starts):
        rows = slice(first, last)
        heads_first = [np.swapaxes(x[rows], 0, 1)[None] for x in (do, q, k, v, o)]
        alone = cupy_flash.attention_backward(*heads_first, lse[None, :, rows], **same)
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(packed, name)[rows], np.swapaxes(getattr(alone, name)[0], 0, 1))


def test_masks_and_biases_of_chunks(core: str) -> None:
    q, k, v = normal(3, 1, 3, 200, 24)
    bias, mask = normal(1, 3, 200, 200, seed=1), normal(1, 1, 200, 200, seed=2) > -0.5
    bias[:, :, 50:60, :40] = -np.inf
    mask[..., 100:120, :] = False
    options: dict[str, Any] = {"return_lse": True, "reproducible": "batch"}
    o, lse = cupy_flash.attention(q, k, v, bias=bias, mask=mask, causal=True, **options)
    for first, end in ((0, 1), (55, 64), (99, 109), (30, 94), (199, 200)):
        cut: dict[str, Any] = {"bias": bias[:, :, first:end, :end], "mask": mask[:, :, first:end, :end]}
        made = cupy_flash.attention(
            q[:, :, first:end], k[:, :, :end], v[:, :, :end], causal=True, align=first, **cut, **options
        )
        assert_same(made[0], o[:, :, first:end])
        assert_same(made[1], lse[:, :, first:end])


def test_a_neighbours_prompt_of_10_tokens_instead_of_9(core: str) -> None:
    """What vLLM's issue 51902 saw change."""
    mine = normal(3, 30, 4, 64)

    def beside(length: int) -> np.ndarray:
        q, k, v = np.concatenate([normal(3, length, 4, 64, seed=1), mine], axis=1)
        cuts = np.array([0, length, length + 30], np.int32)
        o = cupy_flash.attention_varlen(q, k, v, cuts, cuts, causal=True, reproducible="batch")
        return o[length:]

    assert_same(beside(9), beside(10))


def test_a_table_of_heads_widths_lengths_and_masks(core: str) -> None:
    """Kinds of case that flash-attention's pull request 2450 has 192 of, 16 of which fail there.

    As many heads of keys as of queries are among them; packed beside others, and by decode.
    """
    compared = 0
    for heads_k, dtype, head_dim in product((1, 2, 4), ("float32", "bfloat16"), (16, 40)):
        rng = np.random.default_rng(head_dim)
        cuts = np.cumsum([0, 9, 150, 33, 650], dtype=np.int32)
        q, k, v = (rng.standard_normal((cuts[-1], heads, head_dim), np.float32).astype(DTYPES[dtype])
                   for heads in (4, heads_k, heads_k))  # fmt: skip
        for window, n in product((None, (64, 0)), range(4)):
            options: dict[str, Any] = {"causal": True, "window": window, "reproducible": "batch"}
            packed = cupy_flash.attention_varlen(q, k, v, cuts, cuts, **options)
            mine = slice(cuts[n], cuts[n + 1])
            alone = [x[mine].swapaxes(0, 1)[None] for x in (q, k, v)]
            o = cupy_flash.attention(*alone, **options)
            assert_same(o[0].swapaxes(0, 1), packed[mine])
            token = cached(alone[0][:, :, -1:], *alone[1:], cache_seqlens=cuts[n + 1] - cuts[n], **options)
            assert_same(token, o[:, :, -1:])
            compared += 2
    assert compared == 192


def test_new_keys_are_as_if_they_had_been_there(core: str) -> None:
    """Appending and rotating in the call, or in calls before."""
    k, v = normal(2, 1, 2, 40, 16)
    q = normal(1, 4, 40, 16, seed=1)
    angle = np.outer(np.arange(64, dtype=np.float32), [1, 0.5, 0.25, 0.1]).astype(np.float32)
    turned = {"rotary_cos": np.cos(angle), "rotary_sin": np.sin(angle)}
    once = np.zeros((2, 1, 2, 64, 16), np.float32)
    whole = cached(q, *once, cache_seqlens=0, k=k, v=v, causal=True, reproducible="batch", **turned)
    by_token = np.zeros_like(once)
    for t in range(40):
        new = slice(t, t + 1)
        o = cached(
            q[:, :, new], *by_token, cache_seqlens=t, k=k[:, :, new], v=v[:, :, new], causal=True,
            reproducible="batch", **turned,
        )  # fmt: skip
        assert_same(o, whole[:, :, new])
    assert_same(by_token, once)


def test_zeros_have_one_sign(core: str) -> None:
    """Sums that underflow to -0, beside rows that add 0 for keys that they do not see."""
    q, k = np.zeros((2, 1, 1, 64, 8), np.float32)
    q[..., 0], k[..., 1:, 0] = 1, -85 * 8**0.5
    v, do = np.full((2, 1, 1, 64, 8), -1e-30, np.float32)
    v[:, :, 0], v[:, :, 20:] = 0, 1e-30
    options: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    whole, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    assert not whole.any()
    for t in range(15, 22):
        cut = (q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        assert_same(cupy_flash.attention(*cut, align=t, **options), whole[:, :, t : t + 1])
    dv = cupy_flash.attention_backward(do, q, k, v, whole, lse, **options).dv
    assert not dv[:, :, 1:].any()
    assert not np.signbit(dv[:, :, 1:]).any()


# ---------------------------------------------------------------------------------------------- not kept


def test_without_the_promise_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons see it, in NumPy's products."""
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    found = same_bits(lengths=(10, 65), reproducible=None)
    assert not found.same
    assert any(line.startswith("decode") for line in found.differences)
    assert "instead of" in str(found)


def test_nothing_compared_is_not_the_same() -> None:
    assert not SameBits(0).same
    with pytest.raises(InvalidArgumentsError, match="lengths"):
        same_bits(lengths=())
    with pytest.raises(InvalidArgumentsError, match="causal is False"):  # and not computed with causal
        same_bits(causal=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reproducible": "always"}, "reproducible is 'always'"),
        ({"reproducible": True}, "reproducible is True"),
        ({"reproducible": "batch", "dropout": 0.1, "seed": 0}, "with dropout=0.1"),
        (
            {"reproducible": "batch", "tuning": cupy_flash.Tuning(tile=(64, 64))},
            r"with tuning.tile=\(64, 64\)",
        ),
    ],
)
def test_what_cannot_keep_it_is_refused(options: dict[str, Any], says: str) -> None:
    x = normal(1, 2, 5, 8)
    with pytest.raises((InvalidArgumentsError, UnsupportedError), match=says) as caught:
        cupy_flash.attention(x, x, x, **options)
    assert "Try:" in str(caught.value)


def test_numpy_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    x = normal(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match="BLAS") as caught:
        cupy_flash.attention(x, x, x, reproducible="batch")
    assert "CUPY_FLASH_CPU is numpy" in str(caught.value)
    assert cupy_flash.attention(x[:0], x[:0], x[:0], reproducible="batch").shape == (0, 2, 5, 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_cpu_does_not_claim_the_bits_of_a_gpu(dtype: Any) -> None:
    x = normal(1, 2, 5, 8).astype(dtype)
    with pytest.raises(UnsupportedError, match="kept by the kernels of GPUs") as caught:
        cupy_flash.attention(x, x, x, reproducible="device")
    assert 'Try: reproducible="batch"' in str(caught.value)


def test_explain_says_what_it_costs(core: str) -> None:
    x = normal(1, 2, 5, 8)
    assert "at no cost" in cupy_flash.explain(x, x, x, reproducible="batch")
    text = cupy_flash.explain(x, x, x, direction="backward", reproducible="batch")
    assert "sums of parts of its rows" in text
    assert "bits" not in cupy_flash.explain(x, x, x)
