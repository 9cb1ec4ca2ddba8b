"""flash_tangent against FP64: what it takes, over several of its tiles, and every class of code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupy_flash
from bench.machine.blas import one_thread
from cupy_flash import testing
from cupy_flash.device import simulator
from tests.cases import Case, feature_cases
from tests.checks import Device, dead_outputs
from tests.cpu import test_second_order as on_cpu
from tests.simulator import sanitized

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.sampled(64),
    pytest.mark.usefixtures("tensor_cores_only"),
    pytest.mark.parametrize("device", ["sm_80"], indirect=True),
]

TAKEN = {
    "dtype": ("float16", "bfloat16", "float32"),
    "style": ("aligned", "padded", "reversed"),
}
LENGTHS = ((64, 64), (1, 1), (7, 9), (65, 63), (140, 70), (33, 200), (1, 129))
HEAD_DIMS = ((64, 64), (32, 32), (40, 24), (33, 65), (7, 1))
FEATURES = feature_cases(LENGTHS, HEAD_DIMS, heads=((2, 2), (2, 1)), dlse=(False,), **TAKEN)
# Only causal, window and scale: kernels of their own.
PLAIN = {"mask": (None,), "bias": (None,), "bias_dtype": (None,), "softcap": (None,), "alibi": (None,)}
PLAIN_FEATURES = feature_cases(
    LENGTHS,
    HEAD_DIMS,
    heads=((2, 2), (2, 1)),
    scale=(None, 0.3),
    dropout=(0.0,),
    dlse=(False,),
    **PLAIN,
    **TAKEN,
)
# Every class of head dims, on and between them.
CLASSES = [
    Case(dtype=dtype, batch=1, heads=(2, 1), lengths=(130, 75), head_dims=head_dims, causal=True,
         align="bottom_right", softcap=softcap, sinks=True, style="aligned")
    for dtype in ("float16", "bfloat16", "float32")
    for head_dims in ((64, 64), (128, 128), (127, 65))
    for softcap in (None, 3.0)
]  # fmt: skip


def tangents_of(case: Case, arrays: dict[str, Any], tangents: dict[str, Any], **extra: Any) -> dict[str, Any]:
    inputs = [arrays[name] for name in ("q", "k", "v", "o", "lse")]
    o, lse = cupy_flash.derivatives.jvp(*inputs, **tangents, **{**case.options(arrays), **extra})
    return {"o": o, "lse": lse}


def exact(case: Case, arrays: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    with one_thread():
        qkv = [arrays[name] for name in "qkv"]
        return testing.reference_jvp(*qkv, **tangents, **case.options(arrays))._asdict()


def made(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a case, and a tangent of each."""
    arrays = case.inputs()
    arrays |= on_cpu.results_of(case, arrays)
    return arrays, on_cpu.tangents_of(arrays)


def check(case: Case, device: Device) -> None:
    arrays, tangents = made(case)
    guarded = {name: device.hostile(x, case.style) for name, x in {**arrays, **tangents}.items()}
    views = {name: g.view for name, g in guarded.items()}
    with dead_outputs(device, case):
        actual = tangents_of(case, views, {name: views[name] for name in tangents})
    for g in guarded.values():
        g.check_untouched()
    # Those of on_cpu.check; tf32x3 multiplies to 2^-22 where a float product errs by 2^-24.
    units = 256 if case.dtype == "float32" else 64
    on_cpu.assert_close(actual, exact(case, arrays, tangents), units, case.dtype)


@pytest.mark.parametrize("case", [*FEATURES, *PLAIN_FEATURES], ids=str)
def test_features(case: Case, device: Device) -> None:
    check(case, device)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize("case", CLASSES, ids=str)
