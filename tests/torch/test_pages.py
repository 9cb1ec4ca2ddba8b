"""Pages, ragged queries and left padding under the names of flash-attn 2 and 3, and of torch."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, flash_attn_3
from cupy_flash.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.torch.test_flash_attn import expected, rotated

pytestmark = pytest.mark.torch

QUERIES, KEYS = (30, 4, 1, 2), (30, 61, 45, 7)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def paged(page, heads=2, dim=16):
    """Pages in which sequences lie, their table, and the sequences."""
    generator = torch.Generator().manual_seed(page)
    pages = -(-64 // page)
    keys = torch.randn(2, len(KEYS), pages * page, heads, dim, generator=generator, dtype=torch.float64)
    order = torch.randperm(len(KEYS) * pages, generator=generator)
    pool = torch.empty(2, len(order), page, heads, dim, dtype=torch.float64)
    pool[:, order] = keys.reshape(2, -1, page, heads, dim)
    return *pool, order.reshape(len(KEYS), pages).to(torch.int32), *keys


def queries():
    return torch.randn(sum(QUERIES), 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def wanted(q, k, v, **options):
    """Each sequence by itself in plain torch."""
    cut, o, lse = offsets(QUERIES), [], []
    for b, n in enumerate(KEYS):
        one = expected(q[None, cut[b] : cut[b + 1]], k[b, None, :n], v[b, None, :n], **options)
        o.append(one[0][0]), lse.append(one[1][0])
    return torch.cat(o), torch.cat(lse, 1)


@pytest.mark.parametrize("page", [1, 5, 8, 16, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_block_table_of_flash_attn_2(page, causal):
    pool_k, pool_v, table, k, v = paged(page)
    q = queries()
    out, lse, _ = flash_attn_varlen_func(
        q, pool_k, pool_v, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS), causal=causal,
        window_size=(20, -1), softcap=3.0, return_attn_probs=True, block_table=table,
    )  # fmt: skip
    want = wanted(q, k, v, causal=causal, window=(20, -1), softcap=3.0)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])


def test_block_table_of_varlen_attn():
    """Torch's contract: a block_table needs seqused_k, and cu_seq_k may be None."""
    pool_k, pool_v, table, k, v = paged(16)
    q, used = queries(), torch.tensor(KEYS, dtype=torch.int32)
    given = (q, pool_k, pool_v, offsets(QUERIES), None, max(QUERIES), max(KEYS))
    o = cf.varlen_attn(*given, window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=table)
    torch.testing.assert_close(o, wanted(q, k, v, causal=True)[0])
    with pytest.raises(InvalidArgumentsError, match="without seqused_k"):
        cf.varlen_attn(*given, enable_gqa=True, block_table=table)
    with pytest.raises(InvalidArgumentsError, match="4 heads of query, 2 of key"):
        cf.varlen_attn(*given, seqused_k=used, block_table=table)


def test_a_compiled_program_keeps_pages_as_one_operator():
    pool_k, pool_v, table, _, _ = paged(8)
    q, used, cut = queries(), torch.tensor(KEYS, dtype=torch.int32), offsets(QUERIES)

    def call(q):
        return cf.varlen_attn(
            q, pool_k, pool_v, cut, None, 30, 61, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
            block_table=table,
        )  # fmt: skip

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q))


@pytest.mark.parametrize("turned", [None, (3, 0, 9, 20)])
def test_ragged_queries_and_new_keys_of_flash_attn_3(turned):
    """cu_seqlens_q, cu_seqlens_k_new and rotary_seqlens: rotation begins behind the cache, or there."""
    pool_k, pool_v, table, k, v = paged(5)
    q, added = queries(), (30, 4, 1, 0)
    generator = torch.Generator().manual_seed(2)
    new_k, new_v = torch.randn(2, sum(added), 2, 16, generator=generator, dtype=torch.float64)
    angles = torch.rand(80, 4, generator=generator, dtype=torch.float64)
    before = torch.tensor([n - m for n, m in zip(KEYS, added, strict=True)], dtype=torch.int32)
    out = flash_attn_3.flash_attn_with_kvcache(
        q, pool_k, pool_v, new_k, new_v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), causal=True,
        cache_seqlens=before, page_table=table, cu_seqlens_q=offsets(QUERIES), max_seqlen_q=max(QUERIES),
        cu_seqlens_k_new=offsets(added), rotary_interleaved=False,
        rotary_seqlens=None if turned is None else torch.tensor(turned, dtype=torch.int32),
    )  # fmt: skip
    cut, cut_new = offsets(QUERIES), offsets(added)
    for b, start in enumerate(before.tolist()):
        first = start if turned is None else turned[b]
        mine, own = slice(cut[b], cut[b + 1]), slice(cut_new[b], cut_new[b + 1])
        at = angles[first : first + QUERIES[b]]
        q[mine] = rotated(q[mine], at.cos(), at.sin(), False)
        at = angles[first : first + added[b]]
        k[b, start : KEYS[b]] = rotated(new_k[own], at.cos(), at.sin(), False)
        v[b, start : KEYS[b]] = new_v[own]
    torch.testing.assert_close(out, wanted(q, k, v, causal=True)[0])


