"""Schedules over a stand-in for NCCL: numbers, exceptions at each step, and faults that it has to find."""

import functools
import importlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist

import cupy_flash.torch as cf
from cupy_flash.parallel import allgather, alltoall, parts, positions, ring
from cupy_flash.torch import ring as over_torch
from tests.schedule_cases import SCHEDULES, Case
from tests.torch import nccl
from tests.torch.processes import in_processes
from tests.torch.test_ring import raising_at
from tests.torch.test_schedules import run

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

RANKS = 3  # of which each has two neighbours, and a ring uses its memory again
LENGTHS = (2 * RANKS, 0, 4 * RANKS)
OWN = {"heads": (2 * RANKS, RANKS), "dims": (8, 6), "batch": 1}
CASES = [
    *({"options": {"schedule": x, "causal": True}, "rows": (17, 17), "extra": ("sinks",)} for x in SCHEDULES),
    *({"options": {"schedule": x, "causal": True}, "lengths": LENGTHS} for x in SCHEDULES),
    *(  # one window, in which a ring skips a step, and queries beside more keys
        {
            "options": {"schedule": x, "window": (4, 0), "parts": "contiguous", "align": "bottom_right"},
            "rows": (15, 18),
        }
        for x in SCHEDULES
    ),
    # Two processes have no rows.
    *({"options": {"schedule": x}, "rows": (1, 1), "dtype": "float16"} for x in SCHEDULES),
]


def check_numbers(rank, group):
    """Process 0 compares what all return, with the agreement of GPUs; no message is under way then."""
    for given in CASES:
        case = Case(**OWN | given)
        if not case.lengths:
            case.options["seqlen"] = case.rows
        everyone = [None] * RANKS if rank == 0 else None
        dist.gather_object(run(case, rank, RANKS, group=group, agreement="signature"), everyone)
        assert not group.under_way, case
        if rank == 0:
            case.check(everyone)


# What fails, and how often a process calls it in a pass.
STEPS = [
    ("ring", parts, "attention", 3),
    ("ring", ring, "merge", 2),
    ("ring", parts, "attention_backward", 3),
    ("alltoall", alltoall, "attention", 1),
    ("alltoall", alltoall, "attention_backward", 1),
    ("allgather", allgather, "attention", 2),
    ("allgather", allgather, "attention_backward", 2),
]


def check_exceptions(rank, group):
    """Processes fail at each of their steps: all messages are through, and the group works."""
    whole = torch.randn(1, RANKS, 4 * RANKS, 8, generator=torch.Generator().manual_seed(0))
    mine = torch.from_numpy(positions(rank, RANKS, 4 * RANKS, causal=True))
    q = whole[:, :, mine].requires_grad_()

    for schedule, owner, name, count in STEPS:
        attend = functools.partial(cf.ring_attention, q, q, q, causal=True, schedule=schedule, group=group)
        right, step = attend(), attend
        if name == "attention_backward":
            step = functools.partial(torch.autograd.grad, right.sum(), q, retain_graph=True)
        for at in range(count):
            failed = False
            with pytest.MonkeyPatch.context() as patch:
                if rank == at % RANKS:
                    patch.setattr(owner, name, raising_at(at, getattr(owner, name)))
                try:
                    step()
                except MemoryError:
                    failed = True
            assert failed == (rank == at % RANKS), (name, at)
            assert not group.under_way, (name, at)
        torch.testing.assert_close(attend(), right, rtol=0, atol=0)


def check_context(rank, group):
    """Buffers that are cut and put together again."""
    x = torch.randn(2, 14, 4, generator=torch.Generator().manual_seed(1))
    before, mesh = x.clone(), SimpleNamespace(device_type="cpu")
    module = importlib.import_module("cupy_flash.torch.context_parallel")
    with pytest.MonkeyPatch.context() as patch:
        # torch makes no mesh of a backend in Python, which has no name.
        patch.setattr(module, "_group_of", lambda mesh: (group, rank, RANKS))
        with cf.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            (again,) = cf.context_parallel_unshard(mesh, [x], [1])
    torch.testing.assert_close(again, before, rtol=0, atol=0)
    assert not group.under_way


