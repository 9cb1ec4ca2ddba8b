"""cupy_flash.torch against torch itself: its checkers, its functions, its transforms, its optimizers."""

import doctest
import importlib
import math
import subprocess
import sys
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.torch import ops
from cupy_flash.torch.call import Call, arguments

# torch compiles with, and warns of, its own torch.jit.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


def tensors(*shapes, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_(grad) for s in shapes]


def qkv(batch=2, heads=4, heads_k=2, seqlen=9, head_dim=8, **kwargs):
    rows = (batch, heads_k, seqlen, head_dim)
    return tensors((batch, heads, seqlen, head_dim), rows, rows, **kwargs)


def transposed(*xs):
    """The same values with heads and rows swapped in memory, as models hand them over."""
    return [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad) for x in xs
    ]


class TestGradients:
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_gradcheck_of_every_gradient_there_is(self, layout):
        q, k, v = qkv()
        if layout == "bshd":
            q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
        bias, sinks = tensors((4, 9, 9), (4,), seed=1)

        def function(q, k, v, bias, sinks):
            return cf.attention(
                q, k, v, bias=bias, sinks=sinks, causal=True, softcap=5.0, layout=layout, return_lse=True
            )

        assert torch.autograd.gradcheck(function, (q, k, v, bias, sinks))

    @pytest.mark.parametrize("shape", [(1, 1, 1, 9), (2, 1, 9, 1), (9, 9), (4, 1, 1)])
    def test_gradcheck_of_a_broadcast_bias(self, shape):
        q, k, v = qkv(grad=False)
        (bias,) = tensors(shape)
        assert torch.autograd.gradcheck(lambda b: cf.attention(q, k, v, bias=b), (bias,))

    def test_gradcheck_of_packed_sequences_with_dropout(self):
        q, k, v = tensors((10, 4, 8), (12, 2, 8), (12, 2, 6))
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 9], [0, 4, 5, 12]))

        def function(q, k, v):
            return cf.attention_varlen(
                q, k, v, cu_q, cu_k, causal=True, align="bottom_right", dropout=0.3, seed=7, return_lse=True
            )

        assert torch.autograd.gradcheck(function, (q, k, v))

    def test_gradcheck_of_keys_in_use(self):
        """Keys behind those in use are not read, and get no gradient."""
        q, k, v = tensors((10, 4, 8), (12, 2, 8), (12, 2, 6))
        cu_q, cu_k, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 10], [0, 5, 12], [4, 6]))

        def function(q, k, v):
            return cf.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, causal=True, align="bottom_right")

        assert torch.autograd.gradcheck(function, (q, k, v))
        with torch.no_grad():
            k[[4, 11]] = v[[4, 11]] = torch.nan
        function(q, k, v).sum().backward()
        assert not k.grad[[4, 11]].any()
        assert v.grad[[0, 3, 5, 10]].all()

    def test_of_several_directions_at_once(self):
        q, k, v = qkv()
        bias, sinks = tensors((4, 9, 9), (4,), seed=1)

        def function(q, k, bias, sinks):
            return cf.attention(q, k, v.detach(), bias=bias, sinks=sinks, return_lse=True)

        assert torch.autograd.gradcheck(function, (q, k, bias, sinks), check_batched_grad=True)
        directions = torch.randn(3, *q.shape, dtype=torch.float64)
        o = cf.attention(q, k, v)
        batched = torch.autograd.grad(o, (q, v), directions, is_grads_batched=True, retain_graph=True)
        for n, direction in enumerate(directions):
            one = torch.autograd.grad(o, (q, v), direction, retain_graph=True)
            for a, b in zip(batched, one, strict=True):
                torch.testing.assert_close(a[n], b)
        jacobian = torch.autograd.functional.jacobian
        rows = [jacobian(lambda x: cf.attention(x, k, v).sum(-1), q, vectorize=w) for w in (True, False)]
        torch.testing.assert_close(*rows)

    @pytest.mark.parametrize("value", [0.3, 0.0, -1.0])
    def test_of_the_scale(self, value):
        """It may be a tensor, as a learned temperature is."""
        q, k, v = qkv()
        scale = torch.tensor(value, dtype=torch.float64, requires_grad=True)

        def function(q, scale):
            return cf.attention(q, k, v, scale=scale, softcap=3.0, causal=True, return_lse=True)

        assert torch.autograd.gradcheck(function, (q, scale))
        torch.testing.assert_close(
            function(q, scale)[0], cf.attention(q, k, v, scale=value, softcap=3.0, causal=True)
        )
        compiled = torch.compile(
            lambda s: cf.attention(q, k, v, scale=s), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(scale), cf.attention(q, k, v, scale=value))
        ours = torch.autograd.grad(
            cf.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).sum(), scale
        )
        scores = q @ k.repeat_interleave(2, 1).mT * scale
        theirs = torch.autograd.grad((scores.softmax(-1) @ v.repeat_interleave(2, 1)).sum(), scale)
        torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    @pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["heads", "batch"])
    def test_of_a_scale_for_each_head(self, shape, layout):
        """A temperature per head, also 0 and below."""
        q, k, v = qkv()
        scale = torch.linspace(-0.5, 1, math.prod(shape), dtype=torch.float64).reshape(shape)
        scale[..., 1] = 0
        scale.requires_grad_()
        lie = (lambda x: x) if layout == "bhsd" else (lambda x: x.transpose(1, 2))

        def function(q, scale):
            o, lse = cf.attention(
                lie(q), lie(k), lie(v), scale=scale, softcap=3.0, layout=layout, return_lse=True
            )
            return lie(o), lse

        def textbook(q, scale):
            scores = 3 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * scale[..., None, None] / 3)
            return scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)

        torch.testing.assert_close(function(q, scale), textbook(q, scale))
        assert torch.autograd.gradcheck(function, (q, scale))
        ours, theirs = (
            torch.autograd.functional.hessian(lambda s, f=f: f(q, s)[0].sin().sum(), scale)
            for f in (function, textbook)
        )
        torch.testing.assert_close(ours, theirs)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, scale), function(q, scale))
        half = [x.detach().bfloat16() for x in (q, k, v)]
        assert cf.attention(*map(lie, half), scale=scale, layout=layout).dtype == torch.bfloat16

    def test_of_a_scale_for_each_head_of_packed_sequences(self):
        q, k, v = (x[0].transpose(0, 1) for x in qkv())
        cuts = torch.tensor([0, 4, 9], dtype=torch.int32)
        scale = torch.tensor([0.3, 0.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        o = cf.attention_varlen(q, k, v, cuts, cuts, scale=scale)
        torch.testing.assert_close(
            o, cf.attention_varlen(q * scale[:, None], k, v, cuts, cuts, scale=1.0), atol=0, rtol=0
        )
        assert torch.autograd.gradcheck(lambda s: cf.attention_varlen(q, k, v, cuts, cuts, scale=s), scale)
        with pytest.raises(InvalidArgumentsError, match=r"scale has shape \(2, 4\)"):
            cf.attention_varlen(q, k, v, cuts, cuts, scale=torch.ones(2, 4))

    @pytest.mark.parametrize("shape", [(4,), (2, 4)])
    def test_a_scale_for_each_head_where_nothing_is_recorded(self, shape):
        q, k, v = (x.detach() for x in qkv())
        scale = torch.linspace(-0.5, 1, math.prod(shape), dtype=torch.float64).reshape(shape)
        product = q * scale[..., None, None]
        expected = cupy_flash.attention(product, k, v, scale=1.0)
        assert torch.equal(cupy_flash.attention(q, k, v, scale=scale), expected)
        assert torch.equal(
            cupy_flash.attention(q, k, v, scale=scale[:1] if shape == (4,) else scale[:1, :1]),
            cupy_flash.attention(q, k, v, scale=-0.5),
        )

        def cached(q, scale):
            return cf.attention_with_kv_cache(q, k, v, cache_seqlens=9, scale=scale)

        compiled = torch.compile(cached, fullgraph=True, backend="aot_eager")
        for call in (cached, compiled, partial(cupy_flash.attention_with_kv_cache, k_cache=k, v_cache=v)):
            more = {} if call in (cached, compiled) else {"cache_seqlens": 9}
            assert torch.equal(call(q, scale=scale, **more), call(product, scale=1.0, **more))

    def test_of_numbers_that_would_be_lost(self):
        q, k, v = qkv()
        number = torch.tensor(0.5, requires_grad=True)
        for shape in ((3,), (4, 2), (1, 4), (2, 4, 1)):
            with pytest.raises(InvalidArgumentsError, match=r"scale has shape \((.|\n)*Try: .*\(heads_q,\)"):
                cf.attention(q, k, v, scale=torch.ones(shape))
        with pytest.raises(UnsupportedError, match=r"softcap has no gradient(.|\n)*Try: softcap\.detach"):
            cf.attention(q, k, v, softcap=number)
        plain = [x.detach() for x in (q, k, v)]
        with pytest.raises(
            InvalidArgumentsError, match=r"scale is a torch tensor that(.|\n)*Try: cupy_flash\.torch"
        ):
            cupy_flash.attention(*plain, scale=torch.ones(4, dtype=torch.float64, requires_grad=True))
        for name in ("scale", "softcap"):
            with pytest.raises(
                InvalidArgumentsError, match=f"{name} is a tensor that requires grad(.|\n)*Try:"
            ):
                cupy_flash.attention(*plain, **{name: number})
            with torch.no_grad():
                cupy_flash.attention(*plain, **{name: number})

    def test_only_lse_is_used(self):
        q, k, v = qkv()
        cf.attention(q, k, v, return_lse=True)[1].sum().backward()
        assert q.grad.abs().sum() > 0
        assert not v.grad.any()

    def test_slopes_that_want_a_gradient_are_refused(self):
        q, k, v = qkv()
        with pytest.raises(UnsupportedError, match="alibi_slopes has no gradient"):
            cf.attention(q, k, v, alibi_slopes=torch.ones(4, dtype=torch.float64, requires_grad=True))

    def test_slopes_that_require_a_gradient_are_taken_where_none_is_recorded(self):
        q, k, v = (x.detach() for x in qkv())
        slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            ours = cf.attention(q, k, v, alibi_slopes=slopes)
        torch.testing.assert_close(ours, cf.attention(q, k, v, alibi_slopes=slopes.detach()))

    def test_the_core_refuses_to_cut_a_gradient(self):
        with pytest.raises(InvalidArgumentsError, match="requires grad"):
            cupy_flash.attention(*qkv())


class TestOperators:
    @pytest.mark.parametrize("arrange", [lambda *x: x, transposed])
    def test_opcheck(self, arrange):
        q, k, v = arrange(*qkv())
        bias, sinks = tensors((4, 9, 9), (4,))
        options = {"causal": True, "softcap": 4.0, "dropout": 0.1, "seed": 3, "bias": bias, "sinks": sinks}
        torch.library.opcheck(ops.operator, arguments(Call.of(q, k, v, options)))

    def test_opcheck_of_packed_sequences(self):
        q, k, v = tensors((10, 4, 8), (12, 2, 8), (12, 2, 6))
        *cuts, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 10], [0, 5, 12], [4, 6]))
        options = {"causal": True, "align": "bottom_right", "layout": "bshd", "seqused_k": used}
        call = Call.of(q, k, v, options | {"max_seqlen_q": 7, "max_seqlen_k": 7}, tuple(cuts))
        torch.library.opcheck(ops.operator, arguments(call))

    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("arrange", [lambda *x: x, transposed])
    def test_compiled_whole_equals_torch(self, arrange, dynamic):
        compiled = torch.compile(
            lambda q, k, v: cf.attention(q * 2, k, v, causal=True, align="bottom_right").relu(),
            fullgraph=True, dynamic=dynamic,
        )  # fmt: skip
        for seqlen in (9, 12):
            q, k, v = arrange(*qkv(heads_k=4, seqlen=seqlen))
            ours = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
            theirs = torch.autograd.grad(torch_sdpa(q * 2, k, v, is_causal=True).relu().sum(), (q, k, v))
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    def test_seeds_are_no_constants_of_a_compiled_program(self):
        q, k, v = qkv()
        compiled = torch.compile(
            lambda q, seed: cf.attention(q, k, v, dropout=0.5, seed=seed), fullgraph=True, dynamic=True
        )
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for seed in (2, 3, 2**62):
            torch.testing.assert_close(compiled(q, seed), cf.attention(q, k, v, dropout=0.5, seed=seed))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
        drawing = torch.compile(
            lambda q: cf.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True), fullgraph=True
        )
        assert not torch.equal(drawing(q), drawing(q))

    def test_whoever_wants_to_see_the_operator_sees_it(self):
        q, k, v = qkv(grad=False)
        traced = torch.jit.trace(lambda q: cf.attention(q, k, v), q)
        torch.testing.assert_close(traced(2 * q), cf.attention(2 * q, k, v))
        assert cf.attention(*(x.to("meta") for x in (q, k, v))).shape == q.shape
        with torch._subclasses.FakeTensorMode() as mode:
            fake = cf.attention(*map(mode.from_tensor, (q, k, v)), return_lse=True)
        assert [tuple(x.shape) for x in fake] == [(2, 4, 9, 8), (2, 4, 9)]
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda q: cf.attention(q, k, v))(q)
        torch.testing.assert_close(graph(2 * q), cf.attention(2 * q, k, v))

    def test_func_transforms(self):
        q, k, v = qkv(heads_k=4)
        expected = torch.autograd.grad(cf.attention(q, k, v).sum(), q)[0]
        q, k, v = (x.detach() for x in (q, k, v))
        got = torch.func.grad(lambda x: cf.attention(x, k, v).sum())(q)
        torch.testing.assert_close(got, expected)
        each = torch.vmap(lambda q, k, v: cf.attention(q, k, v))(q, k, v)
        torch.testing.assert_close(each, cf.attention(q, k, v))

    def test_activation_checkpointing(self):
        q, k, v = qkv()
        plain = torch.autograd.grad(cf.attention(q, k, v, dropout=0.2, seed=1).sum(), q)[0]
        o = torch.utils.checkpoint.checkpoint(
            lambda q: cf.attention(q, k, v, dropout=0.2, seed=1), q, use_reentrant=False
        )
        torch.testing.assert_close(torch.autograd.grad(o.sum(), q)[0], plain)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_autocast_takes_the_dtype_of_the_user(self, dtype):
        q, k, v = qkv(dtype=torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            o = cf.attention(q, k, v)
        assert o.dtype == dtype
        o.float().sum().backward()
        assert q.grad.dtype == torch.float32

    @pytest.mark.parametrize("by_option", [True, False])
    def test_bits_repeat_on_demand(self, by_option):
        q, k, v = qkv(seqlen=70)
        options = {"reproducible": "run"} if by_option else {}
        torch.use_deterministic_algorithms(not by_option)
        try:
            runs = [torch.autograd.grad(cf.attention(q, k, v, **options).sum(), (q, k, v)) for _ in range(2)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


class TestSdpa:
    @pytest.mark.parametrize(
        ("shape_q", "shape_k"),
        [
            ((2, 4, 9, 8), (2, 4, 9, 8)),
            ((4, 9, 8), (4, 5, 8)),
            ((9, 8), (5, 8)),
            ((2, 3, 4, 9, 8), (3, 4, 5, 8)),
            ((4, 9, 8), (2, 4, 5, 8)),
            ((2, 4, 9, 8), (4, 5, 8)),
            ((9, 8), (2, 4, 5, 8)),
            ((2, 4, 9, 8), (5, 8)),
            ((2, 1, 9, 8), (1, 4, 5, 8)),
            ((3, 4, 9, 8), (1, 1, 5, 8)),
        ],
    )
    @pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
    def test_equals_torch(self, shape_q, shape_k, kind):
        q, k, v = tensors(shape_q, shape_k, shape_k)
        pairs = (shape_q[-2], shape_k[-2])
        options = {
            "none": {"scale": 0.3},
            "causal": {"is_causal": True},
            "bool": {"attn_mask": torch.rand(pairs) < 0.8},
            "float": {"attn_mask": torch.randn(pairs, dtype=torch.float64)},
        }[kind]
        ours, theirs = cf.scaled_dot_product_attention(q, k, v, **options), torch_sdpa(q, k, v, **options)
        torch.testing.assert_close(ours, theirs)
        if kind == "none":
            assert cf.scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v))).shape == theirs.shape
        for a, b in zip(
            *(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (ours, theirs)), strict=True
        ):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize(
        ("of_query", "of_value", "options"),
        [
            (0, 8, {}),
            (0, 8, {"is_causal": True, "scale": 0.5}),
            (0, 0, {}),
            (8, 0, {}),
            (8, 8, {"dropout_p": 1.0}),
        ],
    )
    def test_no_features_and_no_weights_are_torchs(self, of_query, of_value, options):
        qkv = tensors((2, 4, 9, of_query), (2, 4, 5, of_query), (2, 4, 5, of_value))
        found = []
        for function in (cf.scaled_dot_product_attention, torch_sdpa):
            o = function(*qkv, **options)
            found.append((o, *torch.autograd.grad(o.square().sum(), qkv)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"dropout_p": 1.5}, r"dropout_p is 1\.5(.|\n)*Try: .*dropout_p=0\.1"),
            ({"is_causal": 1}, r"is_causal is 1(.|\n)*Try: is_causal=True"),
            ({"attn_mask": torch.ones(9, 4).bool()}, "attn_mask of shape"),
            ({"attn_mask": torch.ones(9, 4).double()}, "attn_mask of shape"),
        ],
    )
    def test_errors_say_what_the_caller_wrote(self, given, says):
        with pytest.raises(InvalidArgumentsError, match=f"^{says}"):
            cf.scaled_dot_product_attention(*tensors((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8)), **given)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_masks_of_float32(self, dtype):
        q, k, v = (x.to(dtype) for x in tensors((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8)))
        grads = []
        for function in (cf.scaled_dot_product_attention, torch_sdpa):
            mask = torch.linspace(-2, 2, 45).reshape(9, 5).requires_grad_()
            o = function(q, k, v, mask)
            assert o.dtype == dtype
            grads.append((o, *torch.autograd.grad(o.double().sin().sum(), mask)))
        torch.testing.assert_close(*grads, atol=2e-2 if dtype.itemsize == 2 else 1e-5, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_masks_under_autocast(self, dtype):
        q, k, v = (x.float() for x in tensors((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8)))
        mask = torch.linspace(-2, 2, 45).reshape(9, 5).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (f(q, k, v, mask) for f in (cf.scaled_dot_product_attention, torch_sdpa))
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)

    def test_heads_and_groups_broadcast_as_torchs_do(self):
        for shapes in (((4, 9, 8), (2, 2, 5, 8), (2, 2, 5, 8)), ((1, 4, 9, 8), (2, 2, 5, 8), (2, 2, 5, 8))):
            q, k, v = tensors(*shapes)
            options = {"enable_gqa": True, "attn_mask": torch.rand(2, 1, 9, 5) < 0.8}
            ours = cf.scaled_dot_product_attention(q, k, v, **options)
            torch.testing.assert_close(ours, torch_sdpa(q, k, v, **options))
        q, k, v = tensors((2, 4, 9, 8), (2, 1, 5, 8), (1, 4, 5, 8))
        torch.testing.assert_close(cf.scaled_dot_product_attention(q, k, v), torch_sdpa(q, k, v))
        q, k, v = tensors((3, 2, 4, 9, 8), (2, 4, 5, 8), (3, 1, 4, 5, 8))
        mask = torch.randn(3, 1, 4, 1, 5, dtype=torch.float64)
        torch.testing.assert_close(cf.scaled_dot_product_attention(q, k, v, mask), torch_sdpa(q, k, v, mask))
        with pytest.raises(InvalidArgumentsError, match=r"leading axes \[\(2,\), \(3,\)"):
            cf.scaled_dot_product_attention(*tensors((2, 4, 9, 8), (3, 4, 5, 8), (3, 4, 5, 8)))

    @pytest.mark.parametrize("lengths", [(9, 9), (5, 9)])
    @pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
    def test_patterns_of_torch(self, make, lengths):
        rows = (2, 4, lengths[1], 8)
        q, k, v = tensors((2, 4, lengths[0], 8), rows, rows)
        pattern = make(*lengths)
        expected = torch_sdpa(q, k, v, pattern._materialize())
        torch.testing.assert_close(cf.scaled_dot_product_attention(q, k, v, pattern), expected)
        for name in ("mask", "bias"):
            torch.testing.assert_close(cf.attention(q, k, v, **{name: pattern}), expected)
        swapped = [x.transpose(1, 2) for x in (q, k, v)]
        o = cf.attention(*swapped, mask=pattern, layout="bshd")
        torch.testing.assert_close(o.transpose(1, 2), expected)
        with pytest.raises(InvalidArgumentsError, match="CausalBias of 3 queries and 4 keys"):
            cf.attention(q, k, v, mask=make(3, 4))
        other = "top_left" if make is causal_lower_right else "bottom_right"
        with pytest.raises(InvalidArgumentsError, match=f"and align is '{other}'"):
            cf.attention(q, k, v, mask=pattern, align=other)
        with pytest.raises(InvalidArgumentsError, match="exclude each other"):
            cf.scaled_dot_product_attention(q, k, v, pattern, is_causal=True)

    def test_patterns_in_compiled_programs(self):
        q, k, v = qkv(heads_k=4)
        pattern = causal_lower_right(9, 9)
        compiled = torch.compile(
            lambda q: cf.scaled_dot_product_attention(q, k, v, pattern), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(q), torch_sdpa(q, k, v, is_causal=True))

    def test_grouped_heads_only_on_request(self):
        q, k, v = qkv()
        ours = cf.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(ours, torch_sdpa(q, k, v, enable_gqa=True))
        with pytest.raises(InvalidArgumentsError, match="4 heads of query, 2 of key"):
            cf.scaled_dot_product_attention(q, k, v)

    def test_mask_and_causal_exclude_each_other(self):
        q, k, v = qkv(heads_k=4)
        with pytest.raises(InvalidArgumentsError, match="exclude each other"):
            cf.scaled_dot_product_attention(q, k, v, torch.ones(9, 9, dtype=torch.bool), is_causal=True)

    def test_dropout_follows_torchs_generator(self):
        q, k, v = qkv(heads_k=4)
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(cf.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])

    def test_takes_torchs_place_inside_the_context_only(self):
        q, k, v = qkv(heads_k=4)
        expected = torch_sdpa(q, k, v, is_causal=True)
        grads = torch.autograd.grad(expected.sum(), (q, k, v))
        impl = torch.nn.attention.current_flash_attention_impl
        with cf.use_in_sdpa() as ran:
            assert impl() == "cupy_flash"
            assert (ran.forward, ran.backward) == (0, 0)
            o = torch_sdpa(q, k, v, is_causal=True)
            assert (ran.forward, ran.backward) == (1, 0)
            torch.testing.assert_close(o, expected)
            for a, b in zip(torch.autograd.grad(o.sum(), (q, k, v)), grads, strict=True):
                torch.testing.assert_close(a, b)
            assert (ran.forward, ran.backward) == (1, 1)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                torch_sdpa(q, k, v)
            assert (ran.forward, ran.backward) == (1, 1)
        assert impl() is None
        torch_sdpa(q, k, v)
        assert ran.forward == 1

    def test_varlen_attn(self):
        q, k, v = tensors((10, 4, 8), (12, 4, 8), (12, 4, 8))
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 10], [0, 4, 12]))
        o = cf.varlen_attn(q, k, v, cu_q, cu_k, 7, 8, window_size=(-1, 0))
        for (a, b), (c, d) in zip(((0, 3), (3, 10)), ((0, 4), (4, 12)), strict=True):
            heads_first = [x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
            one = cf.attention(*heads_first, causal=True, align="bottom_right")
            torch.testing.assert_close(o[a:b], one.transpose(0, 1))
        used = torch.tensor([4, 5], dtype=torch.int32)
        o = cf.varlen_attn(q, k, v, cu_q, cu_k, 7, 8, window_size=(-1, 0), seqused_k=used)
        cut = torch.tensor([0, 4, 9], dtype=torch.int32)
        torch.testing.assert_close(o, cf.varlen_attn(q, k[:9], v[:9], cu_q, cut, 7, 5, window_size=(-1, 0)))
        with pytest.raises(UnsupportedError, match="num_splits"):
            cf.varlen_attn(q, k, v, cu_q, cu_k, 7, 8, num_splits=2)


class TestModule:
    @pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
    def test_a_model_with_it_learns(self, optimizer):
        torch.manual_seed(0)
        project, flash = torch.nn.Linear(16, 48), cf.FlashAttention(cupy_flash.causal_config(8))
        x, wanted = torch.randn(4, 12, 16), torch.randn(4, 12, 16)
        step = optimizer(project.parameters(), lr=0.02)
        losses = []
        for _ in range(60):
            heads = project(x).reshape(4, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
            loss = (flash(*heads).transpose(1, 2).reshape(4, 12, 16) - wanted).square().mean()
            step.zero_grad()
            loss.backward()
            step.step()
            losses.append(loss.item())
        assert losses[-1] < 0.97 * losses[0]

    def test_dropout_ends_with_training(self):
        flash = cf.FlashAttention(cupy_flash.default_config(8).with_dropout(0.5))
        q, k, v = qkv()
        torch.manual_seed(0)
        assert not torch.equal(flash(q, k, v), cf.attention(q, k, v))
        assert torch.equal(flash.eval()(q, k, v), cf.attention(q, k, v))
        assert "dropout=0.5" in repr(flash)

    def test_gradients_reach_a_scale_that_it_holds(self):
        q, k, v = qkv()
        scale = torch.full(q.shape[1:2], 0.2, requires_grad=True)
        cf.FlashAttention(cupy_flash.AttentionConfig(8, scale=scale * 2))(q, k, v).sum().backward()
        through, scale.grad = scale.grad, None
        cf.attention(q, k, v, scale=scale * 2).sum().backward()
        torch.testing.assert_close(through, scale.grad)

    def test_wrong_head_dim_and_tile_are_refused(self):
        with pytest.raises(InvalidArgumentsError, match="head_dim 8, the configuration 16"):
            cf.FlashAttention(cupy_flash.default_config(16))(*qkv())
        with pytest.raises(InvalidArgumentsError, match="tile"):
            cf.FlashAttention(cupy_flash.AttentionConfig(8, tuning=cupy_flash.Tuning(tile=(64, 64))))


def test_gradients_leave_a_vmap():
    q, k, v = qkv(heads_k=4)
    mapped = torch.autograd.grad(torch.vmap(cf.attention)(q, k, v).sin().sum(), (q, k, v))
    for a, b in zip(mapped, torch.autograd.grad(cf.attention(q, k, v).sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("way", [lambda f: f, torch.func.grad], ids=["results", "gradients"])
def test_a_vmap_of_no_elements(way):
    q, k, v = qkv(grad=False)
    call = way(lambda q: cf.attention(q, k, v, causal=True).sum())
    several, none = torch.vmap(call)(q[None]), torch.vmap(call)(q[None][:0])
    assert none.shape == (0, *several.shape[1:])
    assert none.dtype == several.dtype


def test_functionalize():
    q, k, v = qkv(grad=False)
    torch.testing.assert_close(torch.func.functionalize(cf.attention)(q, k, v), cf.attention(q, k, v))


def test_tensors_that_do_not_fit_together_are_told_apart():
    q, k, v = qkv(grad=False)
    with pytest.raises(InvalidArgumentsError, match=r"q has dtype torch\.int64"):
        cf.attention(*(x.long() for x in (q, k, v)))
    with pytest.raises(InvalidArgumentsError, match="k has dtype float32, q has float64"):
        cf.attention(q, k.float(), v)
    with pytest.raises(InvalidArgumentsError, match="on device meta"):
        cf.attention(q, k.to("meta"), v)
    with pytest.raises(InvalidArgumentsError, match="mask has dtype"):
        cf.attention(q, k, v, mask=torch.ones(9, 9))
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_casual'"):
        cf.scaled_dot_product_attention(q, k, v, is_casual=True)


@pytest.mark.parametrize("module", ["cupy_flash.torch", "cupy_flash.flash_attn"])
def test_examples_in_docstrings(module):
    tested = doctest.testmod(importlib.import_module(module))
    assert tested.attempted
    assert not tested.failed


def test_an_option_of_the_eager_call_is_told_where_it_is():
    q = torch.ones(1, 2, 3, 8)
    with pytest.raises(
        InvalidArgumentsError, match=r"(?s)no option 'out'.*Try: cupy_flash\.attention\(\.\.\., out="
    ):
        cupy_flash.torch.attention(q, q, q, out=q)


def test_the_module_asks_for_a_configuration():
    with pytest.raises(
        InvalidArgumentsError, match=r"Try: FlashAttention\(AttentionConfig\(head_dim=64, causal=True"
    ):
        cupy_flash.torch.FlashAttention(causal=True)


def test_unknown_option_is_named():
    with pytest.raises(InvalidArgumentsError, match=r"attention\(\) has no option 'softmax_scale'"):
        cf.attention(*qkv(), softmax_scale=1.0)
    with pytest.raises(InvalidArgumentsError, match=r"Try: mask=cupy_flash\.mask\(f\)"):
        cf.attention(*qkv(), mask=lambda b, h, i, j: i >= j)


def test_the_package_does_not_import_torch():
    code = "import sys, cupy_flash; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_rows_that_a_finite_mask_hides_have_the_gradients_of_a_mean(dtype, learned):
    """Masks of (1 - m) * finfo.min hide every key of some rows, whose weights are then 1 / n."""
    *inputs, do = tensors(*((1, 2, 9, 16),) * 4, dtype=dtype)
    bias = torch.zeros(9, 9)
    bias[::2] = torch.finfo(torch.float32).min
    bias.requires_grad_(learned)
    q, k, v = (x.float() for x in inputs)
    wanted = [*inputs, *[bias] * learned]
    ours, textbook = (
        torch.autograd.grad(o, wanted, do.to(o.dtype), create_graph=True)
        for o in (cf.attention(*inputs, bias=bias), torch.softmax(q @ k.mT / 4 + bias, -1) @ v)
    )
    unit = {torch.float32: 2**-24, torch.bfloat16: 2**-8}[dtype]

    def close(xs, exact):
        for x, y in zip(xs, exact, strict=True):
            allowed = (64 if dtype == torch.float32 else 8) * unit * max(1, y.abs().max().item())
            torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=allowed)

    close(ours, textbook)
    penalties = [sum((g.float() ** 2).sum() for g in found[:3]) for found in (ours, textbook)]
    close(*[torch.autograd.grad(x, inputs) for x in penalties])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["plain", "compiled", "by a function"])
def test_sinks_of_16_bits(way, dtype, kind):
    """As FlashAttention-4 takes them: what the same numbers give in 32 bits, with gradients of 16."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = torch.randn((3, 1, 2, 5, 8), generator=generator).to(dtype)
    narrow = torch.randn(2, generator=generator).to(kind).requires_grad_()
    wide = narrow.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    options = {"score": cupy_flash.score(lambda s, *_: 0.5 * s)} if way == "by a function" else {}

    def attend(sinks):
        return cf.attention(q, k, v, sinks=sinks, **options)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if way == "compiled" else attend
    found, wanted = run(narrow), attend(wide)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    seed = torch.randn_like(found)
    (grad,), (wide_grad,) = (torch.autograd.grad(o, x, seed) for o, x in ((found, narrow), (wanted, wide)))
    torch.testing.assert_close(grad, wide_grad.to(kind), atol=0, rtol=0)
    cache = {"cache_seqlens": 5, "sinks": narrow.detach()}
    decoded = cf.attention_with_kv_cache(q, k, v, **cache)
    torch.testing.assert_close(
        decoded, cf.attention_with_kv_cache(q, k, v, **cache | {"sinks": wide.detach()}), atol=0, rtol=0
    )
    cuts = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    packed = [cf.attention_varlen(*rows, cuts, cuts, sinks=x) for x in (narrow, wide)]
    torch.testing.assert_close(*packed, atol=0, rtol=0)
