"""The public API on Turing's kernels, simulated: every class of head dims."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.checks import Device, check_backward, check_forward

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.sampled(96),
    pytest.mark.usefixtures("tensor_cores_only"),
    pytest.mark.parametrize("device", ["sm_75"], indirect=True),
]

HEAD_DIMS = (
    (32, 32),
    (40, 64),
    (96, 80),
    (128, 128),
    (192, 128),
    (161, 192),
    (256, 256),
    (100, 255),
    (200, 72),
)
CASES = [
    Case(dtype="float16", batch=1, heads=(2, 1), lengths=(70, 75), head_dims=head_dims, causal=True,
         align="bottom_right", style=style, **features)
    for n, head_dims in enumerate(HEAD_DIMS)
    for style, features in (
        ("padded" if n % 2 else "aligned", {}),
        ("aligned", {"bias": "1hqk", "dropout": 0.2, "softcap": 5.0, "sinks": True}),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, deterministic: bool, device: Device) -> None:
    check_backward(case, device, reproducible="run" if deterministic else None)
