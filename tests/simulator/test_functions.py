"""score= on the simple and the flash kernels, in the simulator: the C text of functions against FP64."""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan.families import simple
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward, dead_outputs, only
from tests.cpu import test_functions
from tests.function_cases import FunctionCase, random_function
from tests.simulator import sanitized
from tests.simulator.ptx.backend import kernels_from_ptx
from tests.simulator.ptx.conftest import need

CASES = [
    FunctionCase("tempered", Case(lengths=(70, 90), heads=(4, 2), head_dims=(16, 8), bias="1h11", dlse=True)),
    FunctionCase("buckets", Case(lengths=(66, 70), dtype="float16", causal=True, align=3, dropout=0.2)),
    FunctionCase("pairs", Case(lengths=(40, 33), dtype="float64", sinks=True, softcap=2.0)),
    FunctionCase("dilated", Case(lengths=(65, 65), alibi="bh", window=(40, 40), layout="bshd")),
    FunctionCase("kinks", Case(lengths=(1, 130), heads=(4, 4), mask="b1q1")),
]

# On tensor cores; slopes of either sign, with dropout too.
FLASH = [
    FunctionCase("kinks", Case(lengths=(66, 70), dtype="float16", causal=True, align=3, dropout=0.2)),
    FunctionCase("tempered", Case(lengths=(70, 90), heads=(4, 2), dtype="bfloat16", bias="1h11", dlse=True)),
    FunctionCase("pairs", Case(lengths=(40, 33), softcap=2.0, sinks=True)),
]

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(20)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_are_what_the_specification_says(case: FunctionCase, device: Device) -> None:
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
@pytest.mark.parametrize("case", FLASH, ids=str)
def test_on_tensor_cores(
    case: FunctionCase, device: Device, deterministic: bool, tensor_cores_only: None
) -> None:
    if not deterministic:
        check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device, reproducible="run" if deterministic else None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_75"], indirect=True)
def test_on_turing(device: Device, tensor_cores_only: None) -> None:
    case = FLASH[0]
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [3])
def test_random_functions_are_numpys(seed: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, in which both have the same sums but for their order."""
    draw = np.random.default_rng(seed)
    function = cupy_flash.score(random_function(draw))
    q, k, v, do = draw.standard_normal((4, 1, 2, 40, 8))
    how: dict[str, Any] = {
        "score": function(draw.standard_normal((2, 4)), draw.integers(0, 4, 5).astype(np.int32)),
    }
    results = []
    for driver in ("simulator:sm_61", ""):
        monkeypatch.setenv("CUPY_FLASH_DRIVER", driver)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
        results.append((o, lse, *cupy_flash.attention_backward(do, q, k, v, o, lse, **how)[:3]))
    for ours, theirs in zip(*results, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_products_of_arguments_have_64_bits(device: Device) -> None:
    """Values that nobody looks at on a GPU: as operands, as indices, and of a gradient's place."""
    draw = np.random.default_rng(0)
    of = draw.integers(-(2**31), 2**31, 40).astype(np.int32)
    table = draw.standard_normal(5).astype(np.float32)
    q, do = draw.standard_normal((2, 1, 2, 40, 8), np.float32)

    def function(s: Any, b: Any, h: Any, i: Any, j: Any, of: Any, table: Any) -> Any:
        far = of[i] * of[j] - of[j] // 3
        near = np.where(far > 0, np.minimum(far, 2), np.maximum(-far % 7, of[i] + of[j])) % 3
        return s + table[abs(far) % 5] + 0.1 * near + table[np.clip(far, 0, 4)]

    wide = of.astype(np.int64)
    i, j = np.ogrid[:40, :40]
    bias = function(0.0, 0, 0, i, j, wide, table)[None].astype(np.float32)
    how: dict[str, Any] = {"score": cupy_flash.score(function, learned="table")(of, table)}
    o, lse = cupy_flash.attention(q, q, q, return_lse=True, **how)
    grads = cupy_flash.attention_backward(do, q, q, q, o, lse, **how)
    expected, lse = cupy_flash.attention(q, q, q, bias=bias, return_lse=True)
    by_bias = cupy_flash.attention_backward(do, q, q, q, expected, lse, bias=bias)
    np.testing.assert_allclose(o, expected, atol=1e-5)
    np.testing.assert_allclose(grads.dq, by_bias.dq, atol=1e-4)
    assert grads.dscore is not None
    assert by_bias.dbias is not None
    far = wide[i] * wide[j] - wide[j] // 3
    dtable = sum(np.bincount(x.ravel(), by_bias.dbias.ravel(), 5) for x in (abs(far) % 5, np.clip(far, 0, 4)))
    np.testing.assert_allclose(grads.dscore[1], dtable, atol=1e-4)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_a_bit(policy: str, device: Device) -> None:
    case, results = CASES[0], []
    arrays = case.inputs()
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    for chosen in ("late", policy):
        with simulator.schedule(chosen):
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, **case.options(arrays))
            grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **case.options(arrays))
        every = (o, lse, *grads[:5], *(grads.dscore or ()))
        results.append([x.tobytes() for x in every if x is not None])
    assert results[0] == results[1]


