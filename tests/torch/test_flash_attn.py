"""cupy_flash.flash_attn against flash-attn's signatures, and its rules written out in plain torch."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from cupy_flash import InvalidArgumentsError, UnsupportedError, flash_attn, flash_attn_3
from cupy_flash.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.torch

# As flash-attn 2.8 documents them.
REST = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
)
REST += "deterministic=False, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {REST}",
    "flash_attn_kvpacked_func": f"q, kv, {REST}",
    "flash_attn_qkvpacked_func": f"qkv, {REST}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {REST}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {REST}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {REST}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]}, *, reproducible=None)"


def rows(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def expected(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """What flash-attn's README says: every positional rule counts from the last key."""
    heads, n, m = q.shape[2], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    if slopes is not None:
        scores = scores - slopes.reshape(-1, heads, 1, 1) * distance.abs()
    left, right = window
    right = 0 if causal else right
    if right >= 0:
        scores = scores.masked_fill(distance > right, -torch.inf)
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -torch.inf)
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"softmax_scale": 0.3, "causal": True}, {"scale": 0.3, "causal": True}),
        ({"window_size": (2, 1)}, {"window": (2, 1)}),
        ({"window_size": torch.tensor([2, 1])}, {"window": (2, 1)}),  # as in flash-attn's own tests
        ({"window_size": (3, -1), "softcap": 2.0}, {"window": (3, -1), "softcap": 2.0}),
        ({"causal": True, "window_size": (3, 3)}, {"causal": True, "window": (3, 3)}),
        ({"alibi_slopes": 1, "causal": True}, {"slopes": 1, "causal": True}),
        ({"alibi_slopes": 2}, {"slopes": 2}),
    ],
)
def test_rules_and_gradients(lengths, theirs, ours):
    q, k, v = rows((2, lengths[0], 4, 8), (2, lengths[1], 2, 8), (2, lengths[1], 2, 8))
    if "slopes" in ours:
        slopes = torch.rand((2, 4) if ours["slopes"] == 2 else (4,), dtype=torch.float64)
        theirs, ours = {**theirs, "alibi_slopes": slopes}, {**ours, "slopes": slopes}
    out, lse, nothing = flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    wanted, wanted_lse = expected(q, k, v, **ours)
    assert nothing is None
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    seen = torch.isfinite(wanted_lse).transpose(1, 2)[..., None]  # torch's gradient of an empty row is NaN
    for a, b in zip(
        *(torch.autograd.grad((o * seen).sin().sum(), v, retain_graph=True) for o in (out, wanted)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    if seen.all():
        for x in (q, k):
            a, b = (torch.autograd.grad(o.sin().sum(), x, retain_graph=True)[0] for o in (out, wanted))
            torch.testing.assert_close(a, b)


def test_packed_forms_read_in_place_and_take_gradients():
    (qkv,) = rows((2, 9, 3, 4, 8))
    q, k, v = qkv.unbind(2)
    separate = flash_attn_func(q, k, v, 0.0, 0.2, True, (4, -1), 3.0)
    for packed in (
        flash_attn_qkvpacked_func(qkv, 0.0, 0.2, True, (4, -1), 3.0),
        flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, 0.2, True, (4, -1), 3.0),
    ):
        assert torch.equal(packed, separate)
        a, b = (torch.autograd.grad(o.sin().sum(), qkv, retain_graph=True)[0] for o in (packed, separate))
        torch.testing.assert_close(a, b)


def test_varlen_is_each_sequence_by_itself():
    q, kv = rows((10, 4, 8), (12, 2, 2, 8))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 10], [0, 4, 5, 12]))
    options = {"causal": True, "window_size": (3, 0), "softcap": 4.0, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 7, 7, **options)
    same = flash_attn_varlen_func(q, *kv.unbind(1), cu_q, cu_k, 7, 7, **options)
    assert torch.equal(out, same[0])
    for (a, b), (c, d) in zip(((0, 3), (3, 10)), ((0, 4), (5, 12)), strict=True):
        one = flash_attn_kvpacked_func(q[None, a:b], kv[None, c:d], **options)
        torch.testing.assert_close(out[a:b], one[0][0])
        torch.testing.assert_close(lse[:, a:b], one[1][0])
    (qkv,) = rows((10, 3, 4, 8))
    whole = flash_attn_varlen_qkvpacked_func(qkv, cu_q, 7, causal=True)
    torch.testing.assert_close(whole[3:], flash_attn_qkvpacked_func(qkv[None, 3:], causal=True)[0])
    assert torch.autograd.grad(whole.sum(), qkv)[0].abs().sum() > 0


