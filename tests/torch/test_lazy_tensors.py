"""Tensors that are not numbers in strided memory: right results or a refusal, never a wrong address."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch as recording
from cupy_flash import InvalidArgumentsError
from cupy_flash.call.adopt import adopt
from cupy_flash.call.given import Options
from cupy_flash.torch import ops
from cupy_flash.torch.call import TENSORS, Call, arguments

pytestmark = pytest.mark.torch


def negated(*shape):
    """The imaginary part of a conjugate: torch only notes that its sign is to be changed."""
    x = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


def plain(*shape, requires_grad=False):
    return torch.randn(*shape, requires_grad=requires_grad)


SHAPE = (1, 2, 3, 8)


class TestNegation:
    @pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
    def test_is_refused_where_copies_are(self, name):
        given = {n: plain(*SHAPE) for n in "qkv"} | {"bias": plain(3, 3)}
        given[name] = negated(*given[name].shape)
        with pytest.raises(
            InvalidArgumentsError, match=rf"{name} is a lazy view.*\n.*{name}\.resolve_neg\(\)"
        ):
            cupy_flash.attention(**given)

    @pytest.mark.parametrize("name", ["do", "o", "lse"])
    def test_of_what_a_backward_pass_takes(self, name):
        given = {n: plain(*SHAPE) for n in ("do", "q", "k", "v", "o")} | {"lse": plain(1, 2, 3)}
        given[name] = negated(*given[name].shape)
        with pytest.raises(InvalidArgumentsError, match=f"{name} is a lazy view"):
            cupy_flash.attention_backward(**given)

    @pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k"])
    def test_of_a_cache(self, name):
        given = {n: plain(*SHAPE) for n in ("q", "k_cache", "v_cache", "k", "v")}
        given[name] = negated(*SHAPE)
        with pytest.raises(InvalidArgumentsError, match=f"{name} is a lazy view"):
            cupy_flash.attention_with_kv_cache(**given, cache_seqlens=0)

    def test_is_resolved_where_torch_records(self):
        x, (q, k, v, do) = negated(*SHAPE), (plain(*SHAPE, requires_grad=True) for _ in range(4))
        for given in ((x, k, v), (q, x, v), (q, k, x)):
            resolved = [y.resolve_neg() for y in given]
            o, expected = recording.attention(*given), recording.attention(*resolved)
            assert torch.equal(o, expected)
            assert torch.equal(o.detach(), cupy_flash.attention(*(y.detach() for y in resolved)))
            leaf = v if given[2] is v else q
            grads = [torch.autograd.grad(result, leaf, do)[0] for result in (o, expected)]
            assert torch.equal(*grads)
        bias = negated(3, 3)
        o = recording.attention(q, k, v, bias=bias)
        assert torch.equal(o, recording.attention(q, k, v, bias=bias.resolve_neg()))
        assert torch.equal(
            torch.autograd.grad(o, q, x, retain_graph=True)[0], torch.autograd.grad(o, q, x.resolve_neg())[0]
        )

    def test_lazy_zeros(self):
        k = plain(*SHAPE, requires_grad=True)
        q = torch._efficientzerotensor(SHAPE)
        o = recording.attention(q, k, k)
        torch.testing.assert_close(o, k.mean(-2, keepdim=True).expand(SHAPE))
        assert not torch.autograd.grad(o, k, torch._efficientzerotensor(SHAPE))[0].any()


# How to make each kind of tensor that has no memory, or none to be read by strides; and what is said of it.
KINDS = {
    "sparse": ("torch.ones(SHAPE).to_sparse()", "to_dense"),
    "mkldnn": ("torch.ones(SHAPE).to_mkldnn()", "to_dense"),
    "nested": ("torch.nested.nested_tensor([torch.ones(3, 8)])", "attention_varlen"),
    "jagged": ("torch.nested.nested_tensor([torch.ones(3, 8)], layout=torch.jagged)", "attention_varlen"),
    "quantised": ("torch.quantize_per_tensor(torch.ones(SHAPE), 0.1, 0, torch.quint8)", "dtype torch.quint8"),
    "zero": ("torch._efficientzerotensor(SHAPE)", "torch.zeros"),
    "meta": ("torch.ones(SHAPE, device='meta')", "device meta"),
    "fake": ("torch._subclasses.FakeTensorMode().from_tensor(torch.ones(SHAPE))", "cupy_flash.torch"),
    "functional": ("torch._to_functional_tensor(torch.ones(SHAPE))", "cupy_flash.torch"),
    "masked": ("torch.masked.masked_tensor(torch.ones(SHAPE), torch.ones(SHAPE) > 0)", "get_data"),
    "two": ("TwoTensor(torch.ones(SHAPE), torch.ones(SHAPE))", "inside of it"),
    "distributed": ("distributed()", "to_local"),
    "freed": ("freed(torch.ones(SHAPE))", "resized to 0"),
    "part-of-freed": ("freed(torch.ones(2, *SHAPE)[1])", "resized to 0"),
    "causal": ("torch.nn.attention.bias.causal_upper_left(3, 8)", 'causal=True, align="top_left"'),
}
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, cupy_flash
SHAPE = (1, 2, 3, 8)

def distributed():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return distribute_tensor(torch.ones(SHAPE), init_device_mesh("cpu", (2,)), [Shard(0)])

def freed(x):
    x.untyped_storage().resize_(0)
    return x

def tries(x, case):
    good = torch.ones(SHAPE)
    calls = (
        lambda: cupy_flash.attention(x, good, good), lambda: cupy_flash.attention(good, x, good),
        lambda: cupy_flash.attention(good, good, good, bias=x),
        lambda: cupy_flash.attention_with_kv_cache(good, x, good, cache_seqlens=3),
    )
    for call in calls:
        try:
            call()
        except cupy_flash.InvalidArgumentsError as error:
            print(case, str(error).replace("\\n", " "), flush=True)
        else:
            print(case, "was computed", flush=True)

for line in sys.stdin.read().splitlines():
    case, _, made = line.partition(" ")
    if made.startswith("TwoTensor"):
        from torch.testing._internal.two_tensor import TwoTensor
    if "masked" in made:
        import torch.masked
    if "bias" in made:
        import torch.nn.attention.bias
    if made.startswith("transform "):
        try:
            eval(made[10:])(lambda x: (tries(x, case), x.sum())[1])
        except RuntimeError as error:
            print(case, error)
    else:
        tries(eval(made), case)
"""
TRANSFORMS = {
    "batched": "transform lambda f: torch.vmap(f)(torch.ones((2, *SHAPE)))",
    "differentiated": "transform lambda f: torch.func.grad(f)(torch.ones(SHAPE))",
    "functionalised": "transform lambda f: torch.func.functionalize(f)(torch.ones(SHAPE))",
}