def test_packed_positions(device: Device) -> None:
    test_functions.check_packed(device, learned=("by_batch",))


# ---- second order


@pytest.mark.slow
@pytest.mark.parametrize("case", test_functions.SECOND[-2:], ids=str)
def test_second_order_by_differences(case: FunctionCase, device: Device) -> None:
    """Of results and gradients of the simulated kernels, in float64."""
    test_functions.check_second_order(case)


def bent(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, temperature: Any) -> Any:
    """Curved everywhere, by halves, with elements of a head, a distance and all pairs."""
    raised = np.minimum(s * s, 4.0) * table[h, i - j + 69]
    return 3.0 * np.tanh(s * temperature / 3.0) + np.where((i + j) % 3 == 0, raised, np.maximum(s, 0.5) / 2)


BENT = cupy_flash.score(bent)
BENT_IN_C = cupy_flash.score("""
template <class T, class Table, class X>
T score(T s, int b, int h, int i, int j, Table table, X temperature) {
    const T raised = min(s * s, T(4)) * table(h, i - j + 69);
    T y = 3 * tanh(s * temperature / 3);
    y += (i + j) % 3 == 0 ? raised : max(s, T(0.5)) / 2;
    return y;
}
""")


def second_order(function: Any, dtype: str, packed: bool = False, **how: Any) -> list[np.ndarray]:
    """J and H of several tiles of queries that share heads of keys, with the inputs in this dtype."""
    draw = np.random.default_rng(7)
    sets = [draw.standard_normal((4, 2, 4, 70, 16)), draw.standard_normal((4, 2, 2, 70, 16))]
    # why of few bits: every dtype holds the same numbers, and the directions.
    (q, do, dq, _), (k, v, dk, dv) = (np.round(x * 16).astype(np.float64) / 32 for x in sets)
    arguments = (np.round(draw.standard_normal((4, 140)) * 64) / 64, np.array(0.75))
    given = {"q": q, "k": k, "v": v, "do": do, "dq": dq, "dk": dk, "dv": dv}
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x = {name: a.astype(narrow) for name, a in given.items()}
    exact = dtype == "float64"
    bound = [a if exact else a.astype(np.float32) for a in arguments]
    options = {"score": function(*bound), "softcap": 5.0, "causal": True, **how}
    moved = {name: x[name] for name in ("dq", "dk", "dv")}
    o, lse = cupy_flash.attention(x["q"], x["k"], x["v"], return_lse=True, **options)
    if not packed:
        j = cupy_flash.derivatives.jvp(x["q"], x["k"], x["v"], o, lse, **moved, **options)
        h = cupy_flash.derivatives.hvp(x["do"], x["q"], x["k"], x["v"], o, lse, **moved, **options)
        return [np.asarray(a, np.float64) for a in (*j, *h[:3])]
    rows = {name: np.concatenate(list(a.swapaxes(1, 2))) for name, a in {**x, "o": o}.items()}
    moved = {name: rows[name] for name in moved}
    cuts = np.array([0, 70, 140], np.int32)
    flat = np.concatenate(list(lse), axis=-1)
    three = (rows["q"], rows["k"], rows["v"], rows["o"], flat)
    options |= {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts}
    j = cupy_flash.derivatives.jvp(*three, **moved, **options)
    h = cupy_flash.derivatives.hvp(rows["do"], *three, **moved, **options)
    unpacked = [np.asarray(a, np.float64).reshape(2, 70, *a.shape[1:]).swapaxes(1, 2) for a in (j[0], *h[:3])]
    return [unpacked[0], j[1].reshape(-1, 2, 70).swapaxes(0, 1), *unpacked[1:]]


