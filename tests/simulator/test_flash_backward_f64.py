"""Gradients of float64 on tensor cores, sm_80 and sm_90, simulated, on every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import f64, flash
from tests.cases import Case
from tests.checks import Device, check_backward
from tests.simulator import sanitized
from tests.simulator.flash_features import BANDS
from tests.simulator.forward_cases import POLICIES, small_gpu, under
from tests.simulator.test_hopper_backward import check_packed
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(24)]

# Products of 8 rows, of 16.
TARGETS = ("sm_80", "sm_90a")
# Tiles that end inside, at and beyond an edge; one, two and more tiles than a ring has slots for.
LENGTHS = ((1, 1), (16, 128), (7, 200), (130, 33), (128, 32), (75, 129))
HEAD_DIMS = ((64, 64), (63, 33), (40, 24), (8, 64), (64, 1), (48, 56))
CASES = tuple(
    Case(
        dtype="float64",
        batch=1 + turn % 2,
        heads=((1, 1), (2, 1), (3, 1), (4, 2))[turn % 4],
        lengths=LENGTHS[turn % 6],
        head_dims=HEAD_DIMS[(turn + turn // 6) % 6],
        sinks=turn % 3 == 1,
        dlse=turn % 4 == 2,
        scale=(None, None, 0.3, -0.2, 0.0)[turn % 5],
        layout=("bhsd", "bshd")[turn // 2 % 2],
        style=("aligned", "padded", "aligned", "reversed")[turn % 4],
        **BANDS[(turn + 2 * (turn // 6)) % 6],
    )
    for turn in range(18)
)


@pytest.fixture(params=TARGETS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield from small_gpu(monkeypatch, request.param, flash)


@pytest.mark.parametrize(
    ("number", "device"),
    [pytest.param(n, TARGETS[n // 2 % 2], id=str(case)) for n, case in enumerate(CASES)],
    indirect=["device"],
)
def test_bands(number: int, device: Device) -> None:
    with under(number):
        check_backward(CASES[number], device)


# More tiles than a ring has slots for, a last one that ends early, several blocks and heads.
IN_ANY_ORDER = Case(dtype="float64", batch=1, heads=(2, 1), lengths=(150, 140), head_dims=(64, 64),
                    causal=True, align="bottom_right", sinks=True, style="aligned")  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_in_any_order(policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=7):
        check_backward(IN_ANY_ORDER, device)


PACKED: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    ((64, 64), {"causal": True, "align": "bottom_right"}),
    ((40, 56), {"window": (60, 10), "align": "top_left"}),
)


def test_mistakes(device: Device) -> None:
    """What mutants are tried on, under the schedule of the process."""
    check_backward(IN_ANY_ORDER, device)
    check_packed("float64", PACKED[1][0], **PACKED[1][1])


@pytest.mark.parametrize("device", ["sm_90a"], indirect=True)
@pytest.mark.usefixtures("device")
def test_packed() -> None:
    head_dims, options = PACKED[0]
    with simulator.schedule("random", seed=5):
        check_packed("float64", head_dims, **options)


def test_gradients_repeat_every_bit(device: Device) -> None:
    """Whatever the schedule, and whether it is asked for or not: each sum has one owner."""
    first = check_backward(IN_ANY_ORDER, device)
    for policy, asked in (("early", None), ("random", "run")):
        with simulator.schedule(policy, seed=1):
            again = check_backward(IN_ANY_ORDER, device, reproducible=asked)
        for name in ("dq", "dk", "dv"):
            x, y = (np.asarray(getattr(gradients, name)) for gradients in (first, again))
            assert x.tobytes() == y.tobytes(), f"{name} under {policy}"


@pytest.mark.usefixtures("device")
def test_what_sees_nothing_has_no_gradient() -> None:
    """Rows without keys, and keys that no query sees, a whole block of them included."""
    options: dict[str, Any] = {"window": (3, 3), "align": -100}
    arrays = (np.random.default_rng(n).standard_normal((1, 1, 200, 64)) for n in range(3))
    q, k, v = (testing.hostile(x, style="aligned").view for x in arrays)
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(q, q, k, v, o, lse, **options)
    assert not gradients.dq[0, 0, :97].any()
    for x in (gradients.dk, gradients.dv):
        assert not x[0, 0, 103:].any()
        assert x[0, 0, :103].any()
    testing.assert_within_budget(gradients, q, k, v, do=q, **options)


@pytest.mark.usefixtures("device")
def test_keys_that_are_not_in_use_have_no_gradient() -> None:
    """Whatever they hold: gradients of rows behind the last key in use are written, and 0."""
    q, k, v = (np.random.default_rng(n).standard_normal((300, 2, 64)) for n in range(3))
    cu, options = np.array([0, 300], np.int32), {"seqused_k": np.array([77], np.int32)}
    o, lse = cupy_flash.attention_varlen(q, k, v, cu, cu, return_lse=True, **options)
    k[77:], v[77:] = np.nan, np.nan
    gradients = cupy_flash.attention_varlen_backward(q, q, k, v, o, lse, cu, cu, **options)
    for x in (gradients.dk, gradients.dv):
        assert not x[77:].any()
    part = {name: getattr(gradients, name).swapaxes(0, 1)[None] for name in ("dq", "dk", "dv")}
    part |= {name: part[name][:, :, :77] for name in ("dk", "dv")}
    q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k[:77], v[:77]))
    testing.assert_within_budget(part, q, k, v, do=q)


# ---------------------------------------------------------------------- more digits than float64


def textbook(
    kind: type[np.floating[Any]], q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray
) -> tuple[np.ndarray, ...]:
    """dQ, dK, dV of one head, all keys, computed in a type; sums one after the other."""

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        sums = np.zeros((a.shape[0], b.shape[1]), kind)
        for column, row in zip(a.T, b, strict=True):
            sums += column[:, None] * row
        return sums

    q, k, v, do = (x[0, 0].astype(kind) for x in (q, k, v, do))
    scale = 1 / np.sqrt(kind(q.shape[1]))
    scores = product(q, k.T) * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    of_weights = product(do, v.T)
    of_scores = weights * (of_weights - (weights * of_weights).sum(1, keepdims=True))
    return product(of_scores, k) * scale, product(of_scores.T, q) * scale, product(weights.T, do)


# Sizes of q and k, and of v and do: usual ones, scores of some hundreds, one key of all, equal, both ends.
SIZES = {"usual": (1, 1), "large": (8, 1), "one key": (40, 1), "equal": (1e-9, 1), "huge": (1, 1e150),
         "tiny": (1, 1e-140)}  # fmt: skip


@pytest.mark.parametrize(("sizes", "device"), [*zip(SIZES, 3 * TARGETS, strict=True)], indirect=["device"])
@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 60, reason="long double has no more digits than float64 here"
)
@pytest.mark.usefixtures("device")
def test_as_exact_as_the_textbook_in_float64(sizes: str) -> None:
    of_scores, of_values = SIZES[sizes]
    q, k, v, do = (np.random.default_rng(n).standard_normal((1, 1, 150, 64)) for n in range(4))
    q, k, v, do = of_scores * q, of_scores * k, of_values * v, of_values * do
    o, lse = cupy_flash.attention(q, k, v, return_lse=True)
    ours = cupy_flash.attention_backward(do, q, k, v, o, lse)[:3]
    exact, theirs = textbook(np.longdouble, q, k, v, do), textbook(np.float64, q, k, v, do)
    # LSE is rounded to float64 between the passes, which moves all weights of a row by as much.
    of_lse = 4 + np.abs(lse).max()
    for name, x, other, wanted in zip(("dq", "dk", "dv"), ours, theirs, exact, strict=True):
        least = of_lse * np.finfo(np.float64).eps * np.abs(wanted).max()
        error, allowed = np.abs(x[0, 0] - wanted).max(), 2 * np.abs(other - wanted).max() + least
        assert error <= allowed, f"{name}: {error} above {allowed}"


# ---------------------------------------------------------------------- what it costs


def test_cost_is_the_theory(device: Device) -> None:
    """Products and bytes are the least possible; nothing meets a bank conflict."""
    heads, rows, keys, d = 2, 256, 256, 64
    q, o, do = (aligned((1, heads, rows, d), np.float64, 0.5) for _ in range(3))
    k, v = (aligned((1, 1, keys, d), np.float64, 0.5) for _ in range(2))
    lse = aligned((1, heads, rows), np.float64, 5.0)
    with simulator.costs() as counted:
        cupy_flash.attention_backward(do, q, k, v, o, lse)
    costs, pairs = dict(counted), heads * rows * keys
    variants = [v for v in f64.variants(architecture(device.name)) if v.step]
    assert costs.keys() == {"simple_backward_delta_f64_d512_any_64x1", *(v.name for v in variants)}
    for variant in variants:
        (m, n), cost, dkv = variant.tile, costs[variant.name], variant.step == "dkv"
        tiles = heads * (rows // m) * (keys // n)
        assert cost["mma_flops"] == 2 * pairs * d * (4 if dkv else 3)
        # What a block owns and what it streams; LSE and delta: in dkv all lanes of a column, in all warps.
        if dkv:
            numbers = tiles * m * 2 * 8 * 8 * (n // 16)
            assert cost["global_load_bytes"] == 8 * 2 * d * (keys + tiles * m) + numbers
            assert cost["global_store_bytes"] == 8 * 2 * d * keys
        else:
            numbers = heads * rows * 2 * 8 * 4
            assert cost["global_load_bytes"] == 8 * 2 * d * (heads * rows + tiles * n) + numbers
            assert cost["global_store_bytes"] == 8 * d * heads * rows
        for what in ("shared_load", "shared_store", "copy_store"):
            assert cost[f"{what}_cycles"] == cost[f"{what}s"], f"bank conflicts in {what}s"


# ---------------------------------------------------------------------- what it leaves to others


def explained(target: str, head_dims: tuple[int, int] = (64, 64), **options: Any) -> str:
    q, k, v = (np.zeros((1, 2, 64, d)) for d in (head_dims[0], head_dims[0], head_dims[1]))
    return cupy_flash.explain(q, k, v, direction="backward", arch=target, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_explain_says_what_is_taken(target: str) -> None:
    plain, asked = (explained(target, causal=True, reproducible=x) for x in (None, "run"))
    for kernel in ("simple_backward_delta_f64", "flash_backward_f64_dkv_f64_d64_band_16x128",
                   "flash_backward_f64_dq_f64_d64_band_128x32"):  # fmt: skip
        assert kernel in plain
    assert "dq_accumulator" not in plain
    assert plain.partition("family")[2] == asked.partition("family")[2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": np.ones((64, 64), bool)}, "has no mask"),
        ({"bias": np.zeros((64, 64)), "softcap": 3.0}, "has no bias or softcap"),
        ({"alibi_slopes": np.ones(2), "dropout": 0.1, "seed": 1}, "has no ALiBi or dropout"),
        ({"mask": cupy_flash.spans.documents([30, 34])}, "has no Spans"),
        ({"reproducible": "prefill"}, "has no guaranteed order of sums"),
        ({"reproducible": "device"}, "order of sums depends on the architecture"),
        ({"head_dims": (65, 64)}, "head_dim 65 is above 64, of gradients of float64"),
        ({"head_dims": (64, 128)}, "head_dim 128 is above 64, of gradients of float64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_simple_takes(options: dict[str, Any], reason: str, target: str) -> None:
    text = explained(target, **options)
    assert "simple_backward_dkv" in text
    assert any(reason in line for line in text.splitlines() if line.startswith("skipped   flash:")), text


# ---------------------------------------------------------------------- sanitizers

_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{target}"
from cupy_flash.device import simulator
from tests.simulator.test_flash_backward_f64 import IN_ANY_ORDER, Device, check_backward, np
with simulator.schedule("early"):
    check_backward(IN_ANY_ORDER, Device("{target}", np))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "target"), [("thread", "sm_80"), ("address", "sm_90a")])
def test_sanitizers_find_nothing(sanitizer: str, target: str) -> None:
    done = sanitized.run(sanitizer, _SANITIZED.format(target=target), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
