"""Trees of drafts over a cache on simulated GPUs, by spans of the last keys, against masks over it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupy_flash import UnsupportedError, spans
from cupy_flash.device import simulator
from tests.cpu.test_drafts import COUNT, PARENTS, ancestors, as_mask
from tests.kv_cases import KvCase
from tests.public import cached

pytestmark = [pytest.mark.simulator, pytest.mark.sampled(6)]


def on(arch: str) -> Any:
    return mock.patch.dict(os.environ, {"CUPY_FLASH_DRIVER": f"simulator:{arch}"})


def made(**kinds: Any) -> tuple[dict[str, Any], np.ndarray]:
    """A call, and the lengths of its sequences with the drafts."""
    given = {"queries": COUNT, "lengths": (0, 31, 151), "heads": (4, 2), "new": COUNT} | kinds
    case = KvCase(**given)
    inputs = case.inputs()
    return inputs | case.options(), inputs["cache_seqlens"] + np.int32(COUNT)


def held(arch: str, given: dict[str, Any], tree: np.ndarray, mask: np.ndarray, **options: Any) -> None:
    """Attention by spans on a GPU is the CPU's by a mask, which tests/cpu holds to FP64."""
    copies = {n: x.copy() for n, x in given.items() if n.endswith("_cache")}
    wanted, wanted_lse = cached(**given | copies, mask=mask, return_lse=True)
    wanted = wanted.astype(float)
    with on(arch), simulator.schedule("late"):
        o, lse = cached(**given, spans=tree, return_lse=True, **options)
    # why these: weights and the result are rounded to 11 or 8 bits of values below 4
    limit = {"float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7, "float32": 2e-5}[str(given["q"].dtype)]
    np.testing.assert_allclose(o.astype(float), wanted, atol=limit * np.abs(wanted).max())
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-4)


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "in one piece": ("sm_80", {}, {}),
    "pages, splits": ("sm_80", {"kind": "paged", "dtype": "bfloat16"}, {"splits": 3}),
    "a window, softcap": ("sm_80", {"window": (20, 5), "softcap": 4.0, "head_dims": (128, 128)}, {}),
    "int8, ALiBi, sinks": ("sm_80", {"stored": "int8", "alibi": "bh", "sinks": True, "kind": "paged"}, {}),
    "float": ("sm_80", {"dtype": "float32", "kind": "indexed", "layout": "bshd"}, {}),
    "Turing": ("sm_75", {"kind": "paged", "causal": True}, {"splits": 2}),
}


@pytest.mark.parametrize("name", KINDS)
def test_as_a_mask_over_the_cache(name: str) -> None:
    arch, kinds, options = KINDS[name]
    given, lengths = made(**kinds)
    held(arch, given, spans.tree(PARENTS), as_mask(ancestors()[None], lengths, 160), **options)


def test_a_tree_for_each_sequence_and_head() -> None:
    """With two intervals, drawn at random."""
    rng = np.random.default_rng(0)
    bounds = rng.integers(0, COUNT + 1, (3, 4, 1, COUNT, 4)).astype(np.int32)
    given, lengths = made()
    rows = np.arange(COUNT)[:, None]
    pairs = np.zeros((3, 4, COUNT, COUNT), bool)
    for start, stop in ((0, 1), (2, 3)):
        low, high = bounds[:, :, :, :, start], bounds[:, :, :, :, stop]
        pairs |= (low <= rows) & (rows < high)
    mask = np.concatenate([as_mask(pairs[b], lengths[b : b + 1], 160) for b in range(3)])
    held("sm_80", given, bounds, mask)


def test_many_drafts() -> None:
    """64 of them, in tiles of 16 rows, over five steps of keys that begin anywhere."""
    given, _ = made(queries=64, new=64, lengths=(0, 37, 90), heads=(2, 1))
    lengths = given["cache_seqlens"] + 64
    starts = np.zeros((1, 64, 2), np.int32)
    # Key d is seen by queries d to d + 9.
    starts[0, :, 0], starts[0, :, 1] = np.arange(64), np.minimum(np.arange(64) + 10, 64)
    ahead = np.arange(64)[:, None] - np.arange(64)
    mask = np.zeros((3, 1, 64, 160), bool)
    for b, length in enumerate(lengths):
        mask[b, 0, :, : length - 64] = True
        mask[b, 0, :, length - 64 : length] = (ahead >= 0) & (ahead < 10)
    held("sm_80", given, starts, mask, splits=2)


def test_bounds_of_any_number_stay_inside() -> None:
    given, lengths = made()
    for value in (-(2**31), 2**31 - 1):
        bounds = np.full((1, COUNT, 2), value, np.int32)
        bounds[0, 0] = (-(2**31), 2**31 - 1)
        pairs = np.zeros((1, COUNT, COUNT), bool)
        pairs[:, :, 0] = True
        copies = {n: x.copy() for n, x in given.items() if n.endswith("_cache")}
        mask = as_mask(pairs, lengths, 160)
        wanted = cached(**given | copies, mask=mask)
        # A GPU's bounds are not looked at by the host, those of the simulator are.
        with on("sm_80"), mock.patch("cupy_flash.dispatch.memo.check_spans"):
            o = cached(**given | copies, spans=bounds, check=False)
        np.testing.assert_allclose(o.astype(float), wanted.astype(float), atol=1e-2)


def test_refused_by_name_where_registers_are_all_taken() -> None:
    given, _ = made(dtype="float32", head_dims=(64, 192))
    with (
        on("sm_80"),
        pytest.raises(UnsupportedError, match="does not support Spans for float32 of head_dim 192"),
    ):
        cached(**given, spans=spans.tree(PARENTS))


def test_refused_by_name_where_bits_are_to_be_the_same() -> None:
    given, _ = made()
    with on("sm_80"), pytest.raises(UnsupportedError, match="does not support Spans over a cache"):
        cached(**given, spans=spans.tree(PARENTS), reproducible="batch")