# Of the largest derivative; what rounding O and the results does to each.
CLOSE = {"float64": 1e-11, "float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}


def hold(ours: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, within: float) -> None:
    """To NumPy's in float64, which differences hold."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "")
    with only():
        theirs = second_order(BENT, "float64")
    for mine, exact in zip(ours, theirs, strict=True):
        assert np.abs(mine - exact).max() <= within * np.abs(exact).max()


@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(x, marks=pytest.mark.slow) for x in ("float64", "float16", "bfloat16"))],
)
def test_second_order_in_every_dtype(dtype: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = second_order(BENT, dtype)
    if dtype == "float32":
        for mine, packed in zip(ours, second_order(BENT, dtype, packed=True), strict=True):
            assert np.array_equal(mine, packed)
    hold(ours, monkeypatch, CLOSE[dtype])


@pytest.mark.slow
def test_second_order_of_a_text_is_its_twins(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By numbers whose slopes have slopes."""
    hold(second_order(BENT_IN_C, "float64"), monkeypatch, CLOSE["float64"])


@pytest.mark.slow
def test_slopes_of_slopes_that_meet_nothing(device: Device) -> None:
    """At 0 a square has a second derivative, and no first one that an exponential would find."""
    q = np.zeros((1, 1, 4, 8))
    dq, v = np.ones((2, 1, 1, 4, 8))
    v = np.random.default_rng(0).standard_normal(v.shape)
    k = np.random.default_rng(1).standard_normal(v.shape)
    body = "return exp(s * s) + log(1 + s * s) + sqrt(4 + s * s);"
    text = cupy_flash.score(f"template <class T> T score(T s, int b, int h, int i, int j) {{ {body} }}")
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, score=text)
    found = cupy_flash.derivatives.hvp(v, q, k, v, o, lse, dq=dq, score=text).dq
    square = cupy_flash.score(lambda s, b, h, i, j: 3.0 + 2.25 * s * s)  # the same to the third order
    wanted = cupy_flash.derivatives.hvp(v, q, k, v, o, lse, dq=dq, score=square).dq
    assert np.abs(wanted).max() > 0.1
    assert np.allclose(found, wanted, atol=1e-12)


