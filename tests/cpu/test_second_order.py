"""attention_jvp and attention_hvp in the core and in NumPy: against FP64, each other; what they refuse."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError, testing
from cupy_flash.call.adopt import adopt
from cupy_flash.call.options import DERIVATIVES
from cupy_flash.call.tangents import check_tangents
from tests.cases import DTYPES, Case, feature_cases
from tests.checks import Device, dead_outputs

NUMPY = Device("numpy")
pytestmark = pytest.mark.usefixtures("cpu_family")
# Within a tile, over its edges, and more rows than keys.
CASES = feature_cases(
    lengths=((33, 33), (1, 40), (65, 20)),
    head_dims=((8, 8), (16, 4)),
    dtype=("float64",),
    bias_dtype=(None,),
    dlse=(True,),
)
MANY = Case(
    dtype="float64", heads=(4, 2), lengths=(20, 30), head_dims=(8, 4), causal=True, align="bottom_right",
    mask="b1q1", bias="1hqk", softcap=1.5, alibi="h", sinks=True, dropout=0.25, dlse=True,
)  # fmt: skip
UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def tangents_of(arrays: dict[str, np.ndarray], directions: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """A tangent of every array that can have one."""
    draw = np.random.default_rng(1)
    return {
        "d" + name: draw.standard_normal((*directions, *arrays[name].shape)).astype(arrays[name].dtype)
        for name in ("q", "k", "v", "bias", "sinks")
        if name in arrays
    }


def results_of(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The o and lse of a case, exact but for their dtypes."""
    exact = testing.reference_attention(*(arrays[n] for n in "qkv"), **case.options(arrays))
    return {"o": exact.o.astype(arrays["q"].dtype), "lse": exact.lse.astype(case.accumulator)}


