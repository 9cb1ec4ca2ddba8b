"""DTensors, two processes: results and gradients beside those of one, and that nobody gathers what fits."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import cupy_flash.torch as cf
from cupy_flash import UnsupportedError
from tests.torch.processes import in_processes

pytestmark = pytest.mark.torch

RANKS = 2


def whole(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


DENSE = {"q": (4, 4, 6, 8), "k": (4, 2, 6, 8), "v": (4, 2, 6, 5)}
EXTRA = {"bias": (4, 1, 6), "sinks": (4,)}

# Shapes, placements of q, k and v, of bias and sinks, of the result, of the gradients of these two, options.
CASES = {
    "batch": ({**DENSE, **EXTRA}, Shard(0), {}, Shard(0), {"bias": Partial(), "sinks": Partial()}, {}),
    "heads": (
        {**DENSE, **EXTRA}, Shard(1), {"bias": Shard(0), "sinks": Shard(0)}, Shard(1),
        {"bias": Shard(0), "sinks": Shard(0)}, {"causal": True},
    ),
    "heads inside": (
        {name: (b, s, h, d) for name, (b, h, s, d) in DENSE.items()}, Shard(2), {}, Shard(2), {},
        {"layout": "bshd", "window": (3, 0)},
    ),
    "bias of each sequence": (
        {**DENSE, "bias": (4, 4, 1, 6)}, Shard(0), {"bias": Shard(0)}, Shard(0), {"bias": Shard(0)}, {},
    ),
    "rows": (DENSE, Shard(2), {}, Replicate(), {}, {"causal": True}),
    "one head of keys": (
        {**DENSE, "k": (4, 1, 6, 8), "v": (4, 1, 6, 5)}, Replicate(), {}, Replicate(), {}, {},
    ),
}  # fmt: skip


def check(mesh, shapes, placement, others, of_result, of_gradients, options):
    tensors = {name: x.requires_grad_() for name, x in whole(**shapes).items()}
    o, lse = cf.attention(**tensors, return_lse=True, **options)
    grads = torch.autograd.grad(o.sin().sum() + lse.cos().sum(), tuple(tensors.values()))
    split = {
        name: distribute_tensor(
            x.detach(), mesh, [placement if name in "qkv" else others.get(name, Replicate())]
        ).requires_grad_()
        for name, x in tensors.items()
    }
    o_split, lse_split = cf.attention(**split, return_lse=True, **options)
    assert isinstance(o_split, DTensor)
    assert o_split.placements == (of_result,)
    torch.testing.assert_close(o_split.full_tensor(), o)
    torch.testing.assert_close(lse_split.full_tensor(), lse)
    loss = o_split.sin().sum() + lse_split.cos().sum()
    for name, ours, wanted in zip(
        split, torch.autograd.grad(loss, tuple(split.values())), grads, strict=True
    ):
        if of_result == placement:  # else they were gathered
            assert ours.placements == (of_gradients.get(name, placement),)
        torch.testing.assert_close(ours.full_tensor(), wanted)


def check_packed(mesh):
    rows = whole(q=(9, 4, 8), k=(9, 2, 8), v=(9, 2, 8))
    cuts = torch.tensor([0, 4, 9], dtype=torch.int32)
    wanted = cf.attention_varlen(*rows.values(), cuts, cuts, causal=True)
    split = [distribute_tensor(x, mesh, [Shard(1)]) for x in rows.values()]
    cuts = distribute_tensor(cuts, mesh, [Replicate()])
    o = cf.attention_varlen(*split, cuts, cuts, max_seqlen_q=5, max_seqlen_k=5, causal=True)
    assert o.placements == (Shard(1),)
    torch.testing.assert_close(o.full_tensor(), wanted)


def check_sdpa(mesh):
    """Torch's signature, with a tensor-parallel layer's views: heads are sharded, and stored after rows."""
    q, k, v, mask = whole(q=(2, 6, 4, 8), k=(2, 6, 2, 8), v=(2, 6, 2, 8), mask=(4, 6, 6)).values()
    for kind, others in (
        ("causal", {"is_causal": True}),
        ("bool", {"attn_mask": mask > 0}),
        ("float", {"attn_mask": mask}),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        split = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]
        wanted = cf.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), enable_gqa=True, **others
        )
        if "attn_mask" in others:
            others = {"attn_mask": distribute_tensor(others["attn_mask"], mesh, [Shard(0)])}
        o = cf.sdpa_with_fallback(*(x.transpose(1, 2) for x in split), enable_gqa=True, **others)
        assert o.placements == (Shard(1),), kind
        torch.testing.assert_close(o.full_tensor(), wanted)
        grads = torch.autograd.grad(o.sin().sum(), split)
        for ours, right in zip(grads, torch.autograd.grad(wanted.sin().sum(), leaves), strict=True):
            assert ours.placements == (Shard(2),), kind
            torch.testing.assert_close(ours.full_tensor(), right)


def process(rank, ranks):
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for name, case in CASES.items():
        try:
            check(mesh, *case)
        except Exception as error:
            raise AssertionError(name) from error
    check_packed(mesh)
    check_sdpa(mesh)
    q = distribute_tensor(whole(q=(4, 2, 6, 8))["q"], mesh, [Shard(0)])
    with pytest.raises(UnsupportedError, match="dropout over DTensors"):
        cf.attention(q, q, q, dropout=0.5)
    with pytest.raises(UnsupportedError, match=r"dropout over DTensors(.|\n)*Try: dropout_p=0\.0"):
        cf.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


@pytest.mark.slow
def test_processes_agree_with_one(tmp_path):
    in_processes(RANKS, process, tmp_path)
