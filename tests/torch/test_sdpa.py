"""Torch's own switches: its registry of flash attention, use_in_sdpa, varlen_attn, and fallbacks on torch."""

import contextlib
import importlib
import inspect
import itertools
import logging
import subprocess
import sys
import threading
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.nn.attention as switches
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cupy_flash.torch as cf
from cupy_flash import CubinNotFoundError, UnsupportedError
from cupy_flash.torch import flash_ops, sdpa, tally
from tests.paths import ROOT

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(?s).*Overriding a previously registered kernel:UserWarning"),
    pytest.mark.skipif(not flash_ops.has_registry(), reason="this torch has other flash operators"),
]

aten = torch.ops.aten
# What torch's FlashAttention-4 overrides.
FIVE = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
)
OF_CPU = (FIVE[0] + "_for_cpu", FIVE[0] + "_for_cpu_backward")
ALL = (*FIVE, *OF_CPU, "scaled_dot_product_attention")
CUTS = torch.tensor([0, 3, 10], dtype=torch.int32)


def dumps():
    """What torch's dispatcher does with each operator, by key, as text."""
    return {name: torch._C._dispatch_dump_table(f"aten::{name}") for name in ALL}


def tensors(*shapes, dtype=torch.float32, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_(grad) for s in shapes]


def qkv(heads=4, heads_k=4, rows=9, head_dim=8, batch=2, **kwargs):
    shape = (batch, heads_k, rows, head_dim)
    return tensors((batch, heads, rows, head_dim), shape, shape, **kwargs)


@contextlib.contextmanager
def activated():
    switches.activate_flash_attention_impl("cupy_flash")
    try:
        yield
    finally:
        switches.restore_flash_attention_impl(_raise_warn=False)


@contextlib.contextmanager
def whole_on_cpu():
    """What use_in_sdpa does of a GPU, of the CPU."""
    override = sdpa._OperatorOverride("CPU")
    try:
        with tally.counted() as calls:
            yield calls
    finally:
        override.remove()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = dumps()
    yield
    assert switches.current_flash_attention_impl() is None
    assert dumps() == before


def run(code):
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_context_ends_its_own_counts_whatever_others_have_counted():
    with tally.counted() as outer:
        for _ in range(2):
            with tally.counted() as inner:
                pass
        tally.ran_forward()
        with pytest.raises(KeyError), tally.counted() as failed:
            raise KeyError
        tally.ran_backward()
    assert (outer.forward, outer.backward) == (1, 1)
    assert inner == failed == tally.Calls()


def test_reasons_that_are_told_apart_are_few(monkeypatch):
    """They hold values of calls, of which there may be any number."""
    monkeypatch.setattr(tally, "_open", [])
    with tally.counted() as calls:
        for n in range(100):
            tally.left_to_torch(f"reason {n}")
        tally.left_to_torch("reason 63")
    assert calls.fallbacks["reason 63"] == 2
    assert calls.fallbacks.pop("other reasons") == 36
    assert list(calls.fallbacks) == [f"reason {n}" for n in range(64)]


