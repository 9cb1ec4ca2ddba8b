"""Repeated calls take a short way to the same bits; whatever else could differ goes the whole way."""

import gc
import itertools
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError, progress
from cupy_flash.dispatch import memo
from cupy_flash.dispatch import repeat as memory
from cupy_flash.torch import functional, repeat, repeat_in_core

# torch compiles with, and warns of, its own torch.jit.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


@pytest.fixture(autouse=True, params=["in core", "by guards", "by keys"])
def whole(monkeypatch, request):
    """How many calls went the whole way, beginning with nothing remembered; without parts of torch, too."""
    memo.forget()
    if request.param != "in core":
        monkeypatch.setattr(repeat_in_core, "_view_of", lambda: 0)
    if request.param == "by keys":
        monkeypatch.setattr(repeat_in_core, "_guards", None)
    calls = []
    real = functional._attend
    monkeypatch.setattr(functional, "_attend", lambda *given: (calls.append(given), real(*given))[1])
    yield calls
    memo.forget()


def qkv(*, heads=(4, 2), lengths=(5, 9), dtype=torch.float32, seed=0, layout="bhsd"):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(2, heads[x > 0], lengths[x > 0], 8) for x in range(3)]
    if layout == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def over_cache(q, k, v):
    return cf.attention_with_kv_cache(q, k, v, cache_seqlens=9)


def same(given, wanted):
    pairs = zip(given, wanted, strict=True) if isinstance(wanted, tuple) else [(given, wanted)]
    return all(torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride() for x, y in pairs)


