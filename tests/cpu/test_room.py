"""Kernels and workspaces have room: for both head dims, and for the tiles of any sequences."""

from __future__ import annotations

from itertools import product

import pytest

from cupy_flash import UnsupportedError
from cupy_flash.call.problem import Cache
from cupy_flash.plan.choose import choose
from cupy_flash.plan.launch import blocks_of
from tests.plan_cases import BASE, CACHED

HEAD_DIMS = ((16, 200), (200, 16), (64, 65), (65, 64), (100, 129), (129, 100), (300, 500), (500, 300))
DTYPES = {"float16": None, "float32": None, "float64": None, "float8_e4m3fn": "float16"}


@pytest.mark.parametrize("direction", ["forward", "backward", "jvp", "hvp"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_kernels_have_room_for_both_head_dims(arch: str, direction: str) -> None:
    for (dtype, of_float8), (d, v) in product(DTYPES.items(), HEAD_DIMS):
        p = BASE._replace(
            direction=direction, dtype=dtype, of_float8=of_float8, head_dim=d, head_dim_v=v, scale=d**-0.5
        )
        if of_float8 and direction != "forward":
            continue
        try:
            launches = choose(p, arch).launches
        except UnsupportedError:
            continue
        for variant in (launch.variant for launch in launches if launch.variant.step != "delta"):
            assert variant.head_dim >= d, variant.name
            assert variant.head_dim_v >= v, variant.name
            if variant.kernel.startswith("simple"):
                assert min(variant.head_dim, variant.head_dim_v) >= max(d, v), variant.name


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_kernels_over_caches_have_room_for_both_head_dims(arch: str, dtype: str) -> None:
    for (d, v), reproducible in product(HEAD_DIMS, (None, "batch")):
        p = CACHED._replace(
            dtype=dtype, cache=Cache(dtype), head_dim=d, head_dim_v=v, reproducible=reproducible
        )
        try:
            launches = choose(p, arch).launches
        except UnsupportedError:
            continue
        for variant in (launch.variant for launch in launches):
            assert variant.head_dim_v >= v, variant.name
            assert variant.head_dim >= d or variant.source == "flash_combine.cu", variant.name


@pytest.mark.parametrize("lengths", [(1,) * 50, (3000, 1, 1, 1), (129,) * 9, (0, 0, 64, 65)], ids=str)
@pytest.mark.parametrize("heads", [(16, 16), (16, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_workspaces_have_room_for_the_tiles_of_packed_sequences(
    dtype: str, direction: str, heads: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    """A tile holds rows of one sequence; of the lengths the planner knows the sum, and how many there are."""
    p = BASE._replace(
        direction=direction, dtype=dtype, packed=True, batch=len(lengths), heads_q=heads[0], heads_k=heads[1],
        seqlen_q=max(lengths), seqlen_k=max(lengths), rows_q=sum(lengths), rows_k=sum(lengths),
        head_dim=64, head_dim_v=64,
    )  # fmt: skip
    plan = choose(p, "sm_90")
    main = max(plan.launches, key=lambda launch: launch.variant.shared_bytes)
    (m, n), bits = main.variant.tile, main.head_bits
    heads_q = heads[1] if bits else heads[0]
    needed = {
        **dict.fromkeys(("q_halves", "do_halves", "dq_accumulator"), (m, bits, heads_q)),
        **dict.fromkeys(("k_halves", "v_halves"), (n, 0, heads[1])),
    }
    for part in plan.workspace:
        if part.name in needed:
            rows, shift, of = needed[part.name]
            assert part.shape[0] >= sum(blocks_of(length << shift, rows) for length in lengths), part
            assert part.shape[1] == of, part
