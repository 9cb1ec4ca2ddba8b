"""Who else works with the operators: torch's generator, exporters, tracers and its counter of FLOPs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import flash_attn_3
from cupy_flash.flash_attn import flash_attn_with_kvcache
from tests.public import int4_parts

pytestmark = pytest.mark.torch

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 4, 17, 8, generator=GENERATOR) for _ in range(3))
ROWS = tuple(x[0].transpose(0, 1) for x in (Q, K, V))
CUTS = torch.tensor([0, 5, 17], dtype=torch.int32)
DOUBLED = cupy_flash.score(lambda s, b, h, i, j: 2 * s)


class TestSeeds:
    """A seed that nobody gives is drawn as torch's own functions draw."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda: cf.attention(Q, K, V, dropout=0.5),
            lambda: cf.attention_varlen(*ROWS, CUTS, CUTS, dropout=0.5),
            lambda: torch.vmap(lambda q: cf.attention(q, K[0], V[0], dropout=0.5), randomness="different")(Q),
        ],
        ids=["dense", "packed", "vmap"],
    )
    def test_manual_seed_governs(self, function):
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(function())
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])
        assert not torch.equal(function(), runs[2])  # the generator moves on

    @pytest.mark.parametrize("score", [None, DOUBLED], ids=["options", "score"])
    def test_a_default_device_changes_nothing(self, score):
        runs = []
        for device in ("cpu", "meta"):
            torch.manual_seed(5)
            q = Q.clone().requires_grad_()
            with torch.device(device):
                o = cf.attention(q, K, V, dropout=0.5, score=score)
                o.backward(V)
            runs.append((o, q.grad))
        torch.testing.assert_close(*runs, rtol=0, atol=0)

    def test_no_dropout_draws_nothing(self):
        torch.manual_seed(3)
        cf.attention(Q, K, V)
        cf.attention(Q, K, V, dropout=0.0)
        cf.attention(Q, K, V, dropout=0.5, seed=1)
        drawn = torch.rand(())
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(()))

    def test_checkpoints_draw_it_again(self):
        def loss(q):
            return cf.attention(q, K, V, dropout=0.5).square().sum()

        grads = []
        for function in (loss, lambda q: checkpoint(loss, q, use_reentrant=False)):
            torch.manual_seed(4)
            q = Q.clone().requires_grad_()
            grads.append(torch.autograd.grad(function(q), q)[0])
        torch.testing.assert_close(*grads)

    # Importing inductor warns of what torch itself will leave.
    @pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_in_a_compiled_program(self, backend):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend=backend)
        def step(q):
            return cf.attention(q, K, V, dropout=0.5)

        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(step(Q))
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])
        assert not torch.equal(step(Q), runs[2])


def caches():
    return {"k_cache": torch.zeros(2, 4, 32, 8), "v_cache": torch.zeros(2, 4, 32, 8)}


class Step(torch.nn.Module):
    """A layer with a cache of its own, which is exported as a buffer that is written to."""

    def __init__(self):
        super().__init__()
        for name, x in caches().items():
            self.register_buffer(name, x)

    def forward(self, q, k, v, lengths):
        return cf.attention_with_kv_cache(
            q, self.k_cache, self.v_cache, cache_seqlens=lengths, k=k, v=v, causal=True
        )


def new(length):
    return (*(x[:, :, :3].contiguous() for x in (Q, K, V)), torch.full((2,), length, dtype=torch.int32))


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_with_a_cache_is_exported(strict):
    exported = torch.export.export(Step(), new(0), strict=strict)
    assert "cupy_flash.attention_with_kv_cache" in exported.graph_module.code
    program, eager = exported.module(), Step()
    for length in (0, 3):
        torch.testing.assert_close(program(*new(length)), eager(*new(length)))
    assert torch.equal(program.k_cache, eager.k_cache)
    assert program.k_cache.any()


class Sized(torch.nn.Module):
    """Calls over caches whose lengths are sizes of tensors."""

    def forward(self, q, k):
        rows = q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)
        appended = cf.attention_with_kv_cache(
            q, k.clone(), k.clone(), cache_seqlens=k.shape[2] - q.shape[2], k=q, v=q
        )
        return appended, flash_attn_with_kvcache(*rows), flash_attn_3.flash_attn_with_kvcache(*rows)


