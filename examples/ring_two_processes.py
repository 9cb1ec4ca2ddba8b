"""Ring attention in torch: two processes hold half of a sequence each, and attend over the whole.

Run: ``python examples/ring_two_processes.py [--tokens 4096]``

It starts its own processes, which talk over gloo. On GPUs, under torchrun, the body of `process` is all you
need, with "nccl" and a device for each rank.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cupy_flash.torch
from cupy_flash.parallel import positions


def process(rank: int, ranks: int, tokens: int, meeting: str) -> None:
    """What each process does: its rows of the result, and its gradients, beside those of the whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(0)  # the same whole in every process, to compare with
    whole = [torch.randn(1, 4, tokens, 32, generator=generator, requires_grad=True) for _ in range(3)]

    # With causal a process holds a part from the front and one from the back: the same work for all.
    mine = torch.from_numpy(positions(rank, ranks, tokens, causal=True))
    parts = [x.detach()[:, :, mine].requires_grad_() for x in whole]
    o = cupy_flash.torch.ring_attention(*parts, causal=True)
    o.square().sum().backward()

    expected = cupy_flash.torch.attention(*whole, causal=True)
    expected.square().sum().backward()
    pairs = [(o, expected), *((p.grad, x.grad) for p, x in zip(parts, whole, strict=True))]
    error = max((ours - wanted[:, :, mine]).abs().max().item() for ours, wanted in pairs)
    print(f"process {rank} holds {len(mine)} of {tokens} rows; largest difference {error:.1e}", flush=True)
    dist.destroy_process_group()
    assert error < 1e-4


def main(argv: list[str] | None = None) -> None:
    """Start two processes, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (2, options.tokens, str(Path(folder) / "meeting")), nprocs=2)


if __name__ == "__main__":
    main()