def no_wait(patch, rank):
    """What has arrived is read at once."""
    begin = over_torch._Link.pass_on
    patch.setattr(over_torch._Link, "pass_on", lambda *args: begin(*args) and (lambda: None))


def one_room(patch, rank):
    """What arrives is written over what is still being sent."""
    of = ring._Buffers.of
    patch.setattr(ring._Buffers, "of", lambda room, owner, turn: of(room, owner, 0))


def added_too_early(patch, rank):
    """Sums are written while they are sent."""
    begin = over_torch._Link.pass_on

    def pass_on(link, arrays, into, by):
        arriving = begin(link, arrays, into, by)
        arrays[0].mul_(2)
        return arriving

    patch.setattr(over_torch._Link, "pass_on", pass_on)


def other_order_of_arrays(patch, rank):
    """One process sends v before k."""
    begin = over_torch._Link.pass_on
    if rank == 1:
        patch.setattr(
            over_torch._Link, "pass_on", lambda link, arrays, into, by: begin(link, arrays[::-1], into, by)
        )


def other_order_of_peers(patch, rank):
    """One process turns to the others in another order."""
    begin = over_torch._Link.pass_on
    if rank == 1:
        patch.setattr(
            over_torch._Link, "pass_on", lambda link, arrays, into, by: begin(link, arrays, into, -by)
        )


def one_by_one(patch, rank):
    """Messages are sent outside of a batch."""
    patch.setattr(dist, "batch_isend_irecv", lambda ops: [op.op(op.tensor, op.peer, op.group) for op in ops])


def with_gaps(patch, rank):
    """Tensors are sent as they lie."""
    patch.setattr(over_torch._Link, "contiguous", lambda link, x: x)


def another_thread(patch, rank):
    """The host waits aside, as for messages of a CPU."""
    patch.setattr(over_torch, "_HOSTS", ("cpu",))


FAULTS = {
    no_wait: "wrong numbers",
    added_too_early: "written while it was sent",
    other_order_of_arrays: "process 1 sends",
    other_order_of_peers: "1 receives",
    one_by_one: "outside of a batch",
    with_gaps: "must be contiguous",
    another_thread: "stream of another thread",
}


def what_is_found(rank, schedule, fault=None):
    """A description of results that differ from those without a fault, or of a misuse."""
    x = torch.randn(1, 4, RANKS, 8, generator=torch.Generator().manual_seed(rank)).transpose(1, 2)
    found = []
    for broken in (False, True):
        group = dist.new_group(backend=nccl.NAME)  # after a fault none works on
        q, k, v = (x.clone()[..., :n].requires_grad_() for n in (8, 8, 6))
        with pytest.MonkeyPatch.context() as patch:
            if broken and fault is not None:
                fault(patch, rank)
            try:
                o = cf.ring_attention(q, k, v, schedule=schedule, group=group)
                found.append([o, *torch.autograd.grad(o.sin().sum(), (q, k, v))])
            except nccl.Misuse as error:
                return str(error)
    return "nothing" if all(map(torch.equal, *found)) else "wrong numbers"


def check_faults(rank):
    """Each fault that is put in by hand is found, in every process."""
    for schedule in SCHEDULES:
        assert what_is_found(rank, schedule) == "nothing"
        for fault, words in FAULTS.items():
            assert words in what_is_found(rank, schedule, fault), (schedule, fault)
    assert "written while it was sent" in what_is_found(rank, "ring", one_room)


def process(rank, ranks):
    with pytest.MonkeyPatch.context() as patch:
        nccl.install(patch)
        group = dist.new_group(backend=nccl.NAME)
        check_numbers(rank, group)
        check_context(rank, group)
        check_exceptions(rank, group)
        check_faults(rank)


def test_messages_are_as_nccl_asks(tmp_path):
    in_processes(RANKS, process, tmp_path)
