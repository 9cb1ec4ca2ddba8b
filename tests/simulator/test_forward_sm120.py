"""The forward kernel of sm_120 with warp roles, a candidate of bench tune, simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import prepare
from cupy_flash.call.problem import Problem
from cupy_flash.cubins import nvrtc, sass
from cupy_flash.cubins.compile import compile_variant
from cupy_flash.device import simulator
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan import choose, families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import flash, flash_tiles
from tests import kv_cases
from tests.cases import Case
from tests.checks import Device, check_forward
from tests.kv_cases import KvCase
from tests.simulator import sanitized
from tests.simulator.test_hopper_attention import check_packed
from tests.simulator.units import SIMULATED, aligned

pytestmark = [*SIMULATED, pytest.mark.sampled(6)]

ALL_FAMILIES = families.FAMILIES
POLICIES = ("late", "early", "random")
# Of classes of head dims: keys of a block, whether Q is in registers, stages. Both ways of Q; one and two
# stages of it; rows of 64 bytes.
CELLS = {(64, 64): (64, 1, 2), (96, 96): (64, 0, 2), (128, 128): (64, 0, 2), (192, 128): (32, 0, 2)}
# One and several tiles; ends inside a tile and inside a block of keys; warps whose rows see none of a block's
# keys, after a diagonal and before a window; more blocks than stages; groups of heads.
CASES = {
    "several_tiles": Case(
        lengths=(300, 300), head_dims=(128, 128), heads=(4, 1), batch=1, causal=True, align=0
    ),
    "all_keys": Case(dtype="bfloat16", lengths=(129, 300), head_dims=(128, 72), heads=(3, 1), sinks=True),
    "window": Case(lengths=(280, 260), head_dims=(64, 40), window=(70, 10), align="bottom_right"),
    "one_key": Case(lengths=(5, 1), head_dims=(128, 128), heads=(3, 1)),
    "no_keys": Case(lengths=(140, 70), head_dims=(64, 64), causal=True, align=-100),
    "span_of_64": Case(dtype="bfloat16", lengths=(200, 130), head_dims=(96, 96), causal=True, align=0),
    "192/128": Case(lengths=(150, 170), head_dims=(192, 128), batch=1, causal=True, align="bottom_right"),
}
CASES = {
    name: dataclasses.replace(
        case, style="aligned", dtype="bfloat16" if case.dtype == "bfloat16" else "float16"
    )
    for name, case in CASES.items()
}


def by_roles(d128: tuple[int, int, int] = CELLS[128, 128]) -> Any:
    """Plan forward kernels of `band` with a warp that copies."""
    key = ("16-bit", "band")
    changed = [list(row) for row in flash_tiles.FORWARD[key]]
    for classes, (n, in_registers, stages) in {**CELLS, (128, 128): d128}.items():
        cell = flash_tiles.ForwardTile(128, n, 288, in_registers, 1, stages=stages)
        changed[flash_tiles.HEAD_DIMS.index(classes)][flash_tiles.MEDIUM] = cell
    return mock.patch.dict(flash_tiles.FORWARD, {key: tuple(map(tuple, changed))})


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A simulated GPU of three multiprocessors, so that blocks take several tiles."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_120")
    monkeypatch.setattr(simulator, "multiprocessors", lambda _device=0: 3)
    monkeypatch.setattr(families, "FAMILIES", (flash,))
    prepare.forget()
    with by_roles():
        yield Device("sm_120", np)
    prepare.forget()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_forward(CASES[name], device)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_stages_of_q(policy: str, device: Device) -> None:
    """Beside 32 keys: Q of the next tile comes while this one is worked on."""
    with simulator.schedule(policy, seed=2), by_roles(d128=(32, 1, 2)):
        prepare.forget()
        check_forward(CASES["several_tiles"], device)


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}], ids=["alike", "banded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_packed(policy: str, options: dict[str, Any]) -> None:
    with simulator.schedule(policy, seed=4):
        check_packed("float16", 128, **options)


def test_in_any_order(device: Device) -> None:
    """Under the schedule of the process: of tests.simulator.mutate."""
    check_forward(CASES["several_tiles"], device)
    check_forward(CASES["one_key"], device)
    check_packed("float16", 64)


def test_keys_in_use(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache: sequences that end inside a block, and one without keys."""
    monkeypatch.setattr(families, "FAMILIES", ALL_FAMILIES)
    case = KvCase(queries=150, room=256, lengths=(30, 0, 200), heads=(2, 1), head_dims=(128, 128))
    with simulator.costs() as counted:
        kv_cases.check(case, device)
    assert "flash_forward_sm120_f16_d128_band_128x64" in dict(counted)


