"""Gradients of float32 on Hopper by products of halves (f16x3), simulated, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.families import f16x3, hopper
from tests.cases import Case
from tests.checks import Device, check_backward
from tests.simulator.forward_cases import POLICIES, small_gpu
from tests.simulator.test_hopper_backward import check_packed
from tests.simulator.units import SIMULATED, aligned

FAMILIES = families.FAMILIES

pytestmark = [*SIMULATED, pytest.mark.sampled(64)]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(f16x3, "FEWEST_ROWS", 0)
    yield from small_gpu(monkeypatch, "sm_90a", hopper)


# Tiles that end inside, at and beyond an edge; one, two and more tiles of queries than there are stages.
KINDS = tuple(
    Case(batch=2, dtype="float32", align="bottom_right", style="aligned", **case)
    for case in (
        {"heads": (2, 1), "head_dims": (64, 64), "lengths": (1, 1)},
        {"heads": (2, 2), "head_dims": (40, 24), "lengths": (7, 9), "scale": 0.3},
        {"heads": (4, 2), "head_dims": (64, 64), "lengths": (65, 176), "causal": True, "sinks": True},
        {"heads": (3, 1), "head_dims": (24, 64), "lengths": (300, 140), "window": (90, 20), "dlse": True},
        {"heads": (1, 1), "head_dims": (64, 36), "lengths": (33, 300), "causal": True},
    )
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case, policy: str, device: Device) -> None:
    with simulator.schedule(policy, seed=3):
        check_backward(case, device)


def test_mistakes(device: Device) -> None:
    """What mutants are tried on, under the schedule of the process."""
    check_backward(KINDS[3], device)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, **options: Any
) -> dict[str, np.ndarray]:
    """The gradients, which are within the budget of tf32x3; o and lse are the rounded exact ones."""
    exact = testing.reference_attention(q, k, v, **options)
    rounded = (exact.o.astype(np.float32), exact.lse.astype(np.float32))
    held = [testing.hostile(x, style="aligned").view for x in (do, q, k, v, *rounded)]
    gradients = cupy_flash.attention_backward(*held, **options)
    made = {name: np.asarray(getattr(gradients, name)) for name in ("dq", "dk", "dv")}
    testing.assert_within_budget(made, q, k, v, do=do, precision="tf32x3", **options)
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_packed(policy: str) -> None:
    """As of 16 bits: sequences of their own lengths among neighbours full of NaN."""
    lengths = ((5, 0, 170, 1, 130, 64), (9, 12, 0, 200, 331, 64))
    with simulator.schedule(policy, seed=5):
        check_packed(
            "float32", (64, 40), lengths=lengths, precision="tf32x3", causal=True, align="bottom_right"
        )


def test_keys_in_use_end_before_the_rows() -> None:
    """Blocks of keys in part and as a whole past the end: their gradients are zeros, and nobody sees them."""
    q, k, v = (drawn(n, 2, 64, seed=n) for n in (70, 300, 300))
    k[77:], v[77:] = np.nan, np.nan
    cu = [np.array([0, n], np.int32) for n in (70, 300)]
    used = {"seqused_k": np.array([77], np.int32)}
    o, lse = cupy_flash.attention_varlen(q, k, v, *cu, return_lse=True, **used)
    made = cupy_flash.attention_varlen_backward(q, q, k, v, o, lse, *cu, **used)
    got = {"dq": made.dq, "dk": made.dk[:77], "dv": made.dv[:77]}
    heads = [x.swapaxes(0, 1)[None] for x in (q, k[:77], v[:77])]
    testing.assert_within_budget(
        {name: x.swapaxes(0, 1)[None] for name, x in got.items()}, *heads, do=heads[0], precision="tf32x3"
    )
    assert not made.dk[77:].any()
    assert not made.dv[77:].any()


def test_what_sees_nothing_has_no_gradient() -> None:
    """Rows without keys, and keys that no query sees, a whole block of them included."""
    q, k, v = (drawn(1, 1, 400, 64, seed=n) for n in range(3))
    made = check_gradients(q, k, v, q, window=(3, 3), align=-260)
    assert not made["dq"][0, 0, :257].any()
    for name in ("dk", "dv"):
        assert not made[name][0, 0, 143:].any()


# Factors on q, k, v and dO.
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1e30, 1e-20), (1e20, 1e-20, 1, 1e15), (1e-30, 1e25, 1e-30, 1e20), (1e-25, 1e-25, 1, 1)],
    ids=str,
)  # fmt: skip
def test_any_magnitude(sizes: tuple[float, ...]) -> None:
    """Powers of two carry what halves cannot, of dS, too."""
    check_gradients(*(drawn(1, 1, 140, 64, seed=i) * np.float32(x) for i, x in enumerate(sizes)))


def test_magnitudes_that_differ_from_tile_to_tile() -> None:
    """Each tile has powers of two of its own, and all sums go across them."""
    q, k, v, do = (drawn(1, 1, 520, 64, seed=i) for i in range(4))
    size = np.exp2(np.arange(520) // 64 * 9 - 40).astype(np.float32)[:, None]
    check_gradients(q, k * np.minimum(size, 1), v * size, do * size[::-1])


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_a_spread_within_a_tile_that_halves_hold(which: int) -> None:
    """2^15 between rows of a tile: still every bit that counts."""
    arrays = [drawn(1, 1, 200, 64, seed=i) for i in range(4)]
    arrays[which] *= np.exp2(np.random.default_rng(9).integers(-15, 1, (200, 1))).astype(np.float32)
    check_gradients(*arrays)


def test_weights_of_many_keys_are_as_exact_as_those_of_few() -> None:
    """A weight of 2^-25 has none of its bits in halves of its own size: a power of two makes it large."""
    q, k, do = (drawn(1, 1, n, 64, seed=n) for n in (64, 128, 64))
    v = aligned((1, 1, 128, 64), np.float32, 0.0)
    lse = aligned((1, 1, 64), np.float32, 24.6 * np.log(2))
    o = aligned((1, 1, 64, 64), np.float32, 0.0)
    dv = cupy_flash.attention_backward(do, q, k, v, o, lse, scale=1e-30).dv
    exact = do[0, 0].astype(np.float64).sum(0) * np.exp(-np.float64(lse[0, 0, 0]))
    assert np.abs(dv[0, 0] - exact).max() < 2**-19 * np.abs(exact).max()


def test_large_scores() -> None:
    q, k, v, do = (drawn(1, 1, 200, 64, seed=i) for i in range(4))
    check_gradients(q * np.float32(40), k, v, do)


def test_zeros() -> None:
    q, k, v = (drawn(1, 1, 130, 64, seed=i) for i in range(3))
    made = check_gradients(q, k, v, np.zeros_like(q))
    assert not any(x.any() for x in made.values())
    check_gradients(np.zeros_like(q), k, v, q)


def test_who_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, wider heads, fewer rows and every order that is promised are left to tf32x3."""
    monkeypatch.setattr(f16x3, "FEWEST_ROWS", 256)
    monkeypatch.setattr(families, "FAMILIES", FAMILIES)
    memo.forget()

    def kernels(rows: int = 256, width: int = 64, **more: Any) -> str:
        q = np.zeros((1, 1, rows, width), np.float32)
        return cupy_flash.explain(q, q, q, direction="backward", causal=True, **more)

    name = "flash_backward_f16x3_sm90"
    assert name in kernels()
    assert name in kernels(width=16, scale=0.5, precision="tf32x3")
    for other in (
        kernels(255), kernels(width=72), kernels(softcap=3.0), kernels(scale=-1.0),
        kernels(dropout=0.1, seed=0), kernels(reproducible="run"), kernels(precision="tf32"),
        kernels(precision="ieee"),
    ):  # fmt: skip
        assert name not in other


