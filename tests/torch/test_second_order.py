"""Second order in torch: its checkers, its transforms, and the formula in torch's own operations."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from unittest import mock

from torch.utils.flop_counter import FlopCounterMode

import cupy_flash.torch as cf
from cupy_flash import UnsupportedError
from cupy_flash.derivatives import second_order
from cupy_flash.torch import second_order as of_torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # linearize
]

func, autograd = torch.func, torch.autograd


def tensors(*shapes, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_(grad) for s in shapes]


ROWS = ((1, 2, 5, 3),) * 3
POINT, DIRECTION = tuple(tensors(*ROWS)), tuple(tensors(*ROWS, seed=1))


def ours(q, k, v):
    return cf.attention(q, k, v, causal=True)


def theirs(q, k, v):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf).softmax(-1) @ v


def loss_of(f):
    return lambda *x: f(*x).square().sum()


def penalty(f):
    """The gradient of the square of a gradient."""
    q = POINT[0].clone().requires_grad_()
    (first,) = autograd.grad(loss_of(f)(q, *POINT[1:]), q, create_graph=True)
    return autograd.grad(first.square().sum(), q)


def by_dual_numbers(f):
    with autograd.forward_ad.dual_level():
        q = autograd.forward_ad.make_dual(POINT[0], DIRECTION[0])
        return autograd.forward_ad.unpack_dual(f(q, *POINT[1:])).tangent


def observed(way):
    """The way below a dispatch mode, where autograd has taken the tangents before an operator runs."""

    def below(f):
        with FlopCounterMode(display=False):
            return way(f)

    return below


WAYS = {
    "jvp": lambda f: func.jvp(f, POINT, DIRECTION),
    "forward_ad": by_dual_numbers,
    "jvp below a mode": observed(lambda f: func.jvp(f, POINT, DIRECTION)),
    "forward_ad below a mode": observed(by_dual_numbers),
    "linearize": lambda f: func.linearize(f, *POINT)[1](*DIRECTION),
    "jacfwd": lambda f: func.jacfwd(f, (0, 1, 2))(*POINT),
    "hessian": lambda f: func.hessian(loss_of(f), (0, 1, 2))(*POINT),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(loss_of(f), (0, 1)), (0, 1))(*POINT),
    "jacrev of jvp": lambda f: func.jacrev(lambda *x: func.jvp(f, x, DIRECTION)[1].sum())(*POINT),
    "jvp of grad": lambda f: func.jvp(func.grad(loss_of(f), (0, 1, 2)), POINT, DIRECTION),
    "vmap of jvp": lambda f: func.vmap(lambda *x: func.jvp(f, x, x))(*(torch.stack([x, -x]) for x in POINT)),
    "jvp of vmap": lambda f: func.jvp(func.vmap(f), *(tuple(x[None] for x in y) for y in (POINT, DIRECTION))),
    "forward_ad of vmap": lambda f: by_dual_numbers(lambda *x: func.vmap(f)(*(y[None] for y in x))),
    "autograd.functional.hessian": lambda f: autograd.functional.hessian(loss_of(f), POINT),
    "create_graph": penalty,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_what_the_formula_gives(way):
    torch.testing.assert_close(WAYS[way](ours), WAYS[way](theirs))


def every_option(q, k, v, bias, sinks):
    return cf.attention(
        q, k, v, bias=bias, sinks=sinks, causal=True, align="bottom_right", softcap=2.0, dropout=0.2, seed=1,
        return_lse=True,
    )  # fmt: skip


def test_checkers_of_torch():
    inputs = tensors((1, 4, 3, 3), (1, 2, 4, 3), (1, 2, 4, 2), (4, 3, 4), (4,), grad=True)
    assert autograd.gradcheck(every_option, inputs, check_forward_ad=True, check_batched_forward_grad=True)
    assert autograd.gradgradcheck(every_option, inputs, check_fwd_over_rev=True)


def test_packed_sequences():
    cut = torch.tensor([0, 3, 5], dtype=torch.int32)

    def packed(q, k, v):
        return cf.attention_varlen(q, k, v, cut, cut, causal=True)

    inputs = tensors((5, 2, 3), (5, 1, 3), (5, 1, 3), grad=True)
    assert autograd.gradcheck(packed, inputs, check_forward_ad=True)
    assert autograd.gradgradcheck(packed, inputs)


@pytest.mark.parametrize("way", ["jvp", "forward_ad"])
def test_results_and_tangents_are_one_pass(way):
    with mock.patch.object(of_torch, "run_with_jvp", wraps=of_torch.run_with_jvp) as together:
        WAYS[way](ours)
    assert together.call_count == 1


def test_packed_results_and_tangents_are_one_pass():
    cut, (q, k, v, dq) = torch.tensor([0, 3, 5], dtype=torch.int32), tensors(*((5, 2, 3),) * 4)

    def packed(q):
        return cf.attention_varlen(q, k, v, cut, cut, causal=True)

    with mock.patch.object(of_torch, "run_with_jvp", wraps=of_torch.run_with_jvp) as together:
        _, moved = func.jvp(packed, (q,), (dq,))
    assert together.call_count == 1
    expected = autograd.functional.jvp(packed, q, dq)[1]
    torch.testing.assert_close(moved, expected)


def test_a_recorded_jvp_is_differentiable():
    """Where the arrays depend on parameters, as in MeanFlow, the pass that does all at once has no graph."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    gradients = []
    for f in (ours, theirs):
        _, moved = func.jvp(lambda *x, f=f: f(x[0] * weight, *x[1:]), POINT, DIRECTION)
        gradients += autograd.grad(moved.square().sum(), weight)
    torch.testing.assert_close(*gradients)


