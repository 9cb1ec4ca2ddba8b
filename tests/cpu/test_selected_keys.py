"""Selected keys on NumPy arrays: FP64 parity, what an index means, what is refused and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, LatentCache, Rotary, Spans, Tuning, UnsupportedError
from tests.checks import Device
from tests.cpu.test_varlen import offsets
from tests.kv_cases import KvCase, check

pytestmark = pytest.mark.usefixtures("cpu_family")

CASES = [
    KvCase(selected=selected, **features)
    for selected, features in (
        (20, {"latent": True, "head_dims": (576, 512), "heads": (16, 1), "dtype": "bfloat16",
              "kind": "paged"}),
        (9, {"dtype": "float32", "queries": 3, "causal": True, "sinks": True, "integers": "int64"}),
        (33, {"dtype": "float32", "queries": 2, "layout": "bshd", "kind": "indexed", "window": (50, 3)}),
        (40, {"queries": 2, "kind": "paged", "layout": "bshd", "softcap": 3.0, "scale": -0.1}),
        (12, {"dtype": "float64", "kind": "paged", "heads": (4, 4), "head_dims": (20, 12)}),
        (50, {"stored": "int8", "scales": "bh", "queries": 2, "heads": (4, 2)}),
        (1, {"dtype": "float32", "heads": (3, 1), "lengths": (160,), "queries": 4}),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: KvCase) -> None:
    check(case, Device("cpu"))


def inputs() -> dict[str, Any]:
    """2 sequences of 30 and 12 keys, 3 queries each, 5 keys of each query, of which one is none."""
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {"q": rng.standard_normal((2, 4, 3, 20))}
    made |= {name: rng.standard_normal((2, 2, 32, 20)) for name in ("k_cache", "v_cache")}
    made["cache_seqlens"] = np.array([30, 12], np.int32)
    picked = [[rng.permutation(n)[:5] for _ in range(3)] for n in (30, 12)]
    made["indices"] = np.array(picked)
    made["indices"][:, :, 2] = -1
    return made


def attend(**given: Any) -> Any:
    return cupy_flash.attention_with_kv_cache(**given)


def as_mask(indices: np.ndarray, keys: int) -> np.ndarray:
    return (indices[..., None] == np.arange(keys)).any(-2)[:, None]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (8, 2)}], ids=str)
def test_a_mask_says_the_same(options: dict[str, Any]) -> None:
    made = inputs()
    o, lse = attend(**made, **options, return_lse=True)
    mask = as_mask(made.pop("indices"), 32)
    wanted, wanted_lse = attend(**made, **options, mask=mask, return_lse=True)
    np.testing.assert_allclose(o, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-12)


@pytest.mark.parametrize("make", [cupy_flash.quantized.int4, cupy_flash.quantized.nvfp4])
def test_codes_of_4_bits(make: Callable[..., Any]) -> None:
    """Their scales lie as they do."""
    rng = np.random.default_rng(4)
    made = inputs() | {"q": rng.standard_normal((2, 4, 3, 64), np.float32)}
    made |= {n: make(rng.standard_normal((2, 2, 32, 64), np.float32)) for n in ("k_cache", "v_cache")}
    o = attend(**made)
    wanted = attend(**made | {"indices": None}, mask=as_mask(made["indices"], 32))
    np.testing.assert_allclose(o, wanted, atol=1e-6)
    for name in ("k_cache", "v_cache"):
        units = {n: x for n, x in made[name]._asdict().items() if n != "codes" and x is not None}
        apart = {n: np.concatenate([x, x], 2)[:, :, :32] for n, x in units.items()}
        with pytest.raises(UnsupportedError, match="k_cache and v_cache have different strides"):
            attend(**made | {name: made[name]._replace(**apart)})


def test_left_padding_leaves_out_keys() -> None:
    made = inputs() | {"cache_leftpad": np.array([15, 3], np.int32)}
    kept = np.where(made["indices"] >= made["cache_leftpad"][:, None, None], made["indices"], -1)
    np.testing.assert_array_equal(attend(**made), attend(**{**inputs(), "indices": kept}))


def test_a_key_named_twice_counts_twice() -> None:
    """As a sum over the list does: its weight doubles."""
    made = inputs()
    made["indices"] = np.broadcast_to([4, 7, 4, -1], (2, 3, 4))
    doubled = np.zeros((1, 1, 1, 32))
    doubled[..., 4] = np.log(2)
    wanted = cupy_flash.attention(
        made["q"], made["k_cache"], made["v_cache"], bias=doubled, mask=as_mask(made["indices"], 32)
    )
    np.testing.assert_allclose(attend(**made), wanted, atol=1e-12)


def test_a_query_without_keys() -> None:
    made = inputs()
    made["indices"][1, 2] = -1
    o, lse = attend(**made, return_lse=True)
    assert not o[1, :, 2].any()
    assert np.isneginf(lse[1, :, 2]).all()
    made["indices"] = np.zeros((2, 3, 0), np.int32)
    o, lse = attend(**made, return_lse=True)
    assert not o.any()
    assert np.isneginf(lse).all()


def test_packed_queries() -> None:
    """Rows of each sequence, and one of none; the second sequence uses two of its three."""
    made = inputs()
    rows = made["q"].swapaxes(1, 2).reshape(6, 4, 20)
    packed = {**made, "q": np.concatenate([rows[1:], rows[:1]]), "cu_seqlens_q": offsets((2, 3))}
    packed["indices"] = np.concatenate([made["indices"].reshape(6, 5)[1:], np.full((1, 5), 3)])
    o, lse = attend(**packed, causal=True, return_lse=True)
    wanted, wanted_lse = attend(**made, causal=True, return_lse=True)
    np.testing.assert_allclose(o[:5], wanted.swapaxes(1, 2).reshape(6, 4, 20)[1:], atol=1e-12)
    np.testing.assert_allclose(lse[:, :5], wanted_lse.swapaxes(0, 1).reshape(4, 6)[:, 1:], atol=1e-12)
    assert not o[5].any()
    used = attend(**packed, seqused_q=np.array([2, 2], np.int32), causal=True)
    assert not used[4].any()
    # The queries in use stand at the end: a position later than among three.
    later = {**made, "cache_seqlens": made["cache_seqlens"] + np.array([0, 1], np.int32)}
    np.testing.assert_allclose(used[2:4], attend(**later, causal=True)[1, :, :2].swapaxes(0, 1), atol=1e-12)


def test_places_of_a_pool() -> None:
    """What FlashMLA calls indices: all pages are one sequence, in which every query stands."""
    rng = np.random.default_rng(1)
    pages = rng.standard_normal((7, 1, 4, 20))
    q, table = rng.standard_normal((2, 4, 1, 20)), np.array([[5, 2], [6, 0]], np.int32)
    at = np.array([[[6, 1, 3]], [[0, 7, -1]]], np.int32)
    options: dict[str, Any] = {"cache_seqlens": 8, "block_table": table, "indices": at}
    wanted = attend(q=q, k_cache=LatentCache(pages, 12), **options)
    places = np.where(at < 0, -1, table[np.arange(2)[:, None, None], at // 4] * 4 + at % 4)
    pool = LatentCache(pages.reshape(1, 1, 28, 20), 12)
    slots = np.zeros(2, np.int32)
    o = attend(q=q, k_cache=pool, cache_seqlens=28, block_table=slots, indices=places)
    np.testing.assert_array_equal(o, wanted)


def test_caches_in_one_array() -> None:
    """Keys and values of a page side by side, as in vLLM; and slots that are not whole rows apart."""
    rng = np.random.default_rng(2)
    both = rng.standard_normal((2, 2, 32, 2, 20))
    made = inputs() | {"layout": "bshd"}
    made["q"] = made["q"].swapaxes(1, 2).copy()
    apart = attend(**made | {"k_cache": both[:, 0].copy(), "v_cache": both[:, 1].copy()})
    np.testing.assert_array_equal(attend(**made | {"k_cache": both[:, 0], "v_cache": both[:, 1]}), apart)
    room = np.zeros((2, 32 * 40 + 7))
    odd = np.lib.stride_tricks.as_strided(room, (2, 32, 2, 20), (*room.strides[:1], 320, 160, 8))
    for name in ("k_cache", "v_cache"):
        with pytest.raises(UnsupportedError, match=f"{name} has strides .* no whole number of keys"):
            attend(**made | {"k_cache": both[:, 0], "v_cache": both[:, 1]} | {name: odd})
    with pytest.raises(UnsupportedError, match="k_cache and v_cache have different strides"):
        attend(**made | {"k_cache": both[:, 0], "v_cache": both[:, 1].copy()})


def test_where_to_write_the_result() -> None:
    made, wanted = inputs(), attend(**inputs())
    out = np.full(wanted.shape, np.nan)
    assert attend(**made, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    for wrong, says in ((out[:1], "out has shape"), (out.astype(np.float32), "out has dtype float32"),
                        (made["q"], "out overlaps q")):  # fmt: skip
        with pytest.raises(InvalidArgumentsError, match=says):
            attend(**made, out=wrong)


def test_unchecked() -> None:
    """Indices beyond the keys of a sequence, and entries of a table that lead nowhere, are no keys."""
    made = inputs()
    wanted = attend(**made)
    made["indices"][:, :, 2] = [[30, 2**40, -(2**40)], [12, 31, 2**31]]
    np.testing.assert_array_equal(attend(**made, tuning=Tuning(check=False)), wanted)
    for slot in (2, -1, -(2**31), 2**31 - 1):
        made = inputs() | {"block_table": np.array([1, slot], np.int32)}
        assert not attend(**made, tuning=Tuning(check=False))[1].any()


def test_explained() -> None:
    made = inputs()
    q, k, v = (made.pop(name) for name in ("q", "k_cache", "v_cache"))
    text = cupy_flash.explain(q, k, v, kv_cache=made)
    assert "selected  5 keys of each of 6 queries, as pages of one key" in text
    assert "batch=6" in text


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "beyond the keys": ({"indices": (1, 0, 3, 12)}, InvalidArgumentsError,
                        r"indices\[1, 0, 3\] is 12; the sequence has 12 keys"),
    "below none": ({"indices": (0, 1, 0, -2)}, InvalidArgumentsError, r"indices\[0, 1, 0\] is -2"),
    "a table outside": ({"block_table": np.array([0, 2], np.int32)}, InvalidArgumentsError,
                        r"indices\[1, 0, 0\] is .* block_table leads outside the cache"),
    "lengths": ({"cache_seqlens": np.array([33, 1], np.int32)}, InvalidArgumentsError,
                r"cache_seqlens\[0\] is 33; the capacity is 32 keys"),
    "one length": ({"cache_seqlens": 40}, InvalidArgumentsError, "cache_seqlens is 40"),
    "floats": ({"indices": np.zeros((2, 3, 5))}, InvalidArgumentsError, "indices has dtype float64"),
    "of a head": ({"indices": np.zeros((2, 4, 3, 5), int)}, InvalidArgumentsError,
                  r"indices has shape \(2, 4, 3, 5\), beside queries \(2, 3\)"),
    "no list": ({"indices": [[1, 2]]}, InvalidArgumentsError, "indices"),
    "slots": ({"k_cache": np.zeros((3, 2, 32, 20)), "v_cache": np.zeros((3, 2, 32, 20))},
              InvalidArgumentsError, "q has a batch of 2, the cache 3 slots"),
    "a table of others": ({"block_table": np.zeros((3, 1), np.int32)}, InvalidArgumentsError,
                          "block_table is .* for a batch of 2"),
    "no room": ({"block_table": np.zeros((2, 0), np.int32)}, InvalidArgumentsError, "capacity of .* 0 keys"),
    "layout": ({"layout": "hbsd"}, InvalidArgumentsError, "layout is 'hbsd'"),
    "most": ({"max_seqlen_k": -1}, InvalidArgumentsError, "max_seqlen_k is -1"),
    "new keys": ({"k": np.zeros((2, 2, 1, 20)), "v": np.zeros((2, 2, 1, 20))}, UnsupportedError,
                 "k is given together with indices"),
    "rotation": ({"rotary": Rotary(np.zeros((40, 4)), np.zeros((40, 4)))}, UnsupportedError, "rotary.cos"),
    "slopes": ({"alibi_slopes": np.ones(4)}, UnsupportedError, "alibi_slopes"),
    "a mask": ({"mask": np.ones((2, 1, 3, 32), bool)}, UnsupportedError, "mask"),
    "spans": ({"mask": Spans(np.zeros((2, 1, 1, 3, 2), np.int32))}, UnsupportedError, "mask.bounds"),
    "a prefix": ({"prefix": (np.zeros((2, 3, 20)),) * 2}, UnsupportedError,
                 "indices is given with a shared prefix"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, kind, says = REFUSED[name]
    made = inputs()
    if isinstance(changes.get("indices"), tuple):
        *place, number = changes["indices"]
        made["indices"][tuple(place)] = number
    else:
        made |= changes
    with pytest.raises(kind, match=says) as raised:
        attend(**made)
    assert "Try:" in str(raised.value)


def test_new_keys_first() -> None:
    """As the hint of the refusal has it: a call without queries stores them."""
    made = inputs()
    new: Callable[[], np.ndarray] = lambda: np.random.default_rng(3).standard_normal((2, 2, 1, 20))  # noqa: E731
    stored = {name: made[name].copy() for name in ("k_cache", "v_cache")}
    attend(q=made["q"][:, :, :0], **stored, k=new(), v=new(), cache_seqlens=made["cache_seqlens"])
    np.testing.assert_array_equal(stored["k_cache"][1, :, 12], new()[1, :, 0])