class TestRegistry:
    def test_import_registers_and_leaves_torch_alone(self):
        run(
            f"""if True:
            import torch
            names = {ALL}
            dump = lambda: [torch._C._dispatch_dump(f"aten::{{x}}") for x in names]
            q = torch.randn(2, 4, 9, 8)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            before, o = dump(), sdpa(q, q, q)
            import cupy_flash.torch
            registry = torch.nn.attention
            assert registry.list_flash_attention_impls() == ["FA3", "FA4", "cupy_flash"]
            assert registry.current_flash_attention_impl() is None
            assert dump() == before
            assert torch.equal(sdpa(q, q, q), o)
            assert cupy_flash.torch.sdpa_calls() == type(cupy_flash.torch.sdpa_calls())()
            """
        )

    def test_activation_and_restoration_twice(self, caplog):
        q, k, v = qkv()
        expected = torch_sdpa(q, k, v, is_causal=True)
        with tally.counted() as calls:
            for turn in (1, 2):
                switches.activate_flash_attention_impl("cupy_flash")
                assert switches.current_flash_attention_impl() == "cupy_flash"
                for name in FIVE:
                    for key in ("CUDA", "CPU"):
                        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
                torch.testing.assert_close(torch_sdpa(q, k, v, is_causal=True), expected)
                assert calls.forward == turn
                switches.restore_flash_attention_impl()
                assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{FIVE[0]}", "CPU")
                assert torch.equal(torch_sdpa(q, k, v, is_causal=True), expected)
                assert calls.forward == turn
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            switches.restore_flash_attention_impl()
        assert "no custom impl was activated" in caplog.text

    def test_activation_again_replaces_itself(self):
        q, k, v = qkv(grad=False)
        with tally.counted() as calls, activated():
            switches.activate_flash_attention_impl("cupy_flash")
            torch_sdpa(q, k, v)
        assert calls.forward == 1

    def test_an_unknown_name_after_ours_gives_torch_back(self):
        switches.activate_flash_attention_impl("cupy_flash")
        with pytest.raises(ValueError, match="cupy_flash"):
            switches.activate_flash_attention_impl("no_such")
        assert switches.current_flash_attention_impl() is None

    def test_two_imports_register_once(self):
        importlib.reload(cf)
        importlib.import_module("cupy_flash.torch")
        assert switches.list_flash_attention_impls().count("cupy_flash") == 1
        q, k, v = qkv(grad=False)
        with tally.counted() as calls, activated():
            torch_sdpa(q, k, v)
        assert calls.forward == 1

    def test_a_torch_without_the_registry(self):
        with mock.patch.object(torch.nn, "attention", object()):
            importlib.reload(cf)
            with (
                pytest.raises(UnsupportedError, match="has no register_flash_attention_impl"),
                cf.use_in_sdpa(),
            ):
                pass

    def test_a_torch_without_some_operator(self, monkeypatch):
        more = (*flash_ops._KERNELS, ("_of_a_newer_torch", print, ("CUDA",)))
        monkeypatch.setattr(flash_ops, "_KERNELS", more)
        with activated():
            assert switches.current_flash_attention_impl() == "cupy_flash"

    @pytest.mark.parametrize("name", [*FIVE, *OF_CPU])
    def test_signatures_are_those_of_torchs_schemas(self, name):
        ours = next(kernel for known, kernel, _ in flash_ops._KERNELS if known == name)
        parameters = inspect.signature(ours).parameters.values()
        schema = getattr(aten, name).default._schema.arguments
        named = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
        assert named == [x.name for x in schema if x.kwarg_only]
        assert len(parameters) == len(schema)
        defaults = {x.default for x in parameters if x.kind is x.KEYWORD_ONLY}
        assert defaults <= {None}


def on_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if torch.is_tensor(x) else x


def strides(x):
    """Those that matter."""
    return [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]


def check_against_meta(operator, *args, **kwargs):
    """Run an operator, and torch's own meta kernel; the results are alike in all but their values."""
    ours = operator(*args, **kwargs)
    metas = operator(*map(on_meta, args), **{name: on_meta(x) for name, x in kwargs.items()})
    one = torch.is_tensor(ours)
    for a, b in zip((ours,) if one else ours, (metas,) if one else metas, strict=True):
        if torch.is_tensor(b):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, torch.device("cpu"))
            assert strides(a) == strides(b)
        else:
            assert a == b
    return ours


def laid_out(x, layout):
    return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else x


DTYPES = [torch.float16, torch.bfloat16]


