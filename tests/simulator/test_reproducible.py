"""reproducible= on simulated GPUs: bits of rows and of gradients in any company, and each hazard put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import Unsupported, prepare
from cupy_flash.call.options import Options
from cupy_flash.call.problem import describe
from cupy_flash.plan.catalog import ARCHITECTURES
from cupy_flash.plan.choose import choose
from cupy_flash.plan.families import cached, decode, flash, flash_tiles
from cupy_flash.testing import same_bits
from tests.checks import Device
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SMALL: dict[str, Any] = {
    "lengths": (1, 9, 10, 65, 130),
    "chunks": (1, 9, 64),
    "pages": (16,),
    "heads": (2, 1),
}


@pytest.fixture
def on(device: Device) -> Iterator[Device]:
    """A simulated GPU whose plans, which a test may change, are forgotten."""
    prepare.forget()
    yield device
    prepare.forget()


def held(dtype: str, **options: Any) -> Any:
    return same_bits(cast=lambda x: x.astype(DTYPES[dtype]), **{**SMALL, **options})


ROWS = {"sinks": np.array([0.5, -1], np.float32), "alibi_slopes": np.array([0.1, 0.3], np.float32)}
# Architecture, dtype, options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sm_61 simple": ("sm_61", "float32", {"head_dim": 40, **ROWS}),
    "sm_75 flash": ("sm_75", "float16", {"window": (70, 0)}),
    "sm_80 flash": ("sm_80", "float16", {"softcap": 4.0, **ROWS}),
    "sm_80 tf32x3": ("sm_80", "float32", {"head_dim": 32}),
    "sm_80 simple f64": ("sm_80", "float64", {"head_dim": 24}),
    "sm_86 window": ("sm_86", "bfloat16", {"window": (40, 0), "head_dim": 96}),
    "sm_90a": ("sm_90a", "float16", {"head_dim": 128, "lengths": (10, 130), "chunks": (9,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients_in_any_company(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, dtype, options = CASES[name]
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
    found = held(dtype, **options)
    assert found.same, str(found)
    assert not found.refused


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_chunks_of_a_long_prompt(on: Device) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 2100, 32)).astype(np.float16)
    options: dict[str, Any] = {"causal": True, "reproducible": "batch"}
    last = cupy_flash.attention(q[:, :, 2040:], k, v, align=2040, **options)
    for first, end in ((2047, 2048), (2048, 2049), (2047, 2096), (2099, 2100)):
        part = cupy_flash.attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], align=first, **options)
        assert part.tobytes() == last[:, :, first - 2040 : end - 2040].tobytes()


# ---------------------------------------------------------------------------------------------- hazards


def differs(**options: Any) -> list[str]:
    return list(held("float16", pages=(), **options).differences)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_86"], indirect=True)
def test_blocks_that_need_masks_first(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that walks over keys in an order that the place of a tile decides."""
    monkeypatch.setattr(flash, "_mask", lambda _problem: "band")
    options = {"window": (70, 0), "lengths": (330,), "chunks": (9,)}
    assert any(line.startswith("chunk") for line in differs(**options))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_keys_split_by_the_planner(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another family for few queries, whose parts follow batch and GPU."""
    monkeypatch.setattr(cached, "refusals", lambda _problem, _arch: ["not in this test"])
    refusals = decode.refusals
    monkeypatch.setattr(decode, "refusals", lambda p, arch: refusals(p._replace(reproducible=None), arch))
    assert any(line.startswith("decode") for line in differs(lengths=(65, 130), chunks=()))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80"], indirect=True)
def test_pages_by_another_kernel(on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask for keys without a page, where a cache in one piece has none."""
    mask = flash._mask
    monkeypatch.setattr(flash, "_mask", lambda problem: mask(problem._replace(reproducible=None)))
    found = held("float16", lengths=(130,), chunks=())
    assert any(line.startswith("decode over pages") for line in found.differences)


# ---------------------------------------------------------------------------------------------- plans


def text(arch: str, dtype: str = "float16", head_dim: int = 64, seqlen: int = 64, **options: Any) -> str:
    x = np.zeros((1, 4, seqlen, head_dim), DTYPES[dtype])
    return cupy_flash.explain(x, x, x, arch=arch, reproducible="batch", **options)


@pytest.mark.parametrize("arch", [row.name for row in ARCHITECTURES])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256, 300])
def test_one_kernel_whatever_the_options_and_lengths(arch: str, head_dim: int) -> None:
    def kernels(**options: Any) -> list[str]:
        lines = text(arch, head_dim=head_dim, **options).splitlines()
        return [line for line in lines if line.startswith("kernel ")]

    one = kernels()
    assert all(
        kernels(**options) == one
        for options in ({"causal": True}, {"seqlen": 1}, {"seqlen": 4096}, {"mask": np.ones((64, 64), bool)},
                        {"softcap": 2.0}, {"scale": -1.0}, {"window": (8, 8)})
    )  # fmt: skip
    if head_dim <= 256 and one[0].split()[1].startswith("flash"):
        cache = text(arch, head_dim=head_dim, seqlen=64, kv_cache={"cache_seqlens": 64})
        assert one[0] in cache.splitlines()