def test_what_has_no_memory_is_refused_before_its_address_is_read():
    """In a process of its own, which a wrong address would end."""
    cases = {case: made for case, (made, _) in KINDS.items()} | TRANSFORMS
    lines = "\n".join(f"{case} {made}" for case, made in cases.items())
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = {}
    for line in done.stdout.splitlines():
        case, _, text = line.partition(" ")
        said.setdefault(case, []).append(text)
    for case in cases:
        words = KINDS[case][1] if case in KINDS else "cupy_flash.torch"
        assert len(said[case]) == 4, case
        assert all(words in text and "Try:" in text for text in said[case]), (case, said[case])


def test_plain_subclasses_are_tensors():
    class Named(torch.Tensor):
        pass

    for x in (torch.nn.Parameter(torch.ones(3, 8), requires_grad=False), torch.nn.Buffer(torch.ones(3, 8)),
              torch.ones(3, 8).as_subclass(Named), torch.ones(0, 8)):  # fmt: skip
        assert adopt(x, "x").pointer == x.data_ptr()
    o = cupy_flash.attention(*[torch.ones(3, 8).as_subclass(Named)] * 3)
    assert torch.equal(o.as_subclass(torch.Tensor), torch.ones(3, 8))


def test_a_tensor_with_a_gradient_is_told_who_records_it():
    q = plain(*SHAPE, requires_grad=True)
    with pytest.raises(
        InvalidArgumentsError,
        match=r"q is a torch tensor that requires grad(.|\n)*Try: cupy_flash\.torch\.attention",
    ):
        cupy_flash.attention(q, q, q)
    with torch.no_grad():
        cupy_flash.attention(q, q, q)
    assert "seqlen=3x3" in cupy_flash.explain(q, q, q, causal=True)


