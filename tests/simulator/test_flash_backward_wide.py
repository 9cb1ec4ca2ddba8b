"""Gradients of head dims above 256 on tensor cores, through the public API, simulated, on every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.plan import families
from cupy_flash.plan.catalog import Variant
from tests.cases import Case
from tests.checks import Device, check_backward
from tests.simulator import sanitized
from tests.simulator.flash_features import BANDS, LENGTHS
from tests.simulator.test_hopper_backward import check_packed
from tests.simulator.units import SIMULATED, aligned

pytestmark = [
    *SIMULATED,
    pytest.mark.sampled(48),
    # One code for all architectures, in the shared memory of the smallest.
    pytest.mark.parametrize("device", ["sm_86"], indirect=True),
]

POLICIES = ("late", "early", "random")


@pytest.fixture(autouse=True)
def wide_only() -> Iterator[None]:
    """Fails a test whose gradients are another kernel's. why not `only`: o and lse are another family's."""
    with simulator.costs() as launches:
        yield
    of_scores = [name for name, _ in launches if "backward_d" in name and "_delta_" not in name]
    assert not [name for name in of_scores if "_dsinks_" not in name]


# Both classes, at their edges and inside; rows of odd lengths; V wider or narrower than K.
HEAD_DIMS = ((512, 512), (384, 384), (257, 257), (488, 488), (300, 64), (40, 392), (321, 500), (264, 272))
STYLES = ("aligned", "padded", "reversed", "aligned")


def cases() -> Iterator[Case]:
    for number, lengths in enumerate((*LENGTHS, (16, 32), (33, 31), (300, 17), (17, 300))):
        for turn in range(2):
            yield Case(
                dtype=("float16", "bfloat16")[(number + turn) % 2],
                batch=1 + number % 2,
                heads=((2, 1), (1, 1), (4, 2), (3, 1))[(number + turn) % 4],
                lengths=lengths,
                head_dims=HEAD_DIMS[(3 * number + 4 * turn) % len(HEAD_DIMS)],
                style=STYLES[(number + turn) % len(STYLES)],
                sinks=number % 3 == 1,
                dlse=number % 4 == 2,
                scale=(None, None, -0.1, 0.3)[(number + 2 * turn) % 4],
                layout=("bhsd", "bshd")[number % 2],
                **BANDS[(number + 3 * turn) % len(BANDS)],
            )


CASES = tuple(cases())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_bands(number: int, device: Device) -> None:
    with simulator.schedule(POLICIES[number % 3], seed=number):
        check_backward(CASES[number], device)


# One of each kind of code; also what the mutants are tried on.
KINDS = tuple(
    Case(batch=1, heads=(2, 1), align="bottom_right", sinks=True, **case)
    for case in (
        {
            "dtype": "float16",
            "head_dims": (512, 512),
            "lengths": (100, 90),
            "causal": True,
            "style": "aligned",
        },
        {
            "dtype": "float16",
            "head_dims": (384, 384),
            "lengths": (70, 130),
            "window": (50, 9),
            "style": "aligned",
        },
        {"dtype": "float16", "head_dims": (257, 321), "lengths": (50, 70), "scale": -0.05},
    )
)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case, device: Device) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("policy", ["early", "random"])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds_on_schedules(case: Case, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_backward(case, device)


PACKED: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
    ("float16", (512, 512), {"causal": True, "align": "bottom_right"}),
    ("bfloat16", (384, 384), {}),
    ("bfloat16", (320, 488), {"window": (60, 10), "align": "top_left"}),
)


@pytest.mark.parametrize(("dtype", "head_dims", "options"), PACKED)
@pytest.mark.usefixtures("device")
def test_packed(dtype: str, head_dims: tuple[int, int], options: dict[str, Any]) -> None:
    check_packed(dtype, head_dims, **options)


@pytest.mark.parametrize("policy", ["early", "random"])
@pytest.mark.parametrize(("dtype", "head_dims", "options"), PACKED)
@pytest.mark.usefixtures("device")
def test_packed_on_schedules(
    dtype: str, head_dims: tuple[int, int], options: dict[str, Any], policy: str
) -> None:
    with simulator.schedule(policy, seed=5):
        check_packed(dtype, head_dims, lengths=((5, 64, 0, 70), (9, 64, 12, 131)), **options)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_gradients_repeat_every_bit(case: Case, device: Device) -> None:
    """Whatever the schedule, and whether it is asked for or not: each sum has one owner."""
    first = check_backward(case, device)
    for policy, seed in (("early", 0), ("random", 0), ("random", 1)):
        with simulator.schedule(policy, seed=seed):
            again = check_backward(case, device, reproducible="run" if seed == 0 else None)
        for name in ("dq", "dk", "dv"):
            x, y = (np.asarray(getattr(gradients, name)) for gradients in (first, again))
            assert x.tobytes() == y.tobytes(), f"{name} under {policy}, seed {seed}"


@pytest.mark.usefixtures("device")
def test_what_sees_nothing_has_no_gradient() -> None:
    """Rows without keys, and keys that no query sees, a whole block of them included."""
    shape, options = (1, 1, 200, 512), {"window": (3, 3), "align": -100}
    arrays = (np.random.default_rng(n).standard_normal(shape).astype(np.float16) for n in range(3))
    q, k, v = (testing.hostile(x, style="aligned").view for x in arrays)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(q, q, k, v, o, lse, **options)
    assert not gradients.dq[0, 0, :97].any()
    for x in (gradients.dk, gradients.dv):
        assert not x[0, 0, 103:].any()
        assert x[0, 0, :103].any()
    testing.assert_within_budget(gradients, q, k, v, do=q, **options)


# bf16 is the same code but for the element.
F16 = [v for v in families.variants("sm_86") if v.source == "flash_backward_wide.cu" and v.dtype == "f16"]


@pytest.mark.parametrize("variant", F16, ids=lambda v: v.name)
@pytest.mark.usefixtures("device")
def test_cost_is_the_theory(variant: Variant) -> None:
    """Products, exponentials and bytes are the least possible; no bank meets a conflict."""
    (m, n), d, heads, rows, keys = variant.tile, variant.head_dim, 2, 64, 96
    q, o, do = (aligned((1, heads, rows, d), np.float16, 0.5) for _ in range(3))
    k, v = (aligned((1, 1, keys, d), np.float16, 0.5) for _ in range(2))
    lse = aligned((1, heads, rows), np.float32, 5.0)
    with simulator.costs() as counted:
        cupy_flash.attention_backward(do, q, k, v, o, lse)
    cost = dict(counted)[variant.name]
    pairs, tiles = heads * rows * keys, heads * (rows // m) * (keys // n)
    assert cost["exps"] == pairs
    assert cost["mma_flops"] == 2 * pairs * d * (4 if variant.step == "dkv" else 3)
    if variant.step == "dkv":  # LSE and delta come with each tile of queries
        assert cost["global_load_bytes"] == 2 * 2 * d * (keys + tiles * m) + 2 * 4 * tiles * m
        assert cost["global_store_bytes"] == 2 * 2 * d * keys
    else:  # four lanes have a row, of which two n8 columns are two warps'
        assert cost["global_load_bytes"] == 2 * 2 * d * (heads * rows + tiles * n) + 2 * 4 * 8 * heads * rows
        assert cost["global_store_bytes"] == 2 * d * heads * rows
    assert cost["barriers"] == 2 * tiles * variant.threads
    for unit in ("matrix_load", "shared_load", "shared_store", "copy_store"):
        assert cost[f"{unit}_cycles"] == cost[f"{unit}s"], f"bank conflicts of {unit}s"
    # Rows of these arrays start on 16-byte boundaries.
    assert 32 * cost["global_store_sectors"] <= 1.5 * cost["global_store_bytes"]


# ---------------------------------------------------------------------- what it leaves to others


def explained(arch: str = "sm_86", dtype: str = "float16", head_dim: int = 300, **options: Any) -> str:
    q, k, v = (np.zeros((1, 2, 64, head_dim), dtype) for _ in range(3))
    return cupy_flash.explain(q, k, v, direction="backward", arch=arch, **options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.usefixtures("device")
def test_taken_everywhere_and_the_same_if_reproducible(arch: str) -> None:
    plain, asked = (explained(arch, reproducible=x) for x in (None, "run"))
    assert "flash_backward_wide_dkv_f16_d384_band_16x32" in plain
    assert "flash_backward_wide_dq_f16_d384_band_32x16" in plain
    assert "dq_accumulator" not in plain
    assert plain.partition("family")[2] == asked.partition("family")[2]


SLOPES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": np.ones((64, 64), bool)}, "has no mask"),
        ({"bias": np.zeros((64, 64), np.float16), "softcap": 3.0}, "has no bias or softcap"),
        ({"alibi_slopes": SLOPES, "dropout": 0.1, "seed": 1}, "has no ALiBi or dropout"),
        ({"mask": cupy_flash.spans.documents([30, 34])}, "has no Spans"),
        ({"arch": "sm_75"}, "head_dim 300 is above 256"),
        ({"reproducible": "prefill"}, "has no guaranteed order of sums"),
        ({"dtype": "float32", "precision": "tf32x3"}, "head_dim 300 is above 256"),
        ({"dtype": "float64"}, "computes float64 on the tensor cores of sm_80 and sm_90 only"),
    ],
)
@pytest.mark.usefixtures("device")
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    try:
        text = explained(**changes)
    except cupy_flash.UnsupportedError as error:
        text = str(error)
    else:
        assert "simple_backward_dkv" in text
    assert reason in text


# ---------------------------------------------------------------------- sanitizers

_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_86"
from cupy_flash.device import simulator
from tests.simulator.test_flash_backward_wide import KINDS, Device, check_backward, check_packed, np
with simulator.schedule("early"):
    for case in KINDS:
        check_backward(case, Device("sm_86", np))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.usefixtures("device")
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
