"""Trees of drafts over a cache, by spans of the last keys, against a mask over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, Spans, UnsupportedError, spans
from tests.kv_cases import KvCase
from tests.public import cached

pytestmark = pytest.mark.usefixtures("cpu_family")

PARENTS = [-1, 0, 1, 1, 0, 4, 4, -1, 7]
COUNT = len(PARENTS)


def ancestors() -> np.ndarray:
    """Which token sees which, by going up from each."""
    seen = np.zeros((COUNT, COUNT), bool)
    for token in range(COUNT):
        above = token
        while above >= 0:
            seen[token, above] = True
            above = PARENTS[above]
    return seen


def as_mask(tree: np.ndarray, lengths: Any, room: int) -> np.ndarray:
    """(batch, heads, queries, room): all of the past, and of the last keys what the tree says."""
    mask = np.zeros((len(lengths), tree.shape[0], COUNT, room), bool)
    for b, length in enumerate(lengths):
        mask[b, ..., : length - COUNT] = True
        mask[b, ..., length - COUNT : length] = tree
    return mask


def given(dtype: str = "float64", **kinds: Any) -> dict[str, Any]:
    case = KvCase(dtype=dtype, queries=COUNT, lengths=(0, 31, 151), heads=(4, 2), new=COUNT, **kinds)
    return case.inputs() | case.options()


def close(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12, rtol=1e-12)


KINDS: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "pages": {"kind": "paged", "page": 16},
    "slots, the other layout": {"kind": "indexed", "layout": "bshd"},
    "rotated, a window, softcap": {"rotary": 16, "window": (20, 5), "softcap": 4.0},
    "int8, ALiBi, sinks": {"stored": "int8", "alibi": "bh", "sinks": True, "kind": "paged"},
}


@pytest.mark.parametrize("name", KINDS)
def test_as_a_mask_over_the_cache(name: str) -> None:
    made = given(**KINDS[name])
    lengths = made["cache_seqlens"] + COUNT
    mask = as_mask(ancestors()[None], lengths, 160)
    copies = {n: x.copy() for n, x in made.items() if n.endswith("_cache")}
    wanted = cached(**made | copies, mask=mask, return_lse=True)
    found = cached(**made, spans=spans.tree(PARENTS), return_lse=True)
    close(found, wanted)


def test_a_tree_for_each_sequence_and_head() -> None:
    """With two intervals, drawn at random."""
    rng = np.random.default_rng(0)
    bounds = rng.integers(0, COUNT + 1, (3, 4, 1, COUNT, 4)).astype(np.int32)
    made = given()
    lengths = made["cache_seqlens"] + COUNT
    rows = np.arange(COUNT)[:, None]
    pairs = np.zeros((3, 4, COUNT, COUNT), bool)
    for start, stop in ((0, 1), (2, 3)):
        low, high = bounds[:, :, :, :, start], bounds[:, :, :, :, stop]
        pairs |= (low <= rows) & (rows < high)
    mask = np.concatenate([as_mask(pairs[b], lengths[b : b + 1], 160) for b in range(3)])
    copies = {n: x.copy() for n, x in made.items() if n.endswith("_cache")}
    wanted = cached(**made | copies, mask=mask, return_lse=True)
    found = cached(**made, spans=bounds, return_lse=True)
    close(found, wanted)


def test_packed_trees() -> None:
    made = given(layout="bshd")
    tree = spans.tree(PARENTS)
    wanted = cached(**made | {n: made[n].copy() for n in ("k_cache", "v_cache")}, spans=tree)
    packed = {n: made[n].reshape(-1, *made[n].shape[2:]) for n in "qkv"}
    cut = np.arange(4, dtype=np.int32) * COUNT
    found = cached(**made | packed, cu_seqlens_q=cut, cu_seqlens_k_new=cut, spans=tree)
    np.testing.assert_allclose(found, wanted.reshape(found.shape), atol=1e-12)


def test_one_draft_behind_a_shared_prefix() -> None:
    made = given()
    prefix = {f"prefix_{x}": np.ones((2, 7, 64)) for x in "kv"}
    copies = {n: made[n].copy() for n in ("k_cache", "v_cache")}
    mask = as_mask(ancestors()[None], made["cache_seqlens"] + COUNT, 160)
    wanted = cached(**made | copies | prefix, mask=mask, return_lse=True)
    found = cached(**made | prefix, spans=spans.tree(PARENTS), return_lse=True)
    close(found, wanted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros((1, 160, 2), np.int32), "mask.bounds has shape"),
        (np.zeros((COUNT, 1, 2), np.int32), "of keys for each query"),
        (np.zeros((1, COUNT, 3), np.int32), "mask.bounds has shape"),
        (np.zeros((1, COUNT, 2)), "mask.bounds has dtype float64"),
        (np.full((1, COUNT, 2), COUNT + 1, np.int32), "its bounds are of 9 queries"),
        (np.full((1, COUNT, 2), -1, np.int32), "mask.bounds holds -1"),
    ],
    ids=["of the room", "by query", "three bounds", "floats", "beyond", "below"],
)
def test_refused(wrong: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message) as caught:
        cached(**given(), spans=wrong)
    assert "Try: " in str(caught.value)


def test_packed_calls_over_pages_mean_something_else_by_spans() -> None:
    x, pages = np.ones((4, 2, 8)), np.ones((2, 4, 2, 8))
    with pytest.raises(UnsupportedError, match="Spans are not supported over pages"):
        cupy_flash.attention_varlen(
            x, pages, pages, np.array([0, 4], np.int32), None, mask=Spans(np.zeros((1, 4, 2), np.int32)),
            block_table=np.zeros((1, 1), np.int32), seqused_k=np.array([4], np.int32),
        )  # fmt: skip


def test_on_a_gpu_pages_of_no_power_of_two_are_refused_by_name() -> None:
    made = given(dtype="float16", kind="paged", page=20)
    own = {n: made[n] for n in ("cache_seqlens", "block_table", "k", "v")}
    for arch in ("sm_80", "sm_90a"):
        with pytest.raises(UnsupportedError, match="does not support Spans over a cache"):
            cupy_flash.explain(
                made["q"],
                made["k_cache"],
                made["v_cache"],
                mask=spans.tree(PARENTS),
                arch=arch,
                kv_cache=own,
            )
