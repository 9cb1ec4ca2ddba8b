"""Mistakes in the way to the driver, one at a time, that a virtual GPU has to notice.

Each is a replacement in a file of cupy_flash; tests that run with it in a copy of the checkout must fail.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT

_DRIVER, _RUN, _ABI = (f"cupy_flash/device/{name}.py" for name in ("driver", "run", "abi"))
STREAMS, DEVICES, GRAPHS, MEMORY = (
    f"tests/gpu/test_{name}.py" for name in ("streams", "devices", "graphs", "memory")
)


class Mutant(NamedTuple):
    """A mistake.

    Attributes
    ----------
    name : str
    file : str
    right, wrong : str
        What stands there once, and what the mistake makes of it.
    tests : tuple of str
        Arguments of pytest that select what notices it.
    devices : str
        Architectures of the virtual GPUs.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    devices: str = "sm_80,sm_80"


_WORKSPACE = (GRAPHS, STREAMS, "-k", "backward or foreign")
_ANOTHER = (STREAMS, "-k", "another_library")
_HOPPER = (STREAMS, DEVICES, "-k", "threads or other")
MUTANTS = (
    Mutant("launch on CuPy's stream", _DRIVER, "shared_bytes, _Stream(stream))\n        else:",
           "shared_bytes)\n        else:", _ANOTHER),
    Mutant("launch on the legacy stream", _DRIVER, "shared_bytes, _Stream(stream))\n        else:",
           "shared_bytes, _Stream(0))\n        else:", (STREAMS,)),
    Mutant("launch on the other device's legacy stream", _DRIVER,
           "self._function(grid, block, (struct,), shared_bytes, _Stream(stream))\n\n\n_loaded",
           "self._function(grid, block, (struct,), shared_bytes, _Stream(0))\n\n\n_loaded", (DEVICES,)),
    Mutant("launch with the wrong device current", _DRIVER, "if cuda.runtime.getDevice() == self.device:\n"
           "            self._function", "if True:\n            self._function", (DEVICES,)),
    Mutant("kernel loaded on the current device", _DRIVER, "        with cupy.cuda.Device(device):\n"
           "            module = cupy.cuda.Module", "        if True:\n            module = cupy.cuda.Module",
           (DEVICES,)),
    Mutant("one kernel for all devices", _DRIVER, "key = (variant.name, device)", "key = (variant.name, 0)",
           (DEVICES, STREAMS)),
    Mutant("stream of the current device", _DRIVER, "get_current_stream(device).ptr)\n\n\n# ",
           "get_current_stream().ptr)\n\n\n# ", (DEVICES,)),
    Mutant("legacy stream always", _DRIVER, "return int(_cupy().cuda.get_current_stream(device).ptr)",
           "return 0", (STREAMS,)),
    Mutant("shared memory not allowed", _DRIVER, "if variant.shared_bytes > _SHARED_BYTES_BY_DEFAULT:",
           "if False:", (STREAMS,)),
    Mutant("less shared memory allowed than is launched with", _DRIVER,
           "_MAX_SHARED_BYTES, variant.shared_bytes)",
           "_MAX_SHARED_BYTES, variant.shared_bytes - 16)", (STREAMS,)),
    Mutant("workspace from another stream's pool", _DRIVER,
           "if stream is None or stream == cupy.cuda.get_current_stream().ptr:", "if True:", _WORKSPACE),
    Mutant("workspace on the current device", _DRIVER,
           "    with cupy.cuda.Device(device):\n        if stream is None",
           "    if True:\n        if stream is None", (DEVICES,)),
    Mutant("workspace of a graph given back", _DRIVER, "_recorded.append(memory)", "pass", _WORKSPACE),
    Mutant("workspace given back before it is used", _DRIVER,
           "return Workspace(int(memory.ptr), memory)", "return Workspace(int(memory.ptr), None)",
           (MEMORY,)),
    Mutant("cleared on the legacy stream", _DRIVER, "memsetAsync(pointer, 0, nbytes, stream)",
           "memsetAsync(pointer, 0, nbytes, 0)", (STREAMS, GRAPHS)),
    Mutant("cleared with the wrong device current", _DRIVER,
           "    with cuda.Device(device):\n        cuda.runtime.memsetAsync",
           "    if True:\n        cuda.runtime.memsetAsync", (DEVICES,)),
    Mutant("half of it cleared", _DRIVER, "memsetAsync(pointer, 0, nbytes, stream)",
           "memsetAsync(pointer, 0, nbytes // 2, stream)", (STREAMS,)),
    Mutant("nothing cleared", _RUN, "for offset, nbytes in self._zeroed:", "for offset, nbytes in ():",
           (STREAMS,)),
    Mutant("cleared elsewhere", _RUN, "clear(workspace + offset, nbytes", "clear(workspace, nbytes",
           (STREAMS,)),
    Mutant("parts of the workspace on top of each other", _RUN, "numbers[name] = workspace + offset",
           "numbers[name] = workspace", (STREAMS,)),
    Mutant("no tensor maps in the struct", _RUN, "            if maps:\n", "            if False:\n", _HOPPER,
           "sm_90,sm_90"),
    Mutant("struct without its end", _RUN, "params, end))", "params))", _HOPPER, "sm_90,sm_90"),
    Mutant("tensor map of another array", _RUN, "x.at(numbers[x.name])", "x.at(numbers[maps[0].name])",
           _HOPPER, "sm_90,sm_90"),
    Mutant("no dynamic shared memory", _RUN, "launch.variant.shared_bytes, params", "0, params", (STREAMS,)),
    Mutant("a grid too small", _RUN, "kernel.launch(launch.grid,", "kernel.launch((1, 1, 1),", (STREAMS,)),
    Mutant("grid and block exchanged", _RUN, "kernel.launch(launch.grid, launch.block,",
           "kernel.launch(launch.block, launch.grid,", (STREAMS,)),
    Mutant("last kernel not launched", _RUN, "in self._steps:", "in self._steps[:-1]:", (STREAMS,)),
    Mutant("q and k exchanged", _ABI, '*_tensor(views, "q"), *_tensor(views, "k"), *_tensor(views, "v"), '
           '*_tensor(views, "o"),\n        *_rows(views, "lse")',
           '*_tensor(views, "k"), *_tensor(views, "q"), *_tensor(views, "v"), '
           '*_tensor(views, "o"),\n        *_rows(views, "lse")', (STREAMS,)),
)  # fmt: skip


@contextmanager
def checkout(mutant: Mutant | None, folder: Path) -> Iterator[Path]:
    """A checkout with the mistake; without any if there is none.

    Raises
    ------
    ValueError
        The text to replace is not there once: the file has changed, and the mutant has to follow.
    """
    for name in ("cupy_flash", "tests", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels_cu", "kernels_cpu", "build", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    if mutant is not None:
        text = (ROOT / mutant.file).read_text()
        if text.count(mutant.right) != 1:
            raise ValueError(
                f"{mutant.name}: {mutant.file} has {mutant.right!r} {text.count(mutant.right)} times"
            )
        (folder / mutant.file).write_text(text.replace(mutant.right, mutant.wrong))
    yield folder
    shutil.rmtree(folder)
