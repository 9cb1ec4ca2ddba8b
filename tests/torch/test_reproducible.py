"""reproducible= through torch: eager, recorded, compiled, over a cache; and what second order says."""

from itertools import pairwise, product

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import AttentionConfig, InvalidArgumentsError, UnsupportedError, flash_attn, flash_attn_3
from cupy_flash.testing import same_bits
from tests.conftest import skip_without_core

pytestmark = pytest.mark.torch

attend = torch.compile(
    lambda q, k, v: cf.attention(q, k, v, causal=True, reproducible="batch"), backend="eager", fullgraph=True
)
MODULE = cf.FlashAttention(AttentionConfig(16, causal=True, reproducible="batch"))
WAYS = {
    "eager": lambda q, k, v: cf.attention(q, k, v, causal=True, reproducible="batch"),
    "compiled": attend,
    "module": MODULE,
    "sequence by sequence": lambda q, k, v: torch.cat([
        cf.attention(*(x[b : b + 1] for x in (q, k, v)), causal=True, reproducible="batch")
        for b in range(len(q))
    ]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def core():
    skip_without_core()


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1100, 16, generator=generator)
    return [x.requires_grad_() for x in (q, *torch.randn(2, 2, 2, 1100, 16, generator=generator))]


@pytest.mark.parametrize("way", WAYS)
def test_results_and_gradients_are_those_of_each_sequence_alone(way, rows):
    """Of so many rows that without the promise gradients are cut by the batch."""

    def outcome(f):
        o = f(*rows)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), rows)]

    for actual, expected in zip(outcome(WAYS[way]), outcome(WAYS["sequence by sequence"]), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_users_can_look(dtype):
    found = same_bits(torch.from_numpy, cast=lambda x: x.to(dtype), lengths=(1, 10, 65), chunks=(9,))
    assert found.same, str(found)


def test_a_cache():
    """A token has the bits of its row of a prompt, and of the row that is trained."""
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    o = cf.attention(q, k, v, causal=True, reproducible="batch")
    trained = cf.attention(
        *(x.clone().requires_grad_() for x in (q, k, v)), causal=True, reproducible="batch"
    )
    for t in (0, 20, 39):
        token = cf.attention_with_kv_cache(
            q[:, :, t : t + 1], k, v, cache_seqlens=t + 1, causal=True, reproducible="batch"
        )  # fmt: skip
        assert torch.equal(token, o[:, :, t : t + 1])
        assert torch.equal(token, trained[:, :, t : t + 1])


# flash-attention's pull request 2450: 192 cases of packed sequences, of which 16 failed there, all of as many
# heads of keys as of queries, with keys split. Its table is not public; these are axes that it names, and 192
# cases of them. The last one is threads, among which keys are split.
GRID = list(
    product((4, 2, 1), (torch.float16, torch.bfloat16), (16, 32), (False, True), (1, 2, 3, 5, 8, 16, 33, 64))
)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("heads_k", "dtype", "head_dim", "causal", "splits"), GRID)
def test_the_192_cases(heads_k, dtype, head_dim, causal, splits, monkeypatch):
    """Each sequence of a packed batch has the bits of itself alone, and its last row those of decode."""
    generator = torch.Generator().manual_seed(head_dim)
    cuts = torch.tensor([0, 9, 139, 172, 822], dtype=torch.int32)
    shapes = [(822, heads, head_dim) for heads in (4, heads_k, heads_k)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    options = {"causal": causal, "reproducible": "batch"}
    monkeypatch.setattr(cupy_flash.cpu.threads, "allowed", lambda *_: 1)
    alone = []
    for first, end in pairwise(cuts.tolist()):
        mine = [x[first:end].swapaxes(0, 1)[None] for x in (q, k, v)]
        alone.append((mine, cf.attention(*mine, **options)))
    monkeypatch.setattr(cupy_flash.cpu.threads, "allowed", lambda *_: splits)
    packed = cf.attention_varlen(q, k, v, cuts, cuts, **options)
    assert torch.equal(packed, torch.cat([o[0].swapaxes(0, 1) for _, o in alone]))
    for mine, o in alone:
        token, keys = mine[0][:, :, -1:], mine[0].shape[2]
        made = cf.attention_with_kv_cache(token, *mine[1:], cache_seqlens=keys, **options)
        assert torch.equal(made, o[:, :, -1:])


assert len(GRID) == 192


@pytest.mark.parametrize("keys", [150, pytest.param(19802, marks=pytest.mark.slow)])
def test_a_decode_row_beside_a_prompt_of_9_or_10_tokens(keys):
    """vLLM's issue 51902: one call for both, over pages of 16 keys; and the row by itself."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-keys // 16) + 1
    k, v = torch.randn(2, pages, 2, 16, 64, generator=generator).bfloat16()
    q = torch.randn(11, 14, 64, generator=generator).bfloat16()
    table = torch.zeros(2, pages, dtype=torch.int32)
    table[0, : pages - 1], table[1, 0] = torch.arange(pages - 2, -1, -1), pages - 1
    options = {"causal": True, "reproducible": "batch"}

    def beside(prompt):
        used = torch.tensor([keys, prompt], dtype=torch.int32)
        cuts = torch.tensor([0, 1, 1 + prompt], dtype=torch.int32)
        return cf.attention_with_kv_cache(
            q[: 1 + prompt], k, v, cache_seqlens=used, block_table=table, cu_seqlens_q=cuts,
            max_seqlen_q=prompt, **options,
        )  # fmt: skip

    nine, ten = beside(9), beside(10)
    assert torch.equal(nine, ten[:10])
    row = cf.attention_with_kv_cache(
        q[None, :1].swapaxes(1, 2), k, v, block_table=table[:1],
        cache_seqlens=torch.tensor([keys], dtype=torch.int32), **options,
    )  # fmt: skip
    assert torch.equal(row[0, :, 0], ten[0])


def over_packed(f, one_tensor):
    """A function of packed sequences, over a batch."""

    def call(*rows, **options):
        batch, length = rows[0].shape[:2]
        cuts = torch.arange(batch + 1, dtype=torch.int32) * length
        lengths = (cuts, length) if one_tensor else (cuts, cuts, length, length)
        return f(*(x.flatten(0, 1) for x in rows), *lengths, **options).unflatten(0, (batch, length))

    return call


NAMED = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (flash_attn, flash_attn_3)
    for name in module.__all__
    if name.endswith("_func")
}


SHAPES = {"qkvpacked": [(3, 2)], "kvpacked": [(4,), (2, 2)], "": [(4,), (2,), (2,)]}


@pytest.mark.parametrize("name", NAMED)
def test_by_the_names_of_flash_attn(name):
    """Results and gradients of a sequence alone, of functions of the packages."""
    f = over_packed(NAMED[name], "qkvpacked" in name) if "varlen" in name else NAMED[name]
    shapes = next(shapes for kind, shapes in SHAPES.items() if kind in name)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 1100, *shape, 16, generator=generator, requires_grad=True) for shape in shapes]

    def outcome(*rows, reproducible="batch"):
        o = f(*rows, causal=True, reproducible=reproducible)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), rows)]

    alone = outcome(*(x[1:].detach().requires_grad_() for x in rows))
    both = outcome(*rows)
    assert all(torch.equal(x[1:], y) for x, y in zip(both, alone, strict=True))
    for mode, error in (("always", InvalidArgumentsError), ("device", UnsupportedError)):
        with pytest.raises(error, match=mode):
            outcome(*rows, reproducible=mode)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3])
def test_a_cache_by_the_names_of_flash_attn(module):
    q, k, v = torch.randn(3, 2, 40, 2, 16)
    o = module.flash_attn_func(q, k, v, causal=True, reproducible="batch")
    for b, used in ((slice(0, 2), 40), (slice(0, 1), 33), (slice(1, 2), 1)):
        last = module.flash_attn_with_kvcache(
            q[b, used - 1 : used], k[b], v[b], cache_seqlens=used, causal=True, reproducible="batch"
        )
        assert torch.equal(last, o[b, used - 1 : used])
    with pytest.raises(InvalidArgumentsError, match="reproducible is 'always'"):
        module.flash_attn_with_kvcache(q, k, v, cache_seqlens=40, reproducible="always")


@pytest.mark.parametrize("way", ["eager", "compiled", "module"])
def test_prefill_is_batch_where_prompts_have_one_kernel(way, rows):
    """Through the recorded gradient too: the mode goes to the backward pass by itself."""
    mode = "prefill"
    f = {
        "eager": lambda q, k, v: cf.attention(q, k, v, causal=True, reproducible=mode),
        "compiled": torch.compile(
            lambda q, k, v: cf.attention(q, k, v, causal=True, reproducible=mode),
            backend="eager",
            fullgraph=True,
        ),
        "module": cf.FlashAttention(AttentionConfig(16, causal=True, reproducible=mode)),
    }[way]
    o, expected = f(*rows), WAYS["eager"](*rows)
    assert torch.equal(o, expected)
    pairs = (torch.autograd.grad(x.square().sum(), rows) for x in (o, expected))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("mode", ["prefill", "device"])
def test_the_mode_reaches_the_plan(mode):
    """By what it alone refuses, and by what is told."""
    x = torch.zeros(1, 2, 64, 40, dtype=torch.float16 if mode == "prefill" else torch.float32)
    text = cupy_flash.explain(x, x, x, arch="sm_90a", reproducible=mode)
    assert ("kernel    flash_forward_sm90" if mode == "prefill" else "ieee32") in text
    if mode == "device":
        for f in (cf.attention, torch.compile(cf.attention, backend="eager")):
            with pytest.raises(Exception, match="kept by the kernels of GPUs"):
                f(x, x, x, reproducible=mode)


def test_second_order_is_refused(rows):
    o = WAYS["eager"](*rows)
    (dq,) = torch.autograd.grad(o.sum(), rows[0], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"not supported for derivatives\."):
        dq.sum().backward()


def test_what_merges_parts_refuses_it():
    """A ring adds up parts, whose cuts its bits depend on; "run" it keeps."""
    parts = torch.zeros(4, 1, 1, 4, 8)
    with pytest.raises(InvalidArgumentsError, match="has no option 'reproducible'"):
        cupy_flash.merge(*parts, reproducible="batch")
    for mode in ("batch", "prefill", "device"):
        with pytest.raises(UnsupportedError, match=f'reproducible="{mode}"'):
            cf.ring_attention(*parts[:3], reproducible=mode, schedule="ring")
