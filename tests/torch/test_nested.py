"""Nested tensors of the jagged layout, beside each of their sequences by itself."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nested import nested_tensor, nested_tensor_from_jagged
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError

pytestmark = pytest.mark.torch

LENGTHS = (3, 7, 0, 1)


def jagged(lengths, heads, dim, offsets=None):
    values = torch.randn(sum(lengths), heads, dim, generator=torch.Generator().manual_seed(heads * dim))
    if offsets is None:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
    return nested_tensor_from_jagged(values, offsets=offsets).requires_grad_()


def qkv(heads_k=2, lengths_k=None):
    q = jagged(LENGTHS, 4, 8)
    k = jagged(lengths_k or LENGTHS, heads_k, 8, None if lengths_k else q.offsets())
    v = jagged(lengths_k or LENGTHS, heads_k, 6, k.offsets())
    return q, k, v


def each(function, *tensors):
    """The function for each sequence, heads first, as rows again."""
    parts = zip(*(x.unbind() for x in tensors), strict=True)
    return torch.cat([function(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 3.0, "scale": 0.4}], ids=str
)
def test_results_and_gradients_are_those_of_each_sequence(layout, options):
    tensors = qkv()
    given = [x.transpose(1, 2) for x in tensors] if layout == "bhsd" else tensors
    o, lse = cf.attention(*given, layout=layout, return_lse=True, **options)
    assert o.is_nested
    assert o.shape == (*given[0].shape[:-1], 6)
    assert lse.shape == (given[0].shape[:-1])
    inside = o.transpose(1, 2) if layout == "bhsd" else o
    wanted = each(lambda q, k, v: cf.attention(q, k, v, **options), *tensors)
    torch.testing.assert_close(inside.values(), wanted)
    grads = torch.autograd.grad(inside.values().sin().sum(), tensors, retain_graph=True)
    for ours, theirs in zip(grads, torch.autograd.grad(wanted.sin().sum(), tensors), strict=True):
        torch.testing.assert_close(ours.values(), theirs.values())
    inside = given[0] if layout == "bshd" else given[0].transpose(1, 2)
    (2 * inside[..., :6] + (o.transpose(1, 2) if layout == "bhsd" else o)).values()  # ragged by the same


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_of_nested_tensors_is_torchs(causal):
    tensors = qkv(heads_k=4)
    o = cf.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), is_causal=causal)
    wanted = each(lambda *part: torch_sdpa(*part, is_causal=causal), *tensors)
    torch.testing.assert_close(o.transpose(1, 2).values(), wanted)


def test_keys_of_other_lengths():
    q, k, v = qkv(lengths_k=(5, 2, 4, 0))
    o = cf.attention(q, k, v, layout="bshd", causal=True, align="bottom_right")
    wanted = each(lambda *part: cf.attention(*part, causal=True, align="bottom_right"), q, k, v)
    torch.testing.assert_close(o.values(), wanted)


def test_in_a_compiled_program():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(q, k, v):
        return cf.attention(2 * q, k, v, layout="bshd", causal=True) + 1

    tensors = qkv()
    o = step(*tensors)
    wanted = cf.attention(2 * tensors[0], *tensors[1:], layout="bshd", causal=True) + 1
    torch.testing.assert_close(o.values(), wanted.values())
    grads = [torch.autograd.grad(x.values().sin().sum(), tensors) for x in (o, wanted)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.values(), b.values())


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
def test_what_is_refused():
    q, k, v = qkv()
    strided = nested_tensor([torch.ones(3, 4, 8)], layout=torch.strided)
    holes = torch.nested.narrow(
        torch.ones(2, 9, 4, 8), 1, *torch.tensor([[1, 2], [3, 4]]), layout=torch.jagged
    )
    other = jagged(LENGTHS[::-1], 2, 6)
    for tensors, message in (
        ((q, k, v.values()), "v is not a nested tensor"),
        ((q, k, other), "k and v are ragged by different lengths"),
        ((q.transpose(1, 2), k, v), "q is a NestedTensor of 4 axes, of which axis 2 is ragged"),
        ((holes,) * 3, r"q is a NestedTensor with holes(.|\n)*contiguous\(\)"),
        ((strided,) * 3, "q is a nested tensor"),
    ):
        with pytest.raises(InvalidArgumentsError, match=message):
            cf.attention(*tensors, layout="bshd")
    with pytest.raises(InvalidArgumentsError, match="attn_mask with nested tensors"):
        cf.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), torch.ones(1))
    with pytest.raises(InvalidArgumentsError, match="4 heads of query, 2 of key"):
        cf.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))


def one_by_one(*lengths):
    """Tensors of which each has offsets of its own, with equal values if their lengths are."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        torch.nested.as_nested_tensor(
            [torch.randn(n, 4, 8, generator=generator) for n in own], layout=torch.jagged
        ).requires_grad_()
        for own in lengths
    ]


