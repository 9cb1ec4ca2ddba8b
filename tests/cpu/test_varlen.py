"""Packed sequences: equal to the same sequences one by one, and nothing past the last offset."""

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, varlen
from cupy_flash.call.cache import describe as describe_of_cache

pytestmark = pytest.mark.usefixtures("cpu_family")

LENGTHS = [((5, 0, 33, 1), (7, 4, 0, 64)), ((16, 70), (16, 70)), ((3,), (150,))]


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed_inputs(lengths_q, lengths_k, spare=3, dtype=np.float64):
    rng = np.random.default_rng(1)
    rows_q, rows_k = sum(lengths_q) + spare, sum(lengths_k) + spare
    q = rng.standard_normal((rows_q, 4, 16)).astype(dtype)
    k = rng.standard_normal((rows_k, 2, 16)).astype(dtype)
    v = rng.standard_normal((rows_k, 2, 24)).astype(dtype)
    return q, k, v


def options_of(name, lengths_q, lengths_k):
    rng = np.random.default_rng(2)
    full = (len(lengths_q), 4, max(lengths_q), max(lengths_k))
    return {
        "plain": {},
        "causal": {"causal": True, "align": "bottom_right"},
        "window": {"window": (9, 4), "align": "top_left"},
        "offset": {"window": (None, 0), "align": 3},
        "alibi": {"alibi_slopes": rng.random((len(lengths_q), 4)), "align": "bottom_right"},
        "bias": {"bias": rng.standard_normal(full), "softcap": 4.0},
        "shared bias": {"bias": rng.standard_normal((1, 1, 1, full[3])), "sinks": rng.standard_normal(4)},
        "mask": {"mask": rng.random(full) < 0.7, "scale": 0.3},
        "dropout": {"dropout": 0.4, "seed": 11},
    }[name]


FEATURES = ("plain", "causal", "window", "offset", "alibi", "bias", "shared bias", "mask", "dropout")


def of_sequence(options, b, length_q, length_k):
    """The options of sequence b as a call of its own."""
    own = dict(options)
    for name in ("bias", "mask"):
        if name in own:
            x = own[name]
            x = x[b : b + 1] if x.shape[0] > 1 else x
            rows = slice(length_q) if x.shape[2] > 1 else slice(None)
            own[name] = x[:, :, rows, :length_k]
    if "alibi_slopes" in own:
        own["alibi_slopes"] = own["alibi_slopes"][b]
    return own


@pytest.mark.parametrize(("lengths_q", "lengths_k"), LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
def test_packed_is_one_by_one(lengths_q, lengths_k, feature):
    q, k, v = packed_inputs(lengths_q, lengths_k)
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    options = options_of(feature, lengths_q, lengths_k)
    o, lse = cupy_flash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    rng = np.random.default_rng(3)
    do, dlse = rng.standard_normal(o.shape), rng.standard_normal(lse.shape)
    grads = cupy_flash.attention_varlen_backward(do, q, k, v, o, lse, cu_q, cu_k, dlse=dlse, **options)
    assert not o[cu_q[-1] :].any()
    assert not lse[:, cu_q[-1] :].any()
    for name, stop in (("dq", cu_q[-1]), ("dk", cu_k[-1]), ("dv", cu_k[-1])):
        assert not getattr(grads, name)[stop:].any()

    dbias = np.zeros(options["bias"].shape) if "bias" in options else None
    dsinks = np.zeros(4)
    for b in range(len(lengths_q)):
        i, j = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = of_sequence(options, b, lengths_q[b], lengths_k[b])
        if feature == "dropout":
            # The kept set is a function of the sequence's number: a batch of b + 1 puts it in its place.
            stack = [np.stack([x] * (b + 1)) for x in (q[i], k[j], v[j])]
            one, one_lse = cupy_flash.attention(*stack, layout="bshd", return_lse=True, **own)
            np.testing.assert_allclose(o[i], one[b], atol=1e-12)
            np.testing.assert_allclose(lse[:, i], one_lse[b], atol=1e-12)
            continue
        batch = (q[None, i], k[None, j], v[None, j])
        one, one_lse = cupy_flash.attention(*batch, layout="bshd", return_lse=True, **own)
        np.testing.assert_allclose(o[i], one[0], atol=1e-12)
        np.testing.assert_allclose(lse[:, i], one_lse[0], atol=1e-12)
        back = cupy_flash.attention_backward(
            do[None, i], *batch, one, one_lse, dlse=dlse[None, :, i], layout="bshd", **own
        )
        np.testing.assert_allclose(grads.dq[i], back.dq[0], atol=1e-12)
        np.testing.assert_allclose(grads.dk[j], back.dk[0], atol=1e-12)
        np.testing.assert_allclose(grads.dv[j], back.dv[0], atol=1e-12)
        if dbias is not None:
            x = dbias[b : b + 1] if dbias.shape[0] > 1 else dbias
            rows = slice(lengths_q[b]) if x.shape[2] > 1 else slice(None)
            x[:, :, rows, : lengths_k[b]] += back.dbias
        if "sinks" in options:
            dsinks += back.dsinks
    if dbias is not None:
        np.testing.assert_allclose(grads.dbias, dbias, atol=1e-12)
    if "sinks" in options:
        np.testing.assert_allclose(grads.dsinks, dsinks, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}], ids=["plain", "causal"])