@pytest.mark.parametrize("strict", [False, True])
def test_lengths_of_a_cache_may_be_sizes_of_a_program(strict):
    sizes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(Sized(), (Q, K), dynamic_shapes=(sizes, sizes), strict=strict)
    given = Q[:1, :, :2].contiguous(), torch.cat([K, K], 2)[:1]
    torch.testing.assert_close(exported.module()(*given), Sized()(*given))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_call_over_a_cache_is_traced(mode):
    def step(q, k, v, lengths, k_cache, v_cache):
        return cf.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v)

    traced = make_fx(step, tracing_mode=mode)(*new(2), *caches().values())
    targets = [node.target for node in traced.graph.nodes]
    assert torch.ops.cupy_flash.attention_with_kv_cache.default in targets
    ours, wanted = caches(), caches()
    torch.testing.assert_close(traced(*new(5), *ours.values()), step(*new(5), *wanted.values()))
    assert torch.equal(ours["k_cache"], wanted["k_cache"])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_dropout_is_no_constant_of_what_is_traced(mode):
    traced = make_fx(lambda *a: cf.attention(*a, dropout=0.5), tracing_mode=mode)(Q, K, V)
    assert not torch.equal(traced(Q, K, V), traced(Q, K, V))


def counted(function, *tensors):
    with FlopCounterMode(display=False) as counter:
        function(*tensors)
    return counter.get_total_flops()


