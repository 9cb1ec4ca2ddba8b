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

# One in so many runs at a push, drawn by the commit: 24 pushes leave one of all out once in 250 times.
TURNS = 3

_DRIVER, _RUN, _ABI, _GPU, _CUDA, _LIBCUDA = (
    f"cupy_flash/device/{name}.py" for name in ("driver", "run", "abi", "gpu", "cuda", "libcuda")
)
_LOCATE = "cupy_flash/cubins/locate.py"
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
           "self._function(grid, block, (struct,), shared_bytes, _Stream(stream))\n\n\ndef _load",
           "self._function(grid, block, (struct,), shared_bytes, _Stream(0))\n\n\ndef _load", (DEVICES,)),
    Mutant("launch with the wrong device current", _DRIVER, "if cuda.runtime.getDevice() == self.device:\n"
           "            self._function", "if True:\n            self._function", (DEVICES,)),
    Mutant("kernel loaded on the current device", _DRIVER, "    with cupy.cuda.Device(device):\n"
           "        module = cupy.cuda.Module", "    if True:\n        module = cupy.cuda.Module",
           (DEVICES,)),
    Mutant("one kernel for all devices", _GPU, "key = (variant.name, device)", "key = (variant.name, 0)",
           (DEVICES, STREAMS)),
    Mutant("stream of the current device", _DRIVER, "get_current_stream(device).ptr)\n\n\n# ",
           "get_current_stream().ptr)\n\n\n# ", (DEVICES,)),
    Mutant("legacy stream always", _DRIVER, "return int(_cupy().cuda.get_current_stream(device).ptr)",
           "return 0", (STREAMS,)),
    Mutant("shared memory not allowed", _DRIVER, "if variant.shared_bytes > gpu.SHARED_BYTES_BY_DEFAULT:",
           "if False:", (STREAMS,)),
    Mutant("less shared memory allowed than is launched with", _DRIVER,
           "MAX_SHARED_BYTES, variant.shared_bytes)",
           "MAX_SHARED_BYTES, variant.shared_bytes - 16)", (STREAMS,)),
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
    Mutant("q and k exchanged", _ABI, "_strided(views, name, 4)",
           '_strided(views, {"q": "k", "k": "q"}.get(name, name), 4)', (STREAMS,)),
    Mutant("sums and maxima of weights exchanged", _ABI, "_strided(views, name, 3)",
           '_strided(views, {"key_sum": "key_max", "key_max": "key_sum"}.get(name, name), 3)',
           ("tests/gpu/test_statistics.py", "-k", "alone")),
)  # fmt: skip