@pytest.mark.parametrize("new", [1, 2])
def test_fewer_new_keys_than_queries(new):
    """As both versions of flash-attn: queries and new keys begin at the position behind the cache."""
    generator = torch.Generator().manual_seed(3)
    q, k_cache, v_cache, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 3, 4, 8), (2, 40, 2, 8), (2, 40, 2, 8), (2, new, 2, 8), (2, new, 2, 8))
    )
    angles, lengths = torch.rand(48, 3, generator=generator, dtype=torch.float64), (17, 5)
    given = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    for module in (flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache):
        keys, values = k_cache.clone(), v_cache.clone()
        out = module(q, keys, values, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), **given)
        for b, n in enumerate(lengths):
            turn = [
                rotated(x[b], a.cos(), a.sin(), True)
                for x, a in ((q, angles[n : n + 3]), (k, angles[n : n + new]))
            ]
            torch.testing.assert_close(keys[b, n : n + new], turn[1])
            want = expected(turn[0][None], keys[b, None, : n + new], values[b, None, : n + new], causal=True)
            torch.testing.assert_close(out[b], want[0][0])


@pytest.mark.parametrize("packed_new", [False, True])
@pytest.mark.parametrize("packed_q", [False, True])
def test_one_length_for_all_and_packed_rows(packed_q, packed_new):
    """cache_seqlens as an integer is where rotation begins, in every sequence."""
    generator = torch.Generator().manual_seed(5)
    q, cache, new = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 2, 4, 8), (2, 40, 2, 8), (2, 2, 2, 8))
    )
    at = torch.rand(48, 3, generator=generator, dtype=torch.float64)[7:]
    turned = [rotated(x, at[:2].cos(), at[:2].sin(), True) for x in (q, new)]
    # Sequence 0 brings one key, sequence 1 two of them; or both bring one.
    used = [(x.flatten(0, 1)[[0, 2, 3]] if packed_new else x[:, :1]) for x in (new, turned[1])]
    options = {"cache_seqlens": 7, "causal": True}
    options |= {"cu_seqlens_k_new": offsets((1, 2))} if packed_new else {}
    options |= {"cu_seqlens_q": offsets((2, 2))} if packed_q else {}
    caches, results = [cache.clone() for _ in range(4)], []
    tables = torch.cat([torch.zeros(7, 3, dtype=torch.float64), at])
    for n, (queries, k, rotary) in enumerate(
        ((q, used[0], {"rotary_cos": tables.cos(), "rotary_sin": tables.sin()}), (turned[0], used[1], {}))
    ):
        rows = queries.flatten(0, 1) if packed_q else queries
        own = caches[2 * n : 2 * n + 2]
        results.append(flash_attn_3.flash_attn_with_kvcache(rows, *own, k, used[0], **rotary, **options))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(caches[0], caches[2])


def test_padding_on_the_left():
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 3, 4, 8), (2, 40, 2, 8), (2, 40, 2, 8))
    )
    pads, lengths = (7, 0), (33, 12)
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), causal=True,
        cache_leftpad=torch.tensor(pads, dtype=torch.int32),
    )  # fmt: skip
    for b, (pad, n) in enumerate(zip(pads, lengths, strict=True)):
        torch.testing.assert_close(
            out[b], expected(q[b, None], k[b, None, pad:n], v[b, None, pad:n], causal=True)[0][0]
        )


def test_queries_in_use_have_gradients():
    """seqused_q of flash-attn 3, which trains with it."""
    cut, used = offsets((9, 6)), torch.tensor([4, 6], dtype=torch.int32)
    q, k, v = (torch.randn(15, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = flash_attn_3.flash_attn_varlen_func(q, k, v, cut, cut, 9, 9, seqused_q=used, causal=True)
    kept = torch.tensor([*range(4), *range(9, 15)])
    short = flash_attn_3.flash_attn_varlen_func(q[kept], k, v, offsets((4, 6)), cut, 9, 9, causal=True)
    torch.testing.assert_close(out[kept], short)
    assert not out[4:9].any()
    seed = torch.randn_like(short)
    full = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out).index_copy(0, kept, seed))
    for got, want in zip(full, torch.autograd.grad(short, (q, k, v), seed), strict=True):
        torch.testing.assert_close(got, want)
