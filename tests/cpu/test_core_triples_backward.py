"""Gradients of float32 by AMX, each float as three bfloat16: errors, numbers that three cannot hold, bits."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.cpu import choose
from cupy_flash.cpu.core import family, isa, locate, sources
from tests.cpu.core_calls import normal
from tests.plan_cases import BASE

NAMES = ("dq", "dk", "dv")
LONG = BASE._replace(direction="backward", dtype="float32", seqlen_q=512, seqlen_k=512)


@pytest.fixture
def by_amx(core: locate.Library, monkeypatch: pytest.MonkeyPatch) -> str:
    """The override with which AMX multiplies floats of any length; skips where there is none."""
    mine = isa.runnable()[0]
    if not sources.multiplies(mine, sources.AMX):
        pytest.skip(f"this CPU ({mine.title}) has no AMX")
    if locate.locate(mine, sources.AMX) is None:
        pytest.skip("the library of AMX is not built")
    monkeypatch.setenv(isa.OVERRIDE, mine.name + isa.BY_AMX)
    return mine.name + isa.BY_AMX


def by_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.OVERRIDE, isa.runnable()[0].name + isa.FLOATS)


def operands(
    lengths: tuple[int, int], features: tuple[int, int], heads: tuple[int, int] = (4, 2), batch: int = 2
) -> list[np.ndarray]:
    """do, q, k and v."""
    (queries, keys), (d, dv), (heads_q, heads_k) = lengths, features, heads
    return [
        normal(batch, heads_q, queries, dv), normal(batch, heads_q, queries, d, seed=1),
        normal(batch, heads_k, keys, d, seed=2), normal(batch, heads_k, keys, dv, seed=3),
    ]  # fmt: skip


def of_both(
    arrays: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, override: str, **options: Any
) -> tuple[Any, Any]:
    """Gradients by AMX and by multiply-adds, from the same O and LSE, which are of multiply-adds."""
    do, q, k, v = arrays
    by_floats(monkeypatch)
    dlse = options.pop("dlse", None)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    floats = cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
    monkeypatch.setenv(isa.OVERRIDE, override)
    return cupy_flash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options), floats


# ---- which calls


def test_amx_multiplies_gradients_of_long_float32_calls(by_amx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and float16, not a gradient of a bias nor second order; short ones if it is asked for."""
    few = LONG._replace(seqlen_k=family.FEW_SPLIT - 1)
    assert choose.choose(few).library.part == sources.AMX
    monkeypatch.delenv(isa.OVERRIDE)
    for free in ({}, {"dtype": "float16"}, {"reproducible": "run"}, {"dropout": 0.1}):
        assert choose.choose(LONG._replace(**free)).library.part == sources.AMX
    for bound in ({"want_dbias": True}, {"reproducible": "batch"}, {"seqlen_q": 1}, {"direction": "hvp"},
                  {"seqlen_k": family.FEW_SPLIT - 1}):  # fmt: skip
        assert choose.choose(LONG._replace(**bound)).library.part != sources.AMX
    by_floats(monkeypatch)
    assert choose.choose(LONG).library.part != sources.AMX


# ---- errors

FEATURES = [(64, 64), (17, 40), (40, 17), (72, 128), (128, 1), (256, 200)]
# More rows than a job computes at once, more keys than a block has, odd tiles at every end.
LENGTHS = [(12, 1), (33, 700), (300, 31), (301, 193), (1100, 401)]
OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": True, "align": "bottom_right"}, {"causal": True, "align": "top_left", "softcap": 5.0},
    {"window": (101, 17), "align": "top_left"},
    {"alibi_slopes": normal(4), "align": "bottom_right", "sinks": normal(4)},
]  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gradients_are_within_the_error_budget(
    lengths: tuple[int, int], features: tuple[int, int], by_amx: str
) -> None:
    """Odd keys and features; the weights are those of AMX, too."""
    do, q, k, v = operands(lengths, features, batch=1)
    for own in (*OPTIONS, {"mask": np.random.default_rng(1).random((1, 1, *lengths)) < 0.7}):
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **own)
        dq, dk, dv, *_ = cupy_flash.attention_backward(do, q, k, v, o, lse, **own)
        testing.assert_within_budget({"dq": dq, "dk": dk, "dv": dv}, q, k, v, do=do, **own)


