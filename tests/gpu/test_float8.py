"""8-bit floats on a GPU with a kernel for them: the simulator's cases as bits, and torch's own dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError, testing
from cupy_flash.device import driver
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import Family, fp8, hopper
from tests.checks import Device, only
from tests.float8_cases import E4M3, Float8Case
from tests.public import quantized
from tests.simulator.test_hopper_fp8 import CASES

pytestmark = pytest.mark.gpu

CAUSAL = (("causal", True), ("align", "bottom_right"))
# Longer than the simulator's: sums in the accumulator of the tensor cores, which it has in float.
LONG = (
    Float8Case((4, 2), (700, 900), (64, 64), batch=1, options=CAUSAL),
    Float8Case((2, 1), (300, 4000), (128, 128), batch=1, options=(("softcap", 8.0),)),
    Float8Case((2, 2), (300, 900), (256, 256), batch=1, sinks=True, options=CAUSAL),
)


def family_here() -> Family | None:
    """The family that multiplies 8-bit floats on this GPU."""
    names = architecture(driver.arch(0)).families
    return next((family for family in (hopper, fp8) if family.NAME in names), None)


@pytest.fixture
def only_its_family(device: Device) -> Iterator[None]:
    """Make the plan fail instead of falling back."""
    family = family_here()
    if family is None:
        pytest.skip(f"this GPU is {driver.arch(0)}; the kernels run on sm_89, sm_90 and sm_120 only")
    with only(family):
        yield


def bits(device: Device, x: np.ndarray, style: str) -> Any:
    """The bits of an array on the device, among NaN as `testing.hostile` has them."""
    held = testing.hostile(x, style=style)
    whole = held.buffer.view(np.uint8).reshape(-1)
    first = held.view.ctypes.data - held.buffer.ctypes.data
    return device.xp.lib.stride_tricks.as_strided(device.array(whole)[first:], x.shape, held.view.strides)


def compare(o: Any, lse: Any, qkv: list[np.ndarray], options: dict[str, Any]) -> None:
    """O with FP64; LSE with the CPU's, as far as sums of 14 bits reach, which is what others have found."""
    testing.assert_within_budget({"o": o}, *qkv, precision="e4m3", **options)
    plain = {name: x for name, x in options.items() if not name.endswith("_scale")}
    wanted = cupy_flash.attention(*quantized(*qkv, options), return_lse=True, **plain)[1]
    axis = 2 if options.get("layout") == "bshd" else 1
    q, k = (np.moveaxis(np.abs(x.astype(np.float32)), axis, 1) for x in qkv[:2])
    sizes = q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)
    head_dim = q.shape[3]
    unit = abs(options.get("scale", head_dim**-0.5)) * options["q_scale"].max() * options["k_scale"].max()
    most = head_dim * (1 + 1 / 32) * 2.0**-13 * sizes.max() * unit
    np.testing.assert_allclose(lse, wanted, rtol=1e-5, atol=float(most))


def check(case: Float8Case, device: Device) -> None:
    """Compare a call with FP64. why scales, and float16: CuPy has neither 8-bit floats nor bfloat16."""
    qkv, options = case._replace(scales=("batch", "heads", "batch"), result="float16").inputs()
    given = {name: device.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out = testing.dead((*qkv[0].shape[:3], case.head_dims[1]), np.float16, style=case.style, xp=device.xp)
    views = [bits(device, x, case.style) for x in qkv]
    o, lse = cupy_flash.attention(
        *quantized(*views, given), return_lse=True, out=out.view,
        **{name: x for name, x in given.items() if not name.endswith("_scale")},
    )  # fmt: skip
    compare(testing.to_numpy(o), testing.to_numpy(lse), qkv, options)
    out.check_written()


def check_places(head_dim: int, device: Device) -> None:
    """A query that sees one key returns that key's value: the order of keys in V^T is that of weights."""
    keys = 2 * hopper._FP8[head_dim, head_dim][0][1]
    v = np.random.default_rng(0).integers(0, 256, (1, 1, keys, head_dim), np.uint8).view(E4M3)
    v[np.isnan(v)] = 1
    q = device.array(np.ones(v.shape, E4M3).view(np.uint8))
    scales = {name: device.array(np.ones(1, np.float32)) for name in ("q_scale", "k_scale", "v_scale")}
    out = device.array(np.zeros(v.shape, np.float16))
    values = device.array(v.view(np.uint8))
    cupy_flash.attention(*quantized(q, q, values, scales), window=(0, 0), align=0, out=out)
    np.testing.assert_array_equal(testing.to_numpy(out), v.astype(np.float16))


def check_many_tiles(head_dim: int, options: dict[str, Any], device: Device, runs: int) -> None:
    """Heads that are all the same, 12 of k and 48 of q: one within the budget, the others equal to it."""
    qkv, more = Float8Case((1, 1), (700, 1000), (head_dim, head_dim), batch=1).inputs()
    scales = {name: more[name].reshape(1) for name in ("q_scale", "k_scale", "v_scale")}
    views = [
        device.array(np.repeat(x.view(np.uint8), heads, axis=1))
        for x, heads in zip(qkv, (48, 12, 12), strict=True)
    ]
    given = {name: device.array(np.repeat(x, 12)) for name, x in scales.items()}
    first = None
    for _ in range(runs):
        out = device.array(np.zeros(views[0].shape, np.float16))
        o, lse = cupy_flash.attention(*quantized(*views, given), return_lse=True, out=out, **options)
        results = {"o": testing.to_numpy(o), "lse": testing.to_numpy(lse)}
        if first is None:
            first = {name: x[:, :1] for name, x in results.items()}
            compare(*first.values(), qkv, {**scales, **options})
        for name, x in results.items():
            np.testing.assert_array_equal(x, np.broadcast_to(first[name], x.shape), err_msg=name)


@pytest.mark.usefixtures("only_its_family")
@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_within_the_budget(case: Float8Case, device: Device) -> None:
    check(case, device)


@pytest.mark.full_size
@pytest.mark.usefixtures("only_its_family")
@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}], ids=["all", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles_twenty_times(head_dim: int, options: dict[str, Any], device: Device) -> None:
    """Every head gives the same bits in every run, whichever block took its tiles."""
    check_many_tiles(head_dim, options, device, 20)


@pytest.mark.usefixtures("only_its_family")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_key_and_feature_has_its_own_place(head_dim: int, device: Device) -> None:
    check_places(head_dim, device)


@pytest.mark.torch
@pytest.mark.usefixtures("only_its_family")
def test_torch_in_bfloat16() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    qkv, options = Float8Case((4, 2), (200, 300), (128, 128)).inputs()
    tensors = [torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn) for x in qkv]
    scales = {name: torch.from_numpy(options[name]).cuda() for name in ("q_scale", "k_scale", "v_scale")}
    o, lse = cupy_flash.attention(*quantized(*tensors, scales), return_lse=True)
    assert o.dtype == torch.bfloat16
    compare(testing.to_numpy(o), testing.to_numpy(lse), qkv, options)


def test_other_gpus_refuse(device: Device) -> None:
    if family_here() is not None:
        pytest.skip("this GPU has a kernel for them")
    x, scale = device.array(np.zeros((1, 1, 8, 64), np.uint8)), device.array(np.ones(1, np.float32))
    with pytest.raises(UnsupportedError, match="no kernel fits"):
        cupy_flash.attention(*[cupy_flash.QuantizedArray(x, scale)] * 3)