def test_keys_not_in_use_are_not_there(options):
    """With seqused_k each sequence of k ends early, whatever the rows after its end hold."""
    lengths_q, lengths_k, used = (5, 0, 33, 1), (7, 4, 9, 64), (3, 0, 9, 40)
    q, k, v = packed_inputs(lengths_q, lengths_k)
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    kept = np.concatenate([np.arange(start, start + n) for start, n in zip(cu_k[:-1], used, strict=True)])
    lost = np.setdiff1d(np.arange(len(k)), kept)
    k[lost], v[lost] = np.nan, np.nan
    seqused = np.array(used, np.int32)
    o, lse = cupy_flash.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=seqused, return_lse=True, **options)
    expected = cupy_flash.attention_varlen(
        q, k[kept], v[kept], cu_q, offsets(used), return_lse=True, **options
    )
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    grads = cupy_flash.attention_varlen_backward(o, q, k, v, o, lse, cu_q, cu_k, seqused_k=seqused, **options)
    wanted = cupy_flash.attention_varlen_backward(
        o, q, k[kept], v[kept], o, lse, cu_q, offsets(used), **options
    )
    np.testing.assert_array_equal(grads.dq, wanted.dq)
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(getattr(grads, name)[kept], getattr(wanted, name))
        assert not getattr(grads, name)[lost].any()


def test_out_is_left_alone_past_the_last_offset():
    q, k, v = packed_inputs((4, 2), (4, 2))
    cut = offsets((4, 2))
    out = np.full((q.shape[0], 4, 24), -42.0)
    assert cupy_flash.attention_varlen(q, k, v, cut, cut, causal=True, out=out) is out
    assert (out[6:] == -42.0).all()
    assert not (out[:6] == -42.0).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_q": [0, 3, 2, 6]}, "never fall"),
        ({"cu_q": [1, 3, 6]}, "begin with 0"),
        ({"cu_q": [0, 3, 600]}, "end at"),
        ({"cu_q": [0, 6]}, "cuts 1 sequences, cu_seqlens_k 2"),
        ({"cu_q_dtype": np.int64}, "int64"),
        ({"cu_q": []}, r"cu_seqlens_q is .*, not \(sequences \+ 1,\) int32"),
        ({"max_seqlen_q": 2}, "the longest length of cu_seqlens_q is 4, not 2"),
        ({"max_seqlen_k": -1}, "the longest length of cu_seqlens_k is -1"),
        ({"causal": True}, "ambiguous"),
        ({"seqused_k": np.array([4, 3], np.int32)}, r"seqused_k\[1\] is 3; the sequence has 2 keys"),
        ({"seqused_k": np.array([-1, 2], np.int32)}, r"seqused_k\[0\] is -1"),
        (
            {"seqused_k": np.array([4], np.int32)},
            r"seqused_k is \(1,\) int32(?s:.*)Try: one number per sequence",
        ),
        ({"seqused_k": np.array([4, 2])}, "int64"),
        ({"rank": 4}, "packed sequences are"),
        ({"cu_k": [0, 3, 2, 6]}, "cu_seqlens_k is .* never fall"),
        ({"cu_k": [0, 3, 600]}, "cu_seqlens_k is .* end at 9"),
        ({"cu_k": [0, 1, 6], "max_seqlen_q": 4, "max_seqlen_k": 4}, "cu_seqlens_k is 5, not 4"),
        ({"seqused_k": np.array([4, 0, 2], np.int32)[::2]}, "not contiguous"),
    ],
)
def test_bad_offsets_are_refused(change, message):
    q, k, v = packed_inputs((4, 2), (4, 2))
    change = dict(change)
    cu_q = np.array(change.pop("cu_q", [0, 4, 6]), change.pop("cu_q_dtype", np.int32))
    cu_k = np.array(change.pop("cu_k", [0, 4, 6]), np.int32)
    if change.pop("rank", 3) == 4:
        q = q[None]
    with pytest.raises(InvalidArgumentsError, match=message):
        cupy_flash.attention_varlen(q, k, v, cu_q, cu_k, **change)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqused_k"])
