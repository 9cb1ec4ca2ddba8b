"""Tiny kernels and their catalog, so that builds take milliseconds and can be broken on purpose."""

from pathlib import Path

import pytest

from cupy_flash.cubins import nvrtc, sources
from cupy_flash.plan import families
from cupy_flash.plan.catalog import Variant

HEADER = "__device__ float scaled(float x) { return 3.0f * x; }\n"
SOURCES = {
    "good.cu": """
#include "stub.cuh"
extern "C" __global__ void __launch_bounds__(CF_THREADS) CF_ENTRY(float* x) {
    __shared__ float s[CF_THREADS];
    s[threadIdx.x] = scaled(x[threadIdx.x]) + CF_HEAD_DIM;
    __syncthreads();
    x[threadIdx.x] = s[CF_THREADS - 1 - threadIdx.x];
}
""",
    # 96 live values and 1024 threads, twice on a multiprocessor: at most 32 registers each.
    "spilling.cu": """
extern "C" __global__ void __launch_bounds__(1024, 2) CF_ENTRY(volatile float* x) {
    float kept[96];
    for (int i = 0; i < 96; i++) kept[i] = x[i];
    for (int i = 0; i < 96; i++) x[i] = kept[i] * kept[95 - i];
}
""",
    # Reads the accumulators before the wait, so that ptxas serialises the multiplication.
    "serialised.cu": """
extern "C" __global__ void __launch_bounds__(128) CF_ENTRY(float* x, size_t a, size_t b) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    for (int i = 0; i < 4; i++) x[i * 128 + threadIdx.x] = d[i];
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
""",
    "wrong.cu": "this is not CUDA\n",
}


def stub(kernel: str = "good", head_dim: int = 64, **changes: object) -> Variant:
    """A row of the stub catalog."""
    row = {"dtype": "f32", "head_dim_v": head_dim, "tile": (16, 16), "threads": 128, "shared_bytes": 0}
    return Variant(f"{kernel}.cu", "", "", head_dim=head_dim, **{**row, **changes})


class Stubs:
    """The stub folder, and what its catalog lists."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.rows: tuple[Variant, ...] = (stub(), stub(head_dim=128))
        (folder / "include").mkdir(parents=True)
        for name, text in SOURCES.items():
            self.write(name, text)
        self.write("include/stub.cuh", HEADER)
        monkeypatch.setattr(sources, "folder", lambda: folder)
        monkeypatch.setattr(families, "variants", lambda _target: self.rows)

    def write(self, name: str, text: str) -> None:
        """Change a source, as an editor would between two builds."""
        (self.folder / name).write_text(text)
        sources._source_digest.cache_clear()


def requires_nvrtc(cuda: int) -> pytest.MarkDecorator:
    """Skip where the compiler's wheels are not installed."""
    return pytest.mark.skipif(
        not nvrtc.installed(cuda), reason=f"NVRTC is not installed: pip install cupy-flash[compiler{cuda}]"
    )