def rotated(x, cos, sin, interleaved):
    """Turn the first features of x, (..., rows, heads, features), row by row."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b = (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (
        x[..., :half], x[..., half : 2 * half])  # fmt: skip
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned, x[..., 2 * half :]), -1)


@torch.no_grad()
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_cache(paged, interleaved):
    q, k, v, past_k, past_v = rows((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8), (2, 48, 2, 8), (2, 48, 2, 8))
    angles = torch.rand(48, 3, dtype=torch.float64)
    lengths, table = torch.tensor([5, 20], dtype=torch.int32), None
    k_cache, v_cache = past_k.clone(), past_v.clone()
    if paged:
        table = torch.tensor([[3, 0, 5], [4, 1, 2]], dtype=torch.int32)
        k_cache, v_cache = (x.reshape(6, 16, 2, 8)[table.flatten().argsort()] for x in (k_cache, v_cache))
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), lengths, None, None, table, 0.3, True, (8, -1),
        2.0, interleaved, return_softmax_lse=True,
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        at = angles[n : n + 3]
        rotated_q, rotated_k = (rotated(x[b], at.cos(), at.sin(), interleaved) for x in (q, k))
        keys, values = torch.cat((past_k[b, :n], rotated_k)), torch.cat((past_v[b, :n], v[b]))
        wanted, wanted_lse = expected(
            rotated_q[None], keys[None], values[None], 0.3, causal=True, window=(8, -1), softcap=2.0
        )
        torch.testing.assert_close(out[b], wanted[0])
        torch.testing.assert_close(lse[b], wanted_lse[0])
        stored = k_cache[b] if table is None else k_cache[table[b].long()].flatten(0, 1)
        torch.testing.assert_close(stored[: n + 3], keys)
    full = flash_attn_with_kvcache(q, past_k, past_v)
    torch.testing.assert_close(full, flash_attn_func(q, past_k, past_v))


def test_dropout_follows_torchs_generator():
    q, k, v = rows((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(flash_attn_func(q, k, v, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_deterministic_reaches_the_backward_pass(monkeypatch):
    from cupy_flash.torch import eager

    seen = []
    monkeypatch.setattr(
        eager, "backward", lambda call, *_: seen.append(call.options.reproducible == "run") or (None,) * 5
    )
    q, k, v = rows((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    for deterministic in (True, False):
        flash_attn_func(q, k, v, deterministic=deterministic).sum().backward()
    assert seen == [True, False]


def test_what_is_not_supported_raises_by_name():
    q, k, v = rows((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    with pytest.raises(UnsupportedError, match="return_attn_probs with dropout_p"):
        flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="with a block_table"):
        flash_attn_varlen_func(q[0], k, v, cu, cu, 9, 9, 0.1, block_table=cu[None])
    with pytest.raises(InvalidArgumentsError, match="requires grad"):
        flash_attn_varlen_func(q[0], k, v, cu, cu, 9, 9, block_table=cu[None, :1])
    cos = torch.ones(9, 4, dtype=torch.float64)
    for options, name in (
        ({"rotary_cos": cos, "rotary_sin": cos, "cache_seqlens": 3}, "rotary_cos is given without k"),
        ({"rotary_cos": cos, "rotary_sin": cos, "cache_seqlens": 0, "k": k, "v": v}, "not causal"),
    ):
        with pytest.raises((InvalidArgumentsError, UnsupportedError), match=name):
            flash_attn_with_kvcache(q, k, v, **options)
    with pytest.raises(InvalidArgumentsError, match="cache_seqlens is None"):
        flash_attn_with_kvcache(q, k, v, k, v)
    with pytest.raises(InvalidArgumentsError, match="requires grad"):
        flash_attn_with_kvcache(q, k, v)
    with pytest.raises(InvalidArgumentsError, match="has no option 'num_splits'"):
        flash_attn_func(q, k, v, num_splits=2)
    with pytest.raises(InvalidArgumentsError, match="qkv has shape"):
        flash_attn_qkvpacked_func(q)
    with pytest.raises(InvalidArgumentsError, match="window_size's left bound is -2"):
        flash_attn_func(q, k, v, window_size=(-2, -1))


def test_what_offsets_are_told_to_be():
    q, lengths = torch.ones(8, 4, 16), torch.tensor([3, 5])

    def refused(cuts, longest):
        with pytest.raises(InvalidArgumentsError) as caught:
            flash_attn_varlen_func(q, q, q, cuts, cuts, longest, longest)
        return str(caught.value).rpartition("Try: ")[2]

    cuts = torch.tensor([0, 3, 8], dtype=torch.int32)
    for wrong in (cuts[:0], cuts[None], cuts.flip(0)):
        assert torch.equal(eval(refused(wrong, 5), {"torch": torch, "lengths": lengths}), cuts)
    assert torch.equal(eval(refused(cuts.long(), 5), {"torch": torch, "cu_seqlens_q": cuts.long()}), cuts)
    assert refused(cuts, 4) == "max_seqlen_q=5, or more"


def test_errors_say_what_the_caller_wrote():
    """Our names for the same are not those that a caller of flash-attn has seen."""
    q, cache, new = torch.ones(2, 1, 4, 16), torch.ones(2, 32, 2, 16), torch.ones(2, 1, 2, 16)
    lengths, wide = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([0, 1])
    short = {"rotary_cos": torch.ones(8, 8), "rotary_sin": torch.ones(8, 8), "k": new, "v": new}
    for options, says, never in (
        (short, "rotary_cos has 8 positions", "rotary.cos"),
        ({"cache_batch_idx": wide}, "cache_batch_idx has dtype torch.int64", "block_table"),
        ({"block_table": wide[:, None]}, "block_table has dtype torch.int64", "page_table"),
        ({"num_splits": -1}, "num_splits is -1", "tuning"),
    ):
        with pytest.raises(InvalidArgumentsError) as caught:
            flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **options)
        assert says in str(caught.value)
        assert never not in str(caught.value)
    with pytest.raises(InvalidArgumentsError, match=r"Try: window_size=\(3, 0\)"):
        flash_attn_func(q, q, q, window_size=3)
    assert torch.equal(flash_attn_func(q, q, q, window_size=None), flash_attn_func(q, q, q))
    with pytest.raises(InvalidArgumentsError, match=r"dropout_p=0\.1"):
        flash_attn_func(q, q, q, dropout_p=2.0)
    with pytest.raises(InvalidArgumentsError) as caught:
        flash_attn_func(q, cache[:, :1, :1].repeat(1, 1, 3, 1), cache[:, :1, :1].repeat(1, 1, 3, 1))
    assert "layout" not in str(caught.value)
    for options, says in (
        ({"page_table": wide[:, None]}, "page_table has dtype torch.int64"),
        ({**short, "rotary_seqlens": lengths.long()}, "rotary_seqlens is "),
    ):
        with pytest.raises(InvalidArgumentsError, match=says):
            flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **options)