def test_a_list_of_integers_becomes_what_the_hint_says(name):
    q, k, v = packed_inputs((4, 2), (4, 2))
    cut = np.array([0, 4, 6], np.int32)
    given = {"cu_seqlens_q": cut, "cu_seqlens_k": cut, "seqused_k": np.array([4, 2], np.int32)}
    with pytest.raises(InvalidArgumentsError) as caught:
        cupy_flash.attention_varlen(q, k, v, **{**given, name: given[name].tolist()})
    hint = str(caught.value).partition("Try: ")[2]
    cupy_flash.attention_varlen(
        q, k, v, **{**given, name: eval(hint, {"numpy": np, name: given[name].tolist()})}
    )


def test_one_array_as_both_offsets_is_checked_for_keys_too():
    q, k, v = packed_inputs((4, 2), (4, 2))
    cut = np.array([0, 4, 6], np.int32)
    with pytest.raises(
        InvalidArgumentsError,
        match=r"cu_seqlens_k is .* end at 5 at most, the rows of an array \(rows, heads, head_dim\)",
    ):
        cupy_flash.attention_varlen(q, k[:5], v[:5], cut, cut)
    with pytest.raises(InvalidArgumentsError, match="cu_seqlens_k is 4, not 2"):
        cupy_flash.attention_varlen(q, k, v, cut, cut, max_seqlen_q=4, max_seqlen_k=2)
    with pytest.raises(InvalidArgumentsError, match="packed sequences are"):
        cupy_flash.attention_varlen(q, k[None], v[None], cut, cut)


def test_offsets_of_one_sequence_are_contiguous_too():
    q, k, v = packed_inputs((6,), (6,))
    apart = np.array([0, 99, 6], np.int32)[::2]
    with pytest.raises(InvalidArgumentsError, match="cu_seqlens_q is not contiguous"):
        cupy_flash.attention_varlen(q, k, v, apart, apart)


def test_there_may_be_no_sequences():
    q, k, v = packed_inputs((), ())
    cut = np.zeros(1, np.int32)
    for longest in ({}, {"max_seqlen_q": 0, "max_seqlen_k": 0}):
        o, lse = cupy_flash.attention_varlen(q, k, v, cut, cut, return_lse=True, **longest)
        assert o.shape == (3, 4, 24)
        assert not o.any()
        assert not lse.any()
        grads = cupy_flash.attention_varlen_backward(o, q, k, v, o, lse, cut, cut, **longest)
        assert not any(x.any() for x in grads[:3])


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_lengths_in_use_may_differ_where_offsets_do_not(name):
    q, k, v = packed_inputs((4, 2), (4, 2))
    cut, used = np.array([0, 4, 6], np.int32), {name: np.array([3, 2], np.int32)}
    with pytest.raises(InvalidArgumentsError, match=rf"causal with .*{name}.* is ambiguous"):
        cupy_flash.attention_varlen(q, k, v, cut, cut, causal=True, **used)
    cupy_flash.attention_varlen(q, k, v, cut, cut, causal=True, align="bottom_right", **used)


def test_offsets_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread writes to the caller's arrays after the checks is not read."""
    q = np.random.default_rng(0).standard_normal((9, 2, 8), np.float32)
    cut, used = np.array([0, 4, 9], np.int32), np.array([3, 5], np.int32)
    exact = cupy_flash.attention_varlen(q, q, q, cut, cut, seqused_q=used, seqused_k=used)
    of_arrays = varlen.check_packing

    def and_then_written(*args: Any) -> Any:
        longest = of_arrays(*args)
        cut[1:], used[:] = (1 << 30, (1 << 31) - 1), 1 << 30
        return longest

    monkeypatch.setattr(varlen, "check_packing", and_then_written)
    found = cupy_flash.attention_varlen(q, q, q, cut, cut, seqused_q=used, seqused_k=used)
    np.testing.assert_array_equal(found, exact)


def test_offsets_of_queries_over_a_cache_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    q, new = rng.standard_normal((9, 2, 8), np.float32), rng.standard_normal((3, 2, 8), np.float32)
    cache = rng.standard_normal((2, 2, 16, 8), np.float32)
    cut, cut_new, used = (np.array(x, np.int32) for x in ([0, 4, 9], [0, 1, 3], [3, 5]))
    options = {
        "cache_seqlens": 6, "cu_seqlens_q": cut, "seqused_q": used,
        "k": new, "v": new, "cu_seqlens_k_new": cut_new,
    }  # fmt: skip
    exact = cupy_flash.attention_with_kv_cache(q, cache.copy(), cache.copy(), **options)
    of_arrays = describe_of_cache.check_counts

    def and_then_written(*args: Any) -> None:
        of_arrays(*args)
        cut[1:] = cut_new[1:] = 1 << 30, (1 << 31) - 1
        used[:] = 1 << 30

    monkeypatch.setattr(describe_of_cache, "check_counts", and_then_written)
    found = cupy_flash.attention_with_kv_cache(q, cache.copy(), cache.copy(), **options)
    np.testing.assert_array_equal(found, exact)
