"""Ring attention over torch.distributed: processes that hold parts, beside one that holds the whole."""

import itertools
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError, ring
from cupy_flash.ring import packed_positions, positions

pytestmark = pytest.mark.torch

CASES = [
    {"causal": False},
    {"causal": True, "softcap": 3.0, "scale": 0.4},
    {"causal": True, "layout": "bshd", "reproducible": "run"},
    {"causal": True, "dtype": torch.bfloat16},
]


def check_part(rank, ranks, group=None, dtype=torch.float64, **options):
    """Compare this process's rows, and its gradients, with those of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    seqlen, axis = 4 * ranks, 1 if options.get("layout") == "bshd" else 2
    whole = []
    for heads, dim in ((4, 8), (2, 8), (2, 6)):
        x = torch.randn(2, heads, seqlen, dim, generator=generator, dtype=torch.float64).to(dtype)
        whole.append((x if axis == 2 else x.transpose(1, 2)).requires_grad_())
    mine = torch.from_numpy(positions(rank, ranks, seqlen, options["causal"]))
    parts = [x.detach().index_select(axis, mine).requires_grad_() for x in whole]
    o, lse = cf.attention(*whole, return_lse=True, **options)
    o_part, lse_part = cf.ring_attention(*parts, group=group, return_lse=True, **options)
    (o.sin().sum() + lse.cos().sum()).backward()
    (o_part.sin().sum() + lse_part.cos().sum()).backward()
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 0.05}
    torch.testing.assert_close(lse_part, lse[..., mine], **tolerance)
    pairs = zip((o_part, *(x.grad for x in parts)), (o, *(x.grad for x in whole)), strict=True)
    for ours, wanted in pairs:
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, wanted.index_select(axis, mine), **tolerance)


def check_packed(rank, ranks):
    """The same of packed sequences, each of which is cut by itself."""
    lengths, generator = [2 * ranks, 6 * ranks, 0, 4 * ranks], torch.Generator().manual_seed(1)
    cuts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    whole = [
        torch.randn(sum(lengths), heads, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, dim in ((4, 8), (2, 8), (2, 6))
    ]
    mine = torch.from_numpy(packed_positions(rank, ranks, lengths, causal=True))
    parts = [x.detach()[mine].requires_grad_() for x in whole]
    o, lse = cf.attention_varlen(*whole, cuts, cuts, causal=True, return_lse=True)
    o_part, lse_part = cf.ring_attention(*parts, cu_seqlens=cuts // ranks, causal=True, return_lse=True)
    (o.sin().sum() + lse.cos().sum()).backward()
    (o_part.sin().sum() + lse_part.cos().sum()).backward()
    torch.testing.assert_close(o_part, o[mine])
    torch.testing.assert_close(lse_part, lse[:, mine])
    for part, x in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, x.grad[mine])


def raising_at(at, function):
    """The function, but for one of its calls."""
    calls = itertools.count()

    def instead(*args, **kwargs):
        if next(calls) == at:
            raise MemoryError("as if there were too little")
        return function(*args, **kwargs)

    return instead


def check_exceptions(rank, ranks):
    """Let each process, and both at once, fail at each of their steps; the group works as before."""
    steps = [("attention", 0), ("attention", 1), ("merge", 0)]
    steps += [("attention_backward", 0), ("attention_backward", 1)]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 2, 8, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    mine = torch.from_numpy(positions(rank, ranks, 8, causal=True))
    wanted = cf.attention(whole, whole, whole, causal=True)
    for (name, at), who in itertools.product(steps, ([0], [1], [0, 1])):
        q, k, v = (whole.detach()[:, :, mine].requires_grad_() for _ in "qkv")
        o = None if name != "attention_backward" else cf.ring_attention(q, k, v, causal=True)
        with pytest.MonkeyPatch.context() as patch:
            if rank in who:
                patch.setattr(ring, name, raising_at(at, getattr(ring, name)))
            try:
                results = (
                    [cf.ring_attention(q, k, v, causal=True)]
                    if o is None
                    else torch.autograd.grad(o.sum(), (q, k, v))
                )
            except MemoryError:
                assert rank in who
            else:
                assert rank not in who
                if o is None:
                    torch.testing.assert_close(results[0], wanted[:, :, mine])
                else:  # what misses a share is NaN
                    assert not results[0].isnan().any()
                    assert all(x.isnan().all() for x in results[1:])
        check_part(rank, ranks, causal=True)


def process(rank, ranks, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(minutes=1)
    )
    for case in CASES:
        check_part(rank, ranks, **case)
    check_packed(rank, ranks)
    if ranks == 2:
        check_exceptions(rank, ranks)
    if ranks == 4:  # two rings of two
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        check_part(rank // 2, 2, group=groups[rank % 2], causal=True)
    q = torch.ones(1, 1, 6, 8, requires_grad=True)
    with pytest.raises(InvalidArgumentsError, match="6 queries and 4 keys"):
        cf.ring_attention(q, q[:, :, :4], q[:, :, :4])
    grad = torch.autograd.grad(cf.ring_attention(q, q, q).sum(), q, create_graph=True)[0]
    with pytest.raises(UnsupportedError, match="no second derivative"):
        grad.sum().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_agree_with_one(ranks, tmp_path):
    torch.multiprocessing.spawn(process, (ranks, tmp_path / "rendezvous"), nprocs=ranks)


def test_without_processes_it_says_so():
    with pytest.raises(UnsupportedError, match=r"torch.distributed is not initialised"):
        cf.ring_attention(*[torch.ones(1, 1, 4, 8)] * 3)
