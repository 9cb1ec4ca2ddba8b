"""flash_hessian against FP64: what it takes, over several of its tiles, and every class of code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError, testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import flash
from tests.block_cases import BlockCase
from tests.cases import Case, feature_cases
from tests.checks import Device, dead_outputs
from tests.cpu import test_second_order as on_cpu
from tests.plan_cases import BASE
from tests.simulator import sanitized
from tests.span_cases import SpanCase

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.sampled(48),
    pytest.mark.usefixtures("tensor_cores_only"),
    pytest.mark.parametrize("device", ["sm_80"], indirect=True),
]

EVERY_FAMILY = families.FAMILIES
# What only scales, caps and shifts scores.
FEATURES = feature_cases(
    lengths=((64, 64), (1, 1), (7, 9), (65, 63), (140, 70), (33, 200), (1, 129)),
    head_dims=((64, 64), (32, 32), (40, 24), (33, 65), (7, 1)),
    heads=((2, 2), (2, 1), (4, 2)),
    scale=(None, 0.3, -0.2),
    mask=(None,),
    bias=(None,),
    bias_dtype=(None,),
    dropout=(0.0,),
    dlse=(False, True),
    dtype=("float16", "bfloat16", "float32"),
    style=("aligned", "padded", "reversed"),
)
# float32 has no class above 64.
FEATURES = [case for case in FEATURES if case.dtype != "float32" or max(case.head_dims) <= 64]
# Every class of head dims, on and between them.
CLASSES = [
    Case(dtype=dtype, batch=1, heads=(2, 1), lengths=(130, 75), head_dims=head_dims, causal=True,
         align="bottom_right", softcap=softcap, alibi=alibi, sinks=True, dlse=True, style="aligned")
    for dtype, head_dims in (
        *((dtype, dims) for dtype in ("float16", "bfloat16") for dims in ((64, 64), (128, 128), (127, 65))),
        ("float32", (64, 64)), ("float32", (63, 30)),
    )
    for softcap, alibi in ((None, None), (3.0, "h"))
]  # fmt: skip


def derivatives(case: Case, arrays: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    """H of a case, from the tangents of o and lse that are exact but for their dtypes."""
    inputs = [arrays[name] for name in ("do", "q", "k", "v", "o", "lse")]
    return cupy_flash.derivatives.hvp(
        *inputs, dlse=arrays.get("dlse"), jvp=(arrays["o_dot"], arrays["lse_dot"]), **tangents,
        **case.options(arrays),
    )._asdict()  # fmt: skip


def made(case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arrays of a case, a tangent of each, and what has to come out."""
    arrays = case.inputs()
    arrays |= on_cpu.results_of(case, arrays)
    tangents = on_cpu.tangents_of(arrays)
    return arrays, tangents, exact(case, arrays, tangents)


