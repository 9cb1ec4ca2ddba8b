"""8-bit floats in NumPy: scales, dtypes of results, and what is refused before it could be misread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError, testing
from cupy_flash.parallel import mpi
from cupy_flash.plan import choose
from cupy_flash.testing import reference
from tests.communicator import in_threads
from tests.float8_cases import E4M3, Float8Case, check, check_packed
from tests.plan_cases import BASE
from tests.public import quantized

pytestmark = pytest.mark.usefixtures("cpu_family")

CASES = (
    Float8Case(),
    Float8Case(scales=("", "", "")),
    Float8Case(scales=("", "batch", ""), result="float16"),
    Float8Case(scales=("", "", "heads"), result="float32", style="strided"),
    Float8Case((4, 2), (70, 300), (40, 24), style="padded", options=(("causal", True), ("align", 3))),
    Float8Case((6, 2), (300, 65), (128, 128), layout="bshd", sinks=True, result="bfloat16"),
    Float8Case((4, 1), (33, 90), alibi=True, options=(("softcap", 3.0), ("align", "bottom_right"))),
    Float8Case((2, 1), (1, 700), style="reversed", options=(("scale", -0.05),)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_budget(case: Float8Case) -> None:
    """Of exact products: NumPy rounds no weight to 8 bits."""
    check(case, None)


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}])
def test_packed(options: dict[str, Any]) -> None:
    check_packed(None, **options)


def test_scales_are_factors_on_what_is_stored() -> None:
    """The reference of scaled inputs is that of the values; the library agrees on exact factors."""
    case = Float8Case((4, 2), (40, 50))
    qkv, options = case.inputs()
    wide = []
    for x, name in zip(qkv, ("q_scale", "k_scale", "v_scale"), strict=True):
        scale = np.broadcast_to(options.pop(name), (case.batch, 2)).astype(np.float64)
        wide.append(x.astype(np.float64) * np.repeat(scale, x.shape[1] // 2, axis=1)[:, :, None, None])
    exact = reference.reference_attention(*wide)
    given = case.inputs()[1]
    again = reference.reference_attention(*qkv, **given)
    np.testing.assert_allclose(again.o, exact.o, rtol=1e-12)
    np.testing.assert_allclose(again.lse, exact.lse, rtol=1e-12)


def test_uint8_stands_for_the_bits_if_all_scales_say_so() -> None:
    qkv, options = Float8Case(scales=("heads", "heads", "heads")).inputs()
    bits = [x.view(np.uint8) for x in qkv]
    plain = {"layout": options["layout"]}
    o = cupy_flash.attention(*quantized(*bits, options), **plain)
    np.testing.assert_array_equal(o, cupy_flash.attention(*quantized(*qkv, options), **plain))
    del options["v_scale"]
    with pytest.raises(InvalidArgumentsError, match="q has dtype uint8"):
        cupy_flash.attention(*quantized(*bits, options))


ONE = np.ones((2, 2, 8, 16), E4M3)
F16 = np.ones((2, 2, 8, 16), np.float16)
SCALE = np.ones(2, np.float32)
NOT_POSITIVE = np.array([1, 0], np.float32)

REFUSED: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("16-bit inputs", InvalidArgumentsError, r"k.scale is given, but q, k and v are float16",
     {"q": F16, "k": F16, "v": F16, "k_scale": SCALE}),
    ("mixed k", InvalidArgumentsError, r"k has dtype float16, q has float8_e4m3fn", {"k": F16}),
    ("mixed q", InvalidArgumentsError, r"k has dtype float8_e4m3fn, q has float16", {"q": F16}),
    ("bits and floats", InvalidArgumentsError, r"k has dtype float8_e4m3fn, q has uint8",
     {"q": ONE.view(np.uint8), "q_scale": SCALE, "k_scale": SCALE, "v_scale": SCALE}),
    ("shape", InvalidArgumentsError, r"q.scale has shape \(3,\), not \(2,\) or \(2, 2\)",
     {"q_scale": np.ones(3, np.float32)}),
    ("shape of a batch", InvalidArgumentsError, r"v.scale has shape \(1, 2\)",
     {"v_scale": np.ones((1, 2), np.float32)}),
    ("a number", InvalidArgumentsError, r"k.scale is a float, not an array", {"k_scale": 0.5}),
    ("dtype", InvalidArgumentsError, r"k.scale has dtype float64, not float32", {"k_scale": np.ones(2)}),
    ("zero", InvalidArgumentsError, r"k.scale holds 0.0", {"k_scale": NOT_POSITIVE}),
    ("negative", InvalidArgumentsError, r"q.scale holds -1.0", {"q_scale": -SCALE}),
    ("NaN", InvalidArgumentsError, r"v.scale holds nan", {"v_scale": np.nan * SCALE}),
    ("out of 8 bits", InvalidArgumentsError, r"out has dtype float8_e4m3fn, the result bfloat16 or float16",
     {"out": np.empty_like(ONE)}),
    ("precision", InvalidArgumentsError, r"precision='tf32' is for float32", {"precision": "tf32"}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "first_line", "changes"), [row[1:] for row in REFUSED],
                         ids=[row[0] for row in REFUSED])  # fmt: skip
def test_refused(error: type[Exception], first_line: str, changes: dict[str, Any]) -> None:
    given = {"q": ONE, "k": ONE, "v": ONE, **changes}
    qkv = quantized(given.pop("q"), given.pop("k"), given.pop("v"), given)
    plain = {name: x for name, x in given.items() if not name.endswith("_scale")}
    with pytest.raises(error, match=first_line) as caught:
        cupy_flash.attention(*qkv, **plain)
    assert str(caught.value).splitlines()[-1].startswith("Try: ")


@pytest.mark.parametrize("schedule", ["ring", "alltoall", "allgather"])
def test_no_parts_of_a_sequence(schedule: str) -> None:
    """Its result would be rounded to 8 bits, which nobody asked for."""
    with pytest.raises(UnsupportedError, match="a sequence in parts has results in the dtype of q"):
        in_threads(2, lambda comm: mpi.ring_attention(ONE, ONE, ONE, comm, schedule=schedule))


def test_no_gradient_and_no_textbook() -> None:
    lse = np.zeros((2, 2, 8), np.float32)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn has no gradient") as caught:
        cupy_flash.attention_backward(ONE, ONE, ONE, ONE, ONE, lse)
    assert "Try: q, k and v times their scales as bfloat16" in str(caught.value)
    with pytest.raises(UnsupportedError, match="naive_attention takes no scales"):
        cupy_flash.naive_attention(ONE, ONE, ONE)


def test_other_gpus_refuse_with_every_reason() -> None:
    problem = BASE._replace(dtype="float8_e4m3fn", of_float8="bfloat16")
    for arch in ("sm_70", "sm_80", "sm_86", "sm_100"):
        with pytest.raises(UnsupportedError) as caught:
            choose.choose(problem, arch)
        text = str(caught.value)
        assert "hopper" in text
        assert "fp8" in text
        assert "simple" in text
        assert "Try: q, k and v times their scales as bfloat16" in text


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"of_float8": "float32"}, "writes float16 and bfloat16, not float32"),
        (
            {"bias": (1, 1, 1, 1), "bias_dtype": "float32", "dropout": 0.1},
            "its inner loop has no bias or dropout",
        ),
        ({"head_dim": 264}, "head_dim 264 is above 256"),
        ({"reproducible": "prefill"}, "the order of sums of float8_e4m3fn is not guaranteed"),
        ({"reproducible": "device"}, "whose order of sums depends on the architecture"),
        ({"tile": (17, 19)}, r"tile \(17, 19\) is not built"),
        ({"in_rows": False, "aligned": False}, "must be contiguous"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_refused_where_there_is_a_kernel(arch: str, changes: dict[str, Any], reason: str) -> None:
    problem = BASE._replace(dtype="float8_e4m3fn", of_float8="bfloat16")
    assert choose.choose(problem, arch).launches
    with pytest.raises(UnsupportedError, match=reason):
        choose.choose(problem._replace(**changes), arch)


def test_rows_that_start_anywhere() -> None:
    """Hopper's bulk copies want boundaries of 16 bytes; the other kernel does not."""
    problem = BASE._replace(dtype="float8_e4m3fn", of_float8="bfloat16", aligned=False)
    assert choose.choose(problem, "sm_89").family == "fp8"
    with pytest.raises(UnsupportedError, match="16-byte boundaries"):
        choose.choose(problem, "sm_90")


def test_explain_takes_the_scales() -> None:
    scaled = cupy_flash.QuantizedArray(ONE, SCALE)
    text = cupy_flash.explain(scaled, scaled, scaled, arch="sm_90a")
    assert "flash_forward_fp8_sm90_e4m3_d64_band_192x128" in text


def test_a_budget_of_8_bits_is_not_met_by_4() -> None:
    """What the tests allow to weights of e4m3, weights with half of its mantissa exceed."""
    qkv, options = Float8Case(lengths=(64, 256)).inputs()
    exact = reference.forward(*qkv, reference.Options(**options))
    for bits, within in ((3, True), (1, False)):
        mantissa, exponent = np.frexp(exact.p)
        p = np.ldexp(np.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
        o = (p @ exact.v).astype(np.float32)
        verdict = testing.error_budget({"o": o}, *qkv, precision="e4m3", **options)[0]
        assert verdict.within == within, verdict