def problem(**changes: Any) -> Problem:
    shape = {"batch": 2, "heads_q": 2, "heads_k": 2, "seqlen_q": 300, "seqlen_k": 300}
    alike = {"head_dim": 128, "head_dim_v": 128, "scale": 0.125}
    return Problem("forward", "float16", None, **{**shape, **alike, **changes})


@pytest.mark.parametrize(
    ("changes", "blocks", "zeroed"),
    [({}, 3, ()), ({"right": 0}, 3, ("next_tile",)), ({"packed": True}, 3, ("next_tile",))],
)
def test_blocks_stay(changes: dict[str, Any], blocks: int, zeroed: tuple[str, ...]) -> None:
    plan = choose.choose(problem(**changes), "sm_120", 3)
    assert plan.family == "flash"
    assert plan.launches[0].grid == (blocks, 1, 1)
    assert plan.zeroed == zeroed


@pytest.mark.parametrize("changes", [{"aligned": False}, {"boxes": False}, {"seqlen_k": 0}])
def test_what_bulk_copies_do_not_take_is_refused(changes: dict[str, Any]) -> None:
    reasons = flash.refusals(problem(**changes), architecture("sm_120"))
    assert reasons == ["bulk copies need keys, rows on 16-byte boundaries, and no axis that is broadcast"]


@pytest.mark.parametrize("classes", CELLS)
def test_cost_is_the_theory(classes: tuple[int, int]) -> None:
    """A tile reads K and V once, without a bank conflict; warps pass over what they do not see."""
    (d, dv), (n, in_registers, _) = classes, CELLS[classes]
    rows, keys, heads = 128, 4 * n, 2
    q, k, v = (aligned((1, heads, s, f), np.float16, 0.5) for s, f in ((rows, d), (keys, d), (keys, dv)))
    found = {}
    for causal in (False, True):
        with simulator.costs() as counted:
            out = aligned((1, heads, rows, dv), np.float16)
            cupy_flash.attention(q, k, v, out=out, causal=causal, align=0)
        ((_, found[causal]),) = counted
    cost = found[False]
    assert cost["bulk_load_bytes"] == 2 * heads * (rows * d + keys * (d + dv))
    assert cost["mma_flops"] == 2 * heads * rows * keys * (d + dv)
    assert cost["global_load_bytes"] == 0
    # A warp reads all of K and V for its 16 rows, and Q once or for each block; 128 bytes a cycle.
    reads = 8 * keys * (d + dv) + rows * d * (1 if in_registers else keys // n)
    assert cost["matrix_load_cycles"] == 2 * heads * reads // 128
    seen = sum(16 * n * -(-min(row + 16, keys) // n) for row in range(0, rows, 16))
    assert found[True]["mma_flops"] == 2 * heads * seen * (d + dv)


@pytest.mark.parametrize("cuda", [12, 13])
def test_nobody_who_multiplies_copies_or_meets_a_barrier(cuda: int, tmp_path: Path) -> None:
    """In the SASS of the loop; and nothing is spilled at the registers that nine warps leave each other."""
    try:
        compiler = nvrtc.Compiler(cuda)
    except UnsupportedError as error:
        pytest.skip(str(error).splitlines()[0])
    variant = choose.choose(problem(), "sm_120", 3).launches[0].variant
    entry, refused, _ = compile_variant(compiler, variant, "sm_120", tmp_path)
    assert not refused
    assert entry["registers"] <= 168
    if sass.disassembler() is None:
        pytest.skip("no nvdisasm")
    listing = sass.disassemble(tmp_path / f"{variant.name}.cubin")
    loops = [[i.name for i in listing.instructions[start : end + 1]] for start, end in listing.loops()]
    loop = min((names for names in loops if names.count("HMMA") == 128), key=len)
    assert not {"LDGSTS", "BAR", "LDG", "UTMALDG"} & set(loop)
    assert (loop.count("LDSM"), loop.count("MUFU")) == (72, 34)


_SANITIZED = """
import os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_120"
from cupy_flash.device import simulator
from tests.checks import only
from tests.simulator.test_forward_sm120 import CASES, Device, by_roles, check_forward, check_packed, flash, np
simulator.multiprocessors = lambda _device=0: 3
for policy in ("late", "early"):
    with simulator.schedule(policy), by_roles(), only(flash):
        check_forward(CASES["several_tiles"], Device("sm_120", np))
        check_packed("float16", 64)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
