"""score= on NumPy arrays: functions that people write and random ones against FP64, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError, testing
from cupy_flash.cpu.functions import TileFunction
from cupy_flash.program.derivative import differentiated
from cupy_flash.program.graph import Argument
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.function_cases import MADE, WITH, FunctionCase, random_function
from tests.public import with_function

CASES = [*(FunctionCase(name) for name in MADE), *WITH]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_are_what_the_specification_says(case: FunctionCase, device: Device) -> None:
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [FunctionCase(name) for name in MADE], ids=str)
def test_naive_attention_runs_the_function_itself(case: FunctionCase) -> None:
    arrays = case.inputs()
    how = with_function({}, MADE[case.name][0], case.arguments())
    qkv = [arrays[name] for name in "qkv"]
    exact = testing.reference_attention(*qkv, **how)
    naive = cupy_flash.naive_attention(*qkv, **how)
    assert np.allclose(naive.o, exact.o, atol=1e-5)
    assert np.allclose(naive.lse, exact.lse, atol=1e-5)


LEARNED = [name for name, (function, _) in MADE.items() if function._learned]


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(
    "how", [{}, {"causal": True, "align": 3, "dropout": 0.3, "seed": 1}], ids=["", "with"]
)
def test_gradients_of_arguments_by_differences(name: str, how: dict[str, Any]) -> None:
    case = FunctionCase(name)
    arrays = {n: x.astype(np.float64) for n, x in case.inputs().items()}
    arguments = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in case.arguments()]
    function = MADE[name][0]
    learned = function.traced([Argument(x.dtype.name, x.ndim) for x in arguments]).learned
    qkv = [arrays[n] for n in "qkv"]

    def o_of(*moved: np.ndarray) -> np.ndarray:
        given = list(arguments)
        for number, x in zip(learned, moved, strict=True):
            given[number] = x
        return cupy_flash.attention(*qkv, score=function(*given), **how)

    o, lse = cupy_flash.attention(*qkv, score=function(*arguments), return_lse=True, **how)
    grads = cupy_flash.attention_backward(arrays["do"], *qkv, o, lse, score=function(*arguments), **how)
    assert grads.dscore is not None
    assert [x is not None for x in grads.dscore] == [n in learned for n in range(len(arguments))]
    testing.gradient_check(
        o_of, [arguments[n] for n in learned], [grads.dscore[n] for n in learned],
        cotangent=arrays["do"], at_most=12,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_random_functions(seed: int) -> None:
    """Value, slope and gradients of the arguments, against the function itself and its differences."""
    draw = np.random.default_rng(seed)
    function = cupy_flash.score(random_function(draw), learned=("table",))
    q, k, v, do = draw.standard_normal((4, 1, 2, 9, 8))
    which = draw.integers(0, 4, 5).astype(np.int32)
    table = draw.standard_normal((2, 4))
    how: dict[str, Any] = {"score": function(table, which)}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **how)
    testing.assert_within_budget(
        {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}, q, k, v, do=do, **how
    )

    def again(table: np.ndarray) -> np.ndarray:
        return cupy_flash.attention(q, k, v, score=function(table, which))

    assert grads.dscore is not None
    testing.gradient_check(again, [table], [grads.dscore[0]], cotangent=do, tolerance=1e-6)


def test_packed_positions_count_from_the_start_of_a_sequence(device: Device) -> None:
    check_packed(device, learned=("by_batch",))


def check_packed(device: Device, learned: tuple[str, ...]) -> None:
    """Hold packed sequences to calls of one each."""
    lengths = [40, 0, 75]
    cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    draw = np.random.default_rng(0)
    q, do = draw.standard_normal((2, sum(lengths) + 2, 4, 8), np.float32)
    k, v = draw.standard_normal((2, sum(lengths) + 2, 2, 8), np.float32)
    function = cupy_flash.score(
        lambda s, b, h, i, j, by_batch: s * by_batch[b] - 0.1 * (h + 1) * abs(i - j), learned=learned
    )
    of_batch = draw.random(3).astype(np.float32)
    how: dict[str, Any] = {"causal": True}
    o, lse = cupy_flash.attention_varlen(
        q, k, v, cuts, cuts, return_lse=True, score=function(of_batch), **how
    )
    grads = cupy_flash.attention_varlen_backward(
        do, q, k, v, o, lse, cuts, cuts, score=function(of_batch), **how
    )
    assert (grads.dscore is not None) == bool(learned)
    for b, n in enumerate(lengths):
        rows = slice(cuts[b], cuts[b] + n)
        one = [x[None, rows] for x in (q, k, v)]
        own = {"score": function(of_batch[b:]), "layout": "bshd", **how}
        o_b, lse_b = cupy_flash.attention(*one, return_lse=True, **own)
        of_b = cupy_flash.attention_backward(do[None, rows], *one, o_b, lse_b, **own)
        assert np.array_equal(o[rows], o_b[0])
        assert all(np.array_equal(x[rows], y[0]) for x, y in zip(grads[:3], of_b[:3], strict=True))
        if grads.dscore is not None and of_b.dscore is not None:
            assert np.allclose(grads.dscore[0][b], of_b.dscore[0][0])
    assert not o[sum(lengths) :].any()


def test_gradients_repeat_and_tiles_do_not_matter() -> None:
    case = FunctionCase("relative")
    arrays, results = case.inputs(), []
    how: dict[str, Any] = {"score": MADE["relative"][0](*case.arguments())}
    qkv = [arrays[n] for n in "qkv"]
    o, lse = cupy_flash.attention(*qkv, return_lse=True, **how)
    for tile in (None, None, (16, 32)):
        grads = cupy_flash.attention_backward(
            arrays["do"], *qkv, o, lse, tuning=cupy_flash.Tuning(tile=tile), **how
        )
        assert grads.dscore is not None
        results.append(grads.dscore[0])
    assert np.array_equal(results[0], results[1])
    assert np.allclose(results[0], results[2], atol=1e-5)


def test_torch_and_python_spellings() -> None:
    """Whoever has written a function for torch keeps it."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    case = FunctionCase("softcap")
    arrays = case.inputs()
    qkv = [arrays[name] for name in "qkv"]
    theirs = cupy_flash.score(
        lambda s, b, h, i, j: torch.where(i >= j, 3.0 * torch.tanh(s / 3.0), -float("inf"))
    )
    ours = cupy_flash.score(lambda s, b, h, i, j: np.where(i >= j, 3.0 * np.tanh(s / 3.0), -np.inf))
    methods = cupy_flash.score(lambda s, b, h, i, j: np.where(i >= j, (s / 3.0).tanh() * 3.0, -np.inf))
    assert np.array_equal(cupy_flash.attention(*qkv, score=methods), cupy_flash.attention(*qkv, score=ours))
    assert np.array_equal(cupy_flash.attention(*qkv, score=theirs), cupy_flash.attention(*qkv, score=ours))


