"""flash_backward, every kind of tile: gradients, determinism, packed sequences, cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_flash.device import simulator
from cupy_flash.testing import assert_within_budget, naive_same_precision
from tests.simulator import sanitized
from tests.simulator.flash_backward_kernel import FlashBackward, Passes, backward
from tests.simulator.flash_features import BANDS, FEATURES, LENGTHS, feature
from tests.simulator.flash_kernel import DTYPES

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]

# Every class of code: one or two slots, registers instead of copies, 16 or 32 rows and one or more n8 columns
# per warp, swizzle of 4 and of 8 chunks, d_v below d_qk, one and three products, V in registers.
TURING_256 = FlashBackward("f16", (256, 256), "band", (16, 64), slots=0, turing=True, v_in_registers=True)
FAST = (
    Passes(FlashBackward("f16", (64, 64), "band", (64, 128))),
    Passes(FlashBackward("bf16", (128, 128), "band", (64, 64), v_in_registers=True)),
    Passes(FlashBackward("f16", (96, 96), "band", (64, 128))),
    Passes(FlashBackward("bf16", (192, 128), "band", (64, 64))),
    Passes(FlashBackward("f16", (256, 256), "band", (16, 64), v_in_registers=True)),
    Passes(FlashBackward("f16", (32, 32), "band", (64, 128), slots=0, turing=True)),
    Passes(FlashBackward("tf32x3", (128, 128), "any", (32, 32), slots=1)),
    Passes(TURING_256),
)
DETERMINISTIC = (
    Passes(FlashBackward("bf16", (64, 64), "band", (64, 128)), ((128, 64), 256)),
    Passes(FlashBackward("f16", (128, 128), "any", (32, 64), slots=0, turing=True), ((64, 32), 128)),
    Passes(FlashBackward("tf32", (64, 64), "any", (32, 64)), ((64, 32), 128)),
    Passes(replace(TURING_256, mask="any"), ((32, 32), 128)),
)
ANY = (Passes(FlashBackward("bf16", (64, 64), "any", (64, 128))), *DETERMINISTIC[1:])


def inputs(
    passes: Passes,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    less: tuple[int, int] = (0, 0),
    draw: int = 0,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Random do, q, k, v, dlse with head dims `less` below the class, and the naive o and lse."""
    rng = np.random.default_rng(draw)
    (queries, keys), kernel = lengths, passes.keys
    d, dv = (full - missing for full, missing in zip(kernel.head_dims, less, strict=True))
    shapes = {
        "q": (1, heads[0], queries, d),
        "k": (1, heads[1], keys, d),
        "v": (1, heads[1], keys, dv),
        "do": (1, heads[0], queries, dv),
    }
    arrays = {name: rng.standard_normal(shape).astype(kernel.element) for name, shape in shapes.items()}
    result = naive_same_precision(*(arrays[name] for name in "qkv"), precision=precision(passes), **options)
    dlse = rng.standard_normal((1, heads[0], queries)).astype(np.float32)
    return {**arrays, "dlse": dlse, "o": result.o, "lse": result.lse.astype(np.float32)}


def precision(passes: Passes) -> str | None:
    return DTYPES[passes.keys.dtype][3]


def check(passes: Passes, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, np.ndarray]:
    result = backward(passes, arrays, **options)
    q, k, v = (arrays[name] for name in "qkv")
    gradients = {name: arrays.get(name) for name in ("do", "dlse")}
    assert_within_budget(result, q, k, v, precision=precision(passes), **gradients, **options)
    return result


@pytest.mark.parametrize("passes", [*FAST, *DETERMINISTIC], ids=lambda p: p.name)
@pytest.mark.parametrize("turn", range(len(LENGTHS)))
def test_band(passes: Passes, turn: int) -> None:
    """Ragged lengths, head dims on and between classes, grouped heads, sinks, dlse; policies in turn."""
    rng = np.random.default_rng(turn)
    heads = ((1, 1), (4, 2), (3, 1))[turn % 3]
    less = ((0, 0), (8, 0), (3, 5), (0, 17), (24, 16), (0, 0))[turn]
    options = dict(BANDS[(turn + len(passes.name)) % len(BANDS)])
    if turn % 3 == 1:
        options["sinks"] = rng.standard_normal(heads[0]).astype(np.float32)
    arrays = inputs(passes, LENGTHS[turn], heads, less, turn, **options)
    if turn % 2:
        del arrays["dlse"]
    with simulator.schedule(("late", "early", "random")[turn % 3], seed=turn + 1):
        check(passes, arrays, options)


@pytest.mark.parametrize("passes", ANY, ids=lambda p: p.name)
@pytest.mark.parametrize("turn", range(len(FEATURES)), ids=["-".join(names) for names in FEATURES])
def test_any(passes: Passes, turn: int) -> None:
    lengths, rng = ((63, 65), (65, 130), (130, 63))[turn % 3], np.random.default_rng(turn)
    options: dict[str, Any] = {"align": 3}
    for name in FEATURES[turn]:
        options |= feature(name, 2, lengths, rng)
    arrays = inputs(passes, lengths, (2, 1), ((0, 0), (5, 8))[turn % 2], turn, **options)
    with simulator.schedule(("late", "random")[turn % 2], seed=turn + 1):
        check(passes, arrays, options)


@pytest.mark.parametrize("passes", DETERMINISTIC, ids=lambda p: p.name)
def test_deterministic_passes_repeat_every_bit(passes: Passes) -> None:
    """Whatever the schedule; the fast passes may differ, because they add in any order."""
    options: dict[str, Any] = {"causal": True, "align": 7}
    arrays = inputs(passes, (150, 200), (2, 1), **options)
    results = []
    for policy, seed in (("late", 1), ("early", 1), ("random", 1), ("random", 2)):
        with simulator.schedule(policy, seed=seed):
            results.append(backward(passes, arrays, **options))
    for name in ("dq", "dk", "dv"):
        assert len({result[name].tobytes() for result in results}) == 1


