"""Several leading axes of torch's scaled_dot_product_attention: torch's results, in linear memory."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError

# torch compiles with, and warns of, its own torch.jit.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


def randn(*shape, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


class Watch(TorchDispatchMode):
    """Elements of the largest tensor that is made inside, and calls of attention."""

    def __init__(self):
        super().__init__()
        self.largest = self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls += function is torch.ops.cupy_flash.attention.default
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.itemsize)
        return result


HEADS, ROWS, DIM = 2, 24, 3
FULL = (HEADS, ROWS, ROWS)
# Leading axes, those of the mask, its own axes, and the fewest calls that write nothing large out.
PATTERNS = {
    "of no axis": ((3, 4), (), FULL, 1),
    "of the first": ((3, 4), (3, 1), FULL, 3),
    "of the last": ((4, 3), (3,), FULL, 3),
    "of the last, which is longer": ((3, 4), (1, 4), FULL, 3),
    "of both": ((3, 4), (3, 4), FULL, 1),
    "of one that is alone": ((1, 5), (1, 1), FULL, 1),
    "of the first of three": ((2, 3, 2), (2, 1, 1), FULL, 2),
    "of the middle": ((2, 3, 2), (3, 1), FULL, 3),
    "of the outer two": ((2, 3, 2), (2, 1, 2), FULL, 3),
    "of keys, which is small": ((3, 4), (3, 1), (1, 1, ROWS), 1),
    "of queries, which is small": ((3, 4), (4,), (HEADS, ROWS, 1), 1),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["bias", "mask", "learned bias"])
def test_a_mask_is_not_written_out(pattern, kind):
    batch, lead, own, calls = PATTERNS[pattern]
    q, k, v = (randn(*batch, HEADS, ROWS, DIM, seed=n) for n in range(3))
    mask = randn(*lead, *own, seed=3, grad=kind == "learned bias")
    mask = mask > -1 if kind == "mask" else mask
    leaves = [x for x in (q, k, v, mask) if x.requires_grad]
    with Watch() as watch:
        o = cf.scaled_dot_product_attention(q, k, v, mask)
        grads = torch.autograd.grad(o.sin().sum(), leaves)
    assert watch.calls == calls
    assert watch.largest <= max(q.numel(), mask.numel())
    wanted = torch_sdpa(q, k, v, mask)
    torch.testing.assert_close(o, wanted)
    for ours, theirs in zip(grads, torch.autograd.grad(wanted.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("axis", range(5))
def test_nor_is_an_expanded_one(axis):
    shape = [3, 4, *FULL]
    shape[axis] = 1
    q, k, v = (randn(3, 4, HEADS, ROWS, DIM, seed=n, grad=False) for n in range(3))
    mask = randn(*shape, seed=3, grad=False)
    for given in (mask, mask > -1):
        with Watch() as watch:
            o = cf.scaled_dot_product_attention(q, k, v, given.expand(3, 4, *FULL))
        assert watch.largest <= max(q.numel(), mask.numel())
        torch.testing.assert_close(o, torch_sdpa(q, k, v, given))


def test_gradients_of_an_expanded_bias_are_those_of_each_element():
    q, k, v = (randn(2, 3, 2, 5, 4, seed=n, grad=False) for n in range(3))
    wide = randn(2, 1, 2, 5, 5, grad=False).expand(2, 3, 2, 5, 5)

    def loss(bias):
        return cf.scaled_dot_product_attention(q, k, v, bias).sin().sum()

    by_function = torch.func.grad(loss)
    for function in (
        by_function,
        lambda x: torch.autograd.grad(loss(y := x.detach().requires_grad_()), y)[0],
    ):
        torch.testing.assert_close(function(wide), function(wide.clone()))
    each = torch.vmap(by_function, in_dims=0)(torch.stack([wide, 2 * wide]))
    torch.testing.assert_close(each[0], by_function(wide))


@pytest.mark.parametrize("kept", [*itertools.product((False, True), repeat=4)])
def test_whatever_is_broadcast_is_torchs(kept):
    """Queries, keys and a mask, each with and without each of two axes; the gradients have their shapes."""
    batch = (2, 3)

    def lead(first):
        return tuple(n if on else 1 for n, on in zip(batch, kept[first : first + 2], strict=True))

    q = randn(*batch, 4, 5, 6)
    k, v = (randn(*lead(0), 2, 7, 6, seed=n) for n in (1, 2))
    bias = randn(*lead(2), 4, 5, 7, seed=3)
    for given in ((q, k, v, bias), (q, k, v, None), (k.mT.mT, k, v, None)):
        leaves = [x for x in given if x is not None and x.is_leaf]
        ours, wanted = (f(*given, enable_gqa=True) for f in (cf.scaled_dot_product_attention, torch_sdpa))
        torch.testing.assert_close(ours, wanted)
        pairs = zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (ours, wanted)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("heads", [(4, 1, 1), (4, 1, 4), (4, 4, 1), (1, 4, 4), (1, 1, 4)])
def test_heads_broadcast_too(heads):
    q, k, v = (randn(2, n, rows, 6, seed=n) for n, rows in zip(heads, (5, 7, 7), strict=True))
    ours, wanted = (f(q, k, v) for f in (cf.scaled_dot_product_attention, torch_sdpa))
    torch.testing.assert_close(ours, wanted)
    pairs = zip(*(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (ours, wanted)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_keys_of_a_long_cache_are_not_written_out():
    q, k = randn(2, 5, 2, 1, 4, grad=False), randn(2, 1, 2, 300, 4, grad=False)
    with Watch() as watch:
        o = cf.scaled_dot_product_attention(q, k, k)
    assert watch.largest <= k.numel()
    torch.testing.assert_close(o, torch_sdpa(q, k, k))


def test_no_rows_no_batch_and_programs():
    for batch in ((0, 3), (2, 0)):
        q, mask = randn(*batch, 2, 5, 4), randn(*batch[:1], 1, 2, 5, 5)
        assert cf.scaled_dot_product_attention(q, q, q, mask).shape == q.shape
    q, mask = randn(2, 3, 2, 5, 4, grad=False), randn(2, 1, 2, 5, 5, grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(cf.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, q, q, mask), torch_sdpa(q, q, q, mask))


def test_what_does_not_broadcast_is_refused():
    q = randn(2, 3, 2, 5, 4)
    for lead in ((3, 1), (2, 2), (4, 2, 3)):
        with pytest.raises(InvalidArgumentsError, match=r"attn_mask has (leading axes|rank)(.|\n)*Try:"):
            cf.scaled_dot_product_attention(q, q, q, randn(*lead, 2, 5, 5))


def test_each_call_of_several_drops_by_itself():
    """One seed for all of them would drop the same pairs in each."""
    q, bias = torch.ones(2, 3, 1, 8, 4), torch.zeros(2, 1, 1, 8, 8)
    torch.manual_seed(0)
    o = cf.scaled_dot_product_attention(q, q, q, bias, dropout_p=0.5)
    assert not torch.equal(o[0], o[1])
    torch.manual_seed(0)
    assert torch.equal(o, cf.scaled_dot_product_attention(q, q, q, bias, dropout_p=0.5))
