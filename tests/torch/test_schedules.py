"""Schedules of torch.distributed: random calls over gloo, and what torch adds to them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.testing import to_numpy
from tests.schedule_cases import fixed_cases, packed_cases, random_case, seeds_of
from tests.torch.processes import in_processes

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


def tensor(x):
    """A tensor of an array, or of what a mask consists of."""
    if isinstance(x, tuple):
        made = [tensor(part) for part in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    return torch.from_numpy(np.ascontiguousarray(x))


def run(case, rank, ranks, **more):
    """What this process returns of a case, by autograd."""
    arrays, options = case.part(rank, ranks)
    x = {name: tensor(array) for name, array in arrays.items()}
    options |= {name: tensor(given) for name, given in case.given.items()}
    if "cu_seqlens" in options:
        options["cu_seqlens"] = tensor(options["cu_seqlens"])
    learned = {name: x[name].requires_grad_() for name in "qkv"}
    if "sinks" in options:
        learned["sinks"] = options["sinks"].requires_grad_()
    o, lse = cf.ring_attention(x["q"], x["k"], x["v"], return_lse=True, **options, **more)
    grads = torch.autograd.grad((o, lse), [*learned.values()], (x["do"], x["dlse"]))
    results = {"o": o, "lse": lse} | {f"d{name}": x for name, x in zip(learned, grads, strict=True)}
    return {name: to_numpy(x) for name, x in results.items()}


def check_random_calls(rank, ranks, seeds):
    """Process 0 compares what all return with float64."""
    cases = {f"random_case(np.random.default_rng({n}), {ranks})": n for n in seeds}
    cases = {name: random_case(np.random.default_rng(n), ranks) for name, n in cases.items()}
    for more in (fixed_cases, packed_cases):
        cases |= {f"{more.__name__}({ranks})[{n}]": case for n, case in enumerate(more(ranks))}
    for name, case in cases.items():
        try:
            everyone = [None] * ranks if rank == 0 else None
            dist.gather_object(run(case, rank, ranks), everyone)
            if rank == 0:
                case.check(everyone)
        except Exception as error:
            raise AssertionError(f"{name} is {case}") from error


def check_casts(x, schedule):
    """Autocast makes one dtype of those of parts, and sinks of 16 bits are cast, as for `attention`."""
    q, v, sinks = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.ones(x.shape[1]).bfloat16()
    sinks.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o = cf.ring_attention(q, x.bfloat16(), v, sinks=sinks, schedule=schedule)
    narrow = [y.detach().bfloat16().requires_grad_() for y in (q, v)]
    wide = sinks.detach().float().requires_grad_()
    wanted = cf.ring_attention(narrow[0], x.bfloat16(), narrow[1], sinks=wide, schedule=schedule)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, wanted, rtol=0, atol=0)
    grads = torch.autograd.grad(o.float().sin().sum(), (q, v, sinks))
    of_wanted = torch.autograd.grad(wanted.float().sin().sum(), (*narrow, wide))
    for grad, other, like in zip(grads, of_wanted, (q, v, sinks), strict=True):
        assert grad.dtype == like.dtype
        torch.testing.assert_close(grad, other.to(grad.dtype), rtol=0, atol=0)


def check_what_torch_adds(rank, ranks):
    """Checkpoints, gradients that nobody asks for, and refusals, of every schedule."""
    x = torch.randn(1, ranks, 4, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    for schedule in ("ring", "alltoall", "allgather"):
        how = {"causal": True, "schedule": schedule, "dropout": 0.3, "seed": 5}
        q, k, v = (x.clone().requires_grad_(name != "k") for name in "qkv")
        o = cf.ring_attention(q, k, v, **how)
        wanted = torch.autograd.grad(o.sin().sum(), (q, v))
        undropped = cf.ring_attention(q, k, v, causal=True, schedule=schedule)
        assert not torch.allclose(o, undropped)
        again = torch.utils.checkpoint.checkpoint(
            lambda *x, how=how: cf.ring_attention(*x, **how), q, k, v, use_reentrant=False
        )
        torch.testing.assert_close(torch.autograd.grad(again.sin().sum(), (q, v)), wanted, rtol=0, atol=0)
        q = x.clone().requires_grad_()  # alone: an all-gather has nothing to send back
        of_q = torch.autograd.grad(cf.ring_attention(q, x, x, **how).sin().sum(), q)
        torch.testing.assert_close(of_q[0], wanted[0], rtol=0, atol=0)
        with pytest.raises(InvalidArgumentsError, match="make different calls: schedule"):
            cf.ring_attention(
                q,
                k,
                v,
                causal=True,
                schedule=schedule if rank else "ring" if schedule != "ring" else "allgather",
            )
        check_casts(x.float(), schedule)
    slopes = torch.ones(ranks, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="alibi_slopes has no gradient"):
        cf.ring_attention(x, x, x, alibi_slopes=slopes, schedule="allgather")
    with pytest.raises(InvalidArgumentsError, match="q is an ndarray, not a torch tensor"):
        cf.ring_attention(np.ones((1, 1, 4, 8)), x, x)
    with pytest.raises(InvalidArgumentsError, match="mask is a numpy array, q a torch array"):
        cf.ring_attention(x, x, x, mask=np.ones((4 * ranks, 4 * ranks), bool), schedule="alltoall")


def process(rank, ranks, seeds):
    """All of it in one process, whose start takes most of the time."""
    check_what_torch_adds(rank, ranks)
    check_random_calls(rank, ranks, seeds)


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_agree_with_float64(ranks, tmp_path, pytestconfig):
    # The first one is packed, in 16 bits, by all-gather: torch writes rows by index in their own dtype only.
    seeds = [96549698, *seeds_of(pytestconfig.option.sample, 40)]
    in_processes(ranks, process, tmp_path, seeds, seconds=120)
