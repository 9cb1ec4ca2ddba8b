"""Ring attention over torch.distributed: processes that hold parts, beside one that holds the whole."""

import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.cpu.core import worker_thread
from cupy_flash.parallel import packed_positions, parts, positions, ring
from tests.torch.processes import in_processes

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

# The default may choose another schedule, by bytes.
ring_attention = functools.partial(cf.ring_attention, schedule="ring")

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
    o_part, lse_part = ring_attention(*parts, group=group, return_lse=True, **options)
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
    o_part, lse_part = ring_attention(*parts, cu_seqlens=cuts // ranks, causal=True, return_lse=True)
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
        o = None if name != "attention_backward" else ring_attention(q, k, v, causal=True)
        with pytest.MonkeyPatch.context() as patch:
            if rank in who:
                owner = ring if name == "merge" else parts
                patch.setattr(owner, name, raising_at(at, getattr(owner, name)))
            try:
                results = (
                    [ring_attention(q, k, v, causal=True)]
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


PARTS = [
    (13, {"causal": True, "seqlen": 13}),
    (13, {"causal": False, "window": (3, 2), "seqlen": 13}),
    (16, {"causal": True, "window": (5, 0), "parts": "contiguous", "layout": "bshd"}),
]


def check_parts(rank, ranks, group=None):
    """Sliding windows, sinks, and lengths that do not divide: gradients too, that of sinks added up."""
    generator = torch.Generator().manual_seed(2)
    for seqlen, options in PARTS:
        axis = 1 if options.get("layout") == "bshd" else 2
        whole = [
            torch.randn(1, 2, seqlen, 8, generator=generator, dtype=torch.float64).transpose(axis, 2)
            for _ in "qkv"
        ]
        sinks = torch.randn(2, generator=generator, dtype=torch.float64)
        mine = torch.from_numpy(positions(rank, ranks, seqlen, options["causal"], parts=options.get("parts")))
        parts = [x.index_select(axis, mine) for x in whole]
        one = {name: x for name, x in options.items() if name not in ("parts", "seqlen")}
        for x in (*whole, *parts, sinks):
            x.requires_grad_()
        o = cf.attention(*whole, sinks=sinks, **one)
        o_part = ring_attention(*parts, sinks=sinks, group=group, **options)
        torch.testing.assert_close(o_part, o.index_select(axis, mine))
        *wanted, of_sinks = torch.autograd.grad(o.sin().sum(), (*whole, sinks))
        *ours, share = torch.autograd.grad(o_part.sin().sum(), (*parts, sinks))
        for x, y in zip(ours, wanted, strict=True):
            torch.testing.assert_close(x, y.index_select(axis, mine))
        dist.all_reduce(share, group=group)
        torch.testing.assert_close(share, of_sinks)


def check_disagreement(rank, ranks):
    """What differs on one process is told to all before the first message, and the group works afterwards."""

    def refused(words, **options):
        q = options.pop("q", torch.ones(1, 2, 8, 16))
        k = options.pop("k", q)
        with pytest.raises(InvalidArgumentsError, match=words):
            ring_attention(q, k, k, **options)
        ring_attention(*[torch.ones(1, 2, 8, 16)] * 3)

    odd, x = rank == 1, torch.ones(1, 2, 8, 16)
    different = "make different calls: "
    refused(different + "q, k, v", q=x.repeat(1, 1, 2, 1) if odd else x)
    refused(different + "q, k, v", q=x[:, :, :4] if odd else x)
    refused(different + "q, k, v", q=x[:, :, :0] if odd else x)
    refused(different + "q, k, v", q=x.double() if odd else x)
    refused(different + "q, k, v", q=x.half() if odd else x.bfloat16())
    refused(different + "q, k, v", q=x.reshape(1, 1, 16, 16) if odd else x)
    refused(different + "k, v", k=x[:, :1] if odd else x)
    refused(different + "causal", causal=odd)
    refused(different + "scale", scale=0.1 if odd else 0.2)
    refused(different + "softcap", softcap=1.0 if odd else None)
    refused(different + "layout", q=torch.ones(1, 8, 8, 16), layout="bshd" if odd else "bhsd")
    cut = torch.tensor([0, 4, 8] if odd else [0, 2, 8], dtype=torch.int32)
    refused(different + "cu_seqlens", q=x[0].transpose(0, 1), cu_seqlens=cut, causal=True)
    refused(different + "gradients of", q=x.clone().requires_grad_(odd), k=x)
    with torch.set_grad_enabled(not odd):
        refused(different + "gradients of", q=x.clone().requires_grad_(), k=x)
    refused("softcap is -1.0", softcap=-1.0 if odd else None)
    if odd:
        with pytest.raises(UnsupportedError, match="reproducible"):
            ring_attention(x, x, x, reproducible="batch")
    else:
        refused_by_others = pytest.raises(InvalidArgumentsError, match='process 1  reproducible="batch"')
        with refused_by_others:
            ring_attention(x, x, x)
    # Backward passes in another order than the others'.
    q = x.clone().requires_grad_()
    results = [ring_attention(q, q, q).sum() for _ in range(2)]
    with pytest.raises(InvalidArgumentsError, match=different + "backward of call"):
        results[rank].backward()
    for result in results:
        result.backward()


def check_when_calls_are_compared(rank, ranks):
    """Every one, each kind once, or none; by default every one, as these tensors are on a CPU."""
    gathered = []
    with pytest.MonkeyPatch.context() as patch:
        gather = dist.all_gather
        patch.setattr(
            dist, "all_gather", lambda out, x, **how: gathered.append(x.nbytes) or gather(out, x, **how)
        )
        for agreement, wanted in ((None, 4), ("call", 4), ("signature", 2), ("never", 0)):
            gathered.clear()
            for _ in range(2):
                q = torch.ones(1, 1, 4, 8, requires_grad=True)
                ring_attention(q, q, q, agreement=agreement).sum().backward()
            assert gathered == [32] * wanted, agreement
    with pytest.raises(InvalidArgumentsError, match="agreement is True"):
        ring_attention(q, q, q, agreement=True)


def check_seeds(rank, ranks):
    """Other seeds are told; where only the first of calls alike is compared, of that one alone."""
    x, how = torch.ones(1, 1, 6, 8), {"schedule": "ring", "dropout": 0.5}
    told = r"different calls: seed\.(.|\n)*process 0(.|\n)*process 1"
    for agreement in ("call", "signature"):
        for _ in range(2):  # a call that was refused is none that all agreed on
            with pytest.raises(InvalidArgumentsError, match=told):
                ring_attention(x, x, x, seed=rank, agreement=agreement, **how)
        ring_attention(x, x, x, seed=7, agreement=agreement, **how)
    ring_attention(x, x, x, seed=rank, agreement="signature", **how)
    with pytest.raises(InvalidArgumentsError, match=told):
        ring_attention(x, x, x, seed=rank, agreement="call", **how)
    ring_attention(x, x, x, seed=rank, **{**how, "dropout": 0.0})  # it drops nothing


def check_what_is_sent(rank, ranks):
    """Gradients of k and v travel in float32, if somebody asks for them."""
    real, sent = dist.batch_isend_irecv, []

    def counted(ops):
        sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    part = 4 * 8 * 2  # bytes of one of k and v, in 16 bits
    for asked in ("qkv", "q", "v"):
        q, k, v = (torch.ones(1, 1, 4, 8, dtype=torch.float16, requires_grad=x in asked) for x in "qkv")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", counted)
            o = ring_attention(q, k, v)
            assert sum(sent) == (ranks - 1) * 2 * part
            sent.clear()
            o.sum().backward()
            home = ranks * 2 * part * sum(x in asked for x in "kv")
            assert sum(sent) == (ranks - 1) * 2 * part + home
            sent.clear()
        assert [x.grad is not None for x in (q, k, v)] == [x in asked for x in "qkv"]


def check_memory_of_what_was_saved(rank, ranks):
    """One has too little to get back what it saved, such as from another device; all are told."""

    def get_back(x):
        if rank == 1:
            raise MemoryError("as if there were too little")
        return x

    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    for schedule in ("ring", "alltoall", "allgather"):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, get_back):
            o = cf.ring_attention(q, q, q, schedule=schedule)
        told = pytest.raises(InvalidArgumentsError, match="process 1  as if there were")
        with pytest.raises(MemoryError) if rank == 1 else told:
            o.sum().backward()
        check_part(rank, ranks, causal=True)


def check_lse_that_one_loss_has(rank, ranks):
    """The loss of the others has no gradient of it, which an all-to-all would send."""
    whole = torch.randn(
        1, ranks, 4 * ranks, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    mine = slice(4 * rank, 4 * rank + 4)
    x = whole.clone().requires_grad_()
    o, lse = cf.attention(x, x, x, return_lse=True)
    (wanted,) = torch.autograd.grad(o.sin().sum() + lse[:, :, :4].cos().sum(), x)
    for schedule in ("ring", "alltoall", "allgather"):
        x = whole[:, :, mine].clone().requires_grad_()
        o, lse = cf.ring_attention(x, x, x, schedule=schedule, return_lse=True)
        loss = o.sin().sum() + (0 if rank else lse.cos().sum())
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], wanted[:, :, mine])


