"""The kernels of tests/simulator/kernels as cubins for a GPU.

Where the GPU's machine has no compiler, make them elsewhere and take build/probes along:

    python -m tests.gpu.probes sm_90a
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from cupy_flash.cubins import nvrtc, sources
from cupy_flash.store import write_atomically
from tests.paths import ROOT
from tests.simulator.units import KERNELS

UNITS = ("boxes", "copies", "matrices", "products", "products_f64", "same_bits", "turns",
         "warp", "warpgroup_products")  # fmt: skip


def cubin(name: str, target: str, cuda: int) -> Path:
    """The file of a kernel, compiled if it is not there or out of date.

    Raises
    ------
    UnsupportedError
        It has to be compiled, and NVRTC is not installed.
    """
    source, include = KERNELS / f"{name}.cu", sources.folder() / "include"
    files = sources.closure(source, include)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    path = ROOT / "build" / "probes" / f"cuda{cuda}" / target / f"{name}-{digest}.cubin"
    if not path.is_file():
        defines = {"CF_SAME_BITS": "1"} if name == "same_bits" else {}
        options = [f"--gpu-architecture={target}", *sources.common(defines), f"-I{include}"]
        compiled, _ = nvrtc.Compiler(cuda).compile(source.read_text(), source.name, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, compiled)
    return path


if __name__ == "__main__":
    for target in sys.argv[1:] or ["sm_90a"]:
        for cuda in nvrtc.TOOLKITS:
            for unit in UNITS:
                print(cubin(unit, target, cuda).relative_to(ROOT))