ROWS, CUTS = torch.ones(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
PACKED = {**dict.fromkeys("qkv", ROWS), "cu_seqlens_q": CUTS, "cu_seqlens_k": CUTS}
DENSE = {
    **dict.fromkeys("qkv", torch.ones(SHAPE)),
    "mask": torch.ones(3, 3).bool(),
    "bias": torch.ones(3, 3),
    **dict.fromkeys(("alibi_slopes", "sinks"), torch.ones(2)),
}
CACHED = {
    **dict.fromkeys(("q", "k_cache", "v_cache", "k", "v"), torch.ones(SHAPE)),
    **dict.fromkeys(("cache_seqlens", "cache_leftpad"), torch.zeros(1, dtype=torch.int32)),
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
    "sinks": torch.ones(2),
}
BOUNDS = torch.zeros(3, 1, 2, dtype=torch.int32)
BLOCKS = cupy_flash.block_mask(lambda b, h, i, j: j <= i, None, None, 3, 3, block=16)
CALLS = {
    "dense": (recording.attention, DENSE, {"causal": True}),
    "spans": (
        lambda bounds, **given: recording.attention(**given, mask=cupy_flash.Spans(bounds)),
        {**dict.fromkeys("qkv", torch.ones(SHAPE)), "bounds": BOUNDS},
        {},
    ),
    "blocks": (
        lambda table, bits, **given: recording.attention(**given, mask=cupy_flash.BlockMask(table, bits)),
        {
            **dict.fromkeys("qkv", torch.ones(SHAPE)),
            "table": torch.from_numpy(BLOCKS.table),
            "bits": torch.from_numpy(BLOCKS.bits),
        },
        {},
    ),
    "prefix": (
        recording.attention_with_shared_prefix,
        {
            **dict.fromkeys("qkv", torch.ones(SHAPE)),
            **dict.fromkeys(("prefix_k", "prefix_v"), torch.ones(SHAPE[1:])),
        },
        {},
    ),
    "packed": (recording.attention_varlen, PACKED, {"max_seqlen_q": 5, "max_seqlen_k": 5}),
    "cache": (recording.attention_with_kv_cache, CACHED, {}),
}


class TestDevices:
    """Tensors of two devices are refused where no kernel sees them, as torch asks for shapes alone."""

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("to_meta", [False, True])
    def test_of_one_tensor_that_has_no_numbers_or_alone_has_some(self, call, to_meta):
        function, tensors, options = CALLS[call]
        everything = {name: x.to("meta") for name, x in tensors.items()}
        assert function(**everything, **options).is_meta
        for name in tensors:
            given = {**(tensors if to_meta else everything), name: (everything if to_meta else tensors)[name]}
            said = "is (on (meta|cpu), q on|a torch tensor on device meta)"
            with pytest.raises(InvalidArgumentsError, match=rf"^[\w.]+ {said}(.|\n)*Try: "):
                function(**given, **options)

    # why not the prefix: its parts are merged by operators of torch, which need a torch with CUDA.
    @pytest.mark.parametrize("call", sorted(CALLS.keys() - {"prefix"}))
    def test_of_fakes(self, call):
        function, tensors, options = CALLS[call]

        def fake(name, x, other):
            return torch.empty_like(x, device="cpu" if name == other else "cuda")

        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            given = {name: fake(name, x, "") for name, x in tensors.items()}
            assert function(**given, **options).device.type == "cuda"
            for other in tensors:
                given = {name: fake(name, x, other) for name, x in tensors.items()}
                with pytest.raises(InvalidArgumentsError, match=r"is on c\w+(:0)?, q on c(.|\n)*Try: "):
                    function(**given, **options)

    def test_of_gradients(self):
        values = [torch.ones(SHAPE, device="meta", requires_grad=True) for _ in "qkv"]
        grads = torch.autograd.grad(recording.attention(*values).sum(), values)
        assert all(x.is_meta and x.shape == SHAPE for x in grads)
        call = Call(tuple(values) + (None,) * (len(TENSORS) - 3), Options())
        meta = torch.ones(SHAPE, device="meta")
        with pytest.raises(InvalidArgumentsError, match="do is on cpu, q on meta"):
            ops.differentiate(torch.ones(SHAPE), None, meta, meta[..., 0], *arguments(call))