class TestAgainstMetaKernels:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    @pytest.mark.parametrize("heads_k", [4, 2])
    def test_sdpa(self, dtype, layout, heads_k):
        q, k, v = (laid_out(x, layout) for x in qkv(heads_k=heads_k, dtype=dtype, grad=False))
        with activated():
            o, lse, *_, seed, offset, debug = check_against_meta(getattr(aten, FIVE[0]), q, k, v, 0.0, True)
            assert (seed.tolist(), offset.item(), debug.numel()) == ([0, 0], 0, 0)
            do = torch.randn_like(o)
            more = None, None, 9, 9, 0.0, True, seed, offset
            check_against_meta(getattr(aten, FIVE[1]), do, q, k, v, o, lse, *more, scale=0.3)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    def test_dense(self, dtype, layout):
        q, k, v = (laid_out(x, layout) for x in qkv(rows=4, heads=9, heads_k=9, dtype=dtype, grad=False))
        with activated():
            none = None, None, 4, 4, 0.0, True
            o, lse, state, unused, _ = check_against_meta(getattr(aten, FIVE[2]), q, k, v, *none, False)
            check_against_meta(getattr(aten, FIVE[4]), o, q, k, v, o, lse, *none, state, unused)
            out = torch.empty_like(q)
            written = check_against_meta(getattr(aten, FIVE[3]), out, q, k, v, *none, False)
        assert torch.equal(out, o)
        assert torch.equal(written, lse)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads_k", [4, 2])
    @pytest.mark.parametrize("strided", [False, True])
    def test_packed(self, dtype, heads_k, strided):
        q, k, v = tensors((10, 4, 8), (10, heads_k, 8), (10, heads_k, 8), dtype=dtype, grad=False)
        if strided:
            q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
        cuts = CUTS, CUTS, 7, 7, 0.0, False
        window = {"window_size_left": 2, "window_size_right": -1}
        with activated():
            o, lse, state, unused, _ = check_against_meta(
                getattr(aten, FIVE[2]), q, k, v, *cuts, False, **window
            )
            check_against_meta(getattr(aten, FIVE[4]), o, q, k, v, o, lse, *cuts, state, unused, **window)
            out = torch.empty_like(q)
            check_against_meta(getattr(aten, FIVE[3]), out, q, k, v, *cuts, False, **window)
        assert torch.equal(out, o)

    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_cpu(self, layout, dtype):
        q, k, v = (laid_out(x, layout) for x in qkv(dtype=dtype, grad=False))
        mask = torch.rand(9, 9).to(dtype)
        with activated():
            o, lse = check_against_meta(getattr(aten, OF_CPU[0]), q, k, v, attn_mask=mask)
            check_against_meta(getattr(aten, OF_CPU[1]), o, q, k, v, o, lse, 0.0, False, attn_mask=mask)


def by_sequence(q, k, v, cuts_q, cuts_k, window=(-1, -1), scale=None):
    """What torch computes of each sequence alone, from its definition: a mask of the band."""
    results = []
    for (a, b), (c, d) in zip(itertools.pairwise(cuts_q), itertools.pairwise(cuts_k), strict=True):
        i = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        j = torch.arange(d - c)
        left, right = (10**9 if bound < 0 else bound for bound in window)
        mask = (j >= i - left) & (j <= i + right)
        one = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        o = torch_sdpa(*one, attn_mask=mask, scale=scale, enable_gqa=True)
        results.append(o[0].transpose(0, 1))
    return torch.cat(results)


