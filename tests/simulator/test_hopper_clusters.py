"""Hopper's forward kernel in clusters of two blocks, a candidate of bench tune, simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import prepare, testing
from cupy_flash.call.problem import Problem
from cupy_flash.device import simulator
from cupy_flash.plan import choose, families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import hopper
from tests.cases import Case
from tests.checks import Device, check_forward
from tests.simulator import sanitized
from tests.simulator.units import SIMULATED, aligned

pytestmark = SIMULATED

POLICIES = ("late", "early", "random")
# One and several tiles, an odd number of them, ends inside a tile and inside either half of a block of keys;
# heads that share one of k; tiles of one head and of a group.
CASES = {
    "odd tiles": Case(dtype="float16", lengths=(300, 300), head_dims=(128, 128), heads=(2, 1)),
    "one tile": Case(dtype="bfloat16", lengths=(70, 129), head_dims=(128, 72), heads=(2, 2)),
    "one key": Case(dtype="float16", lengths=(5, 1), head_dims=(128, 128), heads=(3, 1)),
    "half a block": Case(dtype="float16", lengths=(130, 190), head_dims=(128, 128), heads=(4, 1), sinks=True),
    "192/128": Case(dtype="bfloat16", lengths=(257, 300), head_dims=(192, 128), heads=(2, 2), batch=1),
    "192": Case(dtype="float16", lengths=(129, 170), head_dims=(160, 152), heads=(2, 1), batch=1),
    "256": Case(dtype="float16", lengths=(200, 250), head_dims=(256, 256), heads=(2, 1), batch=1),
    "any": Case(dtype="float16", lengths=(140, 300), head_dims=(128, 128), softcap=3.0, alibi="h", align=0),
    "three consumers": Case(dtype="float16", lengths=(200, 300), head_dims=(64, 64), heads=(4, 2)),
    "span of 64": Case(dtype="bfloat16", lengths=(200, 130), head_dims=(96, 96)),
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_forward(CASES[name], device)