OPTIONS = [
    {},
    {"causal": True, "align": "bottom_right"},
    {"causal": True, "align": 2},
    {"window": (3, 1), "align": 4},
    {"scale": 0.3, "softcap": 5.0},
    {"layout": "bshd"},
    {"reproducible": "batch"},
    {"dropout": 0.0, "mask": None, "bias": None},
    {"return_lse": True},
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_call_of_the_same_kinds_has_the_bits_of_the_whole_way(options, dtype, whole):
    layout = options.get("layout", "bhsd")
    first, second = (qkv(dtype=dtype, layout=layout, seed=seed) for seed in (0, 1))
    before = cf.attention(*first, **options)
    short = cf.attention(*second, **options)
    assert len(whole) == 1
    memo.forget()
    assert same(short, cf.attention(*second, **options))
    assert same(before, cf.attention(*first, **options)), "the first result was written over"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("grouped", [False, True])
def test_torchs_function_repeats_too(causal, rank, grouped, whole):
    first, second = (qkv(heads=(4, 2 if grouped else 4), seed=seed) for seed in (0, 1))
    if rank == 3:
        first, second = ([x[0] for x in xs] for xs in (first, second))
    given = {"is_causal": causal, "enable_gqa": grouped}
    cf.scaled_dot_product_attention(*first, **given)
    short = cf.scaled_dot_product_attention(*second, **given)
    assert len(whole) == 1
    memo.forget()
    assert same(short, cf.scaled_dot_product_attention(*second, **given))
    wanted = torch.nn.functional.scaled_dot_product_attention(*second, **given)
    torch.testing.assert_close(short, wanted)


def test_heads_that_are_broadcast_are_not_taken_for_all_of_them(whole):
    q, k, v = qkv(heads=(4, 1))
    for _ in range(2):
        given = cf.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(given, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    q, k, v = (torch.stack([x, x]) for x in qkv(heads=(2, 2)))
    for _ in range(2):
        given = cf.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(given, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert len(whole) == 2, "attention itself repeats them"


def moved(x, by):
    """The same values at an address that many bytes off a boundary."""
    room = torch.empty(x.numel() + by // x.element_size(), dtype=x.dtype)
    return room[by // x.element_size() :].view(x.shape).copy_(x)


LATER = {
    "one query less": lambda q, k, v: ((q[:, :, :-1], k, v), {}),
    "one key less": lambda q, k, v: ((q, k[:, :, :-1], v[:, :, :-1]), {}),
    "one of the batch": lambda q, k, v: ((q[:1], k[:1], v[:1]), {}),
    "other strides": lambda q, k, v: ((q.mT.contiguous().mT, k, v), {}),
    "other strides of k": lambda q, k, v: ((q, k.mT.contiguous().mT, v), {}),
    "other strides of v": lambda q, k, v: ((q, k, v.mT.contiguous().mT), {}),
    "one head less of k": lambda q, k, v: ((q, k[:, :1].contiguous(), v[:, :1].contiguous()), {}),
    "off a boundary": lambda q, k, v: ((q, moved(k, 4), v), {}),
    "double": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
    "lse": lambda q, k, v: ((q, k, v), {"return_lse": True}),
    "scale": lambda q, k, v: ((q, k, v), {"scale": 0.25}),
    "window": lambda q, k, v: ((q, k, v), {"window": (2, 2), "align": 0}),
    "mask": lambda q, k, v: ((q, k, v), {"mask": torch.ones(5, 9, dtype=torch.bool).tril()}),
    "bias": lambda q, k, v: ((q, k, v), {"bias": torch.ones(5, 9).tril()}),
    "tensor as scale": lambda q, k, v: ((q, k, v), {"scale": torch.tensor(0.5)}),
    "a function": lambda q, k, v: ((q, k, v), {"mask": near}),
    "grad": lambda q, k, v: ((q, k.clone().requires_grad_(), v), {}),
    "parameter": lambda q, k, v: ((q, torch.nn.Parameter(k), v), {}),
    "negated": lambda q, k, v: ((torch.complex(q, -q).conj().imag, k, v), {}),
}


# Kinds that the core repeats by itself.
IN_CORE = ("one key less", "other strides of k", "other strides of v")


def near(b, h, i, j):
    return j <= i + 2


@pytest.mark.parametrize("name", LATER)
def test_other_kinds_go_the_whole_way(name, whole):
    import cupy_flash

    q, k, v = qkv()
    cf.attention(q, k, v)
    given, options = LATER[name](q, k, v)
    if callable(options.get("mask")) and not isinstance(options["mask"], torch.Tensor):
        options = {"mask": cupy_flash.mask(options["mask"])}
    memo.forget()
    wanted = cf.attention(*given, **options)
    memo.forget()
    whole.clear()
    cf.attention(q, k, v)
    assert same(cf.attention(*given, **options), wanted)
    is_whole = "mask" not in options or isinstance(options["mask"], torch.Tensor)
    assert len(whole) == 1 + (is_whole and not (repeat_in_core._view_of() and name in IN_CORE))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("function", [cf.attention, cf.scaled_dot_product_attention, over_cache])
def test_a_strided_nested_tensor_is_refused_after_others(function, position):
    """torch's guards would end the process: they ask for strides, which it has not."""
    tensors = qkv(heads=(4, 4), lengths=(9, 9))
    for _ in range(3):
        function(*tensors)
    tensors[position] = torch.nested.nested_tensor([torch.ones(4, 5, 8), torch.ones(4, 9, 8)])
    with pytest.raises(InvalidArgumentsError, match="is a nested tensor"):
        function(*tensors)


def test_gradients_are_recorded_after_a_call_without(whole):
    q, k, v = qkv()
    with torch.no_grad():
        cf.attention(q.requires_grad_(), k, v)
    cf.attention(q, k, v).sum().backward()
    assert q.grad is not None
    assert len(whole) == 2
    with torch.inference_mode():
        assert not cf.attention(q, k, v).requires_grad
    assert len(whole) == 2


@pytest.fixture
def whole_backward(monkeypatch):
    """How many backward passes of repeated calls went the whole way."""
    calls = []
    real = repeat.gradients
    monkeypatch.setattr(repeat, "gradients", lambda *given: (calls.append(given), real(*given))[1])
    return calls


def leaves(xs, needing="qkv"):
    return [x.detach().clone().requires_grad_(name in needing) for name, x in zip("qkv", xs, strict=True)]


def grads(f, xs, do, needing="qkv", **options):
    """The result of a recorded call, and the gradients of those that need one."""
    xs = leaves(xs, needing)
    o = f(*xs, **options)
    first = o[0] if isinstance(o, tuple) else o
    first.backward(do)
    return first.detach(), *[x.grad for x in xs if x.requires_grad]


@pytest.mark.parametrize("needing", ["qkv", "q", "v", "kv"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [x for x in OPTIONS if x.get("reproducible") is None], ids=str)
def test_recorded_calls_repeat_with_the_bits_of_the_whole_way(options, dtype, needing, whole, whole_backward):
    layout = options.get("layout", "bhsd")
    cases = [qkv(dtype=dtype, layout=layout, seed=seed) for seed in range(4)]
    dos = [torch.randn_like(case[0]) for case in cases]
    given = [grads(cf.attention, case, do, needing, **options) for case, do in zip(cases, dos, strict=True)]
    assert len(whole) == 1
    assert len(whole_backward) == 1, "the first repeated call learns how its gradients go"
    for case, do, one in zip(cases, dos, given, strict=True):
        memo.forget()
        assert same(one, grads(cf.attention, case, do, needing, **options))


def test_torchs_function_repeats_recorded_calls(whole, whole_backward):
    q, k, v = qkv(heads=(4, 4))
    do = torch.randn_like(q)
    for _ in range(4):
        given = grads(cf.scaled_dot_product_attention, (q, k, v), do, is_causal=True)
        wanted = grads(torch.nn.functional.scaled_dot_product_attention, (q, k, v), do, is_causal=True)
        for x, y in zip(given, wanted, strict=True):
            torch.testing.assert_close(x, y)
    assert len(whole) == len(whole_backward) == 1


def recorded_again(**options):
    """A call that repeats one whose gradients are known, and its leaves."""
    xs = qkv()
    for do in (torch.ones_like(xs[0]), torch.ones(1).expand_as(xs[0])):
        for _ in range(3):
            grads(cf.attention, xs, do, **options)
    again = leaves(xs)
    return again, cf.attention(*again, **options)


BACKWARD = {
    "a sum's": lambda o: o.sum(),
    "of other strides": lambda o: (o.transpose(1, 2) * torch.arange(8.0)).mT.exp().mean(),
    "off a boundary": lambda o: (o * moved(torch.arange(o.numel()).view(o.shape).float(), 4)).sum(),
    "of a part": lambda o: o[:, 1:, ::2].square().sum(),
    "negated": lambda o: torch.complex(o, 2 * o).conj().imag.sum(),
    "zero": lambda o: torch._efficientzerotensor(o.shape).mul(o).sum() + o.sum(),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_every_kind_arrive(name):
    xs, o = recorded_again()
    BACKWARD[name](o).backward()
    given = [x.grad.clone() for x in xs]
    memo.forget()
    again = leaves(xs)
    BACKWARD[name](cf.attention(*again)).backward()
    assert all(torch.equal(x, y.grad) for x, y in zip(given, again, strict=True))


def test_a_graph_that_is_kept_is_run_again():
    xs, o = recorded_again()
    first = torch.autograd.grad(o.sum(), xs, retain_graph=True)
    second = torch.autograd.grad(o.sum(), xs)
    assert same(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(o.sum(), xs)


def test_second_derivatives_and_batches_of_gradients_go_the_whole_way(whole_backward):
    def second(xs, o):
        first = torch.autograd.grad(o.square().sum(), xs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), xs)

    def batched(xs, o):
        return torch.autograd.grad(
            o, xs, torch.stack([torch.ones_like(o), o.detach()]), is_grads_batched=True
        )

    for differentiate in (second, batched):
        given = differentiate(*recorded_again())
        memo.forget()
        xs = leaves(qkv())
        wanted = differentiate(xs, cf.attention(*xs))
        for x, y in zip(given, wanted, strict=True):
            torch.testing.assert_close(x, y)
    assert len(whole_backward) == 2 * (2 + 1), "two that learn and one that cannot repeat"


@pytest.mark.parametrize("through_o", [False, True])
def test_gradients_through_lse_go_the_whole_way(through_o):
    def loss(o, lse):
        return lse.exp().sum() + (o.square().sum() if through_o else 0)

    xs, results = recorded_again(return_lse=True)
    loss(*results).backward()
    given = [x.grad for x in xs]
    memo.forget()
    xs = leaves(xs)
    loss(*cf.attention(*xs, return_lse=True)).backward()
    assert all(torch.equal(x, y.grad) for x, y in zip(given, xs, strict=True) if y.grad is not None)
    assert given[0] is not None


def test_saved_tensors_may_come_back_as_others():
    wanted = grads(cf.attention, qkv(), torch.ones(2, 4, 5, 8))
    hooks = [
        (lambda x: x.clone().mT.contiguous(), lambda x: x.mT),
        (lambda x: x.clone(), lambda x: moved(x, 4) if x.is_contiguous() else x),
        (lambda x: -x, lambda x: torch.complex(x, x).conj().imag),
    ]
    for pack, unpack in hooks:
        for _ in range(3):
            xs = leaves(qkv())
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                o = cf.attention(*xs)
            o.sum().backward()
            for x, y in zip(xs, wanted[1:], strict=True):
                torch.testing.assert_close(x.grad, y)


def test_no_gradient_may_arrive():
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, __):
            return None

    xs, o = recorded_again()
    assert torch.autograd.grad(Dropped.apply(o).sum(), xs, allow_unused=True) == (None, None, None)


def test_what_was_written_over_is_noticed():
    xs, o = recorded_again()
    with torch.no_grad():
        xs[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_checkpoints_compute_it_again():
    from torch.utils.checkpoint import checkpoint

    do = torch.randn(2, 4, 5, 8)
    wanted = grads(cf.attention, qkv(), do)
    for reentrant in (False, True):
        for _ in range(3):
            given = grads(lambda *xs: checkpoint(cf.attention, *xs, use_reentrant=reentrant), qkv(), do)  # noqa: B023
            assert same(given, wanted)


def test_deterministic_algorithms_count(whole_backward, monkeypatch):
    asked = []
    real = repeat.prepared
    monkeypatch.setattr(repeat, "prepared", lambda *given: (asked.append(given), real(*given))[1])
    xs = qkv()
    do = torch.ones_like(xs[0])
    for _ in range(3):
        grads(cf.attention, xs, do)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            grads(cf.attention, xs, do)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(whole_backward) == 2
    assert [options.reproducible for direction, _, options, _ in asked if direction == "backward"] == [
        None,
        "run",
    ]


def test_the_environment_counts_for_gradients_too(monkeypatch):
    xs, o = recorded_again()
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    memo.computed_by(())
    given = torch.autograd.grad(o.sum(), xs)
    assert "NumPy" in memo.kernels()
    memo.forget()
    again = leaves(xs)
    for x, y in zip(given, torch.autograd.grad(cf.attention(*again).sum(), again), strict=True):
        torch.testing.assert_close(x, y)


def test_progress_is_told_of_gradients():
    _, o = recorded_again()
    told = []
    with progress(told.append):
        o.sum().backward()
    assert told


def test_transforms_and_modes_see_the_operator():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = qkv()
    wanted = cf.attention(q, k, v)
    torch.testing.assert_close(torch.func.vmap(cf.attention)(q[None], k[None], v[None])[0], wanted)
    _, tangent = torch.func.jvp(lambda q: cf.attention(q, k, v), (q,), (q,))
    assert tangent.abs().max() > 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        o = torch.autograd.forward_ad.unpack_dual(cf.attention(dual, k, v))
        torch.testing.assert_close(o.tangent, tangent)
    with FlopCounterMode(display=False) as counted:
        cf.attention(q, k, v)
    assert counted.get_total_flops() > 0
    on_meta = [x.to("meta") for x in (q, k, v)]
    for _ in range(2):
        assert cf.attention(*on_meta).is_meta


def test_what_is_traced_has_the_operator():
    q, k, v = qkv()
    for _ in range(2):
        wanted = cf.attention(q, k, v)
    traced = torch.jit.trace(cf.attention, (q, k, v), check_trace=False)
    assert "cupy_flash::attention" in str(traced.graph)
    torch.testing.assert_close(traced(q + 1, k, v), cf.attention(q + 1, k, v))
    torch.testing.assert_close(traced(q, k, v), wanted)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda q: cf.attention(q, k, v))(q)
    torch.testing.assert_close(graph(q + 1), cf.attention(q + 1, k, v))


def test_whether_gradients_are_wanted_counts(whole):
    """Leaves that need gradients, with and without a graph, in any order."""
    leaves = [x.requires_grad_() for x in qkv()]
    for enabled in (False, True, True, False, True):
        with torch.set_grad_enabled(enabled):
            assert cf.attention(*leaves).requires_grad == enabled
    with torch.inference_mode():
        assert cf.attention(*leaves).is_inference()
    assert len(whole) <= 3


def test_guards_of_another_torch_are_done_without(whole, monkeypatch):
    if repeat_in_core._guards:
        monkeypatch.setattr(repeat_in_core, "_guards", lambda *tensors: tensors)
    q, k, v = qkv()
    assert torch.equal(cf.attention(q, k, v), cf.attention(q, k, v))
    assert len(whole) == 1


# The memory of a tensor alone, and that of all three, in which views begin behind its address.
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("at", range(3))
def test_freed_memory_is_not_read(whole, at, views):
    """As FSDP frees what is gathered again later."""
    xs = qkv(heads=(2, 2), lengths=(9, 9))
    xs = list(torch.stack(xs)) if views else xs
    for _ in range(3):
        cf.attention(*xs)
        recorded = [x.detach().requires_grad_() for x in xs]
        o = cf.attention(*recorded)
        torch.autograd.grad(o.sum(), recorded, retain_graph=True)
    xs[at].untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentsError, match="resized to 0"):
        cf.attention(*xs)
    with pytest.raises(InvalidArgumentsError, match="resized to 0"):
        o.sum().backward()


def test_what_lay_off_a_boundary_says_nothing_of_what_does_not(whole):
    q, k, v = qkv()
    for given in ((q, moved(k, 4), v), (q, k, v)):
        for _ in range(2):
            wanted = torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=True)
            torch.testing.assert_close(cf.attention(*given), wanted)
    assert len(whole) == 2


def test_the_last_calls_are_found_by_one_look_and_others_by_their_keys(whole, monkeypatch):
    cases = [qkv(lengths=(n, 5)) for n in range(1, memory._MOST_RECENT + 3)]
    wanted = [cf.attention(*case) for case in cases]
    asked, key_of = [], repeat._key_of
    monkeypatch.setattr(repeat, "_key_of", lambda *given: (asked.append(given), key_of(*given))[1])
    for case, o in [*zip(cases, wanted, strict=True)][::-1]:
        assert torch.equal(cf.attention(*case), o)
    assert len(whole) == len(cases)
    before_the_last = 2 if repeat_in_core._guards else len(cases)
    assert len(asked) == before_the_last
    cf.attention(*cases[0])
    assert len(asked) == before_the_last + (not repeat_in_core._guards), "it is one of the last again"


def test_autocast_counts():
    q, k, v = qkv()
    assert cf.attention(q, k, v).dtype == torch.float32
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert cf.attention(q, k, v).dtype == torch.bfloat16
    assert cf.attention(q, k, v).dtype == torch.float32


def test_the_environment_counts(monkeypatch):
    q, k, v = qkv()
    wanted = cf.attention(q, k, v)
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    for _ in range(2):
        torch.testing.assert_close(cf.attention(q, k, v), wanted)
        assert "NumPy" in memo.kernels()
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "nobody")
    with pytest.raises(InvalidArgumentsError, match="CUPY_FLASH_DRIVER"):
        cf.attention(q, k, v)


@pytest.mark.parametrize("options", [{"causal": 1}, {"return_lse": 1}, {"scale": "1"}, {"windw": 1}])
def test_what_is_refused_is_refused_again(options):
    q, k, v = qkv(lengths=(9, 9))
    cf.attention(q, k, v, causal=True)
    cf.attention(q, k, v, return_lse=True)
    for _ in range(2):
        with pytest.raises(InvalidArgumentsError):
            cf.attention(q, k, v, **options)
    for wrong in [
        (q, k[:, :, 1:], v),
        (q, k, v[:, :, 1:]),
        (q, k.half(), v),
        (q, k, v.half()),
        (q[..., 1:], k, v),
    ]:
        with pytest.raises(InvalidArgumentsError):
            cf.attention(*wrong, causal=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="float8"):
            cf.attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)))