class TestVarlen:
    """torch.nn.attention.varlen, which reaches the kernels by three of the operators."""

    @pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
    @pytest.mark.parametrize("heads_k", [4, 2])
    def test_results_and_gradients(self, window, heads_k):
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        q, k, v = tensors((10, 4, 8), (12, heads_k, 8), (12, heads_k, 8))
        cuts_k = torch.tensor([0, 4, 12], dtype=torch.int32)
        expected = by_sequence(q, k, v, CUTS.tolist(), cuts_k.tolist(), window, 0.3)
        do = torch.randn_like(expected)
        grads = torch.autograd.grad(expected, (q, k, v), do)
        options = {
            "window_size": window,
            "enable_gqa": True,
            "scale": 0.3,
            "return_aux": AuxRequest(lse=True),
        }
        with tally.counted() as calls, activated():
            o, lse = varlen_attn(q, k, v, CUTS, cuts_k, 7, 8, **options)
            ours = torch.autograd.grad(o, (q, k, v), do)
        assert (calls.forward, calls.backward, calls.fallbacks) == (1, 1, {})
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(ours, grads)
        named = {"window_size": window, "enable_gqa": True, "scale": 0.3, "return_aux": AuxRequest(lse=True)}
        torch.testing.assert_close(lse, cf.varlen_attn(q, k, v, CUTS, cuts_k, 7, 8, **named)[1])

    def test_without_activation_torch_has_no_such_kernel_for_a_cpu(self):
        from torch.nn.attention.varlen import varlen_attn

        q = torch.randn(10, 4, 8)
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            varlen_attn(q, q, q, CUTS, CUTS, 7, 7)

    def test_out(self):
        from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

        q, k, v = tensors((10, 4, 8), (10, 4, 8), (10, 4, 8), grad=False)
        out = torch.empty_like(q)
        with activated():
            o = varlen_attn(q, k, v, CUTS, CUTS, 7, 7)
            assert varlen_attn_out(out, q, k, v, CUTS, CUTS, 7, 7) is out
        assert torch.equal(out, o)

    @pytest.mark.parametrize("num_splits", [None, 1, 2])
    def test_keys_in_use_and_pages(self, num_splits):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = tensors((10, 4, 8), (16, 4, 8), (16, 4, 8), grad=False)
        room, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 8, 16], [5, 7]))
        kept = [torch.cat((x[:5], x[8:15])) for x in (k, v)]
        expected = by_sequence(q, *kept, CUTS.tolist(), [0, 5, 12], (-1, 0))
        shared = {"window_size": (-1, 0), "seqused_k": used, "num_splits": num_splits}
        with tally.counted() as calls, activated():
            o = varlen_attn(q, k, v, CUTS, room, 7, 8, **shared)
            torch.testing.assert_close(o, expected)
            pages = [x.reshape(4, 4, 4, 8)[[2, 3, 0, 1]] for x in (k, v)]
            table = torch.tensor([[2, 3], [0, 1]], dtype=torch.int32)
            o = varlen_attn(q, *pages, CUTS, None, 7, 8, block_table=table, **shared)
            torch.testing.assert_close(o, expected)
        assert (calls.forward, calls.fallbacks) == (2, {})

    def test_one_split_is_batch_invariant(self):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = tensors((10, 4, 8), (10, 4, 8), (10, 4, 8), grad=False)
        with activated():
            both = varlen_attn(q, k, v, CUTS, CUTS, 7, 7, num_splits=1)
            alone = [x[3:].contiguous() for x in (q, k, v)]
            cut = torch.tensor([0, 7], dtype=torch.int32)
            one = varlen_attn(*alone, cut, cut, 7, 7, num_splits=1)
        assert torch.equal(both[3:], one)


