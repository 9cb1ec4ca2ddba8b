"""The public API on the tensor-core kernels, simulated: what they take, over several of their tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupy_flash import plan
from tests.cases import Case, feature_cases, head_dim_cases
from tests.checks import Device, check_backward, check_forward

pytestmark = [pytest.mark.simulator, pytest.mark.parametrize("device", ["sm_80"], indirect=True)]

# What sends a call to these kernels: rows on 16-byte boundaries, so head dims in multiples of 8.
TAKEN = {"dtype": ("float16", "bfloat16", "float32"), "style": ("aligned",)}
LENGTHS = ((64, 64), (1, 1), (7, 9), (65, 63), (140, 70), (33, 200), (1, 129))
HEAD_DIMS = ((64, 64), (32, 32), (40, 24), (8, 16))
FEATURES = feature_cases(LENGTHS, HEAD_DIMS, heads=((2, 2), (2, 1)), **TAKEN)
# Only causal, window and scale: kernels of their own, which scale after the row maximum.
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


@pytest.fixture(autouse=True)
def tensor_cores_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the plan fail instead of falling back: these cases are for the preferred family."""
    preferred = tuple(family for family in plan.FAMILIES if family.NAME != "simple")
    monkeypatch.setattr(plan, "FAMILIES", preferred)
    plan.choose.cache_clear()
    yield
    plan.choose.cache_clear()


@pytest.mark.parametrize("case", [*FEATURES, *PLAIN_FEATURES], ids=str)
def test_features(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [*FEATURES, *PLAIN_FEATURES], ids=str)
def test_gradients(case: Case, deterministic: bool, device: Device) -> None:
    check_backward(case, device, deterministic=deterministic)


HEAD_DIM_CASES = [
    case
    for case in head_dim_cases(
        (8, 40, 64, 96, 128, 160, 192, 256), lengths=(70, 75), heads=(1, 1), style="aligned"
    )
    if case.dtype != "float64"
]


@pytest.mark.parametrize("case", HEAD_DIM_CASES, ids=str)
def test_head_dims(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", HEAD_DIM_CASES, ids=str)
def test_gradients_of_head_dims(case: Case, deterministic: bool, device: Device) -> None:
    check_backward(case, device, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_tf32_on_request(head_dim: int, device: Device) -> None:
    """Ten-bit products, and no worse."""
    case = Case(
        lengths=(70, 140), head_dims=(head_dim, head_dim), heads=(1, 1), style="aligned", softcap=20.0
    )
    check_forward(case, Device(device.name, device.xp, float32_precision="tf32"), precision="tf32")
