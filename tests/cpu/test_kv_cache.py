"""attention_with_kv_cache on NumPy arrays: FP64 parity, what is refused, and what unchecked input means."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, UnsupportedError, testing
from cupy_flash.call.options import CacheOptions, DenseOptions, declared
from tests.checks import Device
from tests.kv_cases import KvCase, cases, check
from tests.public import cached, over_cache

pytestmark = pytest.mark.usefixtures("cpu_family")

CPU = Device("cpu")

CASES = [
    *cases(dtype=("float16", "bfloat16", "float32", "float64")),
    KvCase(
        dtype="float32", heads=(8, 1), lengths=(5000, 1, 3000), room=5120, head_dims=(16, 16), causal=True
    ),
    KvCase(dtype="float32", kind="paged", page=64, room=4096, lengths=(4096, 77, 2000), head_dims=(8, 24)),
    KvCase(queries=9, lengths=(2, 160, 5), causal=True),  # more queries than keys
    KvCase(head_dims=(31, 7), rotary=6, new=2, dtype="float32"),
    KvCase(head_dims=(31, 7), rotary=6, new=2, dtype="float32", last=True),
    KvCase(head_dims=(33, 7), rotary=30, new=70, queries=70, dtype="float64", last=True, interleaved=True),
    KvCase(dtype="float32", heads=(6, 2), lengths=(3000, 700, 255), room=3008, new=1),
    KvCase(dtype="float32", heads=(4, 2), kind="paged", page=64, room=2048, lengths=(2000, 513)),
    # A prompt, and its second half over the first.
    KvCase(dtype="float32", queries=80, new=80, lengths=(0, 80), rotary=32, causal=True, kind="paged"),
    KvCase(queries=70, new=70, lengths=(0, 70), rotary=32, causal=True, sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: KvCase) -> None:
    check(case, CPU)


def arguments(case: KvCase | None = None, **changes: Any) -> dict[str, Any]:
    case = case or KvCase(dtype="float32", new=1)
    return case.inputs() | case.options() | changes


def shared_prefix(case: KvCase) -> dict[str, Any]:
    """Every sequence begins with the same pages."""
    made = case.inputs()
    made["block_table"][:, :2] = made["block_table"][0, :2]
    return made


def test_pages_may_be_shared() -> None:
    """Entries may repeat: a prefix is stored once; check=True finds no fault with it."""
    case = KvCase(dtype="float32", kind="paged", lengths=(40, 100, 33), new=2)
    check(case, CPU, shared_prefix(case), check=True)


def test_cascade() -> None:
    """A prefix that all share, computed once for the batch, and each one's suffix, merged by merge."""
    rng = np.random.default_rng(0)
    batch, heads, prefix, room, dim = 3, 4, 64, 96, 16
    q = rng.standard_normal((batch, heads, 1, dim))
    keys, values = rng.standard_normal((2, batch, heads, room, dim))
    keys[:, :, :prefix], values[:, :, :prefix] = keys[0, :, :prefix], values[0, :, :prefix]
    lengths = np.array([70, 96, 64], np.int32)
    whole, whole_lse = cached(q, keys, values, cache_seqlens=lengths, return_lse=True)
    # The queries of all sequences see the prefix as queries of one.
    together = q.transpose(2, 1, 0, 3)
    o, lse = cached(together, keys[:1], values[:1], cache_seqlens=prefix, return_lse=True)
    first = (o.transpose(2, 1, 0, 3), lse.transpose(2, 1, 0))
    rest = cached(
        q, keys[:, :, prefix:], values[:, :, prefix:], cache_seqlens=lengths - np.int32(prefix),
        return_lse=True,
    )  # fmt: skip
    merged, merged_lse = cupy_flash.merge(*first, *rest)
    np.testing.assert_allclose(merged, whole, atol=1e-12)
    np.testing.assert_allclose(merged_lse, whole_lse, atol=1e-12)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_step_by_step_is_all_at_once(kind: str) -> None:
    """Appending one key at a time gives what causal attention over all of them gives."""
    case = KvCase(
        dtype="float64", kind=kind, lengths=(0, 0), room=48, new=1, heads=(2, 1), head_dims=(16, 16)
    )
    made = case.inputs()
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 40, 16))
    k, v = rng.standard_normal((2, 2, 1, 40, 16))
    expected = cupy_flash.attention(q, k, v, causal=True)
    names = ("k_cache", "v_cache", "block_table")
    caches = {name: made[name] for name in names if name in made}
    for i in range(40):
        now = slice(i, i + 1)
        o = cached(q[:, :, now], cache_seqlens=i, k=k[:, :, now], v=v[:, :, now], causal=True, **caches)
        np.testing.assert_allclose(o, expected[:, :, now], atol=1e-12)


