"""Which rows each device of a shard_map holds, beside what `cupy_flash.parallel` says of processes."""

import itertools

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'cupy-flash[jax]'")

import jax.numpy as jnp
import numpy as np

from cupy_flash.call.masks import Band
from cupy_flash.jax.shards import Packed, Shards, visible_spans
from cupy_flash.parallel import packed_positions, positions

pytestmark = pytest.mark.jax

RANKS, LENGTHS, ROWS = 4, (8, 24, 0, 16), 14  # of a device: 12 of sequences, and 2 of none
MAX = 2**31 - 1
OFFSETS = np.cumsum((0, *LENGTHS)).astype(np.int32) // RANKS


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_are_those_of_processes(causal):
    found = jax.jit(lambda offsets: Shards.packed(RANKS, ROWS, offsets, causal)[:2])(OFFSETS)
    assert found[1] == RANKS * ROWS
    for rank, rows in enumerate(found[0]):
        assert rows[:12].tolist() == packed_positions(rank, RANKS, LENGTHS, causal).tolist()
        assert rows[12:].tolist() == [RANKS * ROWS] * 2


def test_parts_of_a_length_that_does_not_divide():
    """Padded with 0 at the end of each part, and put together again."""
    x, rows = np.arange(1, 14), [positions(rank, RANKS, 13, causal=True) for rank in range(RANKS)]
    most = max(map(len, rows))
    shards = Shards.of(RANKS, most, True, None, 13, "queries")
    parts = shards.parts(x, 0)
    assert parts.tolist() == [n for own in rows for n in (*x[own], *[0] * (most - len(own)))]
    assert shards.whole(parts, 0).tolist() == x.tolist()
    assert not shards.divides
    assert Shards.of(RANKS, 4, True, None, None, "queries").divides


def test_halves_of_packed_sequences():
    @jax.jit
    def halves(offsets, o, lse):
        packed = Packed.of(offsets, ROWS, causal=True)
        return packed[1:], packed.results(o, lse), packed._replace(half_offsets=None).results(o, lse)

    o, lse = jnp.ones((ROWS, 2, 3), jnp.bfloat16), jnp.ones((2, ROWS))
    (half_offsets, early, late), results, _ = halves(OFFSETS, o, lse)
    rows = [np.split(np.arange(a, b), 2) for a, b in itertools.pairwise(OFFSETS)]
    assert half_offsets.tolist() == (OFFSETS // 2).tolist()
    assert early[:6].tolist() == np.concatenate([first for first, _ in rows]).tolist()
    assert late[:6].tolist() == np.concatenate([last for _, last in rows]).tolist()
    assert results[0].dtype == o.dtype
    for x in (results[0][:, 0, 0], results[1][0]):
        assert x.tolist() == [1] * 12 + [0] * 2
    _, odd, open_ = halves(OFFSETS + np.array([0, 1, 1, 1, 1], np.int32), o, lse)
    assert np.isnan(odd[0][:13].astype(np.float32)).all()
    assert np.isnan(odd[1][:, :13]).all()
    assert open_[1][0].tolist() == [1] * 13 + [0]


def test_keys_that_a_row_sees():
    """In every band, of all keys or of those of a part, without what is padding."""
    queries, keys = 10, 12
    mine, theirs = np.array([0, 1, 7, 8, 9, 10, 10], np.int32), np.array([0, 3, 4, 5, 11, 12], np.int32)
    bands = [Band(), Band(right=0), Band(-3, 2, 1), Band(4, 0, None), Band(0, 99, 99), Band(-99, 1, 2)]
    bands += [Band(0, MAX, MAX), Band(-9, MAX, None)]  # beyond int32, if they were added to positions
    cases = [(part, band) for part in (None, theirs) for band in bands]
    found = jax.jit(lambda: [visible_spans(jnp.asarray(mine), *case, (queries, keys)) for case in cases])()
    for (part, band), spans in zip(cases, found, strict=True):
        held = np.arange(keys) if part is None else part
        for row, (start, stop) in zip(mine, np.asarray(spans)[0, 0, :, 0], strict=True):
            distance = held - row - band.offset
            seen = (held < keys) & (row < queries)
            seen &= True if band.left is None else distance >= -band.left
            seen &= True if band.right is None else distance <= band.right
            assert np.flatnonzero(seen).tolist() == list(range(start, stop)), (band, part, row)
