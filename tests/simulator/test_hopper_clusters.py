"""Hopper's forward kernel in clusters of two blocks, a candidate of bench tune, simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import prepare
from cupy_flash.call.problem import Problem
from cupy_flash.device import simulator
from cupy_flash.plan import choose, families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import hopper
from tests import kv_cases
from tests.cases import Case
from tests.checks import Device, check_forward
from tests.kv_cases import KvCase
from tests.simulator import sanitized
from tests.simulator.units import SIMULATED, aligned

pytestmark = SIMULATED

ALL_FAMILIES = families.FAMILIES
POLICIES = ("late", "early", "random")
# One and several tiles, an odd number of them, ends inside a tile and inside either half of a block of keys;
# heads that share one of k; tiles of one head and of a group.
CASES = {
    "odd_tiles": Case(dtype="float16", lengths=(300, 300), head_dims=(128, 128), heads=(2, 1)),
    "one_tile": Case(dtype="bfloat16", lengths=(70, 129), head_dims=(128, 72), heads=(2, 2)),
    "one_key": Case(dtype="float16", lengths=(5, 1), head_dims=(128, 128), heads=(3, 1)),
    "half_a_block": Case(dtype="float16", lengths=(130, 190), head_dims=(128, 128), heads=(4, 1), sinks=True),
    "192/128": Case(dtype="bfloat16", lengths=(257, 300), head_dims=(192, 128), heads=(2, 2), batch=1),
    "192": Case(dtype="float16", lengths=(129, 170), head_dims=(160, 152), heads=(2, 1), batch=1),
    "256": Case(dtype="float16", lengths=(200, 250), head_dims=(256, 256), heads=(2, 1), batch=1),
    "any": Case(dtype="float16", lengths=(140, 300), head_dims=(128, 128), softcap=3.0, alibi="h", align=0),
    "three_consumers": Case(dtype="float16", lengths=(200, 300), head_dims=(64, 64), heads=(4, 2)),
    "span_of_64": Case(dtype="bfloat16", lengths=(200, 130), head_dims=(96, 96)),
}
CASES = {name: dataclasses.replace(case, style="aligned") for name, case in CASES.items()}


def in_clusters() -> Any:
    """Plan every forward kernel in clusters of two."""
    changed = {key: tuple((*cell, 2) for cell in cells) for key, cells in hopper._FORWARD.items()}
    return mock.patch.object(hopper, "_FORWARD", changed)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A simulated Hopper of five multiprocessors: two clusters, which take several tiles."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90a")
    monkeypatch.setattr(simulator, "multiprocessors", lambda _device=0: 5)
    monkeypatch.setattr(families, "FAMILIES", (hopper,))
    prepare.forget()
    with in_clusters():
        yield Device("sm_90a", np)
    prepare.forget()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_forward(CASES[name], device)


def test_in_any_order(device: Device) -> None:
    """Under the schedule of the process: of tests.simulator.mutate."""
    check_forward(CASES["odd_tiles"], device)


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_in_use(policy: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache: sequences that end in either half of a block; one without keys, which both blocks pass."""
    monkeypatch.setattr(families, "FAMILIES", ALL_FAMILIES)
    case = KvCase(queries=150, room=256, lengths=(30, 0, 200), heads=(2, 1), head_dims=(128, 128))
    with simulator.schedule(policy, seed=1), simulator.costs() as counted:
        kv_cases.check(case, device)
    assert hopper._forward("f16", (128, 128), "band").name in dict(counted)


def problem(**changes: Any) -> Problem:
    shape = {"batch": 2, "heads_q": 2, "heads_k": 2, "seqlen_q": 300, "seqlen_k": 300}
    alike = {"head_dim": 128, "head_dim_v": 128, "scale": 0.125}
    return Problem("forward", "float16", None, **{**shape, **alike, **changes})


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, 4),  # four heads of three tiles, so of two pairs: 16 blocks for two clusters
        ({"batch": 1, "heads_q": 1, "heads_k": 1}, 4),
        ({"batch": 1, "heads_q": 1, "heads_k": 1, "seqlen_q": 100}, 2),
    ],
)
def test_grids_are_whole_clusters(changes: dict[str, Any], blocks: int) -> None:
    plan = choose.choose(problem(**changes), "sm_90", 5)
    assert plan.launches[0].grid == (blocks, 1, 1)
    assert plan.zeroed == ()


@pytest.mark.parametrize("changes", [{"right": 0}, {"left": 3}, {"packed": True}])
def test_other_problems_are_refused(changes: dict[str, Any]) -> None:
    reasons = hopper.refusals(problem(**changes), architecture("sm_90"))
    assert reasons == ["blocks of a cluster see the same keys: no causal mask, window or packed sequences"]


@pytest.mark.parametrize("classes", [c for c in hopper._FORWARD if c[0] >= 128])
def test_keys_are_read_once_for_two_tiles(classes: tuple[int, int]) -> None:
    d, dv = classes
    variant = hopper._forward("f16", classes, "band")
    (m, n), heads = variant.tile, 2
    rows, keys = 2 * m, 3 * n
    q, k, v = (aligned((1, heads, s, f), np.float16, 0.5) for s, f in ((rows, d), (keys, d), (keys, dv)))
    with simulator.costs() as counted:
        cupy_flash.attention(q, k, v, out=aligned((1, heads, rows, dv), np.float16), return_lse=True)
    ((_, cost),) = counted
    assert cost["bulk_load_bytes"] == 2 * heads * (rows * d + keys * (d + dv))
    assert cost["mma_flops"] == 2 * heads * rows * keys * (d + dv)


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_90a"
from cupy_flash.device import simulator
from tests.simulator.test_hopper_clusters import CASES, Device, check_forward, in_clusters, np
for policy in ("late", "early"):
    with simulator.schedule(policy), in_clusters():
        check_forward(CASES["odd_tiles"], Device("sm_90a", np))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No race between the blocks of a cluster either."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
