"""Results have the order of axes in memory that torch's have: models view them as (batch, rows, features)."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cupy_flash.torch as cf
from cupy_flash.dispatch import memo
from cupy_flash.torch import sdpa

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(?s).*Overriding a previously registered kernel:UserWarning"),
]

B, H, S, D = 2, 4, 9, 8


@pytest.fixture(autouse=True)
def _nothing_remembered():
    memo.forget()
    yield
    memo.forget()


def strides(x):
    """Those that matter."""
    return [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]


def in_rows(b=B, h=H, s=S, d=D):
    return torch.randn(b, s, h, d).transpose(1, 2)


# Queries as torch has them; all of one shape but for the last two.
QUERIES = {
    "dense": lambda: torch.randn(B, H, S, D),
    "in rows": in_rows,
    "of fused projections": lambda: torch.randn(B, S, 3, H, D).permute(2, 0, 3, 1, 4)[0],
    "one sequence for all": lambda: torch.randn(1, H, S, D).expand(B, H, S, D),
    "one head for all": lambda: torch.randn(B, 1, S, D).expand(B, H, S, D),
    "one head for all, in rows": lambda: in_rows(h=1).expand(B, H, S, D),
    "a slice": lambda: torch.randn(B, H, S + 3, D + 2)[:, :, 2:-1, :D],
    "a slice, in rows": lambda: in_rows(s=S + 3, d=D + 2)[:, :, 2:-1, :D],
    "one row": lambda: in_rows(s=1),
    "one head": lambda: in_rows(h=1),
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(S, S, dtype=torch.bool).tril()},
    "bias": {"attn_mask": torch.linspace(-1, 1, S * S).reshape(S, S)},
    "scale": {"scale": 0.1},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", QUERIES)
def test_o_is_torchs(name, grad):
    q = QUERIES[name]()
    k, v = in_rows(h=q.shape[1]), torch.randn(B, q.shape[1], S, D)
    wanted = torch_sdpa(q, k, v)
    q = q.detach().requires_grad_(grad)
    for _ in range(3):  # the whole way, and repeated
        o = cf.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(o, wanted)
        assert strides(o) == strides(wanted)


def as_in_models(q, k, v, **options):
    o = cf.scaled_dot_product_attention(q, k, v, **options)
    return o.transpose(1, 2).view(q.shape[0], q.shape[2], -1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("features", [D, D + 2])
def test_models_view_it(name, features):
    q, k, v = (in_rows(d=d).requires_grad_() for d in (D, D, features))
    for _ in range(3):
        assert as_in_models(q, k, v, **CALLS[name]).shape == (B, S, H * features)


@pytest.mark.parametrize("of", [torch_sdpa, cf.scaled_dot_product_attention])
def test_gradients_are_like_their_tensors(of):
    """Torch's are so on a GPU; on a CPU they are always in rows, ours in the order of the query."""
    q, k, v = (in_rows().requires_grad_() for _ in "qkv")
    for _ in range(4):
        o = of(q, k, v, is_causal=True)
        grads = torch.autograd.grad(o, (q, k, v), torch.randn_like(o).contiguous())
        assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]


def test_gradients_of_repeated_calls_have_the_bits_of_the_whole_way():
    k, v = in_rows(h=2), in_rows(h=2, d=D + 2)
    for _ in range(4):
        q = in_rows()
        do = torch.randn(B, H, S, D + 2)
        xs = [x.detach().requires_grad_() for x in (q, k, v)]
        o = cf.scaled_dot_product_attention(*xs, enable_gqa=True)
        given = torch.autograd.grad(o, xs, do)
        known = dict(memo.REPEATED)
        memo.forget()
        o2 = cf.scaled_dot_product_attention(*xs, enable_gqa=True)
        wanted = torch.autograd.grad(o2, xs, do)
        memo.REPEATED.update(known)
        assert torch.equal(o, o2)
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(given, wanted, strict=True))


def test_checkpoints_save_the_same_the_whole_way_and_repeated():
    from torch.utils.checkpoint import checkpoint

    q, k, v = (in_rows().requires_grad_() for _ in "qkv")
    for _ in range(2):
        o = checkpoint(as_in_models, q, k, v, use_reentrant=False)
        (dq,) = torch.autograd.grad(o.sum(), q)
        (wanted,) = torch.autograd.grad(torch_sdpa(q, k, v).sum(), q)
        torch.testing.assert_close(dq, wanted, atol=1e-5, rtol=1e-5)


def test_of_second_order():
    q, k, v = (in_rows().double().requires_grad_() for _ in "qkv")
    for _ in range(3):  # gradcheck repeats its calls
        assert torch.autograd.gradgradcheck(
            cf.scaled_dot_product_attention, (q[:1, :1, :3], k[:1, :1, :3], v[:1, :1, :3])
        )


@pytest.mark.parametrize("name", ["dense", "in rows", "of fused projections", "one head for all, in rows"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(name, dynamic):
    torch._dynamo.reset()

    def function(q, k, v):
        o = cf.scaled_dot_product_attention(q, k, v)
        assert strides(o) == strides(torch_sdpa(q, k, v)), "as the program believes"
        return o

    q = QUERIES[name]()
    k, v = in_rows(h=q.shape[1]), in_rows(h=q.shape[1])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for grad in (False, True):
        q = q.detach().requires_grad_(grad)
        o = compiled(q, k, v)
        torch.testing.assert_close(o, torch_sdpa(q, k, v))
        assert strides(o) == strides(torch_sdpa(q, k, v))


def test_compiled_gradients():
    torch._dynamo.reset()
    compiled = torch.compile(as_in_models, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (S, S + 1):
        q, k, v = (in_rows(s=rows).requires_grad_() for _ in "qkv")
        given = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
        wanted = torch.autograd.grad(torch_sdpa(q, k, v).sum(), (q, k, v))
        for x, y in zip(given, wanted, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
            assert x.stride() == y.stride()


@pytest.mark.parametrize("name", ["dense", "in rows"])
def test_sizes_that_only_a_run_tells(name):
    torch._dynamo.reset()
    q = QUERIES[name]()
    for axis in (0, 2):
        torch._dynamo.decorators.mark_unbacked(q, axis)
    compiled = torch.compile(cf.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    o = compiled(q, q, q)
    torch.testing.assert_close(o, torch_sdpa(q, q, q))
    assert o.stride() == q.stride()


@pytest.mark.parametrize("name", ["dense", "in rows", "of fused projections"])
def test_without_numbers(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = QUERIES[name]()
    wanted = torch_sdpa(q, q, q).stride()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert cf.scaled_dot_product_attention(fake, fake, fake).stride() == wanted
    meta = torch.empty_strided(q.shape, q.stride(), device="meta")
    assert cf.scaled_dot_product_attention(meta, meta, meta).stride() == wanted


@pytest.mark.parametrize("name", CALLS)
def test_in_torchs_place(name):
    q, k, v = (in_rows().requires_grad_() for _ in "qkv")
    override = sdpa._OperatorOverride("CPU")
    try:
        for function in (torch_sdpa, cf.sdpa_with_fallback):
            o = function(q, k, v, **CALLS[name])
            assert o.stride() == q.stride()
            assert torch.autograd.grad(o.sum(), q)[0].stride() == q.stride()
    finally:
        override.remove()