class TestFallback:
    """Torch's own kernels, for which recorders stand in: torch has none of a GPU here."""

    @contextlib.contextmanager
    def torchs_own(self, name, key="CPU"):
        seen, library = [], torch.library.Library("aten", "IMPL")

        def own(*args, **kwargs):
            seen.append((args, kwargs))
            q = args[0]
            return tuple(q.new_full(q.shape, 7.0) for _ in getattr(aten, name).default._schema.returns)

        library.impl(name, own, key)
        try:
            yield seen
        finally:
            library._destroy()

    def call(self, **given):
        q = torch.ones(10, 4, 8)
        named = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, **given}
        values = named.pop("dropout_p"), named.pop("is_causal"), named.pop("return_debug_mask")
        return aten._flash_attention_forward(q, q, q, CUTS, CUTS, 7, 7, *values, scale=0.5, **named)

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({"dropout_p": 0.5}, "dropout"),
            ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
            ({"return_debug_mask": True}, "return_debug_mask"),
        ],
    )
    def test_what_is_refused_goes_to_torchs_own_kernel(self, given, reason):
        with self.torchs_own("_flash_attention_forward") as seen, tally.counted() as calls:
            with activated():
                assert (self.call(**given)[0] == 7).all()
                assert (self.call()[0] == 1).all()
            assert len(seen) == 1
            assert (self.call()[0] == 7).all()
        args, kwargs = seen[0]
        assert kwargs["scale"] == 0.5
        assert args[5:9] == (7, 7, given.get("dropout_p", 0.0), True)
        assert (calls.forward, sum(calls.fallbacks.values())) == (1, 1)
        assert f"torch       1: _flash_attention_forward: {reason}" in calls.report()
        assert "cupy_flash  1 forward, 0 backward" in calls.report()

    def test_and_its_backward_pass(self):
        q = torch.ones(10, 4, 8)
        more = CUTS, CUTS, 7, 7, 0.5, True, q, q
        with self.torchs_own("_flash_attention_backward"), activated():
            grads = aten._flash_attention_backward(q, q, q, q, q, torch.zeros(4, 10), *more)
        assert all((x == 7).all() for x in grads)

    @pytest.mark.parametrize("given", [{"dropout_p": 0.5}, {"alibi_slopes": torch.ones(4)}])
    def test_without_one_the_error_is_torchs_kind(self, given):
        with activated(), pytest.raises(RuntimeError, match="is not replaced") as caught:
            self.call(**given)
        assert isinstance(caught.value, UnsupportedError)

    def test_reasons_do_not_grow_without_end(self):
        with tally.counted() as calls:
            for i in range(1000):
                tally.left_to_torch(str(i))
            tally.left_to_torch("0")
        assert len(calls.fallbacks) < 100
        assert calls.fallbacks["0"] == 2
        assert sum(calls.fallbacks.values()) == 1001

    def test_calls_after_the_context_are_not_counted(self):
        with tally.counted() as outer:
            with tally.counted() as inner:  # equal counts, another object
                pass
            tally.ran_forward()
        tally.ran_backward()
        assert (outer.forward, outer.backward, inner.forward) == (1, 0, 0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).reshape(2, 9, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return torch_sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 9, 16)


class TestCompile:
    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_a_model_after_activation(self, backend):
        torch.manual_seed(0)
        model, x = Model(), torch.randn(2, 9, 16)
        expected = model(x)
        grads = torch.autograd.grad(expected.sum(), model.parameters())
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with tally.counted() as calls, activated():
            for turn in (1, 2):
                o = compiled(x)
                torch.testing.assert_close(o, expected)
                ours = torch.autograd.grad(o.sum(), model.parameters())
                torch.testing.assert_close(ours, grads)
                assert (calls.forward, calls.backward) == (turn, turn)
        torch.testing.assert_close(compiled(x), expected)
        assert calls.forward == 2  # the same program, and torch's kernels again

    def test_varlen(self):
        from torch.nn.attention.varlen import varlen_attn

        def function(q, k, v):
            return varlen_attn(q, k, v, CUTS, CUTS, 7, 7, window_size=(-1, 0))

        q, k, v = tensors((10, 4, 8), (10, 4, 8), (10, 4, 8))
        torch._dynamo.reset()
        with tally.counted() as calls, activated():
            expected = torch.autograd.grad(function(q, k, v).sum(), (q, k, v))
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v)), expected)
        assert (calls.forward, calls.backward) == (2, 2)