@pytest.mark.slow
def test_second_order_from_ptx(device: Device) -> None:
    """Bit for bit what the source gives."""
    need(12)
    with kernels_from_ptx(12) as used:
        ours = second_order(BENT, "float32")
    kernels = {variant.kernel for variant, _ in used}
    assert kernels >= {"simple_tangent", "simple_hessian_dq_dot", "simple_hessian_dkv_dot"}
    for mine, theirs in zip(ours, second_order(BENT, "float32"), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_second_order(policy: str, device: Device) -> None:
    results = []
    for chosen in ("late", policy):
        with simulator.schedule(chosen):
            results.append([x.tobytes() for x in second_order(BENT, "float32")])
    assert results[0] == results[1]


# ---- gradients of arguments


def every_pattern(
    s: Any, b: Any, h: Any, i: Any, j: Any, common: Any, head: Any, query: Any, key: Any, table: Any, far: Any
) -> Any:
    """Elements that all pairs share, those of a head, a query, a key, a distance; of an array three reads."""
    bucket = np.minimum(abs(i - j) // 8, 4)
    of_both = query[b, i] * key[b % 2, j] + query[b, j // 2] + np.where(s > 0, query[b, i // 7], 0.1)
    return s * common + head[h] * of_both + table[h, i - j + 69] * np.exp(-far[bucket])


PATTERNS = cupy_flash.score(every_pattern, learned=("common", "head", "query", "key", "table", "far"))


def patterns(dtype: str = "float64") -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    draw = np.random.default_rng(5)
    shapes = ((), (4,), (2, 75), (2, 75), (4, 145), (5,))
    arguments = [draw.standard_normal(shape).astype(dtype) for shape in shapes]
    arguments[3] = arguments[3][:, ::-1]
    q, do = draw.standard_normal((2, 2, 4, 70, 8)).astype(dtype)
    k, v = draw.standard_normal((2, 2, 2, 75, 8)).astype(dtype)
    return {"q": q, "k": k, "v": v, "do": do}, {
        "score": PATTERNS(*tuple(arguments)), "window": (50, 60), "align": 2, "softcap": 3.0,
    }  # fmt: skip


def gradients_of(arrays: dict[str, np.ndarray], how: dict[str, Any]) -> tuple[np.ndarray, ...]:
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
    found = cupy_flash.attention_backward(do, q, k, v, o, lse, **how).dscore
    assert found is not None
    return tuple(x for x in found if x is not None)


@pytest.mark.parametrize("slices", [1, 3, 256])
def test_gradients_of_arguments_read_in_every_way(
    slices: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the CPU but for the order, however many blocks add; in float64."""
    monkeypatch.setattr(simple, "_MOST_SLICES", slices)
    memo.forget()
    ours = gradients_of(*patterns())
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "")
    for mine, theirs in zip(ours, gradients_of(*patterns()), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-11, atol=1e-11)
    monkeypatch.undo()
    memo.forget()


@pytest.mark.parametrize("case", [CASES[0], CASES[1], FunctionCase("relative")], ids=str)
def test_gradients_of_arguments_in_other_dtypes(case: FunctionCase, device: Device) -> None:
    check_gradients_of_arguments(case, device)


def check_both_ways(case: FunctionCase) -> None:
    """Both passes of a case on the simulated GPU, and the gradients of its function's arguments."""
    device = Device("simulator", np, float32_precision="ieee")
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]
    check_gradients_of_arguments(case, device)


def check_gradients_of_arguments(case: FunctionCase, device: Device) -> None:
    """Hold them to those in float64 on the CPU; they are written into arrays of any strides."""
    arrays = case.inputs()
    options = case.options(arrays)
    with dead_outputs(device, case.case):
        ours = gradients_of(arrays, options)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    exact_how = {
        name: x.astype(np.float64) if name in wide and isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }
    with only(), mock.patch.dict(os.environ, CUPY_FLASH_DRIVER=""):
        exact = gradients_of(wide, exact_how)
    for mine, theirs in zip(ours, exact, strict=True):
        scale = np.abs(theirs).max()
        narrow = "float16" in str(arrays["q"].dtype)
        assert np.abs(mine - theirs).max() <= (2e-2 if narrow else 1e-5) * scale


def test_order_of_threads_does_not_change_gradients_of_arguments(device: Device) -> None:
    results = []
    for policy in ("late", "early", "random"):
        with simulator.schedule(policy, seed=3):
            results.append([x.tobytes() for x in gradients_of(*patterns())])
    assert results[0] == results[1] == results[2]


def test_sums_of_a_large_table_are_bounded() -> None:
    """A slice for each of so many blocks, as many as 64 MB hold, and no less than one."""
    q = np.ones((4, 8, 512, 8), np.float16)
    f = cupy_flash.score(lambda s, b, h, i, j, t: s + t[i], learned="t")
    for size, slices in ((512, 256), (1 << 16, 128), (1 << 24, 1)):
        text = cupy_flash.explain(
            q, q, q, arch="sm_80", direction="backward", score=f(np.ones(size, np.float32))
        )
        found = re.search(r"simple_backward_args_sum\S+\n.*\n +grid +(\d+)", text)
        assert found, text
        assert int(found[1]) == slices


def test_elements_outside_of_an_argument_are_cut_off(device: Device) -> None:
    """On a GPU nobody looks at indices before the kernel does; it reads nothing else."""
    q = np.random.default_rng(0).standard_normal((1, 1, 6, 8)).astype(np.float32)
    given = device.hostile(np.arange(4, dtype=np.float32), "strided")
    o = cupy_flash.attention(
        q, q, q, score=cupy_flash.score(lambda s, b, h, i, j, x: s + x[i - j])(given.view)
    )
    i, j = np.ogrid[:6, :6]
    bias = np.clip(i - j, 0, 3).astype(np.float32)
    assert np.allclose(o, cupy_flash.attention(q, q, q, bias=bias), atol=1e-6)


_SANITIZED = """
from tests.checks import Device
from tests.simulator.test_functions import CASES, check_backward, check_forward, gradients_of, patterns
check_forward(CASES[1], Device("simulated"))
check_backward(CASES[1], Device("simulated"))
gradients_of(*patterns())
"""


@pytest.mark.slow
def test_sanitizers_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions too: no integer overflows, and no index leaves its array."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_61")
    done = sanitized.run("address", _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_the_kernels_do_not_do_is_refused(device: Device) -> None:
    q = np.ones((1, 4, 6, 8), np.float32)
    slopes = np.ones(4, np.float32)
    o, lse = cupy_flash.attention(q, q, q, return_lse=True)
    huge = np.lib.stride_tricks.as_strided(slopes, (2**16, 2**15), (0, 0))
    table = cupy_flash.score(lambda s, b, h, i, j, t: s + t[i, j], learned="t")
    with pytest.raises(
        UnsupportedError, match=r"gradients of fewer than 2\*\*31 elements that a score function"
    ):
        cupy_flash.attention_backward(o, q, q, q, o, lse, score=table(huge))
    many = cupy_flash.score(lambda s, b, h, i, j, *numbers: sum(numbers, s))
    with pytest.raises(UnsupportedError, match="takes at most 16 arguments"):
        cupy_flash.attention(q, q, q, score=many(*(slopes[0:1].reshape(()),) * 17))
    with pytest.raises(UnsupportedError, match="has no derivatives of dscore"):
        cupy_flash.derivatives.hvp(o, q, q, q, o, lse, dq=q, score=table(np.ones((6, 6))))
