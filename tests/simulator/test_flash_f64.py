"""Forward attention in float64 on tensor cores, sm_80 and sm_90, simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import f64, flash
from tests.cases import Case
from tests.checks import Device, check_forward
from tests.simulator import sanitized
from tests.simulator.flash_features import BANDS
from tests.simulator.forward_cases import (
    POLICIES,
    check_key_that_is_not_a_number,
    check_masked_keys,
    check_packed,
    check_rows_without_keys,
    small_gpu,
    under,
)
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(32)]

# Products of 8 rows, of 16.
TARGETS = ("sm_80", "sm_90a")
# Tiles that end inside, at and beyond an edge; one, two and more blocks of keys than the ring has slots for.
LENGTHS = ((1, 1), (64, 32), (7, 65), (65, 200), (130, 70), (33, 130))
# Both classes, head dims between, and of one operand alone.
HEAD_DIMS = ((64, 64), (128, 128), (40, 24), (96, 104), (16, 128), (128, 8))
CASES = [
    Case(
        dtype="float64",
        batch=1 + turn % 2,
        heads=((1, 1), (2, 1), (3, 1), (4, 2))[turn % 4],
        lengths=LENGTHS[(turn + turn // 6) % 6],
        head_dims=head_dims,
        sinks=turn % 3 == 1,
        scale=(None, None, 0.3, -0.2, 0.0)[turn % 5],
        style="aligned",
        **BANDS[turn % 6],
    )
    for n, head_dims in enumerate(HEAD_DIMS)
    for turn in range(n, n + 6)
]


@pytest.fixture(params=TARGETS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield from small_gpu(monkeypatch, request.param, flash)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_bands(number: int, device: Device) -> None:
    with under(number):
        check_forward(CASES[number], device)


# More blocks than the ring has slots for, a last one that ends early, several tiles.
IN_ANY_ORDER = Case(dtype="float64", batch=1, heads=(2, 1), lengths=(130, 150), head_dims=(128, 128),
                    causal=True, align="bottom_right", sinks=True, style="aligned")  # fmt: skip


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_in_any_order(policy: str, head_dims: tuple[int, int], device: Device) -> None:
    with simulator.schedule(policy, seed=7):
        check_forward(replace(IN_ANY_ORDER, head_dims=head_dims), device)


def test_mistakes(device: Device) -> None:
    """What mutants are tried on, under the schedule of the process."""
    check_forward(IN_ANY_ORDER, device)
    check_packed("float64", 64, causal=True, align="bottom_right")


@pytest.mark.parametrize("head_dims", [(1, 1), (63, 33), (65, 95), (127, 127)], ids=str)
@pytest.mark.parametrize("style", testing.STYLES)
def test_rows_that_start_anywhere(style: str, head_dims: tuple[int, int], device: Device) -> None:
    """On 8-byte boundaries; rows of any stride, heads and batches anywhere, if columns are neighbours."""
    case = Case(dtype="float64", batch=1, heads=(2, 1), lengths=(70, 75), head_dims=head_dims, style=style)
    arrays = [testing.hostile(x, style=style).view for x in case.inputs().values()]
    if any(x.strides[-1] != 8 and x.shape[-1] > 1 for x in arrays):
        pytest.skip(f"columns of {style} arrays are not neighbours, which simple takes")
    check_forward(case, device)


PACKED: tuple[tuple[int, dict[str, Any]], ...] = (
    (128, {"causal": True, "align": "bottom_right"}),
    (64, {}),
    (96, {"window": (60, 10), "align": "top_left"}),
)


@pytest.mark.parametrize("number", range(len(PACKED)))
@pytest.mark.usefixtures("device")
def test_packed(number: int) -> None:
    head_dim, options = PACKED[number]
    with simulator.schedule(POLICIES[number], seed=5):
        check_packed("float64", head_dim, **options)


@pytest.mark.usefixtures("device")
def test_keys_in_use_end_before_the_rows() -> None:
    q, k, v = (aligned((n, 2, 64), np.float64, 0.5) for n in (70, 200, 200))
    k[77:], v[77:] = np.nan, np.nan
    cu = [np.array([0, n], np.int32) for n in (70, 200)]
    o = cupy_flash.attention_varlen(q, k, v, *cu, seqused_k=np.array([77], np.int32))
    np.testing.assert_allclose(o, 0.5, rtol=4e-15)


@pytest.mark.usefixtures("device")
def test_masked_keys_may_hold_anything() -> None:
    check_masked_keys("float64", batch=1, lengths=(70, 200), head_dims=(64, 64))


@pytest.mark.parametrize("key", [0, 70, 199])
@pytest.mark.usefixtures("device")
def test_a_key_that_is_not_a_number(key: int) -> None:
    check_key_that_is_not_a_number(key, 200, 64, "float64")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("device")
def test_rows_without_keys(head_dim: int) -> None:
    check_rows_without_keys("float64", head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("device")
def test_every_key_and_feature_has_its_own_place(head_dim: int) -> None:
    """A query that sees one key returns the bits of that key's value."""
    v = np.random.default_rng(1).standard_normal((1, 1, 300, head_dim))
    q, k = (aligned((1, 1, 300, head_dim), np.float64, 1.0) for _ in "qk")
    np.testing.assert_array_equal(cupy_flash.attention(q, k, v, window=(0, 0), align=0), v)


