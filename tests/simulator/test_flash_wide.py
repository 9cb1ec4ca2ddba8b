"""Forward attention of head dims above 256: on mma.sync, and by Hopper's own kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.plan import choose
from cupy_flash.plan.catalog import Variant, architecture
from cupy_flash.plan.families import flash, hopper
from tests.cases import Case
from tests.checks import Device, check_forward
from tests.simulator import sanitized
from tests.simulator.flash_features import BANDS
from tests.simulator.forward_cases import (
    POLICIES,
    check_key_that_is_not_a_number,
    check_large_scores,
    check_masked_keys,
    check_packed,
    check_rows_without_keys,
    numbered,
    small_gpu,
    under,
)
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(32)]

# Of the mma.sync kernel chunks that wait in registers, Q in shared memory and partly in registers, four slots
# and two; and Hopper's.
TARGETS = {"sm_75": flash, "sm_80": flash, "sm_86": flash, "sm_90a": hopper}
# Tiles that end inside, at and beyond an edge; so many blocks that the rings are gone through several times.
LENGTHS = ((1, 1), (64, 64), (7, 129), (65, 200), (130, 70), (33, 330))
# Every class, head dims between, and of one operand alone.
HEAD_DIMS = ((512, 512), (264, 320), (320, 320), (384, 384), (488, 512), (576, 512), (128, 512))
CASES = [
    Case(
        dtype=("float16", "bfloat16")[turn % 2],
        batch=1 + turn % 2,
        heads=((1, 1), (2, 1), (3, 1), (4, 2))[turn % 4],
        lengths=LENGTHS[(turn + turn // 6) % 6],
        head_dims=head_dims,
        sinks=turn % 3 == 1,
        scale=0.3 if turn % 5 == 2 else None,
        style="aligned",
        **BANDS[turn % 6],
    )
    for n, head_dims in enumerate(HEAD_DIMS)
    for turn in range(n, n + 6)
]


@pytest.fixture(params=TARGETS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield from small_gpu(monkeypatch, request.param, TARGETS[request.param])


def taken(case: Case, device: Device) -> Case:
    """The case as Turing takes it, which multiplies float16 only, and has no class of 576."""
    if device.name != "sm_75":
        return case
    return replace(case, dtype="float16", head_dims=(min(512, case.head_dims[0]), case.head_dims[1]))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_bands(number: int, device: Device) -> None:
    with under(number):
        check_forward(taken(CASES[number], device), device)


@pytest.mark.parametrize("mask", ["b11k", "1h11", "k"])
@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_86"], indirect=True)
def test_masks_of_keys(mask: str, device: Device) -> None:
    """One that is the same for all queries; with others, the plan says so."""
    for number, head_dims in enumerate(((512, 512), (320, 384))):
        case = Case(dtype="float16", batch=2, heads=(4, 2), lengths=(70, 200), head_dims=head_dims, mask=mask,
                    style="aligned", **BANDS[number])  # fmt: skip
        with under(number):
            check_forward(case, device)


def test_other_masks_are_refused_by_name() -> None:
    q = np.zeros((1, 1, 64, 512), np.float16)
    for shape, kernel in (((1, 1, 64, 64), "simple_forward"), ((1, 1, 1, 64), "flash_forward_wide")):
        plan = cupy_flash.explain(q, q, q, mask=np.ones(shape, bool), arch="sm_86")
        assert f"kernel    {kernel}_" in plan
        assert ("above 256, has no mask that differs from query to query" in plan) == (shape[2] > 1)


@pytest.mark.parametrize(
    ("softcap", "alibi"), [(1.5, None), (20.0, None), (None, "h"), (None, "bh"), (5.0, "bh")]
)
@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_86"], indirect=True)
def test_softcap_and_alibi(softcap: float | None, alibi: str | None, device: Device) -> None:
    for number, head_dims in enumerate(((512, 512), (320, 384), (576, 512))):
        case = Case(dtype=("float16", "bfloat16")[number % 2], batch=2, heads=(2, 1), lengths=(70, 200),
                    head_dims=head_dims, softcap=softcap, alibi=alibi, sinks=number == 1,
                    scale=(None, 0.3, None)[number], style="aligned", causal=number == 0,
                    window=(90, 10) if number == 1 else None,
                    align=("top_left", "bottom_right", 40)[number])  # fmt: skip
        with under(number):
            check_forward(taken(case, device), device)


# More blocks than the ring has slots for, a last one that ends early, several tiles.
IN_ANY_ORDER = Case(dtype="float16", batch=1, heads=(2, 1), lengths=(130, 300), head_dims=(512, 512),
                    causal=True, align="bottom_right", sinks=True, style="aligned")  # fmt: skip


@pytest.mark.parametrize("head_dims", [(512, 512), (576, 512), (320, 384)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_in_any_order(policy: str, head_dims: tuple[int, int], device: Device) -> None:
    with simulator.schedule(policy, seed=7):
        check_forward(taken(replace(IN_ANY_ORDER, head_dims=head_dims), device), device)


def test_mistakes(device: Device) -> None:
    """What mutants are tried on, under the schedule of the process."""
    check_forward(IN_ANY_ORDER, device)
    check_packed("float16", 320, causal=True, align="bottom_right")
    if device.name != "sm_90a":
        check_forward(replace(IN_ANY_ORDER, softcap=5.0, alibi="bh", scale=0.3), device)


@pytest.mark.parametrize("head_dims", [(257, 300), (511, 385), (573, 509)], ids=str)
@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_86"], indirect=True)
def test_rows_that_start_anywhere(head_dims: tuple[int, int], device: Device) -> None:
    case = Case(dtype="float16", heads=(2, 1), lengths=(70, 75), head_dims=head_dims)
    check_forward(taken(case, device), device)


PACKED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("float16", 512, {"causal": True, "align": "bottom_right"}),
    ("bfloat16", 320, {}),
    ("bfloat16", 512, {"window": (60, 10), "align": "top_left"}),
)


@pytest.mark.parametrize("number", range(len(PACKED)))
def test_packed(number: int, device: Device) -> None:
    dtype, head_dim, options = PACKED[number]
    dtype = "float16" if device.name == "sm_75" else dtype
    with simulator.schedule(POLICIES[number], seed=5):
        check_packed(dtype, head_dim, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", ["sm_90a"], indirect=True)
def test_heads_of_a_group_share_a_tile(policy: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, grouped=True)
    with simulator.schedule(policy, seed=2):
        check_packed("float16", 512, causal=True, align="bottom_right")
        for heads in ((8, 1), (6, 2)):
            case = Case(dtype="bfloat16", batch=1, heads=heads, lengths=(17, 150), head_dims=(512, 512),
                        causal=True, align="bottom_right", sinks=True, style="aligned")  # fmt: skip
            check_forward(case, device)


@pytest.mark.usefixtures("device")
def test_keys_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of which a part is in use: what lies behind it is NaN."""
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((2, n, h, 512)).astype(np.float16) for n, h in ((70, 2), (200, 1), (200, 1))
    )
    used = np.array([70, 131], np.int32)
    for n, end in enumerate(used):
        k[n, end:] = v[n, end:] = np.nan
    held = [testing.hostile(x, style="aligned").view for x in (q, k, v)]
    o, lse = cupy_flash.attention_with_kv_cache(
        *held, cache_seqlens=used, causal=True, return_lse=True, layout="bshd"
    )
    for n, end in enumerate(used):
        part = {"o": o[n : n + 1].swapaxes(1, 2), "lse": lse[n : n + 1]}
        keys = [x[n : n + 1, :end].swapaxes(1, 2) for x in (k, v)]
        own = q[n : n + 1].swapaxes(1, 2)
        testing.assert_within_budget(part, own, *keys, causal=True, align="bottom_right")


