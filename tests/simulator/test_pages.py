"""Ragged queries and keys over pages of any size, by the forward kernels over what is gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.device import simulator
from tests.cpu.test_pages import KEYS, QUERIES, Pool, one_by_one, queries
from tests.cpu.test_varlen import offsets
from tests.public import cached
from tests.simulator import sanitized
from tests.simulator.test_cached import on

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(4)]

ARCHS = ("sm_80", "sm_90a")


def aligned(x: np.ndarray, columns: int) -> np.ndarray:
    """Values of dimensions that the kernels of every family take."""
    return np.ascontiguousarray(np.tile(x, -(-columns // x.shape[-1]))[..., :columns])


def pool_of(page: int, keys: tuple[int, ...] = KEYS, columns: int = 32) -> tuple[Pool, np.ndarray]:
    pool = Pool(keys, page, dtype=np.float16)
    pool.v, pool.values = aligned(pool.v, columns), [aligned(x, columns) for x in pool.values]
    return pool, queries(dtype=np.float16)


def close(
    o: np.ndarray, lse: np.ndarray, wanted: tuple[np.ndarray, np.ndarray], of_scores: float = 1e-4
) -> None:
    # why these: products of halves are exact, weights and results are rounded to 11 bits of values below 4
    np.testing.assert_allclose(o.astype(np.float64), wanted[0], atol=4 * 2.0**-10)
    np.testing.assert_allclose(lse, wanted[1], atol=of_scores)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "columns", "options"), [
    (1, 32, {}), (5, 32, {"causal": True}), (16, 32, {"window": (20, 3), "softcap": 3.0}),
    (24, 32, {"causal": True}), (7, 264, {"causal": True}), (16, 512, {"window": (20, 3)}),
])  # fmt: skip
def test_a_prefill_over_pages(arch: str, page: int, columns: int, options: dict[str, Any]) -> None:
    pool, q = pool_of(page, columns=columns)
    cut = offsets(QUERIES)
    wanted = one_by_one(q, cut, pool.keys, pool.values, **options)
    with on(arch, without_decode=False), simulator.schedule("late"):
        o, lse = cupy_flash.attention_varlen(
            q, pool.k, pool.v, cut, None, seqused_k=pool.used, block_table=pool.table,
            align="bottom_right", return_lse=True, **options,
        )  # fmt: skip
    close(o, lse, wanted)
    assert not o[cut[-1] :].any()


@pytest.mark.parametrize("arch", ARCHS)
def test_ragged_new_keys_and_every_rotation(arch: str) -> None:
    pool, q = pool_of(5)
    cut, added = offsets(QUERIES), (40, 9, 1, 2, 0)
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, sum(added) + 1, 2, 32)).astype(np.float16)
    angles = rng.random((160, 8)) * 6
    given: dict[str, Any] = {
        "cache_seqlens": pool.used - np.array(added, np.int32), "block_table": pool.table, "k": k, "v": v,
        "cu_seqlens_q": cut, "cu_seqlens_k_new": offsets(added), "causal": True, "layout": "bshd",
        "rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32),
    }  # fmt: skip
    turns: list[dict[str, Any]] = [
        {}, {"rotary_seqlens": np.array([3, 50, 0, 100, 7], np.int32), "rotary_last": True},
        {"rotate_cache": True}, {"rotate_cache": True, "rotary_last": True, "rotary_interleaved": True},
    ]  # fmt: skip
    for turn in turns:
        results = []
        for simulated in (False, True):
            own = {name: np.nan_to_num(getattr(pool, name)) for name in "kv"}
            call = {**given, **turn, "k_cache": own["k"], "v_cache": own["v"]}
            if simulated:
                with on(arch, without_decode=False), simulator.schedule("early"):
                    o, lse = cached(q, **call, return_lse=True)
            else:
                o, lse = cached(q, **call, return_lse=True)
            results.append((o, lse, own))
        # why: gathered keys are halves again, so that each of 16 turned features is up to 2**-11 off its
        # share of a score, q * k / sqrt(32); the CPU rounds none.
        of_scores = 16 * 2.0**-11 / 32**0.5 if "rotate_cache" in turn else 1e-4
        close(*results[1][:2], (results[0][0].astype(np.float64), results[0][1]), of_scores)
        for name in "kv":
            np.testing.assert_allclose(
                results[1][2][name].astype(np.float64), results[0][2][name].astype(np.float64), atol=2.0**-9
            )


@pytest.mark.parametrize("columns", [32, 264])
@pytest.mark.parametrize("arch", ARCHS)
def test_padding_and_masks(arch: str, columns: int) -> None:
    pool, _ = pool_of(144, KEYS[:3], columns)
    q = queries((9, 9, 9), 0, np.float16)
    cut = offsets((9, 9, 9))
    pads = np.array([3, 0, 60], np.int32)
    k, v = (np.nan_to_num(x)[pool.table[:, 0]] for x in (pool.k, pool.v))
    batched = q.reshape(3, 9, *q.shape[1:])
    seen = [np.broadcast_to(np.arange(n) >= pad, (9, n)) for n, pad in zip(KEYS, pads, strict=False)]
    padded = np.zeros((3, 1, 9, 144), bool)
    for mask, own in zip(padded, seen, strict=True):
        mask[0, :, : own.shape[1]] = own
    wanted = one_by_one(q, cut, pool.keys, pool.values, mask=seen, causal=True)
    for option in ({"cache_leftpad": pads}, {"mask": padded}):
        with on(arch, without_decode=False), simulator.schedule("random", seed=3):
            o, lse = cached(
                batched, k, v, cache_seqlens=pool.used, layout="bshd", causal=True, return_lse=True, **option
            )
        close(o.reshape(len(q), *o.shape[2:]), np.concatenate(list(lse), 1), wanted)


def test_what_no_kernel_takes_is_refused_by_name() -> None:
    pool, q = pool_of(16)
    cut = offsets(QUERIES)
    given: dict[str, Any] = {"cu_seqlens_k": None, "seqused_k": pool.used, "block_table": pool.table}
    with on("sm_80", without_decode=False):
        with pytest.raises(UnsupportedError, match="no kernel reads seqused_q"):
            cupy_flash.attention_varlen(q, pool.k, pool.v, cut, seqused_q=np.diff(cut), **given)
        rows = np.ones(int((np.diff(cut) * pool.used).sum()), bool)
        with pytest.raises(UnsupportedError, match="no kernel reads a RaggedMask"):
            cupy_flash.attention_varlen(q, pool.k, pool.v, cut, mask=cupy_flash.RaggedMask(rows), **given)
        with pytest.raises(UnsupportedError, match="needs the mask for padding and unused pages"):
            cupy_flash.attention_varlen(q, pool.k, pool.v, cut, mask=np.ones((1, 1, 1, 144), bool), **given)


_SANITIZED = """
import numpy as np, os
os.environ["CUPY_FLASH_DRIVER"] = "simulator:sm_80"
from cupy_flash.device import simulator
from tests.cpu.test_varlen import offsets
from tests.public import cached
from tests.simulator.test_pages import KEYS, QUERIES, pool_of
for page, value in ((5, -2**31), (16, 2**31 - 1)):
    pool, q = pool_of(page)
    pool.table[:, 1:] = value
    added = offsets((40, 9, 1, 2, 0))
    angles = np.ones((160, 8), np.float32)
    with simulator.schedule("late"):
        cached(
            q, pool.k, pool.v, cache_seqlens=np.array([value, 40, 160, 3, 7], np.int32), layout="bshd",
            block_table=pool.table, cu_seqlens_q=offsets(QUERIES), cu_seqlens_k_new=added,
            k=q[:52, :2].copy(), v=q[:52, :2].copy(), rotary_cos=angles, rotary_sin=angles,
            rotary_seqlens=np.full(5, value, np.int32),
            cache_leftpad=np.full(5, value, np.int32), check=False)
"""


@pytest.mark.slow
def test_hostile_lengths_tables_and_positions_stay_inside() -> None:
    done = sanitized.run("address", _SANITIZED)
    assert done.returncode == 0, done.stderr[-3000:]