def check_retries(rank, ranks):
    """Memory is short on both at different steps; both try again, and the result is right."""
    whole = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = torch.from_numpy(positions(rank, ranks, 8, causal=True))
    x = whole[:, :, mine]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "attention", raising_at(rank, parts.attention))
        with pytest.raises(MemoryError):
            ring_attention(5 * x, x, 3 * x, causal=True)
        o = ring_attention(x, x, x, causal=True)
    torch.testing.assert_close(o, cf.attention(whole, whole, whole, causal=True)[:, :, mine])


def check_interrupts(rank, ranks):
    """Ctrl-C ends the wait for a process that does not come at once, and a group made again works."""
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    calls = [lambda: ring_attention(q, q, q, group=group, agreement="call")]
    calls += [lambda: ring_attention(q, q, q, group=group, agreement="never")]
    calls += [lambda: torch.autograd.grad(o.sum(), q)]
    for call in calls:
        group = dist.new_group()
        o = ring_attention(q, q, q, group=group, agreement="never")
        if rank == 0:
            # why: a shell lets what it runs in the background ignore it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            interrupted = []

            def interrupt(interrupted=interrupted):
                interrupted.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            def then_interrupted(wait, interrupt=interrupt):
                done = worker_thread.run_in_worker(wait)
                threading.Timer(0.2, interrupt).start()
                return done

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cupy_flash.torch.ring.run_in_worker", then_interrupted)
                with pytest.raises(KeyboardInterrupt):
                    call()
            assert time.monotonic() - interrupted[0] < 5  # and not the 30 of the group
            with pytest.raises(
                UnsupportedError, match=r"interrupt ended a call.*\nTry: torch\.distributed\.destroy"
            ):
                call()
        dist.barrier()
        dist.destroy_process_group(group)
    check_part(rank, ranks, group=dist.new_group(), causal=True)