def test_equal_nodes_are_one_and_what_nobody_needs_is_none() -> None:
    function = cupy_flash.score(lambda s, b, h, i, j: (s - 0.5 * (i - j)) * 0.25 + 0.5 * (i - j) + 0 * b)
    graph = function.traced(())
    assert sum(node.op == "subtract" and node.kind == "int" for node in graph.nodes) == 1
    by_score = differentiated(graph).graph
    assert [node.op for node in by_score.nodes] == ["constant"], "the derivative is the number 0.25"
    assert by_score.nodes[0].value == 0.25


def test_what_is_known_of_a_function_is_not_found_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 1, 4, 4), np.float32)
    ran = []
    function = cupy_flash.score(lambda s, b, h, i, j: ran.append(1) or s + 1)
    for _ in range(3):
        cupy_flash.attention(q, q, q, score=function)
    assert len(ran) == 1


def test_function_of_no_score_has_no_gradient() -> None:
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 1, 5, 4))
    function = cupy_flash.score(lambda s, b, h, i, j: 0.5 * (i - j))
    o, lse = cupy_flash.attention(q, k, v, score=function, return_lse=True)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, score=function)
    assert not grads.dq.any()
    assert not grads.dk.any()
    assert grads.dscore is None


def test_branches_not_taken_may_be_infinite() -> None:
    """A gradient through sqrt, log and / at 0 of np.where's other branch is 0, not NaN."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 1, 6, 4))
    function = cupy_flash.score(
        lambda s, b, h, i, j, x: np.where(i > j, np.log(x[h] * (i - j)) + np.sqrt(s * s * (i - j)), s),
        learned="x",
    )
    how: dict[str, Any] = {"score": function(np.ones(1))}
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **how)
    assert grads.dscore is not None
    for x in (o, lse, *grads[:3], grads.dscore[0]):
        assert np.isfinite(x).all()


# ---- what is refused


def branching(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    if i > j:  # this line
        return s
    return s - 1


def with_and(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i > j and j > 3  # this line


def of_math(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    import math

    return s + math.exp(i)  # this line


CLOSED_OVER = np.ones(4)


def over_closure(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + CLOSED_OVER[h]  # this line


def whole(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table  # this line


def by_float(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[s]  # this line


def two_axes(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, i]  # this line


def unknown(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.sinh(s)  # this line


def far(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + (i + 2**40)  # this line


def one_sided(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.where(i > j)  # this line


def by_method(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s.round()  # this line


def cast_down(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + s.astype(np.int32)  # this line


def to_device(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s.to("cuda")  # this line


def floored(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s // 2  # this line


def shaped(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[i % table.shape[0]]  # this line


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (branching, "branches in Python on a value"),
        (of_math, "converts a traced value to a Python number"),
        (over_closure, "the function reads CLOSED_OVER, an array that is no argument of it"),
        (whole, "table has 1 axes, and stands for a number"),
        (by_float, "table is indexed by a float"),
        (two_axes, "table has 1 axes, and 2 indices"),
        (unknown, "sinh is not known to score functions"),
        (one_sided, "where is not known to score functions with such arguments"),
        (by_method, "round is not known to score functions"),
        (cast_down, "a float is cast to an integer"),
        (to_device, "a value is cast to 'cuda'"),
        (far, "1099511627776 is beyond 32 bits"),
        (floored, "floor_divide is of integers; here it is of float and int"),
        (shaped, "table.shape: an argument is known by its elements only"),
        (with_and, "branches in Python on a value"),
    ],
)
def test_errors_show_the_line(function: Any, says: str, device: Device) -> None:
    q = np.ones((1, 4, 6, 8), np.float32)
    maker = cupy_flash.mask if function is with_and else cupy_flash.score
    given = (np.ones(4, np.float32),) if "table" in function.__code__.co_varnames else ()
    with pytest.raises(InvalidArgumentsError) as raised:
        cupy_flash.attention(q, q, q, **with_function({}, maker(function), given))
    text = str(raised.value)
    assert re.search(re.escape(says), text), text
    assert re.search(r"test_functions.py:\d+ .*# this line", text), text
    assert "\nTry: " in text


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("where", ["global", "closed over", "local", "in a list"])
def test_an_array_that_is_no_argument_is_named(library: str, where: str, monkeypatch: Any) -> None:
    """However it is read: indexed by a position, or as a whole in an expression."""
    xp = pytest.importorskip(library, reason=f"{library} is not installed")
    made = xp.ones(4)
    monkeypatch.setattr(sys.modules[__name__], "CLOSED_OVER", made)
    several = [made]

    def of_global(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + CLOSED_OVER[h]

    def of_local(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        here = xp.ones(4)
        return s + here[h]

    indexed = {
        "global": of_global,
        "closed over": lambda s, b, h, i, j: s + made[h],
        "local": of_local,
        "in a list": lambda s, b, h, i, j: s + several[0][h],
    }
    name = {"global": "CLOSED_OVER", "closed over": "made", "local": "here", "in a list": r"\w+"}[where]
    q = np.ones((1, 4, 6, 8), np.float32)
    for function in (indexed[where], *[lambda s, b, h, i, j: s * made] * (where == "closed over")):
        with pytest.raises(InvalidArgumentsError) as raised:
            cupy_flash.attention(q, q, q, score=cupy_flash.score(function))
        text = str(raised.value)
        if where == "in a list" and library == "numpy":
            assert "the function converts a traced value to a Python number" in text
            continue
        what = rf"(an array( of type \w+)?|{name}, an array)"
        assert re.search(rf"the function reads {what} that is no argument", text), text
        assert re.search(r"test_functions.py:\d+ ", text), text
        assert re.search(
            rf"\nTry: a parameter {name} behind j, and a call that binds it: f\({name}\)", text
        ), text


FLEX: dict[str, tuple[Any, Any]] = {
    "exp2": (lambda t: lambda s, b, h, i, j: s + t.exp2(-(h + 1) * 8.0 / 4) * (j - i),
             lambda s, h, i, j: s + 2.0 ** (-(h + 1) * 8.0 / 4) * (j - i)),
    "silu": (lambda t: lambda s, b, h, i, j: t.nn.functional.silu(s),
             lambda s, h, i, j: s / (1 + np.exp(-s))),
    "sigmoid": (lambda t: lambda s, b, h, i, j: s.sigmoid() + t.sigmoid(s),
                lambda s, h, i, j: 2 / (1 + np.exp(-s))),
    "to": (lambda t: lambda s, b, h, i, j: s.to(t.float32) + (i - j).to(s.dtype) / 8 + (i > j).to(t.int64)
           + i.float() - (j % 2).to(t.bool).float() - (j % 3).bool().long() + h.type(t.bfloat16),
           lambda s, h, i, j: s + (i - j) / 8 + (i > j) + i - (j % 2 != 0) - (j % 3 != 0) + h),
    "astype": (lambda t: lambda s, b, h, i, j: s.astype(np.float64) + i.astype(float)
               - (j > 2).astype("int32"),
               lambda s, h, i, j: s + i - (j > 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", FLEX)
def test_what_functions_of_flex_attention_use(name: str) -> None:
    """By torch's and NumPy's spellings; forward and backward are those of the same scores as a bias."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    make, of_numpy = FLEX[name]
    score = cupy_flash.score(make(torch))
    draw = np.random.default_rng(0)
    q, k, v, do = draw.standard_normal((4, 1, 4, 6, 8))
    i, j = np.ogrid[:6, :6]
    h = np.arange(4)[:, None, None]
    s = q @ k.swapaxes(-1, -2) * 8**-0.5
    o, lse = cupy_flash.attention(q, k, v, score=score, return_lse=True)
    np.testing.assert_allclose(o, cupy_flash.attention(q, k, v, bias=of_numpy(s, h, i, j) - s), atol=1e-12)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, score=score)

    def again(*moved: np.ndarray) -> np.ndarray:
        return cupy_flash.attention(*moved, score=score)

    testing.gradient_check(again, [q, k, v], list(grads[:3]), cotangent=do, at_most=4)


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (lambda: cupy_flash.score(lambda s, b, h, i, j: None), (), "value of type NoneType, not a n"),
        (lambda: cupy_flash.score(lambda s, b, h, i, j: i > j), (), "a value of kind bool, not a number"),
        (lambda: cupy_flash.mask(lambda b, h, i, j: i - j), (), "a value of kind int, not a condition"),
        (lambda: cupy_flash.score(lambda s, b: s), (), r"takes \(s, b\), not \(s, b, h, i, j, ...\)"),
        (lambda: cupy_flash.score(3), (), r"score\(\) is given a value of type int"),
        (lambda: cupy_flash.score(lambda s, b, h, i, j, x: s, learned="y"), (), "learned names 'y'"),
        (lambda: cupy_flash.score(lambda s, b, h, i, j, x: s), (), "takes 1 argument behind j"),
        (lambda: MADE["window"][0], (np.ones(3),), "takes 0 arguments behind j"),
        (lambda: MADE["alibi"][0], (np.arange(4),), r"arguments\[0\] has dtype int64"),
        (lambda: MADE["alibi"][0], (np.arange(4, dtype=np.int32),), "slope is learned and has dtype int32"),
        (lambda: MADE["alibi"][0], (0.5,), r"arguments\[0\] is a float"),
        (lambda: MADE["alibi"][0], (np.ones((1,) * 5),), r"arguments\[0\] has 5 axes"),
        (lambda: MADE["alibi"][0], (np.ones(0),), r"arguments\[0\] has shape \(0,\), and no element"),
        (lambda: MADE["alibi"][0], (np.ones(3),), r"shape \(3,\), and <lambda> reads element 3 of axis 0"),
        (lambda: lambda s, b, h, i, j: s, None, "score is a function"),
        (lambda: cupy_flash.mask(lambda b, h, i, j: i > j), None, "score is a mask function"),
    ],
)  # fmt: skip
def test_wrong_functions_are_refused(make: Any, arguments: Any, says: str, device: Device) -> None:
    q = np.ones((1, 4, 6, 8), np.float32)
    o, lse = cupy_flash.attention(q, q, q, return_lse=True)

    def given() -> dict[str, Any]:
        made = make()
        return {"score": made} if arguments is None else with_function({}, made, arguments)

    for call in (
        lambda: cupy_flash.attention(q, q, q, **given()),
        lambda: cupy_flash.attention_backward(o, q, q, q, o, lse, **given()),
    ):
        with pytest.raises(InvalidArgumentsError, match=rf"(?s){says}.*\nTry: ."):
            call()


