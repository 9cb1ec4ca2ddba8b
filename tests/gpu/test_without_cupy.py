"""torch on a GPU in a process without CuPy: through the driver's own library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

_CODE = """
import sys
sys.modules["cupy"] = None
import torch
from cupy_flash.device import choice, cuda
from tests.gpu.calls import arrays, both_passes, check

assert choice.gpu_driver("torch") is cuda
for device in range(torch.cuda.device_count()):
    on_gpu = [torch.from_numpy(x).to(f"cuda:{device}") for x in arrays()]
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in on_gpu]
        torch.cuda._sleep(50_000_000)
        for to, x in zip(late, on_gpu):
            to.copy_(x)
        results = {name: x.cpu().numpy() for name, x in both_passes(*late).items()}
    check(results)

both_passes(*on_gpu)
graph, given = torch.cuda.CUDAGraph(), [torch.zeros_like(x) for x in on_gpu]
with torch.cuda.graph(graph):
    recorded = both_passes(*given)
for to, x in zip(given, on_gpu):
    to.copy_(x)
graph.replay()
check({name: x.cpu().numpy() for name, x in recorded.items()})
"""


def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    done = subprocess.run([sys.executable, "-c", _CODE], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