# ---------------------------------------------------------------------- more digits than float64


def textbook(
    kind: type[np.floating[Any]], q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """O and LSE of one head, all keys, computed in a type."""
    q, k, v = (x[0, 0].astype(kind) for x in (q, k, v))
    # why not NumPy's products: sums of several parts of a row are kinder than one after the other.
    scores = np.zeros((len(q), len(k)), kind)
    for column in range(q.shape[1]):
        scores += q[:, column, None] * k[:, column]
    scores /= np.sqrt(kind(q.shape[1]))
    top = scores.max(1, keepdims=True)
    weights = np.exp(scores - top)
    total, sums = weights.sum(1, keepdims=True), np.zeros((len(q), v.shape[1]), kind)
    for key, value in enumerate(v):
        sums += weights[:, key, None] * value
    return sums / total, (top + np.log(total))[:, 0]


# Sizes of q and k, and of v. Scores of some hundreds, where a weight is off by as much times what a score is;
# scores further apart than 709; that hardly differ; results near both ends of the range.
SIZES = {"usual": (1, 1), "large": (8, 1), "one key": (40, 1), "equal": (1e-9, 1), "huge": (1, 1e300),
         "tiny": (1, 1e-290)}  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 60, reason="long double has no more digits than float64 here"
)
@pytest.mark.usefixtures("device")
def test_as_exact_as_the_textbook_in_float64(sizes: str, head_dim: int) -> None:
    of_scores, of_values = SIZES[sizes]
    q, k, v = (np.random.default_rng(n).standard_normal((1, 1, 130, head_dim)) for n in range(3))
    q, k, v = of_scores * q, of_scores * k, of_values * v
    k[0, 0, 0] = q[0, 0, 5]  # a maximum that comes with the last block
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    exact, theirs = textbook(np.longdouble, q, k, v), textbook(np.float64, q, k, v)
    for ours, other, wanted in zip((o[0, 0], lse[0, 0]), theirs, exact, strict=True):
        least = 4 * np.finfo(np.float64).eps * np.abs(wanted).max()
        assert np.abs(ours - wanted).max() <= 2 * np.abs(other - wanted).max() + least


