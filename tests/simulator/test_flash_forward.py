"""flash_forward, a variant of every class: results, cost, packed sequences, the order of its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash.device import simulator
from cupy_flash.testing import assert_within_budget
from tests.simulator import sanitized
from tests.simulator.flash_features import BANDS, FEATURES, LENGTHS, feature
from tests.simulator.flash_kernel import DTYPES, FlashForward, forward
from tests.simulator.units import pack, unit

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(64)]

# Every class of code: 16 or 32 rows per warp, Q in registers or not, swizzle of 4 and of 8 chunks, d_v below
# d_qk, a longer ring, registers instead of cp.async, one and three products, one loop and two.
BAND = (
    FlashForward("f16", (32, 32), "band", (128, 128), q_in_registers=True),
    FlashForward("f16", (64, 64), "band", (128, 128)),
    FlashForward("bf16", (96, 96), "band", (128, 64)),
    FlashForward("bf16", (128, 128), "band", (128, 64), slots=3),
    FlashForward("f16", (192, 128), "band", (128, 32), threads=256, q_in_registers=True),
    FlashForward("bf16", (256, 256), "band", (128, 64), threads=256),
    FlashForward("f16", (64, 64), "band", (64, 64), q_in_registers=True, turing=True),
    FlashForward("f16", (256, 256), "band", (64, 16), turing=True),
    FlashForward("tf32x3", (64, 64), "band", (128, 64)),
    FlashForward("tf32", (128, 128), "band", (64, 32)),
    FlashForward("f16", (128, 128), "band", (128, 64), loops=1),
)
ANY = (
    FlashForward("bf16", (64, 64), "any", (64, 64), q_in_registers=True),
    FlashForward("f16", (128, 128), "any", (64, 32), q_in_registers=True, turing=True),
    FlashForward("tf32x3", (32, 32), "any", (64, 64)),
)


def inputs(
    variant: FlashForward,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    less: tuple[int, int],
    seed: int = 0,
) -> list[np.ndarray]:
    """Random q, k, v with head dims `less` below the class."""
    rng = np.random.default_rng(seed)
    d, dv = (full - missing for full, missing in zip(variant.head_dims, less, strict=True))
    shapes = ((1, heads[0], lengths[0], d), (1, heads[1], lengths[1], d), (1, heads[1], lengths[1], dv))
    return [rng.standard_normal(shape).astype(variant.element) for shape in shapes]


def check(variant: FlashForward, qkv: list[np.ndarray], options: dict[str, Any]) -> None:
    q, k, v = qkv
    result = forward(variant, q, k, v, **options)
    assert_within_budget(result, q, k, v, precision=DTYPES[variant.dtype][3], **options)


@pytest.mark.parametrize("variant", BAND, ids=lambda v: v.name)
@pytest.mark.parametrize("turn", range(len(LENGTHS)))
def test_band(variant: FlashForward, turn: int) -> None:
    """Ragged lengths, head dims on and between classes, grouped heads, sinks; policies in turn."""
    rng = np.random.default_rng(turn)
    heads = ((1, 1), (2, 1))[turn % 2]
    less = ((0, 0), (8, 0), (3, 5), (0, 17), (24, 16), (0, 0))[turn]
    options = dict(BANDS[(turn + BAND.index(variant)) % len(BANDS)])
    if turn % 3 == 1:
        options["sinks"] = rng.standard_normal(heads[0]).astype(np.float32)
    with simulator.schedule(("late", "early", "random")[turn % 3], seed=turn + 1):
        check(variant, inputs(variant, LENGTHS[turn], heads, less, turn), options)


@pytest.mark.parametrize("variant", [BAND[1], BAND[8]], ids=lambda v: v.name)
def test_a_query_of_nan_is_no_row_without_keys(variant: FlashForward) -> None:
    """Its LSE is NaN: as -inf it would be left out where results are merged."""
    q, k, v = inputs(variant, (65, 70), (1, 1), (0, 0))
    q[0, 0, 3] = np.nan
    result = forward(variant, q, k, v)
    for x in (result["o"][0, 0], result["lse"][0, 0]):
        assert np.isnan(x[3]).all()
        assert np.isfinite(np.delete(x, 3, 0)).all()


@pytest.mark.parametrize("variant", ANY, ids=lambda v: v.name)
@pytest.mark.parametrize("turn", range(len(FEATURES)), ids=["-".join(names) for names in FEATURES])
def test_any(variant: FlashForward, turn: int) -> None:
    lengths, rng = ((63, 65), (65, 130), (130, 63))[turn % 3], np.random.default_rng(turn)
    options: dict[str, Any] = {"align": 3}
    for name in FEATURES[turn]:
        options |= feature(name, 2, lengths, rng)
    with simulator.schedule(("late", "random")[turn % 2], seed=turn + 1):
        check(variant, inputs(variant, lengths, (2, 1), ((0, 0), (5, 8))[turn % 2], turn), options)


def test_features_meet_pairwise() -> None:
    names = {name.rstrip("0123456789") for names in FEATURES for name in names}
    met = {(a[:4], b[:4]) for names in FEATURES for a in names for b in names if a != b}
    assert all((a[:4], b[:4]) in met for a in names for b in names if a != b)


@pytest.mark.parametrize("variant", [BAND[1], ANY[0]], ids=lambda v: v.name)
def test_masked_keys_may_hold_anything(variant: FlashForward) -> None:
    """NaN and infinity in keys that no query sees do not reach the result."""
    q, k, v = inputs(variant, (70, 140), (1, 1), (0, 0))
    k[:, :, 100:] = np.nan
    k[:, :, 120:] = np.inf
    options: dict[str, Any] = {"window": (None, 29), "align": "top_left"}
    if variant.mask == "any":
        options["mask"] = np.broadcast_to(np.arange(140) < 90, (1, 1, 1, 140)).copy()
        k[:, :, 90:] = np.nan
    check(variant, [q, k, v], options)


def test_rows_without_keys() -> None:
    """O = 0 and LSE = -inf, also for a whole tile of queries that sees no block of keys."""
    variant = BAND[6]
    options: dict[str, Any] = {"window": (3, 3), "align": -100}
    q, k, v = inputs(variant, (200, 40), (1, 1), (0, 0))
    result = forward(variant, q, k, v, **options)
    assert_within_budget(result, q, k, v, **options)
    alone = np.r_[0:97, 143:200]
    assert not result["o"][0, 0, alone].any()
    assert np.isneginf(result["lse"][0, 0, alone]).all()


def test_large_scores() -> None:
    """Scores near the end of f16 and a row whose maximum comes last."""
    variant = BAND[6]
    q, k, v = inputs(variant, (65, 200), (1, 1), (0, 0))
    q, k = (50 * q).astype(np.float16), (50 * k).astype(np.float16)
    k[0, 0, 0] = q[0, 0, 0]
    check(variant, [q, k, v], {})


@pytest.mark.parametrize("variant", [BAND[1], ANY[0]], ids=lambda v: v.name)
def test_packed(variant: FlashForward) -> None:
    """Sequences of their own lengths, some empty; rows beyond the last sequence stay untouched."""
    lengths = ((5, 0, 70, 1, 130), (9, 12, 0, 200, 131))
    cu = (np.cumsum([0, *lengths[0]]).astype(np.int32), np.cumsum([0, *lengths[1]]).astype(np.int32))
    q, k, v = inputs(variant, (cu[0][-1] + 3, cu[1][-1] + 2), (2, 1), (0, 0))
    options: dict[str, Any] = {"causal": True, "align": 0}
    extra = {"dropout": 0.3, "seed": 5} if variant.mask == "any" else {}
    result = forward(variant, q, k, v, cu_seqlens=cu, **options, **extra)
    for n in range(len(lengths[0])):
        own_q, own_k = (slice(c[n], c[n + 1]) for c in cu)
        part = {"o": result["o"][:, :, own_q], "lse": result["lse"][:, :, own_q]}
        # Dropout counts the sequence as batch: only the first one is that of a batch of 1.
        if part["o"].size and (n == 0 or not extra):
            keys, values = k[:, :, own_k], v[:, :, own_k]
            assert_within_budget(part, q[:, :, own_q], keys, values, **options, **extra)
    assert (result["o"][:, :, cu[0][-1] :] == result["o"].dtype.type(-1.5 * 2**14)).all()


@pytest.mark.parametrize("variant", [*BAND, ANY[2]], ids=lambda v: v.name)
def test_cost_is_the_theory(variant: FlashForward) -> None:
    """Products, exponentials and bytes are the least possible; nothing meets a bank conflict."""
    (m, n), (d, dv), rows = variant.tile, variant.head_dims, 256
    q, k, v = inputs(variant, (rows, rows), (1, 1), (0, 0))
    with simulator.costs() as counted:
        forward(variant, q, k, v)
    ((_, cost),) = counted
    pairs, tiles, size = rows * rows, rows // m, variant.element.itemsize
    assert cost["mma_flops"] == 2 * pairs * (d + dv) * DTYPES[variant.dtype][2]
    if variant.mask == "band":
        # One per pair; a rescaling per row, lane of the quad and block of keys; two per row and lane at last.
        assert cost["exps"] == pairs + 4 * pairs // n + 8 * rows
    assert cost["global_load_bytes"] == size * (rows * d + tiles * rows * (d + dv))
    assert cost["global_store_bytes"] == size * rows * dv + 4 * rows
    for unit_, cycles in (
        ("matrix_loads", "matrix_load_cycles"),
        ("shared_loads", "shared_load_cycles"),
        ("shared_stores", "shared_store_cycles"),
        ("copy_stores", "copy_store_cycles"),
    ):
        assert cost[cycles] == cost[unit_], f"bank conflicts in {unit_}"
    # ldmatrix x4: Q once or once per block of keys, K in 16 x 32 bytes, V too unless its elements are floats.
    warps, blocks, halves = variant.threads // 32, rows // n, 16 * 32 // size
    q_loads = rows * d // halves * (1 if variant.q_in_registers else blocks)
    kv_loads = tiles * warps * rows * (d + (dv if size == 2 else 0)) // halves
    assert cost["matrix_loads"] == 4 * (q_loads + kv_loads)


@pytest.mark.parametrize("section_elements", [1, 3000, 9000, 1 << 30])
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_k", "tiles"), [(1, 1, 1, 1), (2, 6, 2, 3), (3, 4, 4, 5), (1, 5, 1, 2)]
)
def test_order_of_blocks(section_elements: int, batch: int, heads_q: int, heads_k: int, tiles: int) -> None:
    """Every tile of every head once; within a section of heads that share an L2, later tiles first."""
    count, seqlen_k, dims = batch * heads_q * tiles, 50, (32, 28)
    out = np.full((count, 3), -1, np.int32)
    shape = np.array([batch, heads_q, heads_k, 0, seqlen_k, *dims, 0], np.int32).view(
        np.uint64
    ).tobytes() + bytes(24)
    params = pack(shape=shape, out=out, tiles=tiles, section_elements=section_elements)
    simulator.load(unit("work_order")).launch((count, 1, 1), (1, 1, 1), 0, params.tobytes())
    assert len({tuple(work) for work in out.tolist()}) == count
    tile, head, entry = out.T
    assert set(tile) <= set(range(tiles))
    assert set(head) <= set(range(heads_q))
    assert set(entry) <= set(range(batch))
    group = heads_q // heads_k
    kv_heads = min(max(1, section_elements // sum(dims) // seqlen_k), batch * heads_k)
    section = (entry * heads_q + head) // (kv_heads * group)
    assert (np.diff(section) >= 0).all(), "sections follow each other"
    assert (np.diff(tile)[np.diff(section) == 0] <= 0).all(), "long tiles first"


_SANITIZED = """
from cupy_flash.device import simulator
from tests.simulator.test_flash_forward import ANY, BAND, check, inputs
for variant in (BAND[4], BAND[6], BAND[8], ANY[0]):
    for policy in SCHEDULES:
        with simulator.schedule(policy):
            check(variant, inputs(variant, (70, 133), (2, 1), (5, 3)), {"causal": True, "align": 63})
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    """No access out of bounds, no undefined behaviour, no race, in a variant of each way to stream tiles."""
    done = sanitized.run(sanitizer, _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
