"""Processes of a group of torch.distributed over gloo, which never hang."""

import multiprocessing
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# why a server: what is forked from a process that has imported torch and computed nothing need not import it.
METHOD = "forkserver" if sys.platform.startswith("linux") else "spawn"
if METHOD == "forkserver":
    multiprocessing.set_forkserver_preload(["cupy_flash.torch", "pytest", "torch.distributed.tensor"])


def in_processes(ranks, function, folder, *arguments, seconds=60):
    """Call a function of rank, number of processes and arguments in each process of a group."""
    given = ranks, function, folder / "rendezvous", arguments
    processes = torch.multiprocessing.start_processes(
        _process, given, nprocs=ranks, join=False, start_method=METHOD
    )
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