@pytest.mark.usefixtures("device")
def test_masked_keys_may_hold_anything() -> None:
    check_masked_keys(batch=1, lengths=(70, 200), head_dims=(320, 320))


@pytest.mark.parametrize("key", [0, 70, 199])
@pytest.mark.usefixtures("device")
def test_a_key_that_is_not_a_number(key: int) -> None:
    check_key_that_is_not_a_number(key, 200, 320)


@pytest.mark.usefixtures("device")
def test_rows_without_keys() -> None:
    check_rows_without_keys("float16", 512)


@pytest.mark.usefixtures("device")
def test_large_scores() -> None:
    check_large_scores(200, 512, 20)


def test_tiles_of_a_band_are_taken_by_whoever_is_done(device: Device) -> None:
    """Without a counter a block of Hopper would have the longest tile of every head."""
    for right in (None, 0):
        problem = choose.Problem(
            "forward", "float16", None, 1, 4, 4, 2048, 2048, 512, 512, 0.125, right=right
        )
        counted = right == 0 and device.name == "sm_90a"
        assert choose.choose(problem, device.name, 3).zeroed == (("next_tile",) if counted else ())


def wide(target: str) -> list[Variant]:
    found = TARGETS[target].variants(architecture(target))
    return [v for v in found if v.kernel.startswith("flash_forward_wide") and v.dtype == "f16"]