@pytest.mark.parametrize("lengths", [LENGTHS, (5,), (0,), (2, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_tensors_made_one_by_one(lengths, causal):
    tensors = one_by_one(lengths, lengths, lengths)
    heads_first = [x.transpose(1, 2) for x in tensors]
    wanted = each(lambda *part: torch_sdpa(*part, is_causal=causal), *tensors)
    for o in (
        cf.attention(*tensors, layout="bshd", causal=causal),
        cf.attention(*heads_first, causal=causal).transpose(1, 2),
        cf.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2),
    ):
        torch.testing.assert_close(o.values(), wanted)
        grads = torch.autograd.grad(o.values().sin().sum(), tensors)
        for ours, theirs in zip(
            grads, torch.autograd.grad(wanted.sin().sum(), tensors, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(ours.values(), theirs.values())


def test_queries_of_other_lengths_than_keys_made_one_by_one():
    q, k, v = one_by_one(LENGTHS, (5, 2, 4, 0), (5, 2, 4, 0))
    wanted = each(lambda *part: cf.attention(*part, causal=True, align="bottom_right"), q, k, v)
    o = cf.attention(q, k, v, layout="bshd", causal=True, align="bottom_right")
    torch.testing.assert_close(o.values(), wanted)
    with pytest.raises(InvalidArgumentsError, match=r"causal with (.|\n)* is ambiguous"):
        cf.attention(q, k, v, layout="bshd", causal=True)
    with pytest.raises(
        InvalidArgumentsError, match=r"different lengths(.|\n)*\[5, 2, 4, 0\](.|\n)*\[3, 7, 0, 1\]"
    ):
        cf.attention(q, k, q, layout="bshd")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_program_asks_for_offsets_that_are_one(layout):
    """It does not read their values, and says so; what it tells to do works there."""
    tensors = [x.detach() for x in one_by_one(LENGTHS, LENGTHS, LENGTHS)]
    turned = [x.transpose(1, 2) if layout == "bhsd" else x for x in tensors]

    def step(q, k, v, follow):
        if follow:
            inner = (x.transpose(1, 2) if layout == "bhsd" else x for x in (v, k))
            v, k = next(inner), next(inner)
            v = nested_tensor_from_jagged(v.values(), k.offsets())
            k, v = (x.transpose(1, 2) if layout == "bhsd" else x for x in (k, v))
        o = cf.attention(q, k, v, layout=layout)
        return (o.transpose(1, 2) if layout == "bhsd" else o).values()

    torch._dynamo.reset()
    with pytest.raises(InvalidArgumentsError, match="whose values a program does not read"):
        torch.compile(step, backend="eager")(*turned, False)
    whole = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(*turned, True), step(*turned, True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_the_module_takes_them_too():
    q, k, v = qkv()
    flash = cf.FlashAttention(cupy_flash.AttentionConfig(8, causal=True, layout="bshd"))
    o = flash(q, k, v)
    torch.testing.assert_close(o.values(), cf.attention(q, k, v, layout="bshd", causal=True).values())
    with pytest.raises(InvalidArgumentsError, match="q has head_dim 6, the configuration 8"):
        flash(v, k, v)
    strided = nested_tensor([torch.ones(3, 4, 8)])
    with pytest.raises(InvalidArgumentsError, match="q is a nested tensor"):
        flash(strided, strided, strided)
    with pytest.raises(InvalidArgumentsError, match="q is a list, not a torch tensor"):
        flash([1.0], k, v)
