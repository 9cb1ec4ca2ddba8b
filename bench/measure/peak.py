"""python -m bench.measure.peak PEER CASE DEVICE: peak memory of one call in addition to its inputs, in bytes.

Each call has a process of its own, because a process seldom returns memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..machine import place as places
from ..work import Case
from .peers import OURS, PEERS, Skipped


def _status(name: str) -> int:
    """Memory of this process in bytes: VmRSS is the current value, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise Skipped("is measured by /proc, which this system does not have")


def _on_cpu(call: Callable[[], Any]) -> int:
    before = _status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    start = max(before, _status("VmHWM"))
    call()
    return max(0, _status("VmHWM") - start)


def _on_torch(torch: Any, call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _on_jax(call: Callable[[], Any]) -> int:
    import jax

    device = jax.local_devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    call()
    return int(device.memory_stats()["peak_bytes_in_use"] - before)


def main(name: str, fields: str, device: str) -> int:
    place, _ = places.find(device)
    case = Case(*json.loads(fields))
    peer = next(peer for peer in (OURS, *PEERS) if peer.name == name)
    inputs = place.inputs(case)
    try:
        # A tiny problem first, which loads code, starts threads and makes handles.
        tiny = case._replace(seqlen=min(case.seqlen, 64))
        peer.ready(tiny, place.inputs(tiny), place)
        needed, free = peer.matrices * case.score_bytes(), place.state().free_bytes
        if free is not None and needed > 0.7 * free:
            raise Skipped(f"needs {needed / 1e9:.3g} GB for its S x S matrices, {free / 1e9:.3g} GB are free")
        call = peer.prepare(case, inputs, place)
        if place.name == "cpu":
            peak = _on_cpu(call)
        elif peer.by_clock:
            peak = _on_jax(call)
        elif place.library == "torch":
            peak = _on_torch(place.torch, call)
        else:
            raise Skipped("is measured through torch's allocator, and there is no torch")
    except Skipped as reason:
        print(reason)
        return 1
    except Exception as error:  # why any: as in Peer.ready
        print(f"does not run this: {type(error).__name__}: {error}".splitlines()[0][:200])
        return 1
    print(peak)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