@pytest.mark.parametrize("number", range(3))
def test_cost_is_the_theory(number: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, exponentials and bytes are the least possible; nothing meets a bank conflict."""
    numbered(monkeypatch, grouped=False)
    if number == len(wide(device.name)):
        pytest.skip("Turing has no class of 576")
    variant = wide(device.name)[number]
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    rows, keys = 2 * m, 3 * n
    q, k, v = (aligned((1, 1, r, c), np.float16, 0.5) for r, c in ((rows, d), (keys, d), (keys, dv)))
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, out=aligned((1, 1, rows, dv), np.float16), return_lse=True)
    ((_, cost),) = counted
    pairs, tiles, blocks = rows * keys, rows // m, keys // n
    assert cost["mma_flops"] == 2 * pairs * (d + dv)
    loaded, stored = 2 * (rows * d + tiles * keys * (d + dv)), 2 * rows * dv
    if device.name == "sm_90a":
        assert cost["exps"] == pairs + 4 * 3 * rows
        assert cost["bulk_load_bytes"] == loaded
        assert cost["bulk_store_bytes"] == stored
        assert cost["global_store_bytes"] == 4 * rows
    else:
        # A rescaling per row, block of keys, and lane of the quads of warps that share it; at last two a row.
        row_warps, key_warps = m // 16, 128 // m
        assert cost["exps"] == pairs + 4 * key_warps * rows * blocks + 2 * rows
        assert cost["global_load_bytes"] == loaded
        assert cost["global_store_bytes"] == stored + 4 * rows
        # ldmatrix: K by warps of all rows, Q by those of all keys, V by one, P by all; Q in registers once.
        steps = int(dict(variant.macros)["CF_Q_STEPS"])
        q_loads = key_warps * m * (16 * steps + blocks * (d - 16 * steps))
        kv_loads = row_warps * keys * d + keys * dv + 8 * keys * m
        assert cost["matrix_loads"] == 4 * tiles * (q_loads + kv_loads) // 256
    for what in ("matrix_load", "matrix_store", "shared_load", "shared_store", "copy_store"):
        assert cost[f"{what}_cycles"] == cost[f"{what}s"], f"bank conflicts in {what}s"


# ---------------------------------------------------------------------- what takes what these leave


@pytest.mark.parametrize("target", ["sm_75", "sm_86", "sm_90a"])
@pytest.mark.parametrize(
    ("option", "named"), [({"softcap": 5.0}, "softcap"), ({"alibi_slopes": np.ones(2, np.float32)}, "ALiBi")]
)
def test_explain_says_what_is_taken(option: dict[str, Any], named: str, target: str) -> None:
    """Hopper's own kernel has no softcap and no ALiBi; gradients have none on any GPU."""
    x = np.zeros((1, 2, 64, 512), np.float16)
    plain = cupy_flash.explain(x, x, x, causal=True, arch=target)
    asked = cupy_flash.explain(x, x, x, causal=True, arch=target, **option)
    assert ("flash_forward_wide_sm90_f16" if target == "sm_90a" else "flash_forward_wide_f16") in plain
    assert "kernel    flash_forward_wide_f16" in asked
    hopper_lacks = f"skipped   hopper: its kernel for head_dim 512, above 256, has no {named}"
    assert (hopper_lacks in asked) == (target == "sm_90a")
    gradients = cupy_flash.explain(x, x, x, causal=True, arch=target, direction="backward", **option)
    assert "simple_backward" in gradients
    far = cupy_flash.explain(x, x, x, arch=target, scale=1e-30, **option)
    assert "simple_forward" in far
    assert "has no softcap or ALiBi with a scale of 1e-30" in far


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mask": np.ones((64, 64), bool)}, "mask"),
        ({"bias": np.zeros((64, 64), np.float16)}, "bias"),
        ({"dropout": 0.1, "seed": 1}, "dropout"),
        ({"scale": -1.0}, "scale <= 0"),
        ({"reproducible": "prefill"}, "guaranteed order of sums"),
        ({"mask": cupy_flash.spans.documents([30, 34])}, "Spans"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_options_that_simple_takes(options: dict[str, Any], named: str) -> None:
    x = np.zeros((1, 2, 64, 512), np.float16)
    for target in ("sm_90a", "sm_80"):
        text = cupy_flash.explain(x, x, x, arch=target, **options)
        assert "simple_forward" in text
        skipped = [line for line in text.splitlines() if line.startswith("skipped")]
        assert all(named in line for line in skipped), text


@pytest.mark.parametrize("head_dims", [(584, 512), (520, 520), (1024, 64)], ids=str)
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_head_dims_that_nothing_takes(target: str, head_dims: tuple[int, int]) -> None:
    q, v = (np.zeros((1, 1, 64, d), np.float16) for d in head_dims)
    with pytest.raises(cupy_flash.UnsupportedError, match=r"forward: above 576, 512 of v"):
        cupy_flash.explain(q, q, v, arch=target)


# ---------------------------------------------------------------------- sanitizers

_SANITIZED = """
import os
from dataclasses import replace
os.environ["CUPY_FLASH_DRIVER"] = "simulator:{target}"
from cupy_flash.device import simulator
from tests.simulator import sanitized
from tests.simulator.test_flash_wide import IN_ANY_ORDER, PACKED, Device, check_forward, check_packed, np
for policy in SCHEDULES:
    with simulator.schedule(policy):
        check_forward(replace(IN_ANY_ORDER, lengths=(70, 150)), Device("{target}", np))
        check_packed(*PACKED[0][:2], **PACKED[0][2], **sanitized.PACKED)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, target: str) -> None:
    done = sanitized.run(sanitizer, _SANITIZED.format(target=target), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