def test_directions_of_a_jacobian_share_one_call():
    with mock.patch.object(of_torch, "run_jvp", side_effect=second_order.run_jvp) as calls:
        func.jacfwd(lambda q: ours(q, *POINT[1:]))(POINT[0])
    assert calls.call_count == 1


def test_a_third_derivative_raises():
    q = POINT[0].clone().requires_grad_()
    (first,) = autograd.grad(loss_of(ours)(q, *POINT[1:]), q, create_graph=True)
    (second,) = autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="attention has no third derivative"):
        second.sum().backward()


def along_a_gradient(f, *x):
    """A scalar with second derivatives in it, of no use for the gradient."""
    tangents = func.jvp(func.grad(loss_of(f), (0, 1, 2)), x, tuple(torch.ones_like(y) for y in x))[1]
    return sum(y.sum() for y in tangents).detach()


def gradient_of_a_gradient(f, *x):
    def slope(*y):
        return sum(z.square().sum() for z in func.grad(loss_of(f), (0, 1, 2))(*y))

    return sum(y.sum() for y in func.grad(slope, (0, 1, 2))(*x)).detach()


@pytest.mark.parametrize("second", [along_a_gradient, gradient_of_a_gradient])
@pytest.mark.parametrize("transform", [lambda f: f, func.vmap], ids=["plain", "vmap"])
def test_a_third_derivative_raises_only_where_something_comes_of_it(transform, second):
    def gradients(f):
        total = func.grad(lambda *x: second(f, *x) * loss_of(f)(*x), (0, 1, 2))
        given = POINT if transform is not func.vmap else [torch.stack([x, 2 * x]) for x in POINT]
        return transform(total)(*given)

    for found, wanted in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


def test_a_graph_of_three_derivatives_may_end_in_the_second():
    x = [x.clone().requires_grad_() for x in POINT]
    value = loss_of(ours)(*x)
    first = autograd.grad(value, x, create_graph=True)
    second = autograd.grad(sum(g.square().sum() for g in first), x, create_graph=True)
    energy = sum(g.sum() for g in second)
    found = autograd.grad(energy.detach() * value, x)
    for a, b in zip(found, first, strict=True):
        torch.testing.assert_close(a, energy * b)


def test_forward_mode_of_forward_mode_raises():
    with pytest.raises(UnsupportedError, match="of its forward-mode derivative"):
        func.jacfwd(func.jacfwd(lambda q: ours(q, *POINT[1:])))(POINT[0])


def test_a_tangent_of_slopes_is_refused():
    slopes = tensors((2,))[0]
    with pytest.raises(UnsupportedError, match="alibi_slopes has no derivative"):
        func.jvp(lambda x: cf.attention(*POINT, alibi_slopes=x), (slopes,), (slopes,))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jvp", "jvp of grad"])
def test_in_a_compiled_program(way):
    """The compiler breaks its program at transforms, and the result is the same."""
    # why: torch remembers what other tests have compiled, and what of theirs it could not.
    torch._dynamo.reset()
    compiled = torch.compile(WAYS[way], backend="aot_eager")
    torch.testing.assert_close(compiled(ours), WAYS[way](theirs))