def process(rank, ranks):
    for case in CASES:
        check_part(rank, ranks, **case)
    check_packed(rank, ranks)
    check_parts(rank, ranks)
    check_what_is_sent(rank, ranks)
    if ranks == 2:
        check_exceptions(rank, ranks)
        check_retries(rank, ranks)
        check_disagreement(rank, ranks)
        check_when_calls_are_compared(rank, ranks)
        check_seeds(rank, ranks)
        check_memory_of_what_was_saved(rank, ranks)
        check_lse_that_one_loss_has(rank, ranks)
        if sys.platform != "win32":  # which has no such signal
            check_interrupts(rank, ranks)
    q = torch.ones(1, 1, 6, 8, requires_grad=True)
    if ranks == 4:  # two rings of two
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        check_part(rank // 2, 2, group=groups[rank % 2], causal=True)
        with pytest.raises(InvalidArgumentsError, match=f"process {rank} is not in the group"):
            ring_attention(q, q, q, group=groups[1 - rank % 2])
    with pytest.raises(InvalidArgumentsError, match="6 queries and 4 keys is ambiguous"):
        ring_attention(q, q[:, :, :4], q[:, :, :4], causal=True)
    grad = torch.autograd.grad(ring_attention(q, q, q).sum(), q, create_graph=True)[0]
    with pytest.raises(UnsupportedError, match="ring_attention has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_agree_with_one(ranks, tmp_path):
    in_processes(ranks, process, tmp_path)


@pytest.fixture
def alone(tmp_path):
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_is_no_group_is_refused(alone):
    q = torch.ones(1, 1, 4, 8)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("rows",))
    with pytest.raises(
        InvalidArgumentsError, match=r"a DeviceMesh, not a process group\.\nTry: group=mesh.get"
    ):
        ring_attention(q, q, q, group=mesh)
    ring_attention(q, q, q, group=mesh.get_group("rows"))
    with pytest.raises(InvalidArgumentsError, match="group is a str, not a process group"):
        ring_attention(q, q, q, group="rows")
    with pytest.raises(InvalidArgumentsError, match="process 0 is not in the group"):
        ring_attention(q, q, q, group=dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("schedule", ["ring", "alltoall", "allgather"])
def test_a_group_goes_with_its_last_call(alone, schedule):
    """Not when garbage is collected: threads of a group that is left when a process ends abort it."""
    group, q = dist.new_group(), torch.ones(1, 1, 4, 8, requires_grad=True)
    left = weakref.ref(group)
    gc.collect()
    gc.disable()
    try:
        ring_attention(q, q, q, group=group, schedule=schedule).sum().backward()
        dist.destroy_process_group(group)
        del group
        assert left() is None
    finally:
        gc.enable()


def test_transforms_are_refused(alone):
    q = torch.ones(1, 1, 4, 8)

    def loss(x):
        return ring_attention(x, x, x).sum()

    transforms = [torch.func.grad(loss), torch.func.vmap(loss), torch.func.hessian(loss)]
    transforms += [lambda x: torch.func.vjp(loss, x), lambda x: torch.func.jvp(loss, (x,), (x,))]
    for transform in transforms:
        with pytest.raises(UnsupportedError, match="ring_attention is not supported inside transforms"):
            transform(q)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(UnsupportedError, match="ring_attention has no forward-mode derivative"):
            loss(x)
        with pytest.raises(UnsupportedError, match="ring_attention has no forward-mode derivative"):
            ring_attention(q, q, q, sinks=x[0, 0, 0, :1])
        with pytest.raises(UnsupportedError, match="softcap has no gradient"):
            ring_attention(q, q, q, softcap=x.sum())


def test_compiled_programs_break_at_a_ring(alone):
    """And say why where they may not break; gradients pass through."""
    q = torch.randn(1, 1, 4, 8)

    def loss(x):
        return (2 * ring_attention(x * 3, x, x)).sum()

    with pytest.raises(Exception, match="ring_attention sends messages"):
        torch.compile(loss, backend="eager", fullgraph=True)(q)
    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        x = q.clone().requires_grad_()
        grads += torch.autograd.grad(function(x), x)
    torch.testing.assert_close(*grads)


def test_without_processes_it_says_so():
    with pytest.raises(UnsupportedError, match=r"torch.distributed is not initialised"):
        ring_attention(*[torch.ones(1, 1, 4, 8)] * 3)