class TestThreads:
    def test_calls_of_all_threads_are_counted(self):
        q, k, v = qkv(grad=False)
        with activated(), tally.counted() as calls:
            threads = [
                threading.Thread(target=lambda: [torch_sdpa(q, k, v) for _ in range(50)]) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert calls.forward == 200

    def test_contexts_of_two_threads_overlap(self):
        q, k, v = qkv(grad=False)
        entered, first_left = threading.Event(), threading.Event()
        seen = []

        def other():
            with cf.use_in_sdpa() as calls:
                entered.set()
                first_left.wait(60)
                torch_sdpa(q, k, v)
                seen.append(calls.forward)

        thread = threading.Thread(target=other)
        with cf.use_in_sdpa():
            thread.start()
            assert entered.wait(60)
        first_left.set()
        thread.join()
        assert seen == [1]
        assert switches.current_flash_attention_impl() is None

    def test_contexts_nest_and_give_back_an_activation(self):
        q, k, v = qkv(grad=False)
        with activated():
            with cf.use_in_sdpa() as outer, cf.use_in_sdpa() as inner:
                torch_sdpa(q, k, v)
            assert (outer.forward, inner.forward) == (1, 1)
            assert switches.current_flash_attention_impl() == "cupy_flash"


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()},
    "bias": {"attn_mask": torch.linspace(-1, 1, 81).reshape(9, 9)},
    "scale": {"scale": 0.1},
    "grouped": {"enable_gqa": True},
    "wide": {},
}