def test_masks_that_torch_puts_together() -> None:
    """and_masks, or_masks and noop_mask make their first value of a position."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="torch is not installed")
    i, j = np.ogrid[:9, :9]
    q = np.random.default_rng(0).standard_normal((1, 1, 9, 8))

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) < 3

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    for mask_mod, keep in (
        (flex.and_masks(near, causal), (abs(i - j) < 3) & (j <= i)),
        (flex.or_masks(near, causal), (abs(i - j) < 3) | (j <= i)),
        (flex.noop_mask, np.ones((9, 9), bool)),
        (lambda b, h, i, j: i.new_zeros(i.shape) + j <= i + h.new_ones((), dtype=np.int32) - 1, j <= i),
    ):
        o = cupy_flash.attention(q, q, q, mask=cupy_flash.mask(mask_mod))
        assert np.array_equal(o, cupy_flash.attention(q, q, q, mask=keep))


def test_indices_one_after_the_other() -> None:
    """table[b][h, i] is table[b, h, i], with its gradient."""
    draw = np.random.default_rng(0)
    table = draw.standard_normal((2, 3, 4, 5))
    q, do = draw.standard_normal((2, 2, 3, 4, 8))
    k = draw.standard_normal((2, 3, 5, 8))
    results = []
    for function in (
        lambda s, b, h, i, j, table: s + table[b, h, i, j],
        lambda s, b, h, i, j, table: s + table[b][h, i][j],
        lambda s, b, h, i, j, table: s + table[b][h][i][j],
    ):
        how: dict[str, Any] = {"score": cupy_flash.score(function, learned="table")(table)}
        o, lse = cupy_flash.attention(q, k, k, return_lse=True, **how)
        grads = cupy_flash.attention_backward(do, q, k, k, o, lse, **how)
        assert grads.dscore is not None
        results.append((o, grads.dq, grads.dscore[0]))
    for other in results[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(results[0], other, strict=True))
    too_many = cupy_flash.score(lambda s, b, h, i, j, table: s + table[b][h, i][j, j])
    with pytest.raises(InvalidArgumentsError, match="table has 4 axes, and 5 indices"):
        cupy_flash.attention(q, k, k, score=too_many(table))
    too_few = cupy_flash.score(lambda s, b, h, i, j, table: s + table[b][h])
    with pytest.raises(
        InvalidArgumentsError, match=r"table has 4 axes, 2 of which have an index, and stands for"
    ):
        cupy_flash.attention(q, k, k, score=too_few(table))


def test_elements_outside_of_an_argument_are_nobodys() -> None:
    """Of pairs that are hidden they are cut off."""
    q = np.ones((1, 1, 6, 8), np.float32)
    table = np.arange(6, dtype=np.float32)
    function = cupy_flash.score(lambda s, b, h, i, j, x: s + x[i - j])
    o = cupy_flash.attention(q, q, q, causal=True, score=function(table))
    assert np.isfinite(o).all()
    with pytest.raises(InvalidArgumentsError, match=r"reads element -1 of axis 0(?s:.*)Try: np.clip"):
        cupy_flash.attention(q, q, q, score=function(table))


def test_what_has_no_score_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    q = np.ones((1, 2, 8, 4), np.float32)
    function = MADE["softcap"][0]
    o, lse = cupy_flash.attention(q, q, q, return_lse=True, score=function)
    with pytest.raises(InvalidArgumentsError, match=r"attention_with_kv_cache\(\) has no option 'score'"):
        cupy_flash.attention_with_kv_cache(
            q, q, q, cache_seqlens=np.array([8], np.int32), layout="bhsd", score=function
        )
    learns = {"score": MADE["alibi"][0](np.ones(2, np.float32))}
    assert cupy_flash.derivatives.jvp(q, q, q, o, lse, dq=q, **learns)
    with pytest.raises(UnsupportedError, match=r"(?s)no derivatives of dscore.*\nTry: ."):
        cupy_flash.derivatives.hvp(o, q, q, q, o, lse, dq=q, **learns)
    with pytest.raises(
        UnsupportedError, match='reproducible="batch" is kept on a CPU by the compiled core only'
    ):
        cupy_flash.attention(q, q, q, score=function, reproducible="batch")
    half = q.astype(np.float16)
    text = cupy_flash.explain(half, half, half, score=function, arch="sm_90a")
    assert "skipped   hopper: its inner loop has no score function" in text
    assert "family    flash" in text


def test_explain_names_the_function() -> None:
    q = np.ones((1, 2, 8, 4), np.float32)
    text = cupy_flash.explain(q, q, q, score=MADE["alibi"][0](np.ones(2, np.float32)))
    assert "score(<lambda>, 1 argument, 1 learned)" in text


def test_sums_of_gradients_have_one_order() -> None:
    """They are of TileFunction alone, tile after tile, each by bincount."""
    assert "bincount" in TileFunction._add.__code__.co_names


def test_budget_would_notice_a_wrong_slope() -> None:
    case = FunctionCase("softcap")
    arrays = case.inputs()
    how = case.options(arrays)
    q, k, v, do = (arrays[n] for n in ("q", "k", "v", "do"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **how)
    with pytest.raises(AssertionError, match="outside the error budget"):
        testing.assert_within_budget({"dq": grads.dq * 1.001}, q, k, v, do=do, **how)


# ---- second order


SECOND = [
    *(FunctionCase(name, Case(lengths=(12, 17), heads=(2, 1), head_dims=(8, 4))) for name in MADE),
    FunctionCase(
        "tempered", Case(lengths=(12, 17), heads=(2, 1), head_dims=(8, 4), softcap=1.5, bias="1hqk")
    ),
    FunctionCase("kinks", Case(lengths=(9, 9), causal=True, sinks=True, dropout=0.3, alibi="h")),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SECOND, ids=str)
def test_second_order_by_differences(case: FunctionCase) -> None:
    """J of the textbook (of the tiles, under dropout), and H of the gradients, in float64."""
    check_second_order(case)


def check_second_order(case: FunctionCase) -> None:
    """Hold J and H of a case to differences of what they differentiate, all in float64."""
    arrays = {name: x.astype(np.float64) for name, x in case.inputs().items()}
    how = case.options(arrays)
    function = MADE[case.name][0]
    again = (cupy_flash.mask if function.masks else cupy_flash.score)(function.function)
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in case.arguments()]
    how |= {"score": None, "mask": arrays.get("mask")}
    how = with_function(how, again, exact)
    moved = [name for name in ("q", "k", "v", "bias", "sinks") if name in arrays]
    draw = np.random.default_rng(1)
    tangents = {"d" + name: draw.standard_normal(arrays[name].shape) for name in moved}
    do, dlse = arrays["do"], draw.standard_normal((*arrays["do"].shape[:3],))

    def at(step: float) -> list[np.ndarray]:
        """Results and gradients at a point of the way."""
        there = {name: arrays[name] + step * tangents["d" + name] for name in moved}
        qkv = [there.pop(name) for name in "qkv"]
        o, lse = cupy_flash.attention(*qkv, return_lse=True, **(how | there))
        if not case.dropout:
            of_textbook = {name: x for name, x in how.items() if name not in ("dropout", "seed", "precision")}
            o, lse, *_ = cupy_flash.naive_attention(*qkv, **(of_textbook | there))
        grads = cupy_flash.attention_backward(do, *qkv, o, lse, dlse=dlse, **(how | there))
        return [o, lse, *(x for x in grads[:5] if x is not None)]

    def difference(step: float) -> list[np.ndarray]:
        return [(x - y) / (2 * step) for x, y in zip(at(step), at(-step), strict=True)]

    qkv = [arrays[name] for name in "qkv"]
    (o, lse), j = cupy_flash.derivatives.value_and_jvp(*qkv, **tangents, **how)
    assert all(
        np.array_equal(x, y)
        for x, y in zip(j, cupy_flash.derivatives.jvp(*qkv, o, lse, **tangents, **how), strict=True)
    )
    h = cupy_flash.derivatives.hvp(do, *qkv, o, lse, dlse=dlse, jvp=j, **tangents, **how)
    ours = [*j, *(x for x in h if x is not None)]
    for mine, far, near in zip(ours, difference(4e-5), difference(2e-5), strict=True):
        expected = (4 * near - far) / 3  # why: then the error is of the fourth order
        assert np.abs(mine - expected).max() <= 1e-8 * max(1, np.abs(expected).max())


def test_second_derivatives_where_a_slope_is_zero() -> None:
    """A factor that happens to be 0, of scores of 0, has a derivative; a branch not taken has none."""
    draw = np.random.default_rng(0)
    k, v, do, dq = draw.standard_normal((4, 1, 1, 6, 8))
    q = np.zeros_like(k)
    functions = (
        (lambda s, b, h, i, j: s * np.exp(s), (0.0, 1.0, 2.0)),
        (lambda s, b, h, i, j: np.exp(s * s), (1.0, 0.0, 2.0)),
        (lambda s, b, h, i, j: s * np.sqrt(4.0 + s) + np.log(1.0 + s * s), (0.0, 2.0, 2.5)),
        (
            lambda s, b, h, i, j: np.where(j < 0, np.log(s) + s / s + np.sqrt(s), s * s / (1.0 + s)),
            (0.0, 0.0, 2.0),
        ),
    )
    for function, (value, slope, bend) in functions:
        found = []
        for f in (function, lambda s, b, h, i, j: value + slope * s + bend / 2.0 * s * s):  # noqa: B023
            how: dict[str, Any] = {"score": cupy_flash.score(f)}
            with np.errstate(all="ignore"):
                o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
                found.append(cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=dq, **how))
        for mine, expected in zip(*(x[:3] for x in found), strict=True):
            assert np.allclose(mine, expected, atol=1e-12)


def test_second_order_of_options_said_as_functions() -> None:
    """Several directions at once; of packed sequences too."""
    draw = np.random.default_rng(0)
    q, k, v, do = draw.standard_normal((4, 1, 2, 30, 8))
    dq, dk, dv = draw.standard_normal((3, 5, 1, 2, 30, 8))
    slopes = np.array([0.25, 0.5])
    own = cupy_flash.score(lambda s, b, h, i, j, slope: 3.0 * np.tanh(s / 3.0) - slope[h] * abs(i - j))
    results = []
    for how in ({"score": own(slopes)}, {"softcap": 3.0, "alibi_slopes": slopes}):
        (o, lse), j = cupy_flash.derivatives.value_and_jvp(q, k, v, dq=dq, dk=dk, dv=dv, **how)  # type: ignore[arg-type]
        h = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **how)  # type: ignore[arg-type]
        results.append([*j, *h[:3]])
        rows = [x[0].swapaxes(0, 1) for x in (do, q, k, v, o)]
        cuts = np.array([0, 30], np.int32)
        packed = cupy_flash.derivatives.hvp(
            *rows,
            lse[0],
            cu_seqlens_q=cuts,
            cu_seqlens_k=cuts,
            dq=dq[0, 0].swapaxes(0, 1),
            **how,  # type: ignore[arg-type]
        )
        one = cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=dq[0], **how)  # type: ignore[arg-type]
        assert np.allclose(packed.dk.swapaxes(0, 1), one.dk[0], atol=1e-12)
    for ours, theirs in zip(*results, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-11, atol=1e-11)


# ---- functions in C


IN_C = (
    "template <class T, class X> T score(T s, int b, int h, int i, int j, X slope) { return s - slope(h); }"
)
MASK_IN_C = "inline bool mask(int b, int h, int i, int j) { return j <= i; }"


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: cupy_flash.score("s - 1"), InvalidArgumentsError, r"defines no score\(...\)"),
        (lambda: cupy_flash.mask(IN_C), InvalidArgumentsError, r"defines no mask\(...\)"),
        (lambda: cupy_flash.score("\n#include <x>\n" + IN_C), InvalidArgumentsError, "line 2 +#include <x>"),
        (lambda: cupy_flash.score(IN_C, learned=("slope",)), UnsupportedError, "in C have no gradients"),
        (lambda: cupy_flash.score(IN_C).learning((0,)), UnsupportedError, "in C have no gradients"),
    ],
)
def test_wrong_texts_are_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=rf"(?s){says}.*\nTry: ."):
        make()


def test_a_text_has_no_arrays_of_a_cpu() -> None:
    """Nor a textbook, nor a mask by blocks."""
    q, slopes = np.ones((1, 2, 8, 8), np.float32), np.ones(2, np.float32)
    o, lse = cupy_flash.attention(q, q, q, return_lse=True)
    how: dict[str, Any] = {"score": cupy_flash.score(IN_C)(slopes)}
    for call in (
        lambda: cupy_flash.attention(q, q, q, **how),
        lambda: cupy_flash.attention_backward(o, q, q, q, o, lse, **how),
        lambda: cupy_flash.naive_attention(q, q, q, **how),
        lambda: cupy_flash.block_mask(cupy_flash.mask(MASK_IN_C), None, None, 8, 8),
    ):
        with pytest.raises(
            UnsupportedError, match=r"(?s)score function in C is compiled into kernels.*\nTry: ."
        ):
            call()


def test_a_text_is_planned_and_built_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made, mask = cupy_flash.score(IN_C), cupy_flash.mask(MASK_IN_C)
    assert repr(made) == "cupy_flash.score(score in C)"
    kinds = [Argument("float16", 1)], [Argument("float32", 1)]
    bodies = [made.traced(kind) for kind in kinds]
    assert bodies[0] is made.traced(kinds[0])
    assert len({*bodies, mask.traced([])}) == 3
    assert bodies[0] == cupy_flash.score(IN_C).traced(kinds[0])
    q, slopes = np.ones((1, 2, 8, 64), np.float16), np.ones(2, np.float16)
    for direction in ("forward", "backward"):
        text = cupy_flash.explain(q, q, q, arch="sm_80", direction=direction, score=made(slopes))
        assert "score(score in C, 1 argument)" in text
        assert bodies[0].digest[:12] in text
        assert "bound" not in text


@pytest.mark.parametrize("joined", ["with a score function", "with another mask"])
@pytest.mark.parametrize("count", [0, 2])
def test_each_of_two_functions_takes_its_own_arguments(joined: str, count: int) -> None:
    """Python would say how many both take."""
    q, x = np.ones((1, 4, 6, 8), np.float32), np.ones(4, np.float32)
    near = cupy_flash.mask(lambda b, h, i, j, x: j <= i + x[h])(*[x] * count)
    score = cupy_flash.score(lambda s, b, h, i, j, x: s * x[h])(x)
    other = cupy_flash.mask(lambda b, h, i, j: j < 5)
    how = {"mask": near, "score": score} if "score" in joined else {"mask": (other, near)}
    are = "is" if count == 1 else "are"
    with pytest.raises(InvalidArgumentsError, match=rf"takes 1 argument behind j \(x\); {count} {are} bound"):
        cupy_flash.attention(q, q, q, **how)


@cupy_flash.score
def decorated(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2 * s


def plain(s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any) -> Any:
    return s * slope[h]


def test_functions_are_pickled_and_copied() -> None:
    """As multiprocessing and torch.save do with a model that has one."""
    learned, slopes = cupy_flash.score(plain, learned=["slope"]), np.ones(4, np.float32)
    q = np.ones((1, 4, 6, 8), np.float32)
    for _ in range(2):  # the second after it was traced
        assert pickle.loads(pickle.dumps(decorated)) is decorated
        for again in (pickle.loads(pickle.dumps(learned)), copy.deepcopy(learned)):
            assert (again.function, again.masks, again.learned) == (plain, False, (0,))
        bound = pickle.loads(pickle.dumps(learned(slopes)))
        wanted = cupy_flash.attention(q, q, q, score=learned(slopes))
        np.testing.assert_array_equal(cupy_flash.attention(q, q, q, score=bound), wanted)
    lambdas = cupy_flash.score(lambda s, b, h, i, j: 2 * s)
    assert copy.deepcopy(lambdas).function is lambdas.function


def test_naive_attention_says_where_a_function_reads_outside() -> None:
    q = np.ones((1, 3, 4, 8), np.float32)
    by_head = cupy_flash.score(lambda s, b, h, i, j, table: s + table[h])
    with pytest.raises(
        InvalidArgumentsError, match=r"(?s)index 1 is out of bounds.*table\[h\].*Try: np\.clip"
    ):
        cupy_flash.naive_attention(q, q, q, score=by_head(np.ones(1, np.float32)))
