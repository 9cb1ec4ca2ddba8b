"""score= on the simple and the flash kernels, in the simulator: the C text of functions against FP64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import Unsupported
from cupy_flash.device import simulator
from tests.cases import Case
from tests.checks import Device, check_backward, check_forward
from tests.cpu import test_functions
from tests.function_cases import MADE, FunctionCase, random_function, without_gradients
from tests.simulator import sanitized

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
    frozen = without_gradients(case)
    check_forward(frozen, device)  # type: ignore[arg-type]
    check_backward(frozen, device)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
@pytest.mark.parametrize("case", FLASH, ids=str)
def test_on_tensor_cores(
    case: FunctionCase, device: Device, deterministic: bool, tensor_cores_only: None
) -> None:
    frozen = without_gradients(case)
    if not deterministic:
        check_forward(frozen, device)  # type: ignore[arg-type]
    check_backward(frozen, device, deterministic=deterministic)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_75"], indirect=True)
def test_on_turing(device: Device, tensor_cores_only: None) -> None:
    case = without_gradients(FLASH[0])
    check_forward(case, device)  # type: ignore[arg-type]
    check_backward(case, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [3])
def test_random_functions_are_numpys(seed: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, in which both have the same sums but for their order."""
    draw = np.random.default_rng(seed)
    function = cupy_flash.score(random_function(draw))
    q, k, v, do = draw.standard_normal((4, 1, 2, 40, 8))
    how: dict[str, Any] = {
        "score": function,
        "score_args": (draw.standard_normal((2, 4)), draw.integers(0, 4, 5).astype(np.int32)),
    }
    results = []
    for driver in ("simulator:sm_61", ""):
        monkeypatch.setenv("CUPY_FLASH_DRIVER", driver)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **how)
        results.append((o, lse, *cupy_flash.attention_backward(do, q, k, v, o, lse, **how)[:3]))
    for ours, theirs in zip(*results, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", ["early", "random"])
def test_schedule_does_not_change_a_bit(policy: str, device: Device) -> None:
    case, results = without_gradients(CASES[0]), []
    arrays = case.inputs()
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    for chosen in ("late", policy):
        with simulator.schedule(chosen):
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, **case.options(arrays))
            grads = cupy_flash.attention_backward(do, q, k, v, o, lse, **case.options(arrays))
        results.append([x.tobytes() for x in (o, lse, *grads) if x is not None])
    assert results[0] == results[1]


def test_packed_positions(device: Device) -> None:
    test_functions.check_packed(device, learned=())


def test_elements_outside_of_an_argument_are_cut_off(device: Device) -> None:
    """On a GPU nobody looks at indices before the kernel does; it reads nothing else."""
    q = np.random.default_rng(0).standard_normal((1, 1, 6, 8)).astype(np.float32)
    given = device.hostile(np.arange(4, dtype=np.float32), "strided")
    o = cupy_flash.attention(
        q, q, q, score=cupy_flash.score(lambda s, b, h, i, j, x: s + x[i - j]), score_args=(given.view,)
    )
    i, j = np.ogrid[:6, :6]
    bias = np.clip(i - j, 0, 3).astype(np.float32)
    assert np.allclose(o, cupy_flash.attention(q, q, q, bias=bias), atol=1e-6)


_SANITIZED = """
from tests.checks import Device
from tests.simulator.test_functions import CASES, check_backward, check_forward, without_gradients
case = without_gradients(CASES[1])
check_forward(case, Device("simulated"))
check_backward(case, Device("simulated"))
"""


@pytest.mark.slow
def test_sanitizers_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions too: integers wrap, and no index leaves its array."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_61")
    done = sanitized.run("address", _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_the_kernels_do_not_do_is_refused(device: Device) -> None:
    q = np.ones((1, 4, 6, 8), np.float32)
    slopes = np.ones(4, np.float32)
    o, lse = cupy_flash.attention(q, q, q, return_lse=True)
    with pytest.raises(Unsupported, match="gives no gradients of what a score function learns"):
        cupy_flash.attention_backward(o, q, q, q, o, lse, score=MADE["alibi"][0], score_args=(slopes,))
    many = cupy_flash.score(lambda s, b, h, i, j, *numbers: sum(numbers, s))
    with pytest.raises(Unsupported, match="takes at most 16 arguments"):
        cupy_flash.attention(q, q, q, score=many, score_args=(slopes[0:1].reshape(()),) * 17)
