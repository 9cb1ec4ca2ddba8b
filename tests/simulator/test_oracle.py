"""The stored layouts are what CUTLASS's headers say, where those are installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from cupy_flash.device import host_build
from tests.simulator.units import SIMULATED

pytestmark = SIMULATED
ORACLE = Path(__file__).parent / "oracle"


def _folder(package: str, below: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations if spec else None) or ()
    return next((Path(p) / below for p in places if (Path(p) / below).is_dir()), None)


def test_layouts_are_those_of_cutlass(tmp_path: Path) -> None:
    folders = [
        _folder("cutlass_library", "source/include"),
        _folder("nvidia", "cuda_cccl/include"),
        _folder("nvidia", "cuda_nvcc/include"),
    ]
    if None in folders:
        pytest.skip("pip install nvidia-cutlass nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12")
    program = tmp_path / "layouts"
    includes = [f"-I{folder}" for folder in folders]
    command = ["g++", "-std=c++17", "-O0", "-w", *includes, "-isystem", str(host_build.cuda_headers())]
    subprocess.run([*command, str(ORACLE / "layouts.cpp"), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == json.loads((ORACLE / "layouts.json").read_text())
