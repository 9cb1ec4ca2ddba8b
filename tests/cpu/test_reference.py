"""The specification and its tools, checked themselves: finite differences, literature, and wrong results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_flash import testing
from cupy_flash.cpu import threads
from cupy_flash.testing import budget, reference, second_order
from cupy_flash.testing.reference import philox
from tests.cases import DTYPES, Case, exact_cases, feature_cases, numpy_dtype

SMALL = exact_cases()


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_gradients_match_finite_differences(case: Case) -> None:
    given = case.inputs()
    options = case.options(given)
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in given]
    dlse = given.get("dlse")
    if "bias" in given:  # a difference across -inf is none
        given["bias"] = np.where(np.isneginf(given["bias"]), -1.0, given["bias"])

    def loss(*changed: np.ndarray) -> float:
        now = dict(zip(names, changed, strict=True))
        replaced = {name: now[name] for name in ("bias", "sinks") if name in now}
        o, lse = testing.reference_attention(now["q"], now["k"], now["v"], **(options | replaced))
        total = float(np.sum(o * given["do"]))
        if dlse is not None:
            total += float(np.sum(np.where(np.isneginf(lse), 0.0, lse) * dlse))
        return total

    bias = {"bias": given["bias"]} if "bias" in given else {}
    gradients = testing.reference_backward(
        given["do"], given["q"], given["k"], given["v"], dlse=dlse, **(options | bias)
    )
    testing.gradient_check(
        loss,
        [given[name] for name in names],
        [getattr(gradients, "d" + name) for name in names],
        at_most=40,
    )


def test_one_row_by_hand() -> None:
    """Two keys, scores 0 and log 3: weights 1/4 and 3/4."""
    q, k = np.array([[1.0]]), np.array([[0.0], [np.log(3.0)]])
    v = np.array([[4.0], [8.0]])
    o, lse = testing.reference_attention(q, k, v)
    assert o == pytest.approx(7.0)
    assert lse == pytest.approx(np.log(4.0))
    o, lse = testing.reference_attention(q, k, v, sinks=[np.log(4.0)])
    assert o == pytest.approx(3.5)
    assert lse == pytest.approx(np.log(8.0))
    o, lse = testing.reference_attention(q, k, v, bias=[[-np.inf, 0.0]])
    assert (o, lse) == (pytest.approx(8.0), pytest.approx(np.log(3.0)))
    o, lse = testing.reference_attention(q, k, v, mask=[[False, False]])
    assert (o, lse) == (0.0, -np.inf)
    o, _ = testing.reference_attention(q, k, v, alibi_slopes=[np.log(3.0)], align=0)
    assert o == pytest.approx(6.0)  # the second key is one further away, which takes log 3 off
    o, _ = testing.reference_attention(q, k, v, scale=1e6, softcap=np.log(3.0))
    assert o == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("options", "lengths", "rows"),
    [
        ({"causal": True}, (3, 3), ["100", "110", "111"]),
        ({"causal": True, "align": "top_left"}, (2, 4), ["1000", "1100"]),
        ({"causal": True, "align": "bottom_right"}, (2, 4), ["1110", "1111"]),
        ({"causal": True, "align": "bottom_right"}, (4, 2), ["00", "00", "10", "11"]),
        ({"causal": True, "align": 1}, (2, 2), ["11", "11"]),
        ({"causal": True, "align": -1}, (2, 2), ["00", "10"]),
        ({"window": (1, 0)}, (3, 3), ["100", "110", "011"]),
        ({"window": (0, 1)}, (3, 3), ["110", "011", "001"]),
        ({"window": (None, 1)}, (3, 3), ["110", "111", "111"]),
        ({"window": (0, None)}, (3, 3), ["111", "011", "001"]),
        ({"window": (1, 2), "causal": True}, (3, 3), ["100", "110", "011"]),
        ({"window": (0, 0), "align": "bottom_right"}, (2, 4), ["0010", "0001"]),
        ({}, (1, 3), ["111"]),
    ],
    ids=str,
)
def test_keep_is_what_the_pictures_show(options: Any, lengths: Any, rows: list[str]) -> None:
    kept = testing.reference.keep(testing.Options(**options), (1, 1, *lengths))[0, 0]
    assert ["".join("01"[int(x)] for x in row) for row in kept] == rows


def test_positions_need_align() -> None:
    for options in ({"causal": True}, {"window": (1, 1)}, {"alibi_slopes": [1.0]}):
        with pytest.raises(ValueError, match="align is needed"):
            testing.reference_attention(np.ones((2, 1)), np.ones((3, 1)), np.ones((3, 1)), **options)


def test_philox_known_answers() -> None:
    """Of the authors' Random123 1.14, kat_vectors, philox4x32 10."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = {
        ((0, 0, 0, 0), (0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((ones,) * 4, (ones,) * 2): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (pi, (0xA4093822, 0x299F31D0)): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in known.items():
        assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == words


def test_dropout_uses_the_documented_counter() -> None:
    kept = testing.reference.dropout_weights(testing.Options(dropout=0.25, seed=7 + (9 << 32)), (2, 3, 4, 6))
    word = philox((5 // 4, 2, 1, 1), (7, 9))[5 % 4]  # batch 1, head 1, query 2, key 5
    assert kept[1, 1, 2, 5] == (1 / 0.75 if int(word) >= 2**30 else 0.0)
    many = testing.reference.dropout_weights(testing.Options(dropout=0.25, seed=1), (1, 4, 64, 64))
    assert np.mean(many == 0) == pytest.approx(0.25, abs=0.02)
    assert np.mean(many) == pytest.approx(1.0, abs=0.03)


# Wrong results, each by one mistake that has been made in real kernels.


def _one_key_dropped(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    mask = np.ones((1, 1, 1, case.lengths[1]), bool)
    mask[..., -1] = False
    return {"mask": mask}


def _one_key_dropped_for_the_last_rows(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    mask = np.ones(case.lengths, bool)
    mask[-16:, -1] = False
    return {"mask": mask}


def _scale_by_one_percent(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    return {"scale": case.head_dims[0] ** -0.5 * 1.01}


def _causal_shifted(by: int) -> Callable[..., dict[str, Any]]:
    return lambda _case, _given: {"align": by}


def _causal_ignored(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    return {"causal": False}


def _heads_swapped(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    given["k"], given["v"] = given["k"][:, ::-1], given["v"][:, ::-1]
    return {}


def _values_shifted(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    given["v"] = np.roll(given["v"], 1, axis=2)
    return {}


def _columns_shifted(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    given["v"], given["k"] = np.roll(given["v"], 1, axis=3), np.roll(given["k"], 1, axis=3)
    return {}


def _capped_differently(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    return {"softcap": 8.0}


def _sink_invented(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    return {"sinks": np.full(case.heads[0], np.log(case.lengths[1] / 8), case.accumulator)}


MISTAKES: dict[str, Callable[..., dict[str, Any]]] = {
    "one key dropped": _one_key_dropped,
    "one key dropped for the last rows": _one_key_dropped_for_the_last_rows,
    "scale wrong by 1%": _scale_by_one_percent,
    "causal one key too many": _causal_shifted(1),
    "causal one key too few": _causal_shifted(-1),
    "causal ignored": _causal_ignored,
    "heads swapped": _heads_swapped,
    "values shifted by a key": _values_shifted,
    "columns shifted": _columns_shifted,
    "softcap where none is": _capped_differently,
    "sink counted that is none": _sink_invented,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 64, 127])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_exceed_the_budget(mistake: str, size: int, dtype: str) -> None:
    """Each mistake is caught in o, in lse where it matters there, and in every gradient it touches."""
    case = Case(dtype=dtype, lengths=(size, size), head_dims=(64, 64), causal="causal" in mistake)
    given = case.inputs()
    wrong = dict(given)
    options = case.options(given) | MISTAKES[mistake](case, wrong)
    result = testing.naive_same_precision(wrong["q"], wrong["k"], wrong["v"], do=wrong["do"], **options)
    result = result._replace(dsinks=None)
    right = case.options(given)
    verdicts = testing.error_budget(result, given["q"], given["k"], given["v"], do=given["do"], **right)
    outside = {verdict.tensor for verdict in verdicts if not verdict.within}
    expected = {"o", "dq", "dk"} if "values" in mistake else {"o", "lse", "dq", "dk", "dv"}
    if (mistake, size, dtype) == ("scale wrong by 1%", 7, "bfloat16"):
        expected = {"lse"}  # a change of P by 1%, seven times, drowns in roundings by up to 0.4%
    assert outside >= expected, "\n".join(map(str, verdicts))
    with pytest.raises(AssertionError, match="outside the error budget"):
        testing.assert_within_budget(result, given["q"], given["k"], given["v"], do=given["do"], **right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mistake", "touched"),
    [
        ("dlse ignored", {"dq", "dk", "dbias", "dsinks"}),
        ("dropped set of another seed", {"o", "dq", "dk", "dv", "dbias"}),
        ("sinks of the neighbouring head", {"o", "lse", "dq", "dk", "dv", "dsinks"}),
        ("a bias row shifted", {"o", "lse", "dq", "dk", "dv", "dbias"}),
        ("one head of a group lost", {"dk", "dv"}),
        ("softcap not differentiated", {"dq", "dk"}),
    ],
)
def test_mistakes_in_features_exceed_the_budget(mistake: str, touched: set[str], dtype: str) -> None:
    case = Case(dtype=dtype, heads=(4, 2), bias="1hqk", softcap=4.0, sinks=True, dropout=0.25, dlse=True)
    given = case.inputs()
    given["sinks"] = np.arange(4).astype(case.accumulator)
    q, k, v, do, dlse = (given[name] for name in ("q", "k", "v", "do", "dlse"))
    options = wrong = case.options(given)
    right = testing.naive_same_precision(q, k, v, do=do, dlse=dlse, **options)
    if mistake == "dropped set of another seed":
        wrong = options | {"seed": 5}
    elif mistake == "sinks of the neighbouring head":
        wrong = options | {"sinks": np.roll(given["sinks"], 1)}
    elif mistake == "a bias row shifted":
        wrong = options | {"bias": np.roll(given["bias"], 1, axis=2)}
    result = testing.naive_same_precision(
        q, k, v, do=do, dlse=None if mistake == "dlse ignored" else dlse, **wrong
    )
    if mistake == "one head of a group lost":
        alone = testing.naive_same_precision(
            q[:, ::2], k, v, do=do[:, ::2], dlse=dlse[:, ::2],
            **(options | {"bias": given["bias"][:, ::2], "sinks": given["sinks"][::2]}),
        )  # fmt: skip
        result = right._replace(dk=alone.dk, dv=alone.dv)
    elif mistake == "softcap not differentiated":
        exact = testing.reference.forward(q, k, v, testing.Options(**options))
        ratio = 1 / (1 - (exact.capped / 4.0) ** 2).mean()
        result = right._replace(dq=(right.dq * ratio).astype(q.dtype), dk=(right.dk * ratio).astype(q.dtype))

    def outside(actual: testing.NaiveResult) -> set[str]:
        verdicts = testing.error_budget(actual, q, k, v, do=do, dlse=dlse, **options)
        return {verdict.tensor for verdict in verdicts if not verdict.within}

    assert not outside(right)
    assert outside(result) >= touched


@pytest.mark.parametrize("dtype", DTYPES)
def test_reordered_sums_stay_within_the_budget(dtype: str) -> None:
    """A correct result by another order of operations: unnormalised, tile by tile, P rounded."""
    for size, seed in ((7, 0), (64, 1), (777, 2)):
        draw = np.random.default_rng(seed)
        acc = np.float64 if dtype == "float64" else np.float32
        q, k, v = (draw.standard_normal((size, 64)).astype(numpy_dtype(dtype)) for _ in range(3))
        row_max, row_sum, o = np.full((size, 1), -np.inf, acc), np.zeros((size, 1), acc), 0
        for start in range(0, size, 16):
            s = (q.astype(acc) @ k[start : start + 16].astype(acc).T) * acc(0.125)
            new_max = np.maximum(row_max, s.max(axis=1, keepdims=True))
            p = np.exp(s - new_max)
            shrink = np.exp(row_max - new_max)
            row_sum = row_sum * shrink + p.sum(axis=1, keepdims=True)
            o = o * shrink + p.astype(q.dtype).astype(acc) @ v[start : start + 16].astype(acc)
            row_max = new_max
        result = {"o": (o / row_sum).astype(q.dtype), "lse": (row_max + np.log(row_sum))[:, 0]}
        testing.assert_within_budget(result, q, k, v)


def test_sequential_float32_sums_stay_within_the_budget() -> None:
    """The unkindest order a correct kernel may use: one long chain in float32."""
    draw = np.random.default_rng(3)
    q, k, v = (draw.standard_normal((33, 512)).astype(np.float32) for _ in range(3))
    k[:, 0] += 3.0
    s = np.zeros((33, 33), np.float32)
    for d in range(512):
        s += q[:, d, None] * k[None, :, d]
    s *= np.float32(512**-0.5)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    o = np.zeros((33, 512), np.float32)
    total = np.zeros((33, 1), np.float32)
    for j in range(33):
        o += p[:, j, None] * v[j]
        total += p[:, j, None]
    lse = (s.max(axis=1, keepdims=True) + np.log(total))[:, 0]
    testing.assert_within_budget({"o": o / total, "lse": lse}, q, k, v)


@pytest.mark.parametrize(
    ("dtype", "length", "head_dims"), [("float16", 15, (1, 5)), ("bfloat16", 17, (63, 96))], ids=str
)
def test_rows_that_round_alike_stay_within_the_budget(dtype: str, length: int, head_dims: Any) -> None:
    """Of one-hot rows each has the same O in another order, so that delta errs the same way in every row."""
    case = Case(dtype=dtype, heads=(3, 1), lengths=(length, length), head_dims=head_dims, values="onehot")
    given = case.inputs()
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    exact = testing.reference.forward(q, k, v, testing.Options())
    weights = np.exp(exact.capped - exact.capped.max(-1, keepdims=True))
    o = weights.astype(q.dtype).astype(float) @ exact.v / weights.sum(-1, keepdims=True)
    o = o.astype(q.dtype)
    do4 = do.astype(float)
    ds = exact.p * (do4 @ exact.v.swapaxes(-1, -2) - (do4 * o.astype(float)).sum(-1, keepdims=True))
    dq, dk = exact.scale * ds @ exact.k, exact.scale * ds.swapaxes(-1, -2) @ exact.q
    dk = testing.reference.sum_groups(dk, exact.group)
    result = {"o": o, "dq": dq.astype(q.dtype), "dk": dk.astype(q.dtype)}
    testing.assert_within_budget(result, q, k, v, do=do)


def test_lower_precision_exceeds_the_budget() -> None:
    """float32 computed with TF32 products, and float64 computed in float32, are noticed."""
    case = Case(lengths=(64, 64), head_dims=(64, 64))
    given = case.inputs()
    args = [given[name] for name in "qkv"]
    tf32 = testing.naive_same_precision(*args, do=given["do"], precision="tf32")
    for precision, within in (("tf32", True), ("tf32x3", False), ("ieee", False)):
        verdicts = testing.error_budget(tf32, *args, do=given["do"], precision=precision)
        assert all(verdict.within == within for verdict in verdicts), "\n".join(map(str, verdicts))
    doubles = [x.astype(np.float64) for x in args]
    singles = testing.naive_same_precision(*args)
    wrong = {name: getattr(singles, name).astype(np.float64) for name in ("o", "lse")}
    assert not any(verdict.within for verdict in testing.error_budget(wrong, *doubles))


def test_special_values_shapes_and_dtypes_come_first() -> None:
    q = np.ones((4, 8), np.float32)
    good = testing.naive_same_precision(q, q, q, causal=True)
    for change, message in (
        ({"o": good.o[:3]}, r"o .*shape \(3, 8\), expected \(4, 8\)"),
        ({"o": good.o.astype(np.float64)}, "dtype float64, expected float32"),
        ({"o": np.where(good.o > 2, 0, np.nan).astype(np.float32)}, "nan differs in 32 places"),
        ({"lse": np.full(4, np.inf, np.float32)}, r"\+inf differs in 4 places, first \(0,\): inf for"),
        ({"dsinks": good.o}, "dsinks .* should be absent"),
        ({}, "nothing to compare"),
    ):
        with pytest.raises(AssertionError, match=message):
            testing.assert_within_budget(change, q, q, q, do=q, causal=True)
    with pytest.raises(ValueError, match="without do"):
        testing.error_budget({"dq": q}, q, q, q)


def test_gradient_check_can_fail() -> None:
    x = np.array([1.0, 2.0])
    testing.gradient_check(lambda x: x**2, [x], [2 * x])
    testing.gradient_check(lambda x: x**2, [x], [6 * x], cotangent=3.0)
    with pytest.raises(AssertionError, match=r"gradient 0 at .* finite differences say"):
        testing.gradient_check(lambda x: x**2, [x], [2.001 * x])
    with pytest.raises(AssertionError, match="shape"):
        testing.gradient_check(lambda x: x**2, [x], [np.ones(3)])
    with pytest.raises(AssertionError):
        testing.gradient_check(lambda x: x**2, [x], [np.full(2, np.nan)])
    with pytest.raises(ValueError, match="1 inputs but 2"):
        testing.gradient_check(lambda x: x**2, [x], [x, x])


@pytest.mark.parametrize("style", testing.STYLES)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 5), (2, 3, 4, 5), (2, 0, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "int32"])
def test_hostile_arrays_show_stray_writes(dtype: str, shape: tuple[int, ...], style: str) -> None:
    values = (np.arange(np.prod(shape)).reshape(shape) % 5).astype(numpy_dtype(dtype))
    guarded = testing.hostile(values, style=style)
    assert np.array_equal(guarded.view, values)
    assert guarded.view.dtype == values.dtype
    assert np.shares_memory(guarded.view, guarded.buffer) or values.size == 0
    outside = np.ones(guarded.buffer.shape, bool)
    outside[guarded.inside] = False
    assert outside.sum() == guarded.buffer.size - values.size
    if dtype in DTYPES:
        assert np.isnan(guarded.buffer[outside].astype(np.float32)).all()
    guarded.check_untouched()
    if values.size:
        guarded.view[...] = values.dtype.type(1)
        guarded.check_guards()
        with pytest.raises(AssertionError, match="an input or its guard zone"):
            guarded.check_untouched()
    for at in (0, -1):
        intact = testing.hostile(values, style=style)
        intact.buffer.reshape(-1)[at] = 0
        with pytest.raises(AssertionError, match="guard zone was written"):
            intact.check_guards()


def test_styles_lie_as_they_say() -> None:
    x = np.ones((2, 3, 4, 8), np.float16)
    strides = {style: testing.hostile(x, style=style).view.strides for style in testing.STYLES}
    assert strides["padded"][-1] == 2
    assert strides["padded"][-2] % 16
    aligned = testing.hostile(x, style="aligned")
    assert all(s % 16 == 0 for s in strides["aligned"][:-1])
    assert (aligned.view.ctypes.data - aligned.buffer.ctypes.data) % 16 == 0
    assert strides["transposed"][0] < strides["transposed"][1]
    assert strides["strided"][-1] == 4
    assert strides["reversed"][-2] < 0
    with pytest.raises(ValueError, match="style is 'diagonal'"):
        testing.hostile(x, style="diagonal")


def test_dead_outputs_show_what_was_not_written() -> None:
    for dtype in DTYPES:
        output = testing.dead((2, 3), numpy_dtype(dtype))
        with pytest.raises(AssertionError, match="6 of 6 elements were never written"):
            output.check_written()
        output.view[...] = 1
        output.check_written()
        output.view[1, 2] = testing.DEAD
        with pytest.raises(AssertionError, match="1 of 6"):
            output.check_written()
        output.view[...] = 0
        output.buffer[0, 0] = 1
        with pytest.raises(AssertionError, match="a guard zone was written"):
            output.check_written()


def test_cases_are_distinct_and_cover_every_pair() -> None:
    cases = feature_cases(lengths=((64, 64), (7, 9)), head_dims=((32, 32),))
    assert len(set(map(str, cases))) > 0.95 * len(cases)
    seen = {(case.mask, case.bias) for case in cases}
    assert len(seen) == 100
    assert {(case.dtype, case.dropout) for case in cases} >= {
        (d, p) for d in DTYPES for p in (0.0, 0.25, 0.9)
    }
    first, again = cases[3].inputs(), dataclasses.replace(cases[3]).inputs()
    assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("module", "name"),
    [(reference, "keep"), (reference, "sum_groups"), (budget, "_sigmas"), (second_order, "along")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_blas_keeps_to_one_thread(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads spin between short products: on a busy machine that takes ten times as long."""
    limits, original = [], getattr(module, name)

    def watched(*arguments: Any) -> Any:
        limits.extend(library.get() for library in threads._blas._libraries[0])
        return original(*arguments)

    monkeypatch.setattr(module, name, watched)
    x = np.ones((3, 4))
    testing.assert_within_budget(testing.reference_backward(x, x, x, x)._asdict(), x, x, x, do=x)
    testing.reference_jvp(x, x, x, dq=x)
    assert set(limits) <= {1}
    assert limits or not threads._blas._libraries[0]


def test_every_result_of_a_list_is_compared() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    o = testing.reference_attention(x, x, x).o.astype(np.float32)
    verdicts = testing.error_budget([{"o": o}, {"o": 1.01 * o}, {"o": o}], x, x, x)
    assert [verdict.within for verdict in verdicts] == [True, False, True]