@pytest.mark.parametrize("features", [(64, 64), (40, 72)], ids=str)
@pytest.mark.parametrize(
    "own",
    [{}, {"causal": True}, {"dropout": 0.3, "seed": 7}, {"window": (30, 30)}, {"softcap": 3.0},
     {"dlse": normal(2, 4, 300)}],
    ids=lambda own: " ".join(own) or "plain",
)  # fmt: skip
def test_errors_are_no_larger_than_those_of_multiply_adds(
    features: tuple[int, int], own: dict[str, Any], by_amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mean of squares over all elements, against float64."""
    arrays = operands((300, 300), features)
    made = of_both(arrays, monkeypatch, by_amx, **own)
    if "dlse" in own:
        own = {"dlse": own["dlse"].astype(np.float64)}
    exact, _ = of_both([x.astype(np.float64) for x in arrays], monkeypatch, by_amx, **own)
    for name in NAMES:
        of = [np.sqrt(np.mean((getattr(x, name) - getattr(exact, name)) ** 2)) for x in made]
        assert of[0] <= of[1], (name, of)
        assert of[0] > 0


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_the_gradients_of_each(causal: bool, by_amx: str) -> None:
    """Bit by bit, as sums of a sequence do not depend on others."""
    starts = np.array([0, 40, 40, 341, 402], np.int32)
    do, q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in operands((402, 402), (40, 24), batch=1))
    how = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": causal}
    o, lse = cupy_flash.attention_varlen(q, k, v, return_lse=True, **how)
    found = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, **how)
    for i, j in itertools.pairwise(starts):
        if i == j:
            continue
        one = [np.ascontiguousarray(x[None, i:j].swapaxes(1, 2)) for x in (do, q, k, v)]
        of_one = cupy_flash.attention(*one[1:], return_lse=True, causal=causal)
        alone = cupy_flash.attention_backward(*one, *of_one, causal=causal)
        for name in NAMES:
            part = getattr(found, name)[i:j].swapaxes(0, 1)
            np.testing.assert_allclose(part, getattr(alone, name)[0], rtol=2e-5, atol=2e-6)


def test_scores_far_from_zero_have_the_weights_of_their_sums(
    by_amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of such rows are recomputed with multiply-adds, and so are all their products."""
    do, q, k, v = operands((300, 301), (64, 64))
    amx, floats = of_both([do, q * 1000, k, v], monkeypatch, by_amx)
    for name in NAMES:
        x, y = getattr(amx, name), getattr(floats, name)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())


# ---- numbers that three bfloat16 cannot hold


@pytest.mark.parametrize("which", range(4), ids=("do", "q", "k", "v"))
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 3e38, 1e25, 1e-38, 1e-45])
def test_unusual_numbers_give_what_multiply_adds_give(
    which: int, number: float, by_amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second block of rows and of keys, when the job has begun; NaN and infinities where they are."""
    for own in (
        {},
        {"causal": True, "align": "top_left"},
        {"sinks": normal(4), "window": (200, 0), "align": 0},
    ):
        arrays = operands((1100, 600), (24, 40), (4, 4), batch=1)
        arrays[which][0, 1, -3, 5] = number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            amx, floats = of_both(arrays, monkeypatch, by_amx, **own)
        for name in (*NAMES, *(["dsinks"] if "sinks" in own else [])):
            x, y = getattr(amx, name), getattr(floats, name)
            if name == "dq" and own and which == 3 and not np.isfinite(number):
                # Multiply-adds make rows of the same panel NaN, too, which do not see this key, number 597.
                x, y = (np.delete(z, range(576, 597), axis=2) for z in (x, y))
            finite = np.isfinite(y)
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y), name)
            np.testing.assert_array_equal(np.isposinf(x), np.isposinf(y), name)
            if finite.any():
                size = np.abs(y[finite]).max()
                np.testing.assert_allclose(x[finite] / size, y[finite] / size, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("own", [{}, {"dlse": np.full((2, 4, 40), 1e30, np.float32)}], ids=["dO", "dLSE"])
def test_large_gradients_of_weights_are_floats(
    own: dict[str, Any], by_amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dO, V and dLSE that three bfloat16 hold, or that none splits, with a dS that they do not."""
    do, q, k, v = operands((40, 50), (16, 16))
    amx, floats = of_both([do * 2**38, q, k, v * 2**38], monkeypatch, by_amx, **own)
    for name in NAMES:
        x, y = getattr(amx, name), getattr(floats, name)
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


# ---- bits


@pytest.mark.parametrize("shape", [(1, 1, 1200, 40), (1, 8, 300, 64), (3, 3, 600, 17)], ids=str)
def test_bits_do_not_depend_on_threads(
    shape: tuple[int, int, int, int], by_amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that begins again with floats does so with any number of threads."""
    do, q, k, v = (normal(*shape, seed=s) for s in range(4))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    for last in (1, np.float32(1e-40)):
        k[0, 0, 0, 0] = last
        made = []
        for count in (1, 2, 3):
            monkeypatch.setattr(family, "workers", lambda *_, count=count: count)
            made.append(cupy_flash.attention_backward(do, q, k, v, o, lse))
        for other in made[1:]:
            for name in NAMES:
                np.testing.assert_array_equal(getattr(other, name), getattr(made[0], name), name)