def test_cost_is_the_theory() -> None:
    """Three of each product, one exponential for each pair, every tile once for each block that reads it."""
    m, n, d, heads = 64, 128, 64, 2
    rows, keys = 3 * m, 2 * n
    q, o, do = (aligned((1, heads, rows, d), np.float32, 0.5) for _ in range(3))
    k, v = (aligned((1, 1, keys, d), np.float32, 0.5) for _ in range(2))
    lse = aligned((1, heads, rows), np.float32, 5.0)
    with simulator.costs() as counted:
        cupy_flash.attention_backward(do, q, k, v, o, lse)
    costs = dict(counted)
    cost = costs["flash_backward_f16x3_sm90_f16x3_d64_band_64x128"]
    pairs, tiles = heads * rows * keys, heads * (rows // m) * (keys // n)
    assert cost["exps"] == pairs
    assert cost["mma_flops"] == 3 * 5 * 2 * pairs * d
    # Halves that each of two warpgroups reads: S, dP and dQ of two tiles of 64 rows, dV and dK of one.
    assert cost["product_bytes"] == 2 * tiles * 3 * 2 * (3 * 2 + 2) * 64 * d
    assert cost["bulk_reduce_bytes"] == 2 * 4 * tiles * m * d
    units = 16 * 2 * (keys // n + tiles)
    assert cost["bulk_load_bytes"] == 4 * 2 * d * (keys + tiles * m) + units
    assert cost["global_load_bytes"] == 2 * 4 * tiles * m
    assert cost["global_store_bytes"] == 4 * 2 * keys * d
    for what in ("shared_load", "shared_store", "matrix_store"):
        assert cost[f"{what}_cycles"] == cost[f"{what}s"], f"bank conflicts in {what}s"
    split = costs["flash_split_f16_of_gradients_f16x3_d64_band_64x128"]
    elements = 2 * d * (heads * rows + keys)
    assert split["global_load_bytes"] == 4 * elements
    assert split["global_store_bytes"] == 4 * elements + 16 * 2 * (heads * rows // m + keys // n)
