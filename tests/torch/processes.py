"""Processes of a group of torch.distributed over gloo, which never hang."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def in_processes(ranks, function, folder, *arguments, seconds=60):
    """Call a function of rank, number of processes and arguments in each process of a group."""
    given = ranks, function, folder / "rendezvous", arguments
    processes = torch.multiprocessing.spawn(_process, given, nprocs=ranks, join=False)
    end = time.monotonic() + seconds
    try:
        while not processes.join(timeout=1):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for one in processes.processes:
            one.kill()


def _process(rank, ranks, function, rendezvous, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    function(rank, ranks, *arguments)
    dist.destroy_process_group()
