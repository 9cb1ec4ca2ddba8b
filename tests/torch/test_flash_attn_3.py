"""cupy_flash.flash_attn_3 against flash-attn 3's signatures, and its rules written out in plain torch."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from cupy_flash import InvalidArgumentsError, UnsupportedError, flash_attn_3
from tests.torch.test_flash_attn import expected, rotated, rows

pytestmark = pytest.mark.torch

DESCALE = "q_descale=None, k_descale=None, v_descale=None"
END = "deterministic=False, sm_margin=0, return_attn_probs=False"
BAND = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
# As `flash_attn_interface` of flash-attn 3 has them.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALE}, {BAND}, "
    f"num_splits=1, pack_gqa=None, {END}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALE}, {BAND}, "
    "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, {DESCALE}, {BAND}, "
    f"num_splits=1, pack_gqa=None, {END}",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
    f"{DESCALE}, softmax_scale=None, causal=False, {BAND}, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_attn_3, name)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    ours = "" if name == "flash_attn_combine" else ", *, reproducible=None"
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]}{ours})"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
        ({"window_size": (3, 1), "softcap": 2.0}, {"window": (3, 1), "softcap": 2.0}),
        ({"window_size": torch.tensor([3, 1]), "softcap": 2.0}, {"window": (3, 1), "softcap": 2.0}),
    ],
)
def test_rules_and_gradients(theirs, ours):
    q, k, v = rows((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    o, lse = flash_attn_3.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    want_o, want_lse = expected(q, k, v, **ours)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(lse, want_lse)
    seed = torch.randn_like(o)
    for got, want in zip(
        torch.autograd.grad(o, (q, k, v), seed), torch.autograd.grad(want_o, (q, k, v), seed), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_queries_that_look_for_values_too(scale):
    """Scores are q k + qv v, scaled by the features of both; gradients reach all four."""
    q, k, v, qv = rows((1, 5, 4, 8), (1, 9, 2, 8), (1, 9, 2, 24), (1, 5, 4, 24))
    o = flash_attn_3.flash_attn_func(q, k, v, causal=True, qv=qv, softmax_scale=scale)
    longer = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    want, _ = expected(*longer, v, scale=scale or 32**-0.5, causal=True)
    torch.testing.assert_close(o, want)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v, qv)) for x in (o, want)]
    for got, expect in zip(*grads, strict=True):
        torch.testing.assert_close(got, expect)


@pytest.mark.parametrize(("new", "turns"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("paged", [False, True])
def test_queries_that_look_for_values_in_a_cache(paged, new, turns):
    """Which is of latents: keys begin behind the values of a row, and new ones are stored there.

    Rotated are q and k, not qv and v.
    """
    made = rows((2, 2, 4, 8), (2, 2, 4, 24), (2, 32, 1, 32), (2, new, 1, 8), (2, new, 1, 24))
    q, qv, latents, k, v = (x.detach().float() for x in made)
    angles = torch.arange(128.0).view(32, 4)
    rotated_q, rotated_k = (
        rotated(x, angles[10:12].cos(), angles[10:12].sin(), True) if turns else x for x in (q, k)
    )
    want = torch.cat((latents[:, :10], torch.cat((v, rotated_k), -1)), 1)
    table = {"page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)} if paged else {}
    v_cache, k_cache = latents.view((4, 16, 1, 32) if paged else latents.shape).split((24, 8), -1)
    o = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, *((k, v) if new else (None, None)), qv,
        *((angles.cos(), angles.sin()) if turns else (None, None)), cache_seqlens=10, causal=True, **table,
    )  # fmt: skip
    whole = torch.cat((qv, rotated_q), -1)
    torch.testing.assert_close(o, expected(whole, want, want[..., :24], causal=True)[0])
    torch.testing.assert_close(latents[:, : 10 + new], want, rtol=0, atol=1e-6 * turns)
    assert torch.equal(latents[:, : 10 + new, ..., :24], want[..., :24])


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda x: (x[..., :24], x.clone()[..., 24:]), id="two tensors"),
        pytest.param(lambda x: (x[..., 8:], x[..., :8]), id="keys before values"),
        pytest.param(lambda x: (x[:, :16, :, :24], x[:, ::2, :, 24:]), id="other strides"),
        pytest.param(lambda x: (x[..., :24], x[:1, ..., 24:]), id="other slots"),
        pytest.param(lambda x: (x.view(torch.int32)[..., :24], x[..., 24:]), id="other dtypes"),
        pytest.param(lambda x: (x[..., :16:2], x[..., 8:24:2]), id="gaps between features"),
    ],
)
def test_caches_that_are_no_latents(parts):
    """Read as latents they would give other numbers, or lie beyond the memory."""
    v_cache, k_cache = parts(torch.zeros(2, 32, 1, 32))
    q, qv = (torch.zeros(2, 1, 4, x.shape[-1]) for x in (k_cache, v_cache))
    with pytest.raises(UnsupportedError, match="k_cache and v_cache are not parts of one tensor"):
        flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, cache_seqlens=4)


def test_packed_heads_side_by_side():
    (qkv,) = rows((2, 7, 4 + 2 + 2, 16))
    o = flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    want, _ = expected(*qkv.split([4, 2, 2], -2), causal=True)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(
        flash_attn_3.flash_attn_qkvpacked_func(qkv[:, :, :6].unflatten(2, (3, 2))),
        expected(*qkv[:, :, :6].unflatten(2, (3, 2)).unbind(2))[0],
    )
    with pytest.raises(InvalidArgumentsError, match="num_heads_q"):
        flash_attn_3.flash_attn_qkvpacked_func(qkv, num_heads_q=5)


def test_varlen_is_each_sequence_with_the_keys_in_use():
    q, k, v = rows((7, 4, 16), (12, 2, 16), (12, 2, 16))
    cuts_q, cuts_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 7], [0, 5, 12]))
    used = torch.tensor([4, 6], dtype=torch.int32)
    o, lse = flash_attn_3.flash_attn_varlen_func(
        q, k, v, cuts_q, cuts_k, 4, 7, seqused_k=used, causal=True, return_attn_probs=True
    )
    for (a, b), start, n in (((0, 3), 0, 4), ((3, 7), 5, 6)):
        want_o, want_lse = expected(
            q[None, a:b], k[None, start : start + n], v[None, start : start + n], causal=True
        )
        torch.testing.assert_close(o[a:b], want_o[0])
        torch.testing.assert_close(lse[:, a:b], want_lse[0])


def float8(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=generator).to(torch.float8_e4m3fn) for s in shapes]


def scales(batch, heads):
    generator = torch.Generator().manual_seed(4)
    return [torch.rand((batch, heads), generator=generator) + 0.5 for _ in range(3)]


def values_of(x, scale):
    """What 8-bit floats stand for; the heads of a group have the scale of their key head."""
    groups = x.shape[2] // scale.shape[1]
    return x.double() * scale.double().repeat_interleave(groups, 1)[:, None, :, None]


def test_8_bit_floats_with_scales_by_key_head():
    q, k, v = float8((2, 5, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32))
    of_q, of_k, of_v = scales(2, 2)
    o = flash_attn_3.flash_attn_func(q, k, v, causal=True, q_descale=of_q, k_descale=of_k, v_descale=of_v)
    want, _ = expected(values_of(q, of_q), values_of(k, of_k), values_of(v, of_v), causal=True)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), want, rtol=0.02, atol=0.02)
    with pytest.raises(InvalidArgumentsError, match=r"q_descale with q of torch\.float32"):
        flash_attn_3.flash_attn_func(q.float(), k.float(), v.float(), q_descale=of_q)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_of_8_bit_floats(paged):
    q, cache_k, cache_v = float8((2, 1, 4, 32), (2, 32, 2, 32), (2, 32, 2, 32))
    of_q, of_k, of_v = scales(2, 2)
    lengths = torch.tensor([20, 32], dtype=torch.int32)
    table = {"page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)} if paged else {}
    pages = (4, 16, 2, 32) if paged else cache_k.shape
    o = flash_attn_3.flash_attn_with_kvcache(
        q, cache_k.view(pages), cache_v.view(pages), cache_seqlens=lengths, causal=True,
        q_descale=of_q, k_descale=of_k, v_descale=of_v, **table,
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        want, _ = expected(
            values_of(q[one], of_q[one]),
            values_of(cache_k[one, :n], of_k[one]),
            values_of(cache_v[one, :n], of_v[one]),
        )
        torch.testing.assert_close(o[one].double(), want, rtol=0.02, atol=0.02)


def test_a_cache_takes_new_keys():
    q, cache_k, cache_v, k, v = (
        x.detach().float() for x in rows((2, 3, 4, 16), *[(2, 32, 2, 16)] * 2, *[(2, 3, 2, 16)] * 2)
    )
    want_k = torch.cat((cache_k[:, :10], k), 1)
    want_v = torch.cat((cache_v[:, :10], v), 1)
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        q, cache_k, cache_v, k, v, cache_seqlens=10, causal=True, return_softmax_lse=True
    )
    want_o, want_lse = expected(q, want_k, want_v, causal=True)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(cache_k[:, 10:13], k)


@pytest.mark.parametrize(
    "options", [{}, {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)}], ids=str
)
@pytest.mark.parametrize("new", [0, 1])
def test_positions_of_a_rotation_that_there_is_not(options, new):
    """flash-attn 3 looks at rotary_seqlens only beside rotary_cos."""
    q, cache, *k = (x.detach() for x in rows((2, 1, 4, 16), (3, 32, 2, 16), *[(2, 1, 2, 16)] * new))
    lengths, given = torch.tensor([5, 9], dtype=torch.int32), [q, cache.clone(), cache.clone(), *k * 2]
    call = flash_attn_3.flash_attn_with_kvcache
    if not options:
        given[1:3] = (x[:2] for x in given[1:3])
    found = call(*given, cache_seqlens=lengths, rotary_seqlens=lengths, causal=True, **options)
    torch.testing.assert_close(found, call(*given, cache_seqlens=lengths, causal=True, **options))


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_slots_of_a_page_table(way):
    """With a page table, cache_batch_idx names its rows, of which there may be more than sequences."""
    q, k, v, new_k, new_v = (
        x.detach() for x in rows((2, 1, 4, 16), *[(10, 8, 2, 16)] * 2, *[(2, 1, 2, 16)] * 2)
    )
    table = torch.tensor([[9, 0], [3, 7], [1, 2], [6, 4]], dtype=torch.int32)
    slots, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([3, 1], [11, 6]))

    def step(*caches):
        return flash_attn_3.flash_attn_with_kvcache(
            q, *caches, new_k, new_v, cache_seqlens=lengths, page_table=table, cache_batch_idx=slots,
            cache_leftpad=torch.tensor([0, 2], dtype=torch.int32), causal=True,
        )  # fmt: skip

    caches = k.clone(), v.clone()
    run = torch.compile(step, backend="aot_eager") if way == "compiled" else step
    o = run(*caches)
    for b, (slot, length, first) in enumerate(((3, 11, 0), (1, 6, 2))):
        whole = []
        for cache, before, new in zip(caches, (k, v), (new_k, new_v), strict=True):
            pages = table[slot].long()
            whole.append(torch.cat([before[pages].flatten(0, 1)[first:length], new[b]])[None])
            torch.testing.assert_close(cache[pages].flatten(0, 1)[length], new[b, 0])
        torch.testing.assert_close(o[b : b + 1], expected(q[b : b + 1], *whole)[0])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, 4], dtype=torch.int32), "cache_batch_idx holds 4; page_table has 4 rows"),
        (torch.tensor([0, -1], dtype=torch.int32), "cache_batch_idx holds -1"),
        (torch.tensor([0, 1]), "cache_batch_idx has shape .* and dtype torch.int64"),
        ([0, 1], "cache_batch_idx is a list"),
    ],
)
def test_slots_that_a_page_table_does_not_have(slots, message):
    q, cache = torch.zeros(2, 1, 2, 16), torch.zeros(8, 4, 2, 16)
    table, lengths = (torch.zeros(x, dtype=torch.int32) for x in ((4, 2), 2))
    with pytest.raises(InvalidArgumentsError, match=rf"{message}[\s\S]*Try: "):
        flash_attn_3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, page_table=table, cache_batch_idx=slots
        )


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_combine(out_dtype):
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn((3, 2, 4, 5, 8), generator=generator).transpose(2, 3)
    lse = torch.randn((3, 2, 8, 5), generator=generator).transpose(-1, -2)[..., :4]
    lse[1:, 0] = -torch.inf
    lse[:, 1, 2] = -torch.inf
    o, whole = flash_attn_3.flash_attn_combine(parts, lse, out_dtype=out_dtype)
    weights = torch.nan_to_num(torch.softmax(lse, 0))
    torch.testing.assert_close(whole, torch.logsumexp(lse, 0))
    torch.testing.assert_close(o, (weights[..., None] * parts).sum(0).to(out_dtype or torch.float32))
    target = torch.empty_like(o)
    assert flash_attn_3.flash_attn_combine(parts, lse, target)[0] is target
    torch.testing.assert_close(target, o)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_combine_reads_nothing_of_parts_without_weight(garbage):
    """Kernels that split keys need not write the result of an empty part; gradients through it are 0."""
    generator = torch.Generator().manual_seed(1)
    parts, lse = (torch.randn(shape, generator=generator) for shape in ((3, 2, 4, 5, 8), (3, 2, 4, 5)))
    lse[0, 0] = lse[:, 1] = -torch.inf
    lse[1, 0, 2] = -3e38
    parts = torch.where((lse < -1e38)[..., None], garbage, parts).requires_grad_()
    lse.requires_grad_()
    o, whole = flash_attn_3.flash_attn_combine(parts, lse)
    weights = torch.nan_to_num(torch.softmax(lse, 0))
    written = torch.where((lse < -1e38)[..., None], 0, parts)
    torch.testing.assert_close(o, (weights[..., None] * written).sum(0))
    torch.testing.assert_close(whole, torch.logsumexp(lse, 0))
    grads = torch.autograd.grad(o.square().sum() + whole[0].sin().sum(), (parts, lse))
    for x in grads:
        assert not x[lse < -1e38].any()
        assert x.isfinite().all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"out_partial": torch.ones(3, 5, 4, 8).numpy()}, "out_partial is an ndarray, not a torch tensor"),
        ({"lse_partial": None}, "lse_partial is None, not a torch tensor"),
        (
            {"out_partial": torch.ones(3, 5, 4, 8, dtype=torch.int32)},
            "out_partial is torch.int32, not torch.f",
        ),
        ({"out_partial": torch.ones(3, 5, 4, 8).to(torch.float8_e4m3fn)}, "out_partial is torch.float8"),
        ({"lse_partial": torch.ones(3, 5, 4).half()}, "lse_partial is torch.float16, not torch.float32"),
        ({"lse_partial": torch.ones(3, 5, 4).double()}, "lse_partial is torch.float64, not torch.float32"),
        ({"out_partial": torch.ones(3, 5, 4, 8).double()}, "lse_partial is torch.float32, not torch.float64"),
        ({"lse_partial": torch.ones(3, 4, 5)}, "lse_partial .3, 4, 5."),
        (
            {"lse_partial": torch.ones(0, 5, 4), "out_partial": torch.ones(0, 5, 4, 8)},
            "out_partial has shape .0",
        ),
        (
            {"lse_partial": torch.ones(3, 5), "out_partial": torch.ones(3, 5, 8)},
            "out_partial has shape .3, 5, 8.",
        ),
        ({"lse_partial": torch.ones(()), "out_partial": torch.ones(8)}, "out_partial has shape .8,."),
        ({"lse_partial": torch.ones(3, 5, 4, device="meta")}, "lse_partial is on meta, out_partial on cpu"),
        ({"out": torch.ones(5, 4, 8, device="meta")}, "out is on meta, out_partial on cpu"),
        ({"out": torch.ones(2, 5, 4, 8)}, "out has shape .2, 5, 4, 8., not .5, 4, 8."),
        ({"out": torch.ones(5, 4, 8, dtype=torch.int32)}, "out is torch.int32, not torch.float16 or"),
        (
            {"out": torch.ones(5, 4, 8), "out_dtype": torch.float16},
            "out has dtype torch.float32, and out_dtype",
        ),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
        ({"out_dtype": "float16"}, "out_dtype is float16"),
    ],
)
def test_what_combine_refuses(given, message):
    """It would convert or broadcast some of this in silence."""
    with pytest.raises(InvalidArgumentsError, match=rf"{message}(?s:.*)Try: ."):
        flash_attn_3.flash_attn_combine(
            **{"out_partial": torch.ones(3, 5, 4, 8), "lse_partial": torch.ones(3, 5, 4), **given}
        )


def test_gradients_of_combine():
    generator = torch.Generator().manual_seed(2)
    parts = torch.randn((3, 4, 2, 5), generator=generator, dtype=torch.float64)
    lse = 3 * torch.randn((3, 4, 2), generator=generator, dtype=torch.float64)
    torch.autograd.gradcheck(flash_attn_3.flash_attn_combine, (parts.requires_grad_(), lse.requires_grad_()))


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("func", "attention_chunk", 128),
        ("cache", "qv", torch.zeros(1, 4, 1, 8)),
        ("rotated", "qv", torch.zeros(1, 4, 1, 8)),
    ],
)
def test_what_is_not_taken_raises_by_name(call, name, value):
    latents, cos = torch.zeros(1, 4, 1, 16), torch.ones(4, 4)
    x = torch.zeros(1, 4, 1, 8)
    cuts = torch.tensor([0, 4], dtype=torch.int32)
    calls = {
        "func": lambda: flash_attn_3.flash_attn_func(x, x, x, **{name: value}),
        "varlen": lambda: flash_attn_3.flash_attn_varlen_func(
            x[0], x[0], x[0], cuts, cuts, 4, 4, **{name: value}
        ),
        "cache": lambda: flash_attn_3.flash_attn_with_kvcache(x, x, x, **{name: value}),
        "rotated": lambda: flash_attn_3.flash_attn_with_kvcache(
            x,
            latents[..., 8:],
            latents[..., :8],
            rotary_cos=cos[:, :2],
            rotary_sin=cos[:, :2],
            **{name: value},
        ),
    }
    with pytest.raises(UnsupportedError, match=f"{name} is not supported"):
        calls[call]()


def test_a_call_as_sglang_makes_it():
    """A token of each sequence over pages; offsets of all keys, without new ones, are not read."""
    q, pages = torch.randn(2, 2, 8), torch.randn(4, 4, 2, 8)
    used = {"cache_seqlens": torch.tensor([3, 7]).int(), "page_table": torch.tensor([[2, 0], [1, 3]]).int()}
    packed = {"cu_seqlens_q": torch.tensor([0, 1, 2]).int(), "max_seqlen_q": 1, "causal": True}
    given = {"cu_seqlens_k_new": torch.tensor([0, 3, 10]).int(), "softcap": 0.0, "window_size": (-1, -1)}
    o = flash_attn_3.flash_attn_with_kvcache(q=q, k_cache=pages, v_cache=pages, **used, **packed, **given)
    wanted = flash_attn_3.flash_attn_with_kvcache(q[:, None], pages, pages, **used, causal=True)
    torch.testing.assert_close(o, wanted[:, 0])


def test_what_only_plans_is_taken():
    q, k, v = rows((1, 5, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    o = flash_attn_3.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, sm_margin=8)
    torch.testing.assert_close(o, expected(q, k, v)[0])
    assert flash_attn_3.get_scheduler_metadata(1, 5, 9, 2, 2, 8, cache_seqlens=None) is None