def test_classes(case: Case, arch: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tiles of 163 and of 99 KiB."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    check(case, device)


@pytest.mark.parametrize("missing", [(), ("dq", "dbias")])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_mistakes_show(softcap: float | None, missing: tuple[str, ...], device: Device) -> None:
    """All that a tangent has, in both kinds: what tests/simulator/mutate.py runs for every mutant."""
    plain = Case(dtype="float16", batch=1, lengths=(70, 140), heads=(2, 1), causal=True, align="bottom_right",
                 sinks=True, style="aligned")  # fmt: skip
    case = dataclasses.replace(plain, bias="hqk", softcap=softcap, dropout=0.3) if softcap else plain
    arrays = case.inputs()
    arrays["sinks"] += 4  # as much as all keys together
    arrays |= on_cpu.results_of(case, arrays)
    tangents = on_cpu.tangents_of(arrays)
    tangents = {name: x for name, x in tangents.items() if name not in missing}
    actual = tangents_of(case, arrays, tangents)
    on_cpu.assert_close(actual, exact(case, arrays, tangents), 64, case.dtype)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dbias", "dsinks"])
@pytest.mark.parametrize("bias", [None, "hq1"])
def test_a_missing_tangent_is_zero(name: str, bias: str | None, device: Device) -> None:
    """Its products are left out; the tile that would hold it is never read."""
    case = Case(dtype="float16", lengths=(70, 140), heads=(2, 1), bias=bias, sinks=True, style="aligned")
    arrays, every = made(case)
    if name not in every:
        pytest.skip("there is no bias")
    zeros = {other: x if other == name else np.zeros_like(x) for other, x in every.items()}
    alone = tangents_of(case, arrays, {name: every[name]})
    for result, x in tangents_of(case, arrays, zeros).items():
        np.testing.assert_array_equal(alone[result], x, err_msg=result)


@pytest.mark.parametrize("align", [-200, -66, 66, 200])
def test_bands_that_miss_the_keys(align: int, device: Device) -> None:
    """Every tangent is written where no tile is visited, too."""
    check(Case(dtype="float16", lengths=(130, 70), window=(5, 4), align=align, sinks=True), device)


def test_masked_keys_may_hold_anything(device: Device) -> None:
    """NaN in keys that no query sees, and in their tangents, do not reach the result."""
    for mask in (None, "k"):
        case = Case(dtype="float16", batch=1, heads=(1, 1), lengths=(70, 140), window=(None, 29),
                    align="top_left", mask=mask, style="aligned")  # fmt: skip
        arrays, tangents = made(case)
        if mask:
            arrays["mask"][90:] = False
            arrays |= on_cpu.results_of(case, arrays)
        wanted = exact(case, arrays, tangents)
        for x in (arrays["k"], tangents["dk"]):
            x[:, :, 90 if mask else 100 :] = np.nan
        on_cpu.assert_close(tangents_of(case, arrays, tangents), wanted, 64, case.dtype)


def test_several_directions_are_each_of_them(device: Device) -> None:
    case = Case(dtype="bfloat16", lengths=(40, 70), style="aligned", causal=True, align="bottom_right")
    arrays = case.inputs()
    arrays |= on_cpu.results_of(case, arrays)
    tangents = on_cpu.tangents_of(arrays, (3,))
    together = tangents_of(case, arrays, tangents)
    for n in range(3):
        alone = tangents_of(case, arrays, {name: x[n] for name, x in tangents.items()})
        for name, x in alone.items():
            np.testing.assert_array_equal(together[name][n], x, err_msg=name)


def test_packed_sequences(device: Device) -> None:
    """Sequences of their own lengths, some empty, keys in use; rows of none are 0."""
    rng = np.random.default_rng(0)
    cuts_q, cuts_k = np.int32([0, 5, 5, 75, 140]), np.int32([0, 9, 21, 21, 230])
    used = np.int32([9, 12, 0, 170])
    q, dq = (rng.standard_normal((143, 2, 32)).astype(np.float16) for _ in range(2))
    k, v, dk, dv = (rng.standard_normal((232, 1, 32)).astype(np.float16) for _ in range(4))
    how = {"causal": True, "align": "bottom_right", "seqused_k": used}
    cuts = (cuts_q, cuts_k, 70, 209)
    o, lse = cupy_flash.attention_varlen(q, k, v, cuts_q, cuts_k, max_seqlen_q=70, max_seqlen_k=209,
                                         return_lse=True, **how)  # fmt: skip
    do, dlse = cupy_flash.derivatives.jvp(
        q, k, v, o, lse, cu_seqlens_q=cuts[0], cu_seqlens_k=cuts[1], max_seqlen_q=70, max_seqlen_k=209,
                                               dq=dq, dk=dk, dv=dv, **how)  # fmt: skip
    assert not do[140:].any()
    for n in range(4):
        rows, keys = slice(*cuts_q[n : n + 2]), slice(cuts_k[n], cuts_k[n] + used[n])
        if rows.start == rows.stop:
            continue
        one = [x[s].swapaxes(0, 1)[None] for x, s in ((q, rows), (k, keys), (v, keys))]
        along = {
            name: x[s].swapaxes(0, 1)[None]
            for name, x, s in (("dq", dq, rows), ("dk", dk, keys), ("dv", dv, keys))
        }
        wanted = testing.reference_jvp(*one, **along, causal=True, align="bottom_right")._asdict()
        actual = {"o": do[rows].swapaxes(0, 1)[None], "lse": dlse[:, rows][None]}
        on_cpu.assert_close(actual, wanted, 64, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_schedule_does_not_change_a_bit(dtype: str, device: Device) -> None:
    case = Case(dtype=dtype, lengths=(65, 200), heads=(4, 2), bias="1hqk", sinks=True, dropout=0.1)
    arrays, tangents = made(case)
    results = []
    for policy in ("late", "early", "random"):
        with simulator.schedule(policy):
            results.append(tangents_of(case, arrays, tangents))
    for other in results[1:]:
        for name, x in results[0].items():
            np.testing.assert_array_equal(x, other[name], err_msg=name)


def test_tangents_that_lie_otherwise_take_the_simple_kernel(device: Device) -> None:
    """Rows of the tangents count as those of the arrays do."""
    case = Case(dtype="float16", lengths=(16, 16), style="aligned")
    arrays, tangents = made(case)
    tangents["dk"] = np.asfortranarray(tangents["dk"])
    with pytest.raises(cupy_flash.UnsupportedError, match="last axis of every tensor"):
        tangents_of(case, arrays, tangents)


_SANITIZED = """
import dataclasses
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_80"
import numpy as np
from cupy_flash.device import simulator
from tests.cases import Case
from tests.checks import Device
from tests.simulator.test_flash_tangent import check
device = Device("sm_80", np)
plain = Case(
    dtype="float16", batch=1, heads=(2, 1), lengths=(70, 133), head_dims=(35, 30), causal=True, align=63
)
for case in (plain, dataclasses.replace(plain, dtype="float32", bias="hq1", softcap=3.0, dropout=0.2)):
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
