"""Spans through torch: recorded, compiled, mapped, differentiated twice, and checked by torch's checker."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, Spans, spans
from cupy_flash.torch import ops
from cupy_flash.torch.call import Call, arguments
from tests.span_cases import as_mask

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

TREE = torch.from_numpy(spans.tree([-1, 0, 1, 1, 3, 0, 5], prefix=4).bounds)
MASK = torch.from_numpy(as_mask(TREE.numpy(), 7, 11))
BY_QUERY = torch.from_numpy(
    spans.from_mask(np.indices((7, 11))[1] // 3 == np.indices((7, 11))[0] // 2).bounds
)


def qkv(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 8, generator=draw, dtype=dtype)
    k, v = torch.randn(2, 2, 2, 11, 8, generator=draw, dtype=dtype)
    return tuple(x.requires_grad_() for x in (q, k, v))


def test_gradients_are_those_of_the_mask():
    arrays = qkv()
    results = []
    for how in ({"mask": Spans(TREE)}, {"mask": MASK}):
        o, lse = cf.attention(*arrays, return_lse=True, **how)
        results.append((o, lse, *torch.autograd.grad(o.sin().sum() + lse.sum(), arrays)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bounds", [TREE, BY_QUERY], ids=["by key", "by query"])
def test_gradcheck(bounds):
    assert torch.autograd.gradcheck(lambda *x: cf.attention(*x, mask=Spans(bounds)), qkv(), fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda *x: cf.attention(*x, mask=Spans(bounds)), qkv(), fast_mode=True
    )


@pytest.mark.parametrize("bounds", [TREE, BY_QUERY], ids=["by key", "by query"])
def test_opcheck(bounds):
    torch.library.opcheck(ops.operator, arguments(Call.of(*qkv(torch.float32), {"mask": Spans(bounds)})))


def test_compiled():
    torch._dynamo.reset()

    def loss(q, k, v, bounds):
        return cf.attention(q, k, v, mask=Spans(bounds)).square().sum()

    arrays, compiled = qkv(torch.float32), torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(*arrays, TREE), arrays)
    for x, y in zip(ours, torch.autograd.grad(loss(*arrays, TREE), arrays), strict=True):
        assert torch.equal(x, y)


def test_mapped_over_spans():
    q, k, v = (x.detach() for x in qkv())
    several = torch.stack([TREE, torch.zeros_like(TREE)])
    o = torch.func.vmap(lambda bounds: cf.attention(q, k, v, mask=Spans(bounds)))(several)
    assert torch.equal(o[0], cf.attention(q, k, v, mask=MASK))
    assert not o[1].any()


def test_wrong_bounds_are_refused():
    arrays = qkv()
    for call in (cf.attention, torch.compile(cf.attention, backend="eager")):
        with pytest.raises(
            InvalidArgumentsError, match=r"mask.bounds holds 8; its bounds are of 7 queries(?s:.*)Try: ."
        ):
            call(*arrays, mask=Spans(TREE + 1))
        with pytest.raises(InvalidArgumentsError, match=r"mask.bounds has dtype torch.int64, not int32"):
            call(*arrays, mask=Spans(TREE.long()))