def test_options_count(whole):
    q, k, v = qkv()
    for scale in (0.5, 0.25, 0.5):
        torch.testing.assert_close(
            cf.attention(q, k, v, scale=scale), cf.attention(q * scale, k, v, scale=1.0)
        )
    assert len(whole) == 3


def test_a_number_that_can_change_is_not_remembered():
    q, k, v = qkv()
    scale = torch.tensor(0.5)
    for number in (0.5, 0.5, 0.25):
        scale.fill_(number)
        assert torch.equal(cf.attention(q, k, v, scale=scale), cf.attention(q, k, v, scale=number))


def test_each_call_drops_others(whole):
    q, k, v = qkv()
    results = [cf.attention(q, k, v, dropout=0.5) for _ in range(4)]
    assert not any(torch.equal(x, y) for x, y in itertools.pairwise(results))
    assert len(whole) == 4


def test_progress_is_told():
    q, k, v = qkv()
    cf.attention(q, k, v)
    told = []
    with progress(told.append):
        cf.attention(q, k, v)
    assert told


def test_it_forgets(whole):
    q, k, v = qkv()
    cf.attention(q, k, v)
    assert memo.REPEATED
    memo.forget()
    assert not memo.REPEATED
    cf.attention(q, k, v)
    assert len(whole) == 2


def test_it_remembers_so_many(monkeypatch):
    monkeypatch.setattr(memory, "_MOST_KNOWN", 2)
    for n in range(5):
        q, k, v = qkv(lengths=(n + 1, n + 1))
        for _ in range(2):
            torch.testing.assert_close(
                cf.attention(q, k, v, scale=1.0),
                cf.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True),
            )
        assert len(memo.REPEATED) <= 2


def test_threads_share_it():
    q, k, v = qkv(lengths=(64, 64))
    cf.attention(q, k, v)
    cases = [[x + n for x in (q, k, v)] for n in range(8)]
    wanted = [cf.attention(*case) for case in cases]
    wrong = []

    def again(n):
        for _ in range(50):
            if not torch.equal(cf.attention(*cases[n]), wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=again, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_call_that_is_forgotten_needs_no_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"return_lse": True}, {}):
            cf.attention(*qkv(), **options)
        memo.forget()
        assert not any(type(x) is repeat._PreparedCall for x in gc.get_objects())
    finally:
        gc.enable()
