"""score= as a text in C, in the simulator: against its twin in Python bit for bit, and FP64."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_flash
from bench.machine.blas import one_thread
from cupy_flash import testing
from cupy_flash.device.host_build import SimulatorUnavailable
from tests.checks import Device
from tests.paths import ROOT
from tests.public import with_function
from tests.simulator.ptx.backend import kernels_from_ptx
from tests.simulator.ptx.conftest import need

pytestmark = pytest.mark.simulator


class Twins(NamedTuple):
    """A function in C, and in Python."""

    in_c: cupy_flash.ScoreFunction
    in_python: cupy_flash.ScoreFunction
    arguments: tuple[np.ndarray, ...] = ()


ALIBI = Twins(
    cupy_flash.score("""
template <class T, class Slope> T score(T s, int b, int h, int i, int j, Slope slope) {
    return s - slope(h) * (i - j);
}"""),
    cupy_flash.score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j)),
    (np.float32([0.5, 0.25]),),
)
# Every operation, arguments of several kinds, branches, and the root of what has no slope.
MANY = Twins(
    cupy_flash.score("""
template <class T> T twice(T x) { return x + x; }

template <class T, class Table, class Which>
T score(T s, int b, int h, int i, int j, T common, Table table, Which which) {
    const auto near = abs(i - j) < 9;
    T x = s * common - table(h, which(j % 5)) / (T(2) + s * s);
    x += tanh(s) * exp(-abs(s)) + sqrt(T(i - i)) * s;
    x -= log(T(1.5) + s * s) * T(0.5) + (1 - s);
    x *= min(max(s, T(-1)), T(2));
    x /= sqrt(T(3) + s * s) / (2 / (s * s + T(1)));
    if (near && s > T(0.25)) return twice(x) - s;
    return i % 7 == 3 && j > 0 ? T(-kInfinity) : -x;
}"""),
    cupy_flash.score(lambda s, b, h, i, j, common, table, which: _many(s, h, i, j, common, table, which)),
    (
        np.array(0.75),
        np.random.default_rng(0).standard_normal((2, 4))[:, ::-1],
        np.array([3, 1, 0, 2, 1], np.int32),
    ),
)


def _many(s: Any, h: Any, i: Any, j: Any, common: Any, table: Any, which: Any) -> Any:
    x = s * common - table[h, which[j % 5]] / (2.0 + s * s)
    x = x + (np.tanh(s) * np.exp(-abs(s)) + np.sqrt(1.0 * (i - i)) * s)
    x = x - (np.log(1.5 + s * s) * 0.5 + (1.0 - s))
    x = x * np.minimum(np.maximum(s, -1.0), 2.0)
    x = x / (np.sqrt(3.0 + s * s) / (2.0 / (s * s + 1.0)))
    far = np.where((i % 7 == 3) & (j > 0), -np.inf, -x)
    return np.where((abs(i - j) < 9) & (s > 0.25), x + x - s, far)


def both_passes(function: Any, arguments: Any, dtype: str, **how: Any) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(4)
    q, do = draw.standard_normal((2, 1, 2, 40, 8)).astype(dtype)
    k, v = draw.standard_normal((2, 1, 1, 45, 8)).astype(dtype)
    options = how if function is None else with_function(how, function, arguments)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
    return {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        "o": o,
        "lse": lse,
        "dq": grads.dq,
        "dk": grads.dk,
        "dv": grads.dv,
    }


RESULTS = ("o", "lse", "dq", "dk", "dv")


def test_a_forward_pass(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 8)).astype(np.float32)
    ours = cupy_flash.attention(q, k, v, score=ALIBI.in_c(*ALIBI.arguments))
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "")
    theirs = cupy_flash.attention(q, k, v, score=ALIBI.in_python(*ALIBI.arguments))
    assert np.allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_a_text_is_its_twin(device: Device) -> None:
    """The same arithmetic is the same bits; slopes of products come in another order."""
    ours = both_passes(MANY.in_c, MANY.arguments, "float64")
    theirs = both_passes(MANY.in_python, MANY.arguments, "float64")
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ("o", "lse"))
    for name in RESULTS:
        assert np.allclose(ours[name], theirs[name], rtol=1e-11, atol=1e-11)
    how = {"score": MANY.in_python(*MANY.arguments)}
    with one_thread():
        testing.assert_within_budget(
            {name: ours[name] for name in RESULTS}, *(ours[n] for n in "qkv"), do=ours["do"], **how
        )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_on_tensor_cores(device: Device, tensor_cores_only: None) -> None:
    arguments = (ALIBI.arguments[0].astype(np.float16),)
    ours = both_passes(ALIBI.in_c, arguments, "float16", causal=True, align=5)
    theirs = both_passes(ALIBI.in_python, arguments, "float16", causal=True, align=5)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in RESULTS)


@pytest.mark.slow
def test_the_ptx_is_of_the_same_text(device: Device) -> None:
    """Bit for bit, forward and backward."""
    need(12)
    with kernels_from_ptx(12) as used:
        ours = both_passes(ALIBI.in_c, ALIBI.arguments, "float32")
        theirs = both_passes(ALIBI.in_python, ALIBI.arguments, "float32")
    assert len(used) == 7, "three passes twice, and delta"
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in RESULTS)


@pytest.mark.parametrize(
    ("types", "parameters", "text", "arguments", "says"),
    [
        ("", "", "{ return z; }", (), "score text:3"),
        ("", "", "{ return s; }", (np.ones(3),), "call of the score text"),
        (", class X", ", X x", "{ return s + x(h, i); }", (np.ones(3),), "one index for each axis"),
    ],
)  # fmt: skip
def test_what_does_not_compile_has_the_line_of_the_text(
    types: str, parameters: str, text: str, arguments: tuple[np.ndarray, ...], says: str, device: Device
) -> None:
    text = f"\ntemplate <class T{types}>\nT score(T s, int b, int h, int i, int j{parameters}) {text}"
    q = np.ones((1, 2, 8, 8), np.float32)
    with pytest.raises(SimulatorUnavailable, match=re.escape(says)):
        cupy_flash.attention(q, q, q, score=cupy_flash.score(text)(*arguments))


@pytest.mark.slow
def test_the_texts_of_the_page_run(device: Device) -> None:
    page = (ROOT / "docs" / "score_functions.md").read_text().split("## In C", 1)[1]
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)  # type: ignore[index]
    assert names["alibi"].function.split() == ALIBI.in_c.function.split()
    i, j = np.ogrid[:40, :45]
    ours = both_passes(names["near"], (np.array(8, np.int32),), "float64")
    kept = both_passes(None, (), "float64", mask=np.isin(abs(i - j), (0, 1, 2, 4, 8)))
    assert all(np.allclose(ours[name], kept[name], atol=1e-12) for name in RESULTS)
