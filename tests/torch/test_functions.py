"""score= through torch: recorded, with the gradients of arguments that require one; compiled by a break."""

import math
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

RELATIVE = cupy_flash.score(lambda s, b, h, i, j, table, t: s * t + table[h, i - j + 10])
NEAR = cupy_flash.mask(lambda b, h, i, j: abs(i - j) < 4)


def qkv(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 8, generator=draw, dtype=dtype)
    k, v = torch.randn(2, 2, 2, 11, 8, generator=draw, dtype=dtype)
    table = torch.randn(4, 17, generator=draw, dtype=dtype)
    return tuple(x.requires_grad_() for x in (q, k, v, table))


TEMPERATURE = torch.tensor(0.7, dtype=torch.float64)


def test_gradcheck():
    def attend(q, k, v, table, t, bias, sinks):
        return cf.attention(q, k, v, score=RELATIVE(table, t), bias=bias, sinks=sinks, return_lse=True)

    more = [
        x.requires_grad_()
        for x in (TEMPERATURE.clone(), torch.randn(7, 11).double(), torch.zeros(4).double())
    ]
    assert torch.autograd.gradcheck(attend, (*qkv(), *more), fast_mode=True)


@pytest.mark.simulator
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator compiles kernels with g++")
def test_gradcheck_of_kernels(monkeypatch):
    """In the simulator: the pass that gives the gradients of arguments on GPUs."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_61")

    def attend(q, k, v, table, t):
        return cf.attention(q, k, v, score=RELATIVE(table, t), return_lse=True)

    given = (*qkv(), TEMPERATURE.clone().requires_grad_())
    assert torch.autograd.gradcheck(attend, given, fast_mode=True)


BENT = cupy_flash.score(
    lambda s, b, h, i, j, t: np.where(i % 3 == 0, s * s / 4.0, np.tanh(s)) * t[h] + np.minimum(s, j / 8)
)


def twice(bias, sinks):
    def attend(q, k, v, *more):
        given = dict(zip(("bias", "sinks"), more, strict=False))
        t = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
        return cf.attention(q, k, v, score=BENT(t), return_lse=True, **given)

    return torch.autograd.gradgradcheck(attend, (*qkv()[:3], *bias, *sinks), fast_mode=True)


def test_gradgradcheck():
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(7, 11, generator=draw, dtype=torch.float64).requires_grad_()
    assert twice([bias], [torch.zeros(4).double().requires_grad_()])


@pytest.mark.slow
@pytest.mark.simulator
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator compiles kernels with g++")
def test_gradgradcheck_of_kernels(monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_61")
    assert twice([], [])


def test_second_derivatives_of_packed_sequences():
    q, k, v = (x[0].detach().swapaxes(0, 1).requires_grad_() for x in qkv()[:3])
    cuts = [torch.tensor([0, 3, n], dtype=torch.int32) for n in (7, 11)]
    t = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)

    def attend(q, k, v):
        return cf.attention_varlen(q, k, v, *cuts, score=BENT(t))

    assert torch.autograd.gradgradcheck(attend, (q, k, v), fast_mode=True)


def test_gradients_are_those_of_a_bias():
    q, k, v, table = qkv()
    i, j = np.ogrid[:7, :11]
    results = []
    for how in (
        {"score": RELATIVE(table, torch.ones(()).double())},
        {"bias": table[:, torch.from_numpy(i - j + 10)]},
    ):
        o = cf.attention(q, k, v, **how)
        results.append((o, *torch.autograd.grad(o.sin().sum(), (q, k, v, table))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_what_requires_a_gradient_has_one():
    q, k, v, table = qkv()
    o = cf.attention(q, k, v, score=RELATIVE(table.detach(), TEMPERATURE))
    o.sum().backward()
    assert q.grad is not None
    assert table.grad is None
    with torch.no_grad():
        assert not cf.attention(q, k, v, score=RELATIVE(table, TEMPERATURE)).requires_grad
    plain = cupy_flash.attention(*(x.detach() for x in (q, k, v)), mask=NEAR)
    assert torch.equal(plain, cf.attention(q, k, v, mask=NEAR))


def test_packed_sequences():
    q, k, v, table = qkv()
    rows = q.transpose(1, 2).reshape(14, 4, 8)
    keys = [x.transpose(1, 2).reshape(22, 2, 8) for x in (k, v)]
    cuts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (7, 11)]
    how = {"score": RELATIVE(table, TEMPERATURE)}
    packed = cf.attention_varlen(rows, *keys, *cuts, **how)
    whole = cf.attention(q, k, v, **how).transpose(1, 2).reshape(14, 4, 8)
    torch.testing.assert_close(packed, whole)
    grads = (torch.autograd.grad(o.sin().sum(), (q, k, v, table)) for o in (packed, whole))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert cf.attention_varlen(rows.detach(), *keys, *cuts, mask=NEAR, return_lse=True)[1].shape == (4, 14)


@pytest.mark.slow
# why ignored: torch itself looks at .grad of what goes from one part of a broken program to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_by_a_break():
    torch._dynamo.reset()

    def loss(q, k, v, table):
        return cf.attention(q * 2, k, v, score=RELATIVE(table, TEMPERATURE)).square().sum()

    arrays = qkv()
    ours = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*arrays), arrays)
    for x, y in zip(ours, torch.autograd.grad(loss(*arrays), arrays), strict=True):
        assert torch.equal(x, y)


def test_autocast_and_dropout():
    q, k, v, _ = qkv(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cf.attention(q, k, v, mask=NEAR).dtype == torch.bfloat16
    torch.manual_seed(3)
    first = cf.attention(q, k, v, mask=NEAR, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, cf.attention(q, k, v, mask=NEAR, dropout=0.5))


EVERY = cupy_flash.mask(lambda b, h, i, j: j >= 0)


@pytest.mark.parametrize("more", [{}, {"mask": EVERY}], ids=["", "function"])
@pytest.mark.parametrize("shape", [(4,), (2, 4), ()], ids=str)
def test_autocast_casts_after_a_scale(shape, more):
    """One rounding, as of q * scale in front of torch's own function; with and without a function."""
    q, k, v, _ = (x.detach() for x in qkv(torch.float32))
    scale = torch.linspace(0.3, 1.7, 8)[: math.prod(shape)].reshape(shape)
    product = q * (scale[..., None, None] if shape else scale)
    with torch.autocast("cpu", torch.bfloat16):
        ours = cf.attention(q, k, v, scale=scale, **more)
        expected = cf.attention(product, k, v, scale=1.0, **more)
        theirs = torch.nn.functional.scaled_dot_product_attention(product, k, v, scale=1.0, enable_gqa=True)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, expected)
    torch.testing.assert_close(ours, theirs, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("more", [{}, {"mask": EVERY}], ids=["", "function"])
def test_autocast_casts_after_a_scale_of_packed_rows(more):
    q, k, v = (x.detach()[0].transpose(0, 1) for x in qkv(torch.float32)[:3])
    cuts = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k)]
    scale = torch.linspace(0.3, 1.7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours = cf.attention_varlen(q, k, v, *cuts, scale=scale, **more)
        assert torch.equal(ours, cf.attention_varlen(q * scale[:, None], k, v, *cuts, scale=1.0, **more))


def test_what_is_refused():
    q, k, v, table = qkv()
    given = (table, TEMPERATURE)
    o = cf.attention(q, k, v, score=RELATIVE(*given))
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"arguments of a score function have no second(?s:.*)Try: ."):
        dq.sum().backward()
    o = cf.attention(q, k, v, mask=NEAR)
    (dq,) = torch.autograd.grad(o.sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(dq.sin().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no third derivative"):
        torch.autograd.grad(second.sum(), q)
    with pytest.raises(UnsupportedError, match=r"not supported under torch.func or tracing(?s:.*)Try: ."):
        torch.func.vmap(lambda x: cf.attention(x, k, v, mask=NEAR))(q.detach()[None])
    for how, says in (
        ({"score": lambda s, b, h, i, j: s}, "score is a function"),
        ({"score": NEAR}, "score is a mask function"),
        ({"score": RELATIVE(table.long(), TEMPERATURE)}, "has dtype torch.int64"),
        ({"score": RELATIVE(np.ones((4, 17)), TEMPERATURE)}, "not a torch tensor"),
    ):
        with pytest.raises(InvalidArgumentsError, match=rf"{says}(?s:.*)Try: ."):
            cf.attention(q, k, v, **how)
    slopes = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="alibi_slopes has no gradient"):
        cf.attention(q, k, v, mask=NEAR, alibi_slopes=slopes, align=0)