def expected(case: Case, arrays: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    """What J and H have to give, by name."""
    how, qkv = case.options(arrays), [arrays[name] for name in "qkv"]
    j = testing.reference_jvp(*qkv, **tangents, **how)
    h = testing.reference_hvp(arrays["do"], *qkv, dlse=arrays.get("dlse"), **tangents, **how)
    return {**j._asdict(), **h._asdict()}


def computed(case: Case, views: dict[str, Any], tangents: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """What they give."""
    inputs, how = [views[name] for name in ("q", "k", "v", "o", "lse")], {**case.options(views), **extra}
    j = cupy_flash.derivatives.jvp(*inputs, **tangents, **how)
    h = cupy_flash.derivatives.hvp(views["do"], *inputs, dlse=views.get("dlse"), **tangents, **how)
    assert h.dscore is h.dscale is None
    return {"o": j[0], "lse": j[1], **{name: getattr(h, name) for name in DERIVATIVES}}


def assert_close(actual: dict[str, Any], exact: dict[str, Any], units: float, dtype: str) -> None:
    # why of all results: a gradient of a broadcast bias is a sum of as large terms, and may cancel to 0.
    size = max(1, *(np.abs(x).max(initial=0) for x in exact.values() if x is not None))
    for name, wanted in exact.items():
        if wanted is None:
            assert actual[name] is None
            continue
        error = np.abs(actual[name].astype(np.float64) - wanted).max(initial=0)
        assert error <= units * UNIT[dtype] * size, name


def check(case: Case, device: Device = NUMPY) -> None:
    """Compare both with FP64, of hostile arrays."""
    arrays = case.inputs()
    arrays |= results_of(case, arrays)
    tangents = tangents_of(arrays)
    guarded = {name: device.hostile(x, case.style) for name, x in {**arrays, **tangents}.items()}
    views = {name: g.view for name, g in guarded.items()}
    with dead_outputs(device, case):
        actual = computed(case, views, {name: views[name] for name in tangents})
    for g in guarded.values():
        g.check_untouched()
    units = 1e4 if case.dtype == "float64" else 64
    assert_close(actual, expected(case, arrays, tangents), units, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_are_what_the_specification_says(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_tiles(dtype: str, cpu_family: str) -> None:
    """Several of either path: the core chooses its own."""
    of_core = cpu_family == "core"
    case = dataclasses.replace(MANY, dtype=dtype, lengths=(70, 300) if of_core else (20, 30))
    arrays = case.inputs()
    arrays |= results_of(case, arrays)
    tangents = tangents_of(arrays)
    actual = computed(
        case, arrays, tangents, **({} if of_core else {"tuning": cupy_flash.Tuning(tile=(7, 8))})
    )
    for name, x in tangents.items():
        assert actual[name].dtype == x.dtype
    assert_close(actual, expected(case, arrays, tangents), 64, dtype)


def test_rows_that_jobs_share() -> None:
    """A key head of so many rows that the core gives each of two jobs a dK and dV of its own."""
    case = Case(batch=1, heads=(2, 1), lengths=(700, 60), head_dims=(16, 24), align="bottom_right",
                causal=True, sinks=True, dlse=True)  # fmt: skip
    arrays = case.inputs()
    arrays |= results_of(case, arrays)
    tangents = tangents_of(arrays)
    assert_close(computed(case, arrays, tangents), expected(case, arrays, tangents), 64, "float32")


def test_several_directions_are_each_of_them() -> None:
    arrays = MANY.inputs()
    arrays |= results_of(MANY, arrays)
    tangents = tangents_of(arrays, (6,))  # more than a job of the core has
    together = computed(MANY, arrays, tangents)
    for n in range(6):
        alone = computed(MANY, arrays, {name: x[n] for name, x in tangents.items()})
        for name, x in alone.items():
            np.testing.assert_array_equal(together[name][n], x, err_msg=name)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dbias", "dsinks"])
def test_a_missing_tangent_is_zero(name: str) -> None:
    arrays = MANY.inputs()
    arrays |= results_of(MANY, arrays)
    every = tangents_of(arrays)
    zeros = {other: x if other == name else np.zeros_like(x) for other, x in every.items()}
    assert_close(computed(MANY, arrays, {name: every[name]}), computed(MANY, arrays, zeros), 1e3, "float64")


def test_hvp_takes_what_jvp_gave() -> None:
    arrays = MANY.inputs()
    arrays |= results_of(MANY, arrays)
    tangents, how = tangents_of(arrays), MANY.options(arrays)
    inputs = [arrays[name] for name in ("q", "k", "v", "o", "lse")]
    known = cupy_flash.derivatives.jvp(*inputs, **tangents, **how)
    once = cupy_flash.derivatives.hvp(arrays["do"], *inputs, jvp=known, **tangents, **how)
    again = cupy_flash.derivatives.hvp(arrays["do"], *inputs, **tangents, **how)
    np.testing.assert_array_equal(once.dk, again.dk)
    wrong = cupy_flash.derivatives.hvp(arrays["do"], *inputs, jvp=(0 * known[0], known[1]), **tangents, **how)
    assert not np.allclose(wrong.dk, again.dk)


@pytest.mark.parametrize("used", [None, [5, 0, 3]])
def test_packed_sequences_are_each_of_them(used: list[int] | None) -> None:
    draw = np.random.default_rng(0)
    cut = np.array([0, 9, 9, 14], np.int32)
    shapes = {"q": (16, 4, 8), "k": (16, 2, 8), "v": (16, 2, 4), "do": (16, 4, 4), "bias": (3, 4, 9, 9)}
    arrays = {name: draw.standard_normal(shape) for name, shape in shapes.items()}
    tangents = {"d" + name: draw.standard_normal(shapes[name]) for name in ("q", "k", "v", "bias")}
    how: dict[str, Any] = {"causal": True, "align": "top_left", "dropout": 0.25, "seed": 3}
    qkv = [arrays[name] for name in "qkv"]
    packed = {"seqused_k": None if used is None else np.array(used, np.int32), "bias": arrays["bias"], **how}
    o, lse = cupy_flash.attention_varlen(*qkv, cut, cut, return_lse=True, **packed)
    j = cupy_flash.derivatives.jvp(*qkv, o, lse, cu_seqlens_q=cut, cu_seqlens_k=cut, **tangents, **packed)
    h = cupy_flash.derivatives.hvp(
        arrays["do"], *qkv, o, lse, cu_seqlens_q=cut, cu_seqlens_k=cut, **tangents, **packed
    )

    step = 1e-6
    sides = []
    for sign in (step, -step):
        now = {name: arrays[name] + sign * tangents["d" + name] for name in ("q", "k", "v", "bias")}
        moved = {**packed, "bias": now["bias"]}
        o, lse = cupy_flash.attention_varlen(now["q"], now["k"], now["v"], cut, cut, return_lse=True, **moved)
        grads = cupy_flash.attention_varlen_backward(
            arrays["do"], now["q"], now["k"], now["v"], o, lse, cut, cut, **moved
        )
        sides.append((o, np.where(np.isneginf(lse), 0, lse), *grads[:4]))
    for actual, after, before in zip((*j, *h[:4]), *sides, strict=True):
        np.testing.assert_allclose(actual, (after - before) / (2 * step), atol=1e-7)
    assert not j[0][14:].any()
    assert not h.dk[14:].any()


def test_the_gradient_is_the_transpose_of_the_tangent() -> None:
    """<c, J x> = <B c, x>, to rounding, in float32."""
    case = dataclasses.replace(MANY, dtype="float32", dlse=True)
    arrays = case.inputs()
    arrays |= results_of(case, arrays)
    tangents, how = tangents_of(arrays), case.options(arrays)
    inputs = [arrays[name] for name in ("q", "k", "v", "o", "lse")]
    o, lse = cupy_flash.derivatives.jvp(*inputs, **tangents, **how)
    gradients = cupy_flash.attention_backward(arrays["do"], *inputs, dlse=arrays["dlse"], **how)
    left = [(o * arrays["do"]).ravel(), (lse * arrays["dlse"]).ravel()]
    right = [(getattr(gradients, name) * x).ravel() for name, x in tangents.items()]
    sums = [np.concatenate(x).astype(np.float64) for x in (left, right)]
    size = np.sqrt(sum(np.square(x).sum() for x in sums))
    assert abs(sums[0].sum() - sums[1].sum()) < 32 * 2**-24 * size


@pytest.mark.slow
def test_memory_is_linear() -> None:
    """16384 queries and keys: the score matrix of one head would be 1 GB."""
    draw = np.random.default_rng(0)
    q, k, v, do, dq, dk, dv = (draw.standard_normal((16384, 8), np.float32) for _ in range(7))
    o, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    tracemalloc.start()
    cupy_flash.derivatives.hvp(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6


def small(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    q = np.ones((2, 4, 8), dtype)
    o, lse = cupy_flash.attention(q, q, q, return_lse=True)
    return {"q": q, "k": q, "v": q, "o": o, "lse": lse}


@pytest.mark.parametrize(
    ("tangents", "message"),
    [
        ({}, "no tangent is given"),
        ({"dq": np.ones((2, 4, 7), np.float32)}, r"dq has shape \(2, 4, 7\), q has \(2, 4, 8\)"),
        ({"dq": np.ones((3, 2, 2, 4, 8), np.float32)}, "dq has shape"),
        ({"dk": np.ones((2, 4, 8))}, "dk has dtype float64, k has float32"),
        ({"dv": np.ones((2, 4, 8), np.int32)}, "dv has dtype int32"),
        ({"dv": [1.0]}, "dv is a list"),
        ({"dbias": np.ones((4, 4), np.float32)}, "dbias is given, but no bias"),
        ({"dsinks": np.ones(2, np.float32)}, "dsinks is given, but no sinks"),
        (
            {"dq": np.ones((2, 2, 4, 8), np.float32), "dk": np.ones((2, 4, 8), np.float32)},
            "dk has no axis of directions, dq has an axis of 2 directions",
        ),
    ],
)
def test_tangents_that_fit_nothing_are_refused(tangents: dict[str, Any], message: str) -> None:
    for call in (cupy_flash.derivatives.jvp, lambda *x, **how: cupy_flash.derivatives.hvp(x[3], *x, **how)):
        with pytest.raises(InvalidArgumentsError, match=f"(?s){message}.*Try: "):
            call(*small().values(), **tangents)


def test_a_tangent_of_another_library_or_device_is_refused() -> None:
    q = adopt(small()["q"], "q")
    with pytest.raises(InvalidArgumentsError, match="dq is a torch array, q a numpy array"):
        check_tangents({"q": q}, {"dq": q._replace(library="torch")})
    with pytest.raises(InvalidArgumentsError, match="dq is on cuda:1, q on cpu"):
        check_tangents({"q": q}, {"dq": q._replace(device=("cuda", 1))})


@pytest.mark.parametrize("missing", ["o", "lse"])
def test_o_and_lse_are_needed(missing: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=f"{missing} is None"):
        cupy_flash.derivatives.jvp(**{**small(), missing: None}, dq=small()["q"])


def test_what_has_no_derivative_is_refused() -> None:
    whole = {name: x.astype(np.int32) for name, x in small().items()}
    with pytest.raises(InvalidArgumentsError, match="q has dtype int32"):
        cupy_flash.derivatives.jvp(**whole, dq=whole["q"])
    ml_dtypes = pytest.importorskip("ml_dtypes")
    eight = {name: x.astype(ml_dtypes.float8_e4m3fn) for name, x in small().items()}
    with pytest.raises(UnsupportedError, match="float8_e4m3fn has no gradient"):
        cupy_flash.derivatives.jvp(**eight, dq=eight["q"])


def test_the_jvp_given_to_hvp_must_be_that_of_the_direction() -> None:
    x = small()
    two = np.ones((2, *x["q"].shape), np.float32)
    known = cupy_flash.derivatives.jvp(**x, dq=x["q"])
    with pytest.raises(InvalidArgumentsError, match="jvp has other directions"):
        cupy_flash.derivatives.hvp(x["o"], **x, dq=two, jvp=known)
    with pytest.raises(InvalidArgumentsError, match=r"do has shape \(1, 4, 8\), o has \(2, 4, 8\)"):
        cupy_flash.derivatives.hvp(x["o"], **x, dq=x["q"], jvp=(known[0][:1], known[1]))


def test_what_has_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, lse = np.ones((2, 4, 520), np.float32), np.zeros((2, 4), np.float32)
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_80")
    why = "(?s)flash +{}.*head_dim 520 is above 512.*Try: "
    with pytest.raises(
        UnsupportedError, match=why.format("does not support tangents of head_dim 520, above 128")
    ):
        cupy_flash.derivatives.jvp(q, q, q, q, lse, dq=q)
    with pytest.raises(
        UnsupportedError, match=why.format("does not support second derivatives of .* head_dim 520, above 64")
    ):
        cupy_flash.derivatives.hvp(q, q, q, q, q, lse, dq=q)