# ---------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("number", range(2))
def test_cost_is_the_theory(number: int, device: Device) -> None:
    """Products and bytes are the least possible; nothing meets a bank conflict, whole sectors are stored."""
    variant = list(f64.variants(architecture(device.name)))[number]
    (m, n), d = variant.tile, variant.head_dim
    rows, keys = 2 * m, 3 * n
    q, k, v = (aligned((1, 1, r, d), np.float64, 0.5) for r in (rows, keys, keys))
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, out=aligned((1, 1, rows, d), np.float64))
    ((name, cost),) = counted
    assert name == variant.name
    assert cost["mma_flops"] == 2 * rows * keys * 2 * d
    assert cost["global_load_bytes"] == 8 * (rows * d + rows // m * keys * 2 * d)
    assert cost["global_store_bytes"] == 8 * rows * d
    assert cost["global_store_sectors"] == 8 * rows * d // 32
    # Of 16 rows and 8 keys Q's and K's are read once, V's once: 128-byte cycles.
    assert cost["shared_loads"] == 8 * d * (rows // 16) * (keys // n) * (16 + 2 * n) // 128
    for what in ("shared_load", "shared_store", "copy_store"):
        assert cost[f"{what}_cycles"] == cost[f"{what}s"], f"bank conflicts in {what}s"


# ---------------------------------------------------------------------- what takes what this leaves

X = np.zeros((1, 2, 64, 64))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_explain_says_what_is_taken(target: str) -> None:
    assert "flash_forward_f64_f64_d64_band" in cupy_flash.explain(X, X, X, causal=True, arch=target)
    assert "flash_backward_f64_dq" in cupy_flash.explain(X, X, X, arch=target, direction="backward")


@pytest.mark.parametrize("target", ["sm_75", "sm_86", "sm_87", "sm_89", "sm_100", "sm_120"])
def test_gpus_without_such_tensor_cores(target: str) -> None:
    text = cupy_flash.explain(X, X, X, arch=target)
    assert "simple_forward_f64" in text
    assert "skipped   flash: computes float64 on the tensor cores of sm_80 and sm_90 only" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mask": np.ones((64, 64), bool)}, "mask"),
        ({"bias": np.zeros((64, 64))}, "bias"),
        ({"alibi_slopes": np.ones(2)}, "ALiBi"),
        ({"softcap": 3.0}, "softcap"),
        ({"dropout": 0.1, "seed": 1}, "dropout"),
        ({"reproducible": "batch"}, "guaranteed order of sums"),
        ({"reproducible": "prefill"}, "guaranteed order of sums"),
        ({"reproducible": "device"}, "order of sums depends on the architecture"),
        ({"mask": cupy_flash.spans.documents([30, 34])}, "Spans"),
        ({"mask": cupy_flash.mask(lambda b, h, i, j: i >= j)}, "score function"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("target", TARGETS)
def test_options_that_simple_takes(options: dict[str, Any], named: str, target: str) -> None:
    text = cupy_flash.explain(X, X, X, arch=target, **options)
    assert "simple_forward" in text
    assert any(named in line for line in text.splitlines() if line.startswith("skipped   flash:")), text


@pytest.mark.parametrize("head_dims", [(136, 64), (64, 129), (512, 512)], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_head_dims_that_simple_takes(target: str, head_dims: tuple[int, int]) -> None:
    q, v = (np.zeros((1, 1, 64, d)) for d in head_dims)
    text = cupy_flash.explain(q, q, v, arch=target)
    assert "simple_forward_f64" in text
    assert f"skipped   flash: head_dim {max(head_dims)} is above 128, of float64" in text


def test_columns_that_are_no_neighbours() -> None:
    x = np.zeros((1, 2, 64, 64)).swapaxes(2, 3)
    assert "simple_forward_f64" in cupy_flash.explain(x, x, x, arch="sm_80")


# ---------------------------------------------------------------------- sanitizers

_SANITIZED = """
import os
from dataclasses import replace
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{target}"
from cupy_flash.device import simulator
from tests.simulator import sanitized
from tests.simulator.test_flash_f64 import IN_ANY_ORDER, PACKED, Device, check_forward, check_packed, np
for policy in SCHEDULES:
    with simulator.schedule(policy):
        check_forward(replace(IN_ANY_ORDER, lengths=(70, 150)), Device("{target}", np))
        check_packed("float64", PACKED[0][0], **PACKED[0][1], **sanitized.PACKED)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, target: str) -> None:
    done = sanitized.run(sanitizer, _SANITIZED.format(target=target), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