class TestFlops:
    """By torch's convention: what it counts for its own flash attention."""

    @pytest.mark.parametrize("heads_k", [4, 2])
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_as_torch_counts_its_own(self, heads_k, layout):
        q = Q.clone().requires_grad_()
        k, v = K[:, :heads_k, :11], V[:, :heads_k, :11, :6]
        # Torch's formulas are of its GPU operators; the mathematics of one on a CPU are counted as products.
        with sdpa_kernel(SDPBackend.MATH):
            wide = [x.repeat_interleave(4 // heads_k, 1) for x in (k, v)]
            forward = counted(lambda: torch_sdpa(q.detach(), *wide))
        assert forward == 2 * 2 * 4 * 17 * 11 * (8 + 6)

        def ours(backward):
            given = (q, k, v) if layout == "bhsd" else (x.transpose(1, 2) for x in (q, k, v))
            o = cf.attention(*given, layout=layout, causal=True, align=0)
            if backward:
                o.sum().backward()

        assert counted(ours, False) == forward
        assert counted(ours, True) - forward == 2 * 2 * 4 * 17 * 11 * (3 * 8 + 2 * 6)

    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_one_head_without_an_axis(self, layout):
        flops = counted(lambda: cf.attention(Q[0, 0], K[0, 0, :11], V[0, 0, :11], layout=layout))
        assert flops == 2 * 17 * 11 * (8 + 8)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    @pytest.mark.parametrize("directions", [None, 3])
    def test_forward_mode_and_second_order_by_their_products(self, directions):
        q, k, v = Q, K[:, :2, :11], V[:, :2, :11, :6]
        n = directions or 1
        forward, backward, with_jvp, jvp, jvps, hvp = (
            2 * 2 * 4 * 17 * 11 * (d * 8 + dv * 6)
            for d, dv in ((1, 1), (3, 2), (3, 3), (3, 2), (1 + 2 * n, 2 * n), (7, 3))
        )
        along = torch.ones((n, *q.shape))

        def tangent(x):
            return torch.func.jvp(lambda q: cf.attention(q, k, v), (q,), (x,))[1]

        def twice(x):
            leaf = q.clone().requires_grad_()
            (dq,) = torch.autograd.grad(cf.attention(leaf, k, v).square().sum(), leaf, create_graph=True)
            return torch.autograd.grad(dq, leaf, x, is_grads_batched=directions is not None)

        if directions is None:
            assert counted(tangent, along[0]) == with_jvp
            assert counted(twice, along[0]) == forward + backward + jvp + hvp + backward
        else:
            assert counted(torch.vmap(tangent), along) == forward + jvps
            assert counted(twice, along) == forward + backward + n * (jvp + hvp + backward)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_forward_mode_as_of_the_textbook(self):
        def textbook(q, k, v):
            return (q @ k.mT).softmax(-1) @ v

        ours, theirs = (
            counted(lambda f=f: torch.func.jvp(f, (Q, K, V), (Q, K, V))) for f in (cf.attention, textbook)
        )
        assert ours == theirs

    def test_packed_sequences_by_their_lengths(self):
        flops = counted(lambda: cf.attention_varlen(*ROWS, CUTS, CUTS))
        assert flops == 2 * 4 * (5 * 5 + 12 * 12) * (8 + 8)
        used = torch.tensor([2, 7], dtype=torch.int32)
        flops = counted(lambda: cf.attention_varlen(*ROWS, CUTS, CUTS, seqused_k=used))
        assert flops == 2 * 4 * (5 * 2 + 12 * 7) * (8 + 8)
        flops = counted(lambda: cf.attention_varlen(*ROWS, CUTS, CUTS, seqused_q=used))
        assert flops == 2 * 4 * (2 * 5 + 7 * 12) * (8 + 8)

    def test_packed_queries_over_a_cache_by_their_lengths(self):
        cache, lengths = torch.zeros(2, 4, 32, 8), torch.tensor([3, 9], dtype=torch.int32)
        over = {"k_cache": cache, "v_cache": cache.clone(), "cu_seqlens_q": CUTS}
        for given, keys in (
            ({"cache_seqlens": lengths}, (3, 9)),
            ({"cache_seqlens": 5}, (5, 5)),
            (
                {"cache_seqlens": lengths, "k": ROWS[1], "v": ROWS[2], "cu_seqlens_k_new": CUTS},
                (3 + 5, 9 + 12),
            ),
        ):
            flops = counted(lambda given=given: cf.attention_with_kv_cache(ROWS[0], **over, **given))
            assert flops == 2 * 4 * (5 * keys[0] + 12 * keys[1]) * (8 + 8)

    def test_a_cache_by_its_keys_in_use(self):
        q, k, v, lengths = new(4)

        def step(lengths):
            cf.attention_with_kv_cache(q, **caches(), cache_seqlens=lengths, k=k, v=v)

        assert counted(step, lengths) == counted(step, 4) == 2 * 2 * 4 * 3 * 7 * (8 + 8)

    def test_lengths_outside_of_a_cache_are_cut_to_it(self):
        q, pages, table = new(4)[0], torch.zeros(6, 4, 16, 8), torch.arange(6, dtype=torch.int32).view(2, 3)
        lengths, unchecked = torch.tensor([-3, 99], dtype=torch.int32), cupy_flash.Tuning(check=False)
        over = {"cache_seqlens": lengths, "block_table": table, "tuning": unchecked}
        flops = counted(lambda: cf.attention_with_kv_cache(q, pages, pages.clone(), **over))
        assert flops == 2 * q.shape[1:-1].numel() * (0 + 3 * 16) * (8 + 8)

    def test_selected_keys_of_a_cache_by_their_number(self):
        q, cache = new(4)[0], torch.zeros(2, 1, 32, 8)
        indices = torch.zeros(2, q.shape[2], 5, dtype=torch.int32)
        over = {"k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": 20, "indices": indices}
        flops = counted(lambda: cf.attention_with_kv_cache(q, **over))
        assert flops == 2 * q.shape[:-1].numel() * 5 * (8 + 8)

    def test_a_shared_prefix_of_a_cache_counts(self):
        q, cache, prefix = new(4)[0], torch.zeros(2, 4, 32, 8), torch.zeros(4, 6, 8)
        over = {"k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": 5, "prefix": (prefix, prefix)}
        flops = counted(lambda: cf.attention_with_kv_cache(q, **over))
        assert flops == 2 * q.shape[:-1].numel() * (5 + 6) * (8 + 8)

    def test_codes_of_4_bits_by_their_features(self):
        codes, *scales = map(torch.from_numpy, int4_parts(np.ones((2, 4, 16, 32), np.float32), group=32))
        cache, q = cupy_flash.QuantizedCache(codes, *scales), torch.zeros(2, 4, 3, 32)
        flops = counted(lambda: cf.attention_with_kv_cache(q, cache, cache, cache_seqlens=5))
        assert flops == 2 * 2 * 4 * 3 * 5 * (32 + 32)

    def test_without_values_all_pages_of_a_sequence_count(self):
        q, pages, table = new(4)[0], torch.zeros(5, 4, 16, 8), torch.zeros(2, 3, dtype=torch.int32)
        lengths = torch.zeros(2, dtype=torch.int32)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            q, k, v, table, lengths = map(mode.from_tensor, (q, pages, pages.clone(), table, lengths))
            flops = counted(
                lambda: cf.attention_with_kv_cache(q, k, v, cache_seqlens=lengths, block_table=table)
            )
        assert flops == 2 * q.shape[:-1].numel() * 3 * 16 * (8 + 8)

    def test_without_values_the_longest_counts(self):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            rows, cuts = [mode.from_tensor(x) for x in ROWS], mode.from_tensor(CUTS)
            flops = counted(lambda: cf.attention_varlen(*rows, cuts, cuts, max_seqlen_q=12, max_seqlen_k=12))
        assert flops == 2 * 4 * 2 * 12 * 12 * (8 + 8)