class TestWholeOperator:
    """What use_in_sdpa overrides of a GPU, whatever backend torch would choose; here of the CPU."""

    @pytest.mark.parametrize("name", CALLS)
    def test_results_and_gradients(self, name):
        shape = {"grouped": {"heads_k": 2}, "wide": {"head_dim": 300}}.get(name, {})
        q, k, v = qkv(**shape)
        expected = torch_sdpa(q, k, v, **CALLS[name])
        grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
        with whole_on_cpu() as calls:
            o = torch_sdpa(q, k, v, **CALLS[name])
            ours = torch.autograd.grad(o.square().sum(), (q, k, v))
        torch.testing.assert_close(o, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours, grads, atol=1e-4, rtol=1e-4)
        assert (calls.forward, calls.backward, calls.fallbacks) == (1, 1, {})

    def test_dropout(self):
        q, k, v = qkv()
        with whole_on_cpu() as calls:
            torch.manual_seed(1)
            o = torch_sdpa(q, k, v, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(o, cf.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        assert calls.forward == 1

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients(self, mode):
        q, k, v = qkv(grad=False)
        expected = torch_sdpa(q, k, v)
        with mode(), whole_on_cpu() as calls:
            q, k, v = (x.clone() for x in (q, k, v))
            torch.testing.assert_close(torch_sdpa(q, k, v), expected)
        assert (calls.forward, calls.backward) == (1, 0)

    def test_autocast(self):
        q, k, v = qkv()
        with whole_on_cpu() as calls, torch.autocast("cpu", torch.bfloat16):
            assert torch_sdpa(q, k, v).dtype == torch.bfloat16
        assert calls.forward == 1

    def test_layers_of_torch(self):
        torch.manual_seed(0)
        layer, x = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), torch.randn(9, 2, 16)
        expected = layer(x)
        with whole_on_cpu() as calls:
            torch.testing.assert_close(layer(x), expected)
        assert calls.forward == 1

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"scale": 1e39}, "scale is 1e+39"),
            ({"attn_mask": torch.zeros(9, 9, dtype=torch.float16)}, "attn_mask has dtype"),
        ],
        ids=["accepted", "refused"],
    )
    def test_what_is_refused_is_torchs(self, options, reason):
        """Both what torch accepts and what it refuses, in its own words."""
        q, k, v = qkv(dtype=torch.bfloat16, grad=False)

        def outcome():
            try:
                return torch_sdpa(q, k, v, **options)
            except RuntimeError as error:
                return str(error)

        expected = outcome()
        with whole_on_cpu() as calls:
            result = outcome()
        if isinstance(expected, str):
            assert result == expected
        else:
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert calls.forward == 0
        assert reason in calls.report()

    def test_the_textbook_computation_stays_torchs(self):
        q, k, v = qkv(grad=False)
        with whole_on_cpu() as calls, sdpa_kernel(SDPBackend.MATH):
            torch_sdpa(q, k, v)
        assert calls.forward == 0
        assert "math backend only" in calls.report()

    @pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
    def test_any_other_backend_is_replaced(self, name):
        q, k, v = qkv(grad=False)
        with whole_on_cpu() as calls, sdpa_kernel(getattr(SDPBackend, name)):
            torch_sdpa(q, k, v)
        assert calls.forward == 1

    def test_programs_are_torchs(self):
        q, k, v = qkv()
        torch._dynamo.reset()
        with whole_on_cpu() as calls:
            compiled = torch.compile(torch_sdpa, backend="aot_eager", fullgraph=True)
            o = compiled(q, k, v)
        assert calls.forward == 0  # and no more is counted where torch has the program on disk
        torch.testing.assert_close(o, torch_sdpa(q, k, v))

    def test_the_context_overrides_a_gpus_keys_and_not_the_cpus(self):
        name = "aten::scaled_dot_product_attention"
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        keys = ("CUDA", "AutogradCUDA", "CPU", "AutogradCPU")
        with cf.use_in_sdpa() as calls:
            assert [has(name, key) for key in keys] == [True, True, False, False]
            q, k, v = qkv(grad=False)
            torch_sdpa(q, k, v, dropout_p=0.5)  # torch's own, on a CPU
            assert calls.forward == 0

    def test_fake_tensors_of_a_gpu_arrive(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        # why a stand-in: torch without CUDA aborts where it asks such a device what it can do.
        own = mock.Mock(decompose=lambda q, *_, **__: q)
        with mock.patch.object(sdpa, "_operator", own), cf.use_in_sdpa() as calls, FakeTensorMode():
            for grad in (True, False):
                q = torch.empty(2, 4, 9, 8, device="cuda", requires_grad=grad)
                assert torch_sdpa(q, q, q).device.type == "cuda"
        assert calls.fallbacks == {
            "scaled_dot_product_attention: torch is tracing, or a mode or subclass sees the call.": 2
        }


class TestPermanently:
    """F.scaled_dot_product_attention = one of ours."""

    @pytest.mark.parametrize("function", ["scaled_dot_product_attention", "sdpa_with_fallback"])
    def test_layers_of_torch(self, monkeypatch, function):
        torch.manual_seed(0)
        layer, x = torch.nn.MultiheadAttention(16, 4), torch.randn(9, 2, 16)
        mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
        expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", getattr(cf, function))
        before = cf.sdpa_calls().forward
        o, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
        o.sum().backward()
        torch.testing.assert_close(o, expected)
        assert cf.sdpa_calls().forward - before == (function == "sdpa_with_fallback")

    def test_falls_back_on_torch_and_says_why(self, monkeypatch):
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", cf.sdpa_with_fallback)
        q, k, v = qkv(dtype=torch.bfloat16, grad=False)
        with tally.counted() as calls:
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1e39)
        torch.testing.assert_close(o, torch_sdpa(q, k, v, scale=1e39), rtol=0, atol=0, equal_nan=True)
        assert list(calls.fallbacks.values()) == [1]
        assert "scale is 1e+39" in calls.report()

    def test_missing_kernels_are_no_reason(self, monkeypatch):
        def missing(*_, **__):
            raise CubinNotFoundError("not installed")

        monkeypatch.setattr(sdpa, "scaled_dot_product_attention", missing)
        with pytest.raises(CubinNotFoundError):
            cf.sdpa_with_fallback(*qkv())

    def test_signature_is_torchs(self):
        ours, theirs = (
            inspect.signature(f).parameters for f in (cf.sdpa_with_fallback, cf.scaled_dot_product_attention)
        )
        assert list(ours) == list(theirs)