# The same of the driver's own library, where there is no CuPy.
_TORCH, _JAX = (f"tests/virtual_gpu/alone/test_{name}.py" for name in ("torch", "jax"))
_TENSOR_MAPS = "sm_90,sm_90"
_BAD_INPUT = (("tests/virtual_gpu/alone/test_bad_input.py",), "sm_80,sm_80,sm_110")
MUTANTS_ALONE = (
    Mutant("launch on the legacy stream", _CUDA, "shared_bytes, c_void_p(stream), held, None",
           "shared_bytes, None, held, None", (_TORCH,)),
    Mutant("context taken for current", _CUDA, "if here.value == context:", "if True:", (_TORCH,)),
    Mutant("any context is as good", _CUDA, "if here.value == context:", "if here.value:", (_TORCH,)),
    Mutant("launch in the caller's context", _CUDA, "if here.value == self._context:", "if True:", (_TORCH,)),
    Mutant("context left behind", _CUDA, "cuda.cuCtxPopCurrent_v2(byref(c_void_p()))", "pass", (_TORCH,)),
    Mutant("context of the first device", _CUDA, "byref(context), _handle(device))",
           "byref(context), _handle(0))", (_TORCH,)),
    Mutant("one kernel for all devices", _GPU, "key = (variant.name, device)", "key = (variant.name, 0)",
           (_TORCH,)),
    Mutant("struct from its ninth byte on", _CUDA, "held = _Params(params)",
           "held = _Params(params[8:] + params[:8])", (_TORCH,)),
    Mutant("shared memory not allowed", _CUDA, "if variant.shared_bytes > gpu.SHARED_BYTES_BY_DEFAULT:",
           "if False:", (_TORCH,)),
    Mutant("less shared memory allowed than is launched with", _CUDA,
           "gpu.MAX_SHARED_BYTES, variant.shared_bytes)", "gpu.MAX_SHARED_BYTES, variant.shared_bytes - 16)",
           (_TORCH,)),
    Mutant("no dynamic shared memory", _CUDA, "*block, shared_bytes, c_void_p(",
           "*block, 0, c_void_p(", (_TORCH,)),
    Mutant("grid and block exchanged", _CUDA, "*grid, *block,", "*block, *grid,", (_TORCH,)),
    Mutant("shared bytes and stream exchanged", _CUDA, "shared_bytes, c_void_p(stream), held",
           "c_void_p(stream), shared_bytes, held", (_TORCH,)),
    Mutant("half of a stream's handle", _CUDA, "c_void_p(stream), held", "stream & 0x7FFFFFFF, held",
           (_TORCH,)),
    Mutant("nothing cleared", _CUDA,
           "status := self._call(library().cuMemsetD8Async, pointer, 0, nbytes, stream)", "status := 0",
           (_TORCH,)),
    Mutant("half of it cleared", _CUDA, "cuMemsetD8Async, pointer, 0, nbytes, stream)",
           "cuMemsetD8Async, pointer, 0, nbytes // 2, stream)", (_TORCH,)),
    Mutant("cleared with something else", _CUDA, "cuMemsetD8Async, pointer, 0, nbytes, stream)",
           "cuMemsetD8Async, pointer, 0x7F, nbytes, stream)", (_TORCH,)),
    Mutant("cleared on the legacy stream", _CUDA, "cuMemsetD8Async, pointer, 0, nbytes, stream)",
           "cuMemsetD8Async, pointer, 0, nbytes, 0)", (_TORCH,)),
    Mutant("cleared on the legacy stream for JAX", _CUDA, "cuMemsetD8Async(pointer, 0, nbytes, stream)",
           "cuMemsetD8Async(pointer, 0, nbytes, 0)", (_JAX,)),
    Mutant("legacy stream always", _GPU, "return int(sys.modules[\"torch\"]",
           "return 0 * int(sys.modules[\"torch\"]",
           (_TORCH,)),
    Mutant("stream of the first device", _GPU, "current_stream(device).cuda_stream",
           "current_stream(0).cuda_stream", (_TORCH,)),
    Mutant("workspace given back before it is used", _GPU, "return Workspace(tensor.data_ptr(), tensor)",
           "return Workspace(tensor.data_ptr(), None)", (_TORCH,)),
    Mutant("workspace of the driver's pool on the legacy stream", _CUDA, "nbytes, stream), what)",
           "nbytes, 0), what)\n        stream = 0", (_JAX,)),
    Mutant("workspace of the driver's pool given back before it is used", _CUDA,
           "return Workspace(pointer.value, _OnStream(pointer.value, device, stream))",
           "_OnStream(pointer.value, device, stream)\n    return Workspace(pointer.value, None)", (_JAX,)),
    Mutant("workspace of a graph from the driver's pool", _CUDA, "return status.value != 0", "return False",
           (_JAX,)),
    Mutant("capture that forbids the allocation", _CUDA, "mode = c_int(_RELAXED)", "mode = c_int(0)",
           (_JAX,)),
    Mutant("read before it is there", _CUDA, "nbytes, stream), f\"reading", "nbytes, 0), f\"reading",
           (_JAX,)),
    Mutant("tensor maps in no context", _CUDA,
           "        with _on(self.device):\n            return tensor_map",
           "        if True:\n            return tensor_map", (_TORCH,), _TENSOR_MAPS),
    Mutant("any driver is new enough", _LIBCUDA, "if number < _OLDEST or missing:", "if missing:",
           *_BAD_INPUT),
    Mutant("a fork is not seen", _LIBCUDA, "if _started_in and os.getpid() != _started_in:", "if False:",
           *_BAD_INPUT),
    Mutant("a fork is not seen at the start", _LIBCUDA, "if status == NOT_STARTED:", "if False:",
           *_BAD_INPUT),
    Mutant("cubins of any CUDA are taken", _LOCATE, "if driver_version >= 1000 * major)", "if major)",
           *_BAD_INPUT),
)  # fmt: skip


@contextmanager
def checkout(mutant: Mutant | None, folder: Path) -> Iterator[Path]:
    """A checkout with the mistake; without any if there is none.

    Raises
    ------
    ValueError
        The text to replace is not there once: the file has changed, and the mutant has to follow.
    """
    # why with bytecode: compiling all of it again would be a tenth of the time of a mutant.
    for name in ("cupy_flash", "tests", "bench"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("kernels_cu", "kernels_cpu", "build", "scripts", "pyproject.toml"):
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
