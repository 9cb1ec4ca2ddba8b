"""The public API on the tensor-core kernels, simulated: what they take, over several of their tiles."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupy_flash
from cupy_flash import testing
from tests.cases import Case, feature_cases, head_dim_cases
from tests.checks import Device, check_backward, check_forward
from tests.simulator.units import aligned

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.sampled(96),
    pytest.mark.usefixtures("tensor_cores_only"),
    pytest.mark.parametrize("device", ["sm_80"], indirect=True),
]

# What sends a call to these kernels: rows in one piece, wherever they start.
TAKEN = {
    "dtype": ("float16", "bfloat16", "float32"),
    "style": ("aligned", "padded", "reversed"),
}
LENGTHS = ((64, 64), (1, 1), (7, 9), (65, 63), (140, 70), (33, 200), (1, 129))
HEAD_DIMS = ((64, 64), (32, 32), (40, 24), (33, 65), (7, 1))
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


@pytest.mark.parametrize("case", [*FEATURES, *PLAIN_FEATURES], ids=str)
def test_features(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [*FEATURES, *PLAIN_FEATURES], ids=str)
def test_gradients(case: Case, deterministic: bool, device: Device) -> None:
    check_backward(case, device, reproducible="run" if deterministic else None)


@pytest.mark.parametrize("pattern", ["bhqk", "k", "hq1"])
def test_dbias_of_several_tiles(pattern: str, device: Device) -> None:
    """Tiles of the bias, and strips of the head dim: two of Q and K, one of dO and V."""
    case = Case(dtype="float16", batch=2, heads=(2, 1), lengths=(140, 75), head_dims=(72, 40), bias=pattern,
                causal=True, align="bottom_right", softcap=5.0, style="aligned")  # fmt: skip
    check_backward(case, device)


HEAD_DIM_CASES = [
    case
    for case in head_dim_cases(
        (8, 40, 64, 96, 128, 160, 192, 256), lengths=(70, 75), heads=(1, 1), style="aligned"
    )
    if case.dtype != "float64"
]
# Of every class, wherever rows start.
HEAD_DIM_CASES += [
    Case(dtype=dtype, batch=1, heads=(1, 1), lengths=(70, 75), head_dims=head_dims)
    for dtype in ("bfloat16", "float32")
    for head_dims in ((1, 1), (7, 31), (63, 33), (65, 95), (127, 127), (191, 127), (129, 191), (255, 193))
]


@pytest.mark.parametrize("case", HEAD_DIM_CASES, ids=str)
def test_head_dims(case: Case, device: Device) -> None:
    check_forward(case, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", HEAD_DIM_CASES, ids=str)
def test_gradients_of_head_dims(case: Case, deterministic: bool, device: Device) -> None:
    check_backward(case, device, reproducible="run" if deterministic else None)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_tf32_on_request(head_dim: int, device: Device) -> None:
    """Ten-bit products, and no worse."""
    case = Case(
        lengths=(70, 140), head_dims=(head_dim, head_dim), heads=(1, 1), style="aligned", softcap=20.0
    )
    check_forward(case, Device(device.name, device.xp, float32_precision="tf32"), precision="tf32")


def placed(x: np.ndarray, first: int, row: int, head: int) -> np.ndarray:
    """The values in a buffer of NaN: `first` elements after a 16-byte boundary, strides longer by these."""
    _, heads, rows, columns = x.shape
    strides = [n * x.itemsize for n in (0, rows * (columns + row) + head, columns + row, 1)]
    buffer = aligned((first + (heads * strides[1] + 64) // x.itemsize,), x.dtype, np.nan)
    view: np.ndarray = np.lib.stride_tricks.as_strided(buffer[first:], x.shape, strides)
    view[...] = x
    return view


# Elements of 2 bytes, so rows on 2-, 4- and 8-byte boundaries; and heads that leave them where rows do not.
@pytest.mark.parametrize("extra", [(1, 0, 0), (0, 1, 0), (2, 2, 0), (4, 4, 4), (0, 0, 1), (0, 0, 12)])
def test_rows_that_start_anywhere(extra: tuple[int, int, int], device: Device) -> None:
    """Head dims as wide as a tile, so that only where rows start keeps them from 16-byte copies."""
    case = Case(dtype="float16", batch=1, heads=(4, 2), lengths=(130, 150), head_dims=(64, 64), causal=True,
                align="bottom_right")  # fmt: skip
    inputs, options = case.inputs(), case.options({})
    arrays = {name: placed(x, *extra) for name, x in inputs.items()}
    with threadpool_limits(1):
        exact = testing.reference_attention(*(inputs[name] for name in "qkv"), **options)
    arrays["o"] = placed(exact.o.astype(np.float16), *extra)
    q, k, v, o, do = (arrays[name] for name in ("q", "k", "v", "o", "do"))
    results = {"o": cupy_flash.attention(q, k, v, **options)}
    lse = exact.lse.astype(np.float32)
    for deterministic in (False, True):
        results |= cupy_flash.attention_backward(
            do, q, k, v, o, lse, reproducible="run" if deterministic else None, **options
        )._asdict()
        testing.assert_within_budget(results, *(inputs[name] for name in "qkv"), do=inputs["do"], **options)
    assert device.name
