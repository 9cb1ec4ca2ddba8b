"""Spans and a BlockMask, ours and torch's: recorded, compiled, mapped, differentiated twice."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from torch.nn.attention import flex_attention

import cupy_flash.torch as cf
from cupy_flash import BlockMask, InvalidArgumentsError, Spans, attention, block_mask, mask, spans
from cupy_flash.torch import ops
from cupy_flash.torch.call import Call, arguments
from tests import span_cases
from tests.block_cases import as_mask, random_blocks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

MADE = random_blocks(np.random.default_rng(2), (1, 4), (40, 70), (16, 32))
BLOCKS = BlockMask(*map(torch.from_numpy, MADE))
MASK = torch.from_numpy(as_mask(MADE, 40, 70))
TREE = Spans(torch.from_numpy(spans.tree([-1, 0, 1, 1, 3, 0, 5], prefix=4).bounds))
OF_TREE = torch.from_numpy(span_cases.as_mask(TREE.bounds.numpy(), 7, 11))
BANDS = np.indices((7, 11))[1] // 3 == np.indices((7, 11))[0] // 2
BY_QUERY = Spans(torch.from_numpy(spans.from_mask(BANDS).bounds))
FORMS = pytest.mark.parametrize(
    ("mask", "dense"),
    [(TREE, OF_TREE), (BY_QUERY, torch.from_numpy(BANDS)), (BLOCKS, MASK)],
    ids=["spans by key", "spans by query", "blocks"],
)
DOCUMENT = torch.arange(200) // 45


def documents(b, h, i, j):
    return (DOCUMENT[i] == DOCUMENT[j]) & (j <= i + 3 * h)


def qkv(lengths=(40, 70), dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, lengths[0], 8, generator=draw, dtype=dtype)
    k, v = torch.randn(2, 2, 2, lengths[1], 8, generator=draw, dtype=dtype)
    return tuple(x.requires_grad_() for x in (q, k, v))


def both_passes(arrays, **how):
    o, lse = cf.attention(*arrays, return_lse=True, **how)
    return o, lse, *torch.autograd.grad(o.sin().sum() + lse.clamp(-9).sum(), arrays)


@FORMS
def test_gradients_are_those_of_the_dense_mask(mask, dense):
    for ours, theirs in zip(
        both_passes(qkv(dense.shape[-2:]), mask=mask),
        both_passes(qkv(dense.shape[-2:]), mask=dense),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@FORMS
def test_gradcheck(mask, dense):
    arrays = qkv(dense.shape[-2:])
    assert torch.autograd.gradcheck(lambda *x: cf.attention(*x, mask=mask), arrays, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: cf.attention(*x, mask=mask), arrays, fast_mode=True)


@FORMS
def test_opcheck(mask, dense):
    arrays = qkv(dense.shape[-2:], torch.float32)
    torch.library.opcheck(ops.operator, arguments(Call.of(*arrays, {"mask": mask})))


@pytest.mark.parametrize(("mask", "lengths"), [(TREE, (7, 11)), (BLOCKS, (40, 70))], ids=["spans", "blocks"])
def test_compiled(mask, lengths):
    torch._dynamo.reset()

    def loss(q, k, v, mask):
        return cf.attention(q, k, v, mask=mask).square().sum()

    arrays = qkv(lengths, torch.float32)
    ours = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(*arrays, mask), arrays
    )
    for x, y in zip(ours, torch.autograd.grad(loss(*arrays, mask), arrays), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("size", [128, (16, 64), (64, 32)])
@pytest.mark.parametrize("separate", [True, False], ids=["full apart", "all in part"])
def test_block_masks_of_torch(heads, size, separate):
    def mask_mod(b, h, i, j):
        return documents(b, h if heads else 0 * h, i, j)

    how = {} if separate else {"separate_full_blocks": False}
    if how.keys() - inspect.signature(flex_attention.create_block_mask).parameters.keys():
        pytest.skip("this torch always keeps full blocks apart")
    given = flex_attention.create_block_mask(
        mask_mod, None, heads, 200, 200, device="cpu", BLOCK_SIZE=size, **how
    )
    mask = flex_attention.create_mask(mask_mod, 1, heads or 1, 200, 200, device="cpu")
    made = cf.block_mask(given)
    assert cf.block_mask(given) is made, "torch's functions are asked once"
    assert np.array_equal(as_mask(BlockMask(*(x.numpy() for x in made)), 200, 200), mask.numpy())
    arrays = qkv((200, 200))
    results = [both_passes(arrays, **how) for how in ({"mask": given}, {"mask": made}, {"mask": mask})]
    for ours, again, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(again, theirs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_results_are_those_of_flex_attention():
    given = flex_attention.create_block_mask(documents, None, 4, 200, 200, device="cpu", BLOCK_SIZE=64)
    q, k, v = (x.detach() for x in qkv((200, 200)))
    theirs = flex_attention.flex_attention(q, k, v, block_mask=given, enable_gqa=True)
    assert torch.allclose(cf.attention(q, k, v, mask=given), theirs)


def test_what_torch_puts_in_the_place_of_no_mask():
    """One block, larger than any sequence; with a mask in it, or not seen, it is another one."""
    empty = flex_attention._create_empty_block_mask(*qkv()[:2])
    for ours, theirs in zip(both_passes(qkv(), mask=empty), both_passes(qkv()), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(InvalidArgumentsError, match=r"every query sees every key(?s:.*)Try: mask=None"):
        cf.block_mask(empty)
    size = empty.BLOCK_SIZE
    one, none = (torch.full((1, 1, 1), n, dtype=torch.int32) for n in (1, 0))
    for count, mask_mod in ((none, None), (one, documents)):
        other = flex_attention.BlockMask.from_kv_blocks(
            count, one[..., None] - 1, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(40, 70)
        )
        with pytest.raises(InvalidArgumentsError, match=r"blocks of 1073741824 x 1073741824(?s:.*)Try: ."):
            cf.attention(*qkv(), mask=other)


def test_blocks_beyond_whole_ones_of_torch():
    """Lists without a function, in any order: what is listed is seen."""
    count = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[2, 0, 1], [0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    given = flex_attention.BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=(16, 32), seq_lengths=(48, 96))
    expected = [[[[1, 0, 1], [0, 0, 0], [0, 1, 0]]]]
    assert cf.block_mask(given).table.tolist() == expected


FAR = mask(lambda _b, _h, i, j, distance: i - j < distance)


@pytest.mark.parametrize("inner", ["of torch", "of torch, with a function"])
def test_masks_of_tuples(inner):
    """Tuples may hold tuples, and torch's masks in them are taken as elsewhere."""
    given = flex_attention.create_block_mask(documents, None, 4, 200, 200, device="cpu", BLOCK_SIZE=64)
    even, distance = (torch.arange(200) % 2 == 0), torch.tensor(20.0)
    pairs = flex_attention.create_mask(documents, 1, 4, 200, 200, device="cpu") & even
    several = given, even
    if inner != "of torch":
        pairs = pairs & (torch.arange(200)[:, None] - torch.arange(200) < distance)
        several = (*several, FAR(distance))
    arrays = qkv((200, 200))
    for ours, theirs in zip(
        both_passes(arrays, mask=(None, several)), both_passes(arrays, mask=pairs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_compiled_with_a_mask_of_torch():
    torch._dynamo.reset()
    given = flex_attention.create_block_mask(documents, None, 4, 200, 200, device="cpu", BLOCK_SIZE=64)
    q, k, v = (x.detach() for x in qkv((200, 200)))
    compiled = torch.compile(lambda *x: cf.attention(*x, mask=given), backend="eager")
    assert torch.equal(compiled(q, k, v), cf.attention(q, k, v, mask=given))


def test_mapped_over_tables():
    q, k, v = (x.detach() for x in qkv())
    several = torch.stack([BLOCKS.table, torch.zeros_like(BLOCKS.table)])
    o = torch.func.vmap(lambda table: cf.attention(q, k, v, mask=BlockMask(table, BLOCKS.bits)))(several)
    assert torch.equal(o[0], cf.attention(q, k, v, mask=MASK))
    assert not o[1].any()


def test_mapped_over_spans():
    q, k, v = (x.detach() for x in qkv((7, 11)))
    several = torch.stack([TREE.bounds, torch.zeros_like(TREE.bounds)])
    o = torch.func.vmap(lambda bounds: cf.attention(q, k, v, mask=Spans(bounds)))(several)
    assert torch.equal(o[0], cf.attention(q, k, v, mask=OF_TREE))
    assert not o[1].any()


def test_wrong_bounds_are_refused():
    arrays = qkv((7, 11))
    for call in (cf.attention, torch.compile(cf.attention, backend="eager")):
        with pytest.raises(
            InvalidArgumentsError, match=r"mask.bounds holds 8; its bounds are of 7 queries(?s:.*)Try: ."
        ):
            call(*arrays, mask=Spans(TREE.bounds + 1))
        with pytest.raises(InvalidArgumentsError, match=r"mask.bounds has dtype torch.int64, not int32"):
            call(*arrays, mask=Spans(TREE.bounds.long()))


def test_wrong_blocks_are_refused():
    arrays = qkv()
    with pytest.raises(
        InvalidArgumentsError, match=r"mask.table holds 7, and there are bits of 5(?s:.*)Try: ."
    ):
        cf.attention(*arrays, mask=BLOCKS._replace(table=BLOCKS.table.clamp(max=1) * 7))
    with pytest.raises(InvalidArgumentsError, match=r"mask.table has dtype torch.int64, not int32"):
        cf.attention(*arrays, mask=BLOCKS._replace(table=BLOCKS.table.long()))
    odd = flex_attention.create_block_mask(documents, None, 4, 200, 200, device="cpu", BLOCK_SIZE=40)
    with pytest.raises(InvalidArgumentsError, match=r"blocks of 40 x 40(?s:.*)Try: BLOCK_SIZE=128"):
        cf.attention(*qkv((200, 200)), mask=odd)
    with pytest.raises(InvalidArgumentsError, match=r"block_mask\(\) is given a torch Tensor(?s:.*)Try: ."):
        cf.block_mask(MASK)
    of_torch = flex_attention.create_block_mask(documents, None, 4, 200, 200, device="cpu")
    with pytest.raises(
        InvalidArgumentsError, match=r"mask is of type torch.*BlockMask(?s:.*)Try: cupy_flash.torch.attention"
    ):
        attention(*(x.detach() for x in qkv((200, 200))), mask=of_torch)
    other = block_mask(lambda b, h, i, j: j <= i, None, None, 40, 40)
    with pytest.raises(InvalidArgumentsError, match=r"mask.table is an ndarray, not a torch tensor"):
        cf.attention(*arrays, mask=other)