def test_kernels_of_every_option_walk_over_keys_in_one_order() -> None:
    for (kind, mask), rows in flash_tiles.FORWARD.items():
        if mask == "any":
            assert all(cell is None or cell.loops == 1 for row in rows for cell in row), kind
    assert all(key[1] == "band" for key in flash_tiles.FORWARD_SM90)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_gpu_at_hand_and_its_load_decide_nothing(direction: str, arch: str) -> None:
    """Neither multiprocessors nor batch choose a kernel."""

    def kernels(batch: int, multiprocessors: int) -> list[str]:
        x = np.zeros((batch, 4, 96, 64), np.float16)
        given = dict.fromkeys(("q", "k", "v", "o", "do"), x) | {"lse": np.zeros(x.shape[:3], np.float32)}
        asked = given if direction == "backward" else {name: given[name] for name in "qkv"}
        problem, *_ = describe(direction, asked, Options(reproducible="batch"))
        assert problem.deterministic == (direction == "backward")
        return [launch.variant.name for launch in choose(problem, arch, multiprocessors).launches]

    assert kernels(1, 1) == kernels(1, 200) == kernels(64, 16)


@pytest.mark.parametrize(
    ("arch", "arrays", "says"),
    [
        ("sm_80", lambda x: x[..., ::2], "adds in another order than flash"),
        ("sm_90a", lambda x: x[..., ::2], "the order of a row's sums follows its tile"),
    ],
)
def test_how_arrays_lie_does_not_choose_another_order(arch: str, arrays: Any, says: str) -> None:
    x = arrays(np.zeros((1, 2, 64, 128), np.float16))
    with pytest.raises(Unsupported, match=says) as caught:
        cupy_flash.explain(x, x, x, arch=arch, reproducible="batch")
    assert "Try: reproducible=None" in str(caught.value)


def test_what_a_cache_cannot_keep_is_refused() -> None:
    q, cache = np.zeros((1, 2, 1, 64), np.float16), np.zeros((1, 2, 64, 64), np.int8)
    ones = np.ones(2, np.float32)
    with pytest.raises(Unsupported, match="splits keys by the batch and the GPU"):
        cupy_flash.explain(
            q, cache, cache, arch="sm_80", reproducible="batch",
            kv_cache={"cache_seqlens": 64, "k_scale": ones, "v_scale": ones},
        )  # fmt: skip
    cache = np.zeros((1, 2, 64, 64), np.float16)
    with pytest.raises(Unsupported, match="splits=2 is asked for"):
        cupy_flash.explain(
            q, cache, cache, arch="sm_80", reproducible="batch", kv_cache={"cache_seqlens": 64, "splits": 2}
        )