def exact(case: Case, arrays: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    """What has to come out; the tangents of o and lse go to the arrays."""
    wanted = on_cpu.expected(case, arrays, tangents)
    arrays["o_dot"] = wanted.pop("o").astype(arrays["q"].dtype)
    arrays["lse_dot"] = wanted.pop("lse").astype(case.accumulator)
    return wanted


def check(case: Case, device: Device) -> None:
    arrays, tangents, wanted = made(case)
    guarded = {name: device.hostile(x, case.style) for name, x in {**arrays, **tangents}.items()}
    views = {name: g.view for name, g in guarded.items()}
    with dead_outputs(device, case):
        actual = derivatives(case, views, {name: views[name] for name in tangents})
    for g in guarded.values():
        g.check_untouched()
    # As of flash_tangent.
    units = 256 if case.dtype == "float32" else 64
    on_cpu.assert_close(actual, wanted, units, case.dtype)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_features(case: Case, device: Device) -> None:
    check(case, device)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize("case", CLASSES, ids=str)
def test_classes(case: Case, arch: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tiles of 163 and of 99 KiB."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    check(case, device)


@pytest.mark.parametrize("missing", [(), ("dq",), ("dk",), ("dv",)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_mistakes_show(softcap: float | None, missing: tuple[str, ...], device: Device) -> None:
    """All that a direction has, in every way to its products: what mutate.py runs for each mutant."""
    case = Case(dtype="float16", batch=1, lengths=(150, 140), heads=(2, 1), causal=True, align="bottom_right",
                softcap=softcap, alibi="h" if softcap else None, sinks=True, dlse=True,
                style="aligned")  # fmt: skip
    arrays = case.inputs()
    arrays["sinks"] += 4  # as much as all keys together
    arrays |= on_cpu.results_of(case, arrays)
    tangents = {name: x for name, x in on_cpu.tangents_of(arrays).items() if name not in missing}
    wanted = exact(case, arrays, tangents)
    on_cpu.assert_close(derivatives(case, arrays, tangents), wanted, 16, case.dtype)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsinks"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_missing_tangent_is_zero(dtype: str, name: str, device: Device) -> None:
    """Its products are left out; the tile that would hold it is never read."""
    case = Case(dtype=dtype, lengths=(70, 140), heads=(2, 1), sinks=True, style="aligned")
    arrays, every, _ = made(case)
    zeros = {other: x if other == name else np.zeros_like(x) for other, x in every.items()}
    alone = derivatives(case, arrays, {name: every[name]})
    for result, x in derivatives(case, arrays, zeros).items():
        np.testing.assert_array_equal(alone[result], x, err_msg=result)


@pytest.mark.parametrize("align", [-200, -66, 66, 200])
def test_bands_that_miss_the_keys(align: int, device: Device) -> None:
    """Every derivative is written where no tile is visited, too."""
    check(Case(dtype="float16", lengths=(130, 70), window=(5, 4), align=align, sinks=True, dlse=True), device)


@pytest.mark.parametrize("mask", ["mask", "Spans", "BlockMask"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_mask_leaves_it_to_the_simple_kernels(
    dtype: str, mask: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads none: alone it refuses, and the plan of a call has kernels that do."""
    plain = Case(dtype=dtype, batch=1, lengths=(70, 140), head_dims=(32, 32), heads=(2, 1), style="aligned")
    case: Any = {
        "mask": replace(plain, mask="qk"), "Spans": SpanCase(plain), "BlockMask": BlockCase(plain, (16, 32))
    }[mask]  # fmt: skip
    arrays, tangents, wanted = made(case)
    with pytest.raises(UnsupportedError, match=f"second derivatives with {mask}\\b"):
        derivatives(case, arrays, tangents)
    monkeypatch.setattr(families, "FAMILIES", EVERY_FAMILY)
    memo.forget()
    on_cpu.assert_close(derivatives(case, arrays, tangents), wanted, 64, dtype)


def test_several_directions_are_each_of_them(device: Device) -> None:
    case = Case(dtype="bfloat16", lengths=(40, 70), style="aligned", causal=True, align="bottom_right")
    arrays = case.inputs()
    arrays |= on_cpu.results_of(case, arrays)
    inputs = [arrays[name] for name in ("do", "q", "k", "v", "o", "lse")]
    tangents = on_cpu.tangents_of(arrays, (3,))
    together = cupy_flash.derivatives.hvp(*inputs, **tangents, **case.options(arrays))
    for n in range(3):
        one = {name: x[n] for name, x in tangents.items()}
        alone = cupy_flash.derivatives.hvp(*inputs, **one, **case.options(arrays))
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(together, name)[n], getattr(alone, name), err_msg=name)


def test_packed_sequences(device: Device) -> None:
    """Sequences of their own lengths, some empty, keys in use; other rows are 0."""
    rng = np.random.default_rng(0)
    cuts_q, cuts_k = np.int32([0, 5, 5, 75, 140]), np.int32([0, 9, 21, 21, 230])
    used = np.int32([9, 12, 0, 170])
    q, do, dq = (rng.standard_normal((143, 2, 32)).astype(np.float16) for _ in range(3))
    k, v, dk, dv = (rng.standard_normal((232, 1, 32)).astype(np.float16) for _ in range(4))
    how = {
        "causal": True,
        "align": "bottom_right",
        "seqused_k": used,
        "max_seqlen_q": 70,
        "max_seqlen_k": 209,
    }
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts_q, cuts_k, return_lse=True, **how)
    actual = cupy_flash.derivatives.hvp(
        do, q, k, v, o, lse, cu_seqlens_q=cuts_q, cu_seqlens_k=cuts_k, dq=dq, dk=dk, dv=dv, **how
    )
    assert not actual.dq[140:].any()
    assert not actual.dk[191:].any()
    assert not actual.dv[191:].any()
    for n in range(4):
        rows, keys = slice(*cuts_q[n : n + 2]), slice(cuts_k[n], cuts_k[n] + used[n])
        if rows.start == rows.stop:
            continue
        do_, q_, dq_ = (x[rows].swapaxes(0, 1)[None] for x in (do, q, dq))
        k_, v_, dk_, dv_ = (x[keys].swapaxes(0, 1)[None] for x in (k, v, dk, dv))
        wanted = testing.reference_hvp(
            do_, q_, k_, v_, dq=dq_, dk=dk_, dv=dv_, causal=True, align="bottom_right"
        )
        found = {"dq": actual.dq[rows], "dk": actual.dk[keys], "dv": actual.dv[keys]}
        found = {name: x.swapaxes(0, 1)[None] for name, x in found.items()}
        on_cpu.assert_close(found, {name: getattr(wanted, name) for name in found}, 64, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_schedule_does_not_change_a_bit(dtype: str, device: Device) -> None:
    case = Case(dtype=dtype, lengths=(65, 200), heads=(4, 2), sinks=True, softcap=2.0)
    arrays, tangents, _ = made(case)
    results = []
    for policy in ("late", "early", "random"):
        with simulator.schedule(policy):
            results.append(derivatives(case, arrays, tangents))
    for other in results[1:]:
        for name, x in results[0].items():
            np.testing.assert_array_equal(x, other[name], err_msg=name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": (1, 1, 4096, 4096)}, "second derivatives with mask"),
        (
            {"bias": (1, 1, 4096, 4096), "bias_dtype": "float32", "dropout": 0.1},
            "second derivatives with bias or dropout",
        ),
        ({"head_dim": 192}, "head_dim 192, above 128"),
        ({"dtype": "float32", "head_dim": 96, "head_dim_v": 96}, "head_dim 96, above 64"),
    ],
)
def test_what_it_leaves_to_the_simple_kernels(options: dict[str, Any], reason: str, device: Device) -> None:
    problem = BASE._replace(direction="hvp", **options)
    assert any(reason in given for given in flash.refusals(problem, architecture("sm_80")))


_SANITIZED = """
import dataclasses
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_80"
import numpy as np
from cupy_flash.device import simulator
from tests.cases import Case
from tests.checks import Device
from tests.simulator.test_flash_hessian import check
device = Device("sm_80", np)
plain = Case(
    dtype="float16", batch=1, heads=(2, 1), lengths=(70, 133), head_dims=(35, 30), causal=True, align=63
)
for case in (plain, dataclasses.replace(plain, dtype="float32", softcap=3.0, alibi="h", sinks=True)):
    for policy in SCHEDULES:
        with simulator.schedule(policy):
            check(case, device)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, device: Device) -> None:
    """No access out of bounds, no undefined behaviour, no race."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