def test_one_array_as_both_caches() -> None:
    """Of values that are the keys, as Gemma 4 has them."""
    made = arguments(KvCase(dtype="float32", new=1))
    two = {**made, "v_cache": made["k_cache"].copy(), "v": made["k"]}
    one = {**made, "k_cache": made["k_cache"].copy(), "v": made["k"]}
    one["v_cache"] = one["k_cache"]
    for _ in range(2):
        np.testing.assert_array_equal(cached(**one), cached(**two))
        with pytest.raises(InvalidArgumentsError, match="are one array"):
            cached(**{**one, "v": made["v"]})


# ---- what is refused

PAGED = KvCase(dtype="float32", kind="paged", new=1, lengths=(20, 37, 16))
INT8 = KvCase(dtype="float32", stored="int8")
TURNED = KvCase(dtype="float32", rotary=16, new=1)


def without(case: KvCase, *names: str) -> dict[str, Any]:
    return arguments(case, **dict.fromkeys(names))


def entry(value: int, where: tuple[int, int]) -> dict[str, Any]:
    made = arguments(PAGED)
    made["block_table"][where] = value
    return made


def read_only() -> dict[str, Any]:
    made = arguments()
    made["k_cache"].flags.writeable = False
    return made


def one_cache(case: KvCase = KvCase(dtype="float32", new=1), alike: bool = False) -> dict[str, Any]:  # noqa: B008
    made = arguments(case)
    made["v_cache"] = made["k_cache"]
    made["v"] = made["k"] if alike else made["v"]
    return made


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lengths": (arguments(cache_seqlens=None), "cache_seqlens is None"),
    "lengths as floats": (arguments(cache_seqlens=zeros(3)), "cache_seqlens has dtype float32, not int32"),
    "lengths of another batch": (arguments(cache_seqlens=zeros(4, dtype=np.int32)), "for a batch of 3"),
    "length beyond the cache": (arguments(cache_seqlens=160), "160 plus 1 new;"),
    "negative length": (arguments(cache_seqlens=-1), "cache_seqlens is -1 plus"),
    "length beyond 32 bits": (arguments(cache_seqlens=2**40), "beyond 31 bits"),
    "q of rank 3": (arguments(q=zeros(4, 1, 64)), "q has rank 3, not 4"),
    "q of integers": (arguments(q=zeros(3, 4, 1, 64, dtype=np.int32)), "q has dtype int32"),
    "another head_dim": (arguments(q=zeros(3, 4, 1, 32)), "q has head_dim 32, k_cache has 64"),
    "heads": (arguments(q=zeros(3, 5, 1, 64)), "5 heads of q are not a multiple of 2"),
    "batch": (arguments(q=zeros(2, 4, 1, 64), cache_seqlens=1), "q has a batch of 2, the cache 3 slots"),
    "caches differ": (arguments(v_cache=zeros(3, 2, 150, 64)), "v_cache"),
    "caches of two dtypes": (arguments(v_cache=zeros(3, 2, 160, 64, dtype=np.float16)), "v_cache float16"),
    "cache of float64": (
        arguments(**{n: zeros(3, 2, 160, 64, dtype=np.float64) for n in ("k_cache", "v_cache")}),
        "k_cache has dtype float64",
    ),
    "k without v": (without(KvCase(dtype="float32", new=1), "v"), "k is given without v"),
    "k of another dtype": (arguments(k=zeros(3, 2, 1, 64, dtype=np.float16)), "k has dtype float16"),
    "k of another shape": (arguments(k=zeros(3, 4, 1, 64)), r"\(3, 4, 1, 64\), k_cache \(3, 2, 160, 64\)"),
    "v of another shape": (arguments(v=zeros(3, 2, 1, 32)), r"shape \(3, 2, 1, 32\), k \(3, 2, 1, 64\)"),
    "k longer than the cache": (arguments(KvCase(dtype="float32", new=5, room=48, lengths=(0,)),
                                          k=zeros(1, 2, 49, 64), v=zeros(1, 2, 49, 64)),
                                "49 new keys do not fit a cache for 48"),
    "read-only cache": (read_only(), "k_cache is read-only"),
    "one array as both caches": (one_cache(), "k_cache and v_cache are one array"),
    "one array as both caches, rotated": (one_cache(TURNED, alike=True), "k_cache and v_cache are one array"),
    "table of another batch": (arguments(PAGED, block_table=zeros(2, 4, dtype=np.int32)), "block_table has"),
    "table of int64": (arguments(PAGED, block_table=zeros(3, 4, dtype=np.int64)), "not int32"),
    "pages of 8, too few": (
        arguments(block_table=zeros(3, 9, dtype=np.int32), k_cache=zeros(8, 2, 8, 64),
                  v_cache=zeros(8, 2, 8, 64)), "the capacity is 72 keys"),
    "negative entry": (entry(-1, (1, 0)), r"block_table\[1, 0\] is -1; the cache has 33 pages"),
    "entry beyond the pages": (entry(33, (1, 2)), r"block_table\[1, 2\] is 33"),
    "a page that two write": (
        entry(int(arguments(PAGED)["block_table"][0, 1]), (1, 2)), "where sequence 0 appends keys too"),
    "index beyond the slots": (
        arguments(KvCase(dtype="float32", kind="indexed"), cache_batch_idx=np.array([0, 1, 5], np.int32)),
        r"block_table\[2\] is 5"),
    "cos without sin": (without(TURNED, "rotary_sin"), "rotary.cos is given without rotary.sin"),
    "cos and sin differ": (arguments(TURNED, rotary_sin=zeros(161, 4)), "rotary.sin"),
    "cos too short": (
        arguments(TURNED, rotary_cos=zeros(150, 8), rotary_sin=zeros(150, 8)),
        "rotary.cos has 150 positions for a capacity of 160"),
    "more features than there are": (
        arguments(TURNED, rotary_cos=zeros(160, 33), rotary_sin=zeros(160, 33)), "turns 66 features"),
    "int8 without scale": (without(INT8, "v_scale"), "the cache holds int8 and v_cache.scale is not given"),
    "scale without int8": (arguments(k_scale=zeros(2)), "the cache holds float32 like q"),
    "scale of other heads": (arguments(INT8, k_scale=zeros(4)), r"k_cache.scale has shape \(4,\)"),
    "splits of 0": (arguments(splits=0), "tuning.splits is 0"),
    "splits of 1.5": (arguments(splits=1.5), "tuning.splits is 1.5"),
    "tf32": (arguments(precision="tf32x3"), "needs tensor cores"),
    "a typing mistake": (arguments(softmax_scale=1.0), "no option 'softmax_scale'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises((InvalidArgumentsError, cupy_flash.UnsupportedError), match=message) as caught:
        cached(**given)
    assert "Try: " in str(caught.value)


def test_nothing_is_written_before_it_is_refused() -> None:
    given = entry(-1, (2, 1))
    before = given["k_cache"].copy()
    with pytest.raises(InvalidArgumentsError):
        cached(**given)
    np.testing.assert_array_equal(given["k_cache"], before)


# ---- explain


def test_explain_says_how_keys_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(KvCase(kind="paged", room=2048, lengths=(2000,)))
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    own = {name: given[name] for name in ("cache_seqlens", "block_table")}
    text = cupy_flash.explain(q, k, v, arch="sm_90a", kv_cache={**own, "tuning": cupy_flash.Tuning(splits=3)})
    assert "cache of float16, pages of 16 keys, tuning.splits=3" in text
    assert "splits    3 of 32 steps; 6 thread blocks, 396 at once; cost " in text
    assert "workspace partial_o float32 (3, 1, 4, 1, 64)" in text
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    assert "tiled NumPy: tiles of keys" in cupy_flash.explain(q, k, v, kv_cache=own)


@pytest.mark.parametrize(
    ("own", "more", "message"),
    [
        ({}, {}, "cache_seqlens is None"),
        ({"cache_seqlens": 3}, {"align": 0}, "no option 'align'"),
        ({"cache_seqlens": 3}, {"seed": 1}, "no option 'seed'"),
        ({"cache_seqlens": 3}, {"tuning": cupy_flash.Tuning(tile=(16, 16))}, "tuning has tile"),
        ({"cache_seqlens": 3}, {"direction": "backward"}, "has no backward pass"),
        ({"cache_seqlens": 3}, {"dropout": 0.1, "seed": 1}, "no option 'dropout'"),
    ],
)
def test_explain_refuses_what_the_call_would(own: Any, more: Any, message: str) -> None:
    q, k, v = (arguments()[name] for name in ("q", "k_cache", "v_cache"))
    with pytest.raises(InvalidArgumentsError, match=message):
        cupy_flash.explain(q, k, v, kv_cache=own, **more)


def of_every_option() -> list[tuple[str, dict[str, Any]]]:
    """Options of the call, and the flat arguments of one that has each, with whatever it needs besides."""
    plain, paged = arguments(KvCase(new=1)), arguments(KvCase(kind="paged"))
    turned = arguments(KvCase(new=1, rotary=32))
    seqlens, dim = {"cache_seqlens": plain["cache_seqlens"]}, 64
    new = {**seqlens, "k": plain["k"], "v": plain["v"]}
    tables = {**seqlens, "rotary_cos": turned["rotary_cos"], "rotary_sin": turned["rotary_sin"]}
    cuts = np.arange(4, dtype=np.int32)
    rows = {"q": plain["q"][:, :, 0], "cu_seqlens_q": cuts}
    codes, scales = np.zeros((3, 2, 160, dim // 2), np.uint8), np.ones((3, 2, 160, dim // 32), np.float16)
    int4 = {"k_cache": codes, "v_cache": codes, "k_scale": scales, "v_scale": scales, "k_zero": scales,
            "v_zero": scales}  # fmt: skip
    eights = np.full((3, 2, 160, dim // 16), 56, np.uint8)
    nvfp4 = {"k_cache": codes, "v_cache": codes, "k_block_scale": eights, "v_block_scale": eights,
             "k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}  # fmt: skip
    keys = np.zeros((2, 7, dim), np.float16)
    slopes = np.ones(4, np.float32)
    usual: dict[str, Any] = {
        "max_seqlen_k": 160, "causal": True, "window": (3, 0), "scale": 0.5, "softcap": 2.0, "layout": "bhsd",
        "precision": None, "reproducible": "batch", "alibi_slopes": slopes, "sinks": slopes,
        "cache_leftpad": np.zeros(3, np.int32), "mask": np.ones((3, 4, 1, 160), bool),
    }  # fmt: skip
    return [
        ("block_table", {"k_cache": paged["k_cache"], "v_cache": paged["v_cache"],
                         "block_table": paged["block_table"]}),
        ("block_table", {"block_table": np.arange(3, dtype=np.int32)}),
        ("indices", {"indices": np.full((3, 1, 4), -1)}),
        ("k", new), ("v", new),
        ("cu_seqlens_k_new", {**rows, "k": plain["k"][:, :, 0], "v": plain["v"][:, :, 0],
                              "cu_seqlens_k_new": cuts}),
        ("rotary", tables),
        ("rotary", {**tables, "rotary_seqlens": np.zeros(3, np.int32)}),
        ("rotary", {**tables, "rotary_interleaved": True}),
        ("rotary", {**tables, "rotate_cache": True}),
        ("rotary", {**tables, "rotary_last": True}),
        ("k_cache", int4), ("k_cache", nvfp4),
        ("cu_seqlens_q", rows), ("max_seqlen_q", {**rows, "max_seqlen_q": 1}),
        ("seqused_q", {**rows, "seqused_q": np.ones(3, np.int32)}),
        ("mask", {**rows, "ragged_mask": np.ones(int(plain["cache_seqlens"].sum()), bool)}),
        ("mask", {"spans": np.zeros((1, 1, 1, 2), np.int32)}),
        ("prefix", {"prefix_k": keys, "prefix_v": keys}),
        ("tuning", {"workspace": np.zeros(1 << 20, np.uint8), "splits": 2, "check": True}),
        *((name, {name: value}) for name, value in usual.items()),
    ]  # fmt: skip


def test_explain_takes_every_option_of_the_call() -> None:
    """By the declaration: what the call takes, explain takes, in kv_cache or (if attention has it) beside."""
    calls = of_every_option()
    assert {name for name, _ in calls} == {"k_cache", *declared(CacheOptions)}, "an option without an example"
    plain = arguments(KvCase(new=1))
    beside_too = set()
    for name, more in calls:
        flat = {n: plain[n] for n in ("q", "k_cache", "v_cache", "cache_seqlens")} | more
        given = over_cache(**flat)
        refused = "a call with a shared prefix is two calls" if name == "prefix" else ""
        try:
            cupy_flash.attention_with_kv_cache(**given)
        except UnsupportedError as error:  # NumPy keeps no bits
            refused = str(error).splitlines()[0]
        q, k, v = (given.pop(n) for n in ("q", "k_cache", "v_cache"))
        if refused:
            with pytest.raises(UnsupportedError, match=re.escape(refused)):
                cupy_flash.explain(q, k, v, kv_cache=given)
            continue
        text = cupy_flash.explain(q, k, v, kv_cache=given)
        assert text.startswith("problem   decode"), name
        if name in declared(DenseOptions) and set(given) == {"cache_seqlens", name}:
            beside_too.add(name)
            beside = {name: given.pop(name)}
            assert cupy_flash.explain(q, k, v, kv_cache=given, **beside) == text, name
            with pytest.raises(InvalidArgumentsError, match=f"{name} is given twice"):
                cupy_flash.explain(q, k, v, kv_cache=given | beside, **beside)
    assert beside_too >= {"mask", "tuning", "window", "sinks"}


# ---- what is not checked is defined


@pytest.mark.parametrize("values", [(-(2**31), 5, 2**31 - 1), (160, -1, 2**20)])
def test_lengths_are_cut_to_the_room(values: tuple[int, int, int]) -> None:
    case = KvCase(dtype="float64", new=3)
    made = case.inputs() | {"cache_seqlens": np.array(values, np.int32)}
    expected = testing.reference_with_kv_cache(**made, **case.options())
    o = cached(**made, **case.options(), check=False)
    np.testing.assert_allclose(o, expected.o, atol=1e-12)
    np.testing.assert_array_equal(made["k_cache"], expected.k_cache)


def test_new_keys_are_stored_as_they_are_where_reads_rotate() -> None:
    case = KvCase(dtype="float64", new=3, rotary=32)
    made = case.inputs()
    cached(**made, **case.options(), rotate_cache=True)
    for b, length in enumerate(made["cache_seqlens"]):
        np.testing.assert_array_equal(made["k_cache"][b, :, length : length + 3], made["k"][b])


def test_positions_are_cut_to_the_tables() -> None:
    case = KvCase(dtype="float64", rotary=32)
    made, starts = case.inputs(), np.array([-(2**31), -2, 2**31 - 1], np.int32)
    inside = np.clip(starts, 0, len(made["rotary_cos"]) - 1).astype(np.int32)
    wanted = cached(**made, **case.options(), rotary_seqlens=inside)
    found = cached(**made, **case.options(), rotary_seqlens=starts, check=False)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("values", [(5, -(2**31), 2**31 - 1), (0, 38, -1)])
def test_paddings_are_cut_to_the_keys(values: tuple[int, int, int], queries: int) -> None:
    case = KvCase(dtype="float64", queries=queries, causal=True)
    made, pads = case.inputs(), np.array(values, np.int32)
    mask = np.arange(case.room) >= pads[:, None, None, None]
    wanted = cached(**made, **case.options(), mask=mask, return_lse=True)
    found = cached(**made, **case.options(), cache_leftpad=pads, check=False, return_lse=True)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1, 33])
def test_keys_of_entries_outside_the_cache_are_hidden(value: int) -> None:
    case = KvCase(dtype="float64", kind="paged", new=3, causal=True, lengths=(16, 37, 150))
    made = case.inputs()
    made["block_table"][0, 1] = made["block_table"][1] = made["block_table"][2, 4] = value
    expected = testing.reference_with_kv_cache(**made, **case.options())
    o, lse = cached(**made, **case.options(), check=False, return_lse=True)
    np.testing.assert_allclose(o, expected.o, atol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-12)
    np.testing.assert_array_equal(made["k_cache"], expected.k_cache)
    assert np.isneginf(lse[1]).all()
    assert not o[1].any()


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("page", [1, 10, 16, 300])
def test_nothing_is_read_of_the_pages_that_entries_outside_are_cut_to(page: int, queries: int) -> None:
    """NaN in the first and the last page of the cache; the last key is alone in a page that is absent."""
    draw = np.random.default_rng(0)
    q = draw.standard_normal((1, 2, queries, 64), np.float32)
    k, v = draw.standard_normal((2, 6, 2, page, 64), np.float32)
    k[[0, -1]] = v[[0, -1]] = np.nan
    table = np.array([[2, -1, 3, 6]], np.int32)
    made = cached(q, k, v, block_table=table, cache_seqlens=3 * page + 1, check=False, return_lse=True)
    there = [np.concatenate([x[2], x[3]], 1)[None] for x in (k, v)]
    for actual, expected in zip(made, cupy_flash.attention(q, *there, return_lse=True), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(
    "sizes", [{"lengths": ()}, {"queries": 0}, {"room": 0, "lengths": (0, 0)}, {"heads": (0, 0)}], ids=str
)
def test_nothing_to_do(sizes: dict[str, Any]) -> None:
    case = KvCase(dtype="float32", **sizes)
    o, lse = cached(**case.inputs(), **case.options(), return_lse=True)
    assert o.shape == (len(case.lengths), case.heads[0], case.queries, 64)
    assert not o.any()
    assert np.isneginf(lse).all()


def test_lengths_as_one_integer() -> None:
    case = KvCase(dtype="float64", lengths=(37, 37))
    made = case.inputs()
    expected = cached(**made)
    made["cache_seqlens"] = 37
    np.testing.assert_array_equal(cached(**made), expected)


def test_bits_of_float8_as_uint8() -> None:
    case = KvCase(dtype="float32", stored="e4m3")
    made = case.inputs()
    expected = cached(**made)
    made |= {name: made[name].view(np.uint8) for name in ("k_cache", "v_cache")}
    np.testing.assert_array_equal(cached(**made), expected)


def test_memory_is_linear() -> None:
    """32768 keys and 64 queries: no matrix of scores in memory."""
    import tracemalloc

    case = KvCase(dtype="float32", lengths=(32768,), room=32768, heads=(1, 1), queries=64, head_dims=(16, 16))
    made = case.inputs()
    tracemalloc.start()
    cached(**made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22  # the scores would be 2**23 bytes


def test_the_specification_takes_slots_as_a_call_does() -> None:
    made = KvCase(dtype="float64", kind="indexed").inputs()
    wanted = testing.reference_with_kv_cache(**made)
    made["block_table"] = made.pop("cache_batch_idx")
    np.testing.assert_array_equal(testing.reference_with_kv_cache(**made).o, wanted.o)


def test_the_specification_takes_no_mask() -> None:
    """Its own, of keys whose page does not exist, would take the place of it."""
    made = KvCase(dtype="float64").inputs()
    with pytest.raises(ValueError, match="takes neither"):
        testing.reference_with_kv_cache(**made, mask=np.zeros((1, 1, 1, 160), bool))
