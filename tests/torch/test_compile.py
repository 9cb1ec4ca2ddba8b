"""torch.compile: plain functions are called as a whole, those of cupy_flash.torch are part of the program."""

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.flash_attn import flash_attn_with_kvcache

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

Q = torch.randn(2, 4, 70, 16, generator=torch.Generator().manual_seed(0))
ROWS = Q[0].transpose(0, 1).contiguous()
CUTS = torch.tensor([0, 30, 70], dtype=torch.int32)
OUT, LSE = cupy_flash.attention(Q, Q, Q, return_lse=True)
O_ROWS, LSE_ROWS = cupy_flash.attention_varlen(ROWS, ROWS, ROWS, CUTS, CUTS, return_lse=True)

PLAIN = {
    "attention": lambda q: cupy_flash.attention(2 * q, q, q, causal=True) + 1,
    "scale": lambda q: cupy_flash.attention(2 * q, q, q, scale=LSE[0, :, 0].abs()) + 1,
    "backward": lambda q: cupy_flash.attention_backward(2 * OUT, q, q, q, OUT, LSE).dk + 1,
    "varlen": lambda q: cupy_flash.attention_varlen(2 * ROWS, ROWS, ROWS, CUTS, CUTS, causal=True) + q.sum(),
    "varlen backward": lambda q: cupy_flash.attention_varlen_backward(
        2 * O_ROWS, ROWS, ROWS, ROWS, O_ROWS, LSE_ROWS, CUTS, CUTS
    ).dv + q.sum(),
    "cache": lambda q: cupy_flash.attention_with_kv_cache(2 * q[:, :, :1], q, q, cache_seqlens=5) + 1,
    "merge": lambda q: cupy_flash.merge(2 * OUT, LSE, OUT, LSE)[0] + q.sum(),
    "explain": lambda q: q + len(cupy_flash.explain(2 * q, q, q)),
    "memory": lambda q: q + cupy_flash.memory_report(1, 2, 3, 4).flash_bytes,
    "callable": lambda q: cupy_flash.FlashAttention(cupy_flash.causal_config(16))(2 * q, q, q) + 1,
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_functions_are_called_not_read(name):
    """Nothing of ours is in a graph, and the program around the call is compiled in two parts at most."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    function = PLAIN[name]
    compiled = torch.compile(function, backend=keep)
    began = time.perf_counter()
    torch.testing.assert_close(compiled(Q), function(Q))
    assert time.perf_counter() - began < 30, "reading our loops takes minutes"
    assert len(graphs) <= 2
    torch.testing.assert_close(compiled(Q), function(Q))
    assert len(graphs) <= 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_autograd_traces_the_backward_pass(whole):
    """Of an operator as part of its program, and of a score function by a graph break."""
    options = {"causal": True} if whole else {"score": cupy_flash.score(lambda s, b, h, i, j: s + j)}

    def gradient():
        q = Q.clone().requires_grad_()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=whole)):
            cf.attention(q, Q, Q, **options).sum().backward()
        return q.grad

    wanted = torch.autograd.grad(cf.attention(q := Q.clone().requires_grad_(), Q, Q, **options).sum(), q)[0]
    torch.testing.assert_close(gradient(), wanted)


def test_a_plain_function_compiled_by_itself():
    torch._dynamo.reset()
    compiled = torch.compile(cupy_flash.attention, backend="eager")
    began = time.perf_counter()
    torch.testing.assert_close(compiled(Q, Q, Q, causal=True), cupy_flash.attention(Q, Q, Q, causal=True))
    assert time.perf_counter() - began < 30, "reading our loops takes minutes"


def test_who_wants_one_program_is_told_of_the_functions_for_it():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: cupy_flash.attention(q, q, q), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"cupy_flash\.torch has functions for compiled programs"):
        compiled(Q)


def test_inductor_calls_the_operator_where_continuous_integration_runs(monkeypatch, tmp_path):
    """With CI set, inductor refuses an operator that has a decomposition; ours has one, for exporters."""
    lowering = pytest.importorskip("torch._inductor.lowering")
    operator = torch.ops.cupy_flash.attention.default
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing compiled before
    monkeypatch.delitem(lowering.lowerings, operator, raising=False)  # as another test may have left it
    lowering.FALLBACK_ALLOW_LIST.discard("cupy_flash::attention")
    torch._dynamo.reset()

    def step(q):
        return cf.attention(2 * q, q, q, causal=True) + 1

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(Q), step(Q))


def caches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = {"k_cache": (3, 4, 64, 32), "v_cache": (3, 4, 64, 16), "q": (3, 8, 2, 32)}
    shapes |= {"k": (3, 4, 2, 32), "v": (3, 4, 2, 16)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


LENGTHS = torch.tensor([5, 60, 0], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_cache_is_written_by_a_compiled_program(backend):
    def step(q, k_cache, v_cache, k, v, lengths):
        o, lse = cf.attention_with_kv_cache(
            2 * q, k_cache, v_cache, cache_seqlens=lengths, k=k + 1, v=v, causal=True, return_lse=True
        )
        return o + 1, lse, k_cache.sum()  # after it was written

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        ours, theirs = ({**caches(), "lengths": LENGTHS} for _ in range(2))
        torch.testing.assert_close(compiled(**ours), step(**theirs))
        for name in ("k_cache", "v_cache"):
            assert torch.equal(ours[name], theirs[name])
        assert not torch.equal(ours["k_cache"], caches()["k_cache"])


def test_a_cache_that_a_gradient_needs_is_not_written_by_a_program():
    weight = torch.ones(caches()["k_cache"].shape[-1], requires_grad=True)

    def step(weight, lengths, **given):
        loss = (given["k_cache"] * weight).sum()  # needs the cache as it is now
        return loss, cf.attention_with_kv_cache(**given, cache_seqlens=lengths)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="modified by an inplace operation"):
        compiled(weight, LENGTHS, **caches())[0].backward()


def test_the_functions_of_flash_attn_are_compiled_too():
    given = {name: x.transpose(1, 2) for name, x in caches().items()}

    def step(length):
        return flash_attn_with_kvcache(
            **{n: given[n] for n in ("q", "k_cache", "v_cache")}, cache_seqlens=length, window_size=(4, 0)
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 9, LENGTHS + 2):
        torch.testing.assert_close(compiled(length), step(length))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_operator_of_caches(layout, return_lse):
    given = caches(torch.float64)
    if layout == "bshd":
        given = {name: x.transpose(1, 2) for name, x in given.items()}
    operator = torch.ops.cupy_flash.attention_with_kv_cache.default
    chosen = {**given, "cache_seqlens": LENGTHS, "causal": True, "layout": layout, "return_lse": return_lse}
    names = [argument.name for argument in operator._schema.arguments]
    assert not chosen.keys() - names
    flags = ("rotary_interleaved", "rotate_cache", "rotary_last")
    torch.library.opcheck(operator, tuple({**dict.fromkeys(flags, False), **chosen}.get(n) for n in names))


def test_what_a_cache_does_not_take_is_said_in_programs_too():
    def attend(q, k_cache, v_cache):
        return cf.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=7)

    given = [caches()[name] for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(UnsupportedError, match=r"no rule for torch\.vmap"):
        torch.vmap(attend)(*(x[None] for x in given))
    given[0].requires_grad_()
    torch._dynamo.reset()
    with pytest.raises(InvalidArgumentsError, match=r"q (is a torch tensor that )?requires grad"):
        torch.compile(attend, backend="eager")(*given)