@pytest.mark.parametrize("passes", [FAST[0], DETERMINISTIC[0]], ids=lambda p: p.name)
def test_rows_without_keys_have_no_gradient(passes: Passes) -> None:
    """Neither have keys that no query sees, a whole tile of them included."""
    options: dict[str, Any] = {"window": (3, 3), "align": -100}
    arrays = inputs(passes, (200, 260), (1, 1), **options)
    result = check(passes, arrays, options)
    assert not result["dq"][0, 0, :97].any()
    assert not result["dk"][0, 0, 103:].any()
    assert not result["dv"][0, 0, 103:].any()


@pytest.mark.parametrize("passes", [FAST[0], DETERMINISTIC[1]], ids=lambda p: p.name)
def test_packed(passes: Passes) -> None:
    """Sequences of their own lengths, some empty; rows beyond the last sequence stay untouched."""
    lengths = ((5, 0, 70, 1, 130), (9, 12, 0, 200, 131))
    cu = (np.cumsum([0, *lengths[0]]).astype(np.int32), np.cumsum([0, *lengths[1]]).astype(np.int32))
    options: dict[str, Any] = {"causal": True, "align": 0}
    arrays = inputs(passes, (int(cu[0][-1]) + 3, int(cu[1][-1]) + 2), (2, 1))
    own = [{"k": slice(cu[1][n], cu[1][n + 1]), "q": slice(cu[0][n], cu[0][n + 1])} for n in range(5)]

    def part(name: str, n: int) -> np.ndarray:
        return arrays[name][:, :, own[n]["k" if name in ("k", "v") else "q"]]

    for n in range(5):
        state = naive_same_precision(*(part(name, n) for name in "qkv"), **options)
        part("o", n)[...], part("lse", n)[...] = state.o, state.lse
    result = backward(passes, arrays, cu_seqlens=cu, **options)
    for n in range(5):
        got = {f"d{name}": result[f"d{name}"][:, :, own[n]["q" if name == "q" else "k"]] for name in "qkv"}
        if min(got["dq"].size, got["dk"].size):
            q, k, v, do, dlse = (part(name, n) for name in ("q", "k", "v", "do", "dlse"))
            assert_within_budget(got, q, k, v, do=do, dlse=dlse, **options)
        else:
            assert not any(x.any() for x in got.values())
    untouched = result["dq"].dtype.type(-1.5 * 2**14)
    assert (result["dq"][:, :, cu[0][-1] :] == untouched).all()
    assert (result["dk"][:, :, cu[1][-1] :] == untouched).all()


@pytest.mark.parametrize("passes", [*FAST, *DETERMINISTIC], ids=lambda p: p.name)
def test_cost_is_the_theory(passes: Passes) -> None:
    """Products, exponentials, additions and bytes as few as possible; no bank conflict, whole sectors."""
    rows, (d, dv), size = 256, passes.keys.head_dims, passes.keys.element.itemsize
    arrays = inputs(passes, (rows, rows), (1, 1))
    with simulator.costs() as counted:
        backward(passes, arrays)
    products, pairs = DTYPES[passes.keys.dtype][2], rows * rows
    fast = passes.dq is None
    # Of warps that share rows, each has all of S and dP.
    sharing = 1 if passes.dq is None else max(passes.dq[1] // 2 // passes.dq[0][0], 1)
    widths = {"dqkv": (3 if fast else 2) * d + 2 * dv, "dq": sharing * (d + dv) + d}
    for variant, (_, cost) in zip(passes.launches, counted, strict=True):
        if variant.step not in widths:
            assert cost["mma_flops"] == cost["exps"] == 0
            continue
        (m, n), of_dq = variant.tile, variant.step == "dq"
        assert cost["mma_flops"] == 2 * pairs * widths[variant.step] * products
        assert cost["exps"] == pairs * (sharing if of_dq else 1)
        assert cost["atomics"] == (rows * d * (rows // n) if variant.step == "dqkv" and fast else 0)
        blocks = rows // (m if of_dq else n)
        statistics = cost["global_load_bytes"] - size * rows * (d + dv) * (1 + blocks)
        # LSE and delta of a row, 8 bytes, come with Q; of floats, without cp.async and in pass dq they go to
        # the 4 lanes of a quad, in each warp that has keys for it.
        if of_dq or variant.turing or size == 4:
            warps, left = divmod(statistics, 32 * rows * (1 if of_dq else blocks))
            assert left == 0
            assert 1 <= warps <= (sharing if of_dq else variant.threads // 32)
        else:
            assert statistics == 8 * rows * blocks
        for unit in ("matrix_load", "shared_load", "shared_store", "copy_store"):
            assert cost[f"{unit}_cycles"] == cost[f"{unit}s"], f"{variant.name}: bank conflicts of {unit}s"
        # Rows start on 16-byte boundaries: 64 bytes of one may lie in three sectors, but not in four.
        assert 32 * cost["global_store_sectors"] <= 1.5 * cost["global_store_bytes"]


_SANITIZED = """
from cupy_flash.device import simulator
from tests.simulator.test_flash_backward import DETERMINISTIC, FAST, check, inputs
options = {"causal": True, "align": 33}
for passes in (FAST[1], FAST[2], FAST[-2], FAST[-1], *DETERMINISTIC[-2:]):
    arrays = inputs(passes, (40, 70), (2, 1), (5, 3), **options)
    for policy in SCHEDULES:
        with simulator.schedule(policy):
            check(passes, arrays, options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race, in a variant of each way to keep tiles."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
