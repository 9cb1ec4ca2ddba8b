"""cuda: what it asks of the driver's own library, by one that records, and what it says when it fails."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from cupy_flash import CubinNotFoundError, UnsupportedError, info
from cupy_flash.device import choice, cuda, driver, libcuda, simulator, tensor_map
from cupy_flash.dispatch import backends
from cupy_flash.errors import InvalidArgumentsError
from tests.cpu import fake_cupy
from tests.cpu.fake_libcuda import CONTEXTS, MEMORY, FakeLibcuda, forget, use
from tests.cpu.stub_kernels import stub
from tests.paths import ROOT

SMALL, LARGE = stub(), stub(head_dim=128, shared_bytes=100 * 1024)
ONE = (1, 1, 1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    forget()
    fake_cupy.forget()
    yield
    forget()
    fake_cupy.forget()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibcuda:
    return use(monkeypatch, FakeLibcuda())


def test_devices(fake: FakeLibcuda) -> None:
    assert cuda.devices() == (
        (0, "GPU 0", "sm_80", 100, 2**36), (1, "GPU 1", "sm_86", 101, 2**36),
    )  # fmt: skip
    assert (cuda.arch(1), cuda.multiprocessors(1), cuda.driver_version()) == ("sm_86", 101, 12080)


@pytest.mark.usefixtures("located")
def test_launch_passes_the_struct_by_value_in_the_context_of_the_device(fake: FakeLibcuda) -> None:
    params = bytes(range(200))
    fake.current = [CONTEXTS[0]]
    cuda.load(SMALL, 0).launch((2, 3, 4), (128, 1, 1), 0, params, 5)
    cuda.load(SMALL, 1).launch(ONE, (64, 1, 1), 512, params, 6)
    loads = [("load", context, SMALL.name) for context in CONTEXTS]
    # c_char_p shows a struct up to its first zero
    assert fake.log == [
        loads[0], (SMALL.name, CONTEXTS[0], (2, 3, 4), (128, 1, 1), b"", 0, 5),
        loads[1], (SMALL.name, CONTEXTS[1], ONE, (64, 1, 1), b"", 512, 6),
    ]  # fmt: skip
    assert fake.current == [CONTEXTS[0]]


@pytest.mark.usefixtures("located")
def test_the_struct_is_where_its_bytes_are(fake: FakeLibcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def launch(*arguments: Any) -> int:
        seen.append(ctypes.string_at(ctypes.cast(arguments[-2], ctypes.POINTER(ctypes.c_void_p))[0], 200))
        return 0

    kernel = cuda.load(SMALL, 0)
    kernel._launch = launch
    kernel.launch(ONE, ONE, 0, bytes(range(200)), 0)
    assert seen == [bytes(range(200))]


@pytest.mark.usefixtures("located")
def test_an_empty_grid_launches_nothing(fake: FakeLibcuda) -> None:
    kernel = cuda.load(SMALL, 0)
    fake.log.clear()
    kernel.launch((0, 1, 1), ONE, 0, b"params", 0)
    assert fake.log == []


@pytest.mark.usefixtures("located")
def test_large_shared_memory_is_asked_for_at_load(fake: FakeLibcuda) -> None:
    cuda.load(LARGE, 0), cuda.load(SMALL, 0)
    assert fake.allowed == {LARGE.name: LARGE.shared_bytes}


@pytest.mark.usefixtures("located")
def test_many_threads_load_once(fake: FakeLibcuda) -> None:
    fake.current = [0]
    barrier, found = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        found.append(cuda.load(SMALL, 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(kernel) for kernel in found}) == 1
    assert [one for one in fake.log if one[0] == "load"] == [("load", CONTEXTS[0], SMALL.name)]


@pytest.mark.usefixtures("located")
def test_a_load_that_failed_is_tried_again(fake: FakeLibcuda) -> None:
    fake.fails["cuModuleLoadData"] = 209
    with pytest.raises(
        CubinNotFoundError, match=r"the driver \(CUDA 12\.8\) does not load .*NO_BINARY(.|\n)*Try: "
    ):
        cuda.load(SMALL, 0)
    fake.fails.clear()
    assert cuda.load(SMALL, 0) is cuda.load(SMALL, 0)
    assert fake.current == [0]


@pytest.mark.usefixtures("located")
@pytest.mark.parametrize(
    ("status", "words"),
    [(1, "CUDA_ERROR_INVALID_VALUE, what"), (2, "CUDA_ERROR_OUT_OF_MEMORY, what"), (77, "CUDA error 77, un")],
)
def test_errors_have_names_and_say_the_version(fake: FakeLibcuda, status: int, words: str) -> None:
    kernel = cuda.load(SMALL, 0)
    fake.fails["cuLaunchKernel"] = status
    with pytest.raises(libcuda.CudaError, match=rf"launch of .*{words}.* \(driver of CUDA 12\.8\)\.\nTry: "):
        kernel.launch(ONE, ONE, 0, b"params", 0)
    assert fake.current == [0]


def test_memory_is_set_and_read_on_the_stream_and_device(fake: FakeLibcuda) -> None:
    cuda.clear(4096, 4, 1, 99)
    assert len(cuda.read(4096, 8, 1, 99)) == 8
    set_to_zero, copied, waited = fake.log
    assert set_to_zero == ("cuMemsetD8Async", CONTEXTS[1], 4096, 0, 4, 99)
    assert (copied[:2], copied[3:]) == (("cuMemcpyDtoHAsync_v2", CONTEXTS[1]), (4096, 8, 99))
    assert waited == ("cuStreamSynchronize", CONTEXTS[1], 99)


def test_workspace_is_given_back_on_its_stream(fake: FakeLibcuda) -> None:
    assert cuda.empty(0, 1, "jax", 7).pointer == 0
    workspace = cuda.empty(100, 1, "jax", 7)
    assert workspace.pointer == MEMORY
    del workspace
    assert fake.log == [("alloc on", CONTEXTS[1], 100, 7), ("cuMemFreeAsync", CONTEXTS[1], MEMORY, 7)]


def test_workspace_of_a_recorded_graph_is_kept(fake: FakeLibcuda) -> None:
    """And allocated in a mode that a capture allows, which is then what it was."""
    cuda._recorded.clear()
    fake.capturing = {7}
    assert cuda.empty(100, 0, "jax", 7).pointer == MEMORY
    mode = ("cuThreadExchangeStreamCaptureMode", CONTEXTS[0], 2)
    assert fake.log == [mode, ("alloc", CONTEXTS[0], 100), mode]
    assert cuda._recorded == [MEMORY]
    cuda._recorded.clear()


def test_no_memory_left(fake: FakeLibcuda) -> None:
    fake.fails["cuMemAllocAsync"] = 2
    with pytest.raises(
        libcuda.CudaError, match=r"100 bytes of workspace on cuda:1: CUDA_ERROR_OUT_OF_MEMORY"
    ):
        cuda.empty(100, 1, "jax", 7)


def test_torch_has_its_own_stream_and_pool(fake: FakeLibcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = types.ModuleType("torch")
    torch.uint8 = "uint8"
    torch.cuda = types.SimpleNamespace(current_stream=lambda on: types.SimpleNamespace(cuda_stream=9 + on))
    torch.empty = lambda n, dtype, device: types.SimpleNamespace(
        data_ptr=lambda: 512, asked=(n, dtype, device)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert cuda.current_stream(1, "torch") == 10
    workspace = cuda.empty(64, 1, "torch", 10)
    assert (workspace.pointer, workspace._owner.asked) == (512, (64, "uint8", "cuda:1"))
    assert fake.log == []


# ------------------------------------------------------------------------------------------ what is missing


def unsupported(match: str) -> str:
    with pytest.raises(UnsupportedError, match=match) as caught:
        cuda.devices()
    lines = str(caught.value).splitlines()
    assert any("attention on NumPy arrays needs neither CuPy nor a GPU" in line for line in lines)
    assert not any("pip install" in line for line in lines)
    assert lines[-1].startswith("Try: ")
    return lines[-1]


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "LIBRARY", "no such library")
    assert "driver of version 525" in unsupported("the CUDA driver does not load: no such library")


ON_WINDOWS = """
import importlib, sys, pytest
from cupy_flash.device import cuda, tensor_map
from tests.cpu.fake_libcuda import FakeLibcuda, use
sys.platform = "win32"
importlib.reload(tensor_map)
with pytest.MonkeyPatch.context() as monkeypatch:
    fake = use(monkeypatch, FakeLibcuda())
    cuda.clear(0x100, 64, 0, 0)
    print(tensor_map.LIBRARY, [device.arch for device in cuda.devices()], fake.log[-1][0])
"""


def test_windows_calls_its_own_library() -> None:
    """As far as that shows elsewhere: the stub answers to the name of the library alone."""
    done = subprocess.run([sys.executable, "-c", ON_WINDOWS], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split(" ", 1)[0] == "nvcuda.dll", done.stderr
    assert done.stdout.split(" ", 1)[1] == "['sm_80', 'sm_86'] cuMemsetD8Async\n"


@pytest.mark.parametrize(
    ("fake", "fails", "lacks", "match", "hint"),
    [
        (FakeLibcuda(11080), {}, "", r"the NVIDIA driver is for CUDA 11\.8\.", "driver of version 525"),
        (FakeLibcuda(12000), {}, "cuMemAllocAsync", "it has no cuMemAllocAsync", "driver of version 525"),
        (FakeLibcuda(count=0), {}, "", "CUDA sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (FakeLibcuda(), {"cuInit": 3}, "", "forked from one that had used CUDA", '"spawn"'),
        (
            FakeLibcuda(),
            {"cuInit": 803},
            "",
            r"\(CUDA 12\.8\) does not start: .*DRIVER_MISMATCH",
            "nvidia-smi",
        ),
    ],
)
def test_what_keeps_it_from_starting(
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeLibcuda,
    fails: dict[str, int],
    lacks: str,
    match: str,
    hint: str,
) -> None:
    fake.fails, fake.lacks = fails, {lacks}
    use(monkeypatch, fake)
    assert hint in unsupported(match)
    use(monkeypatch, FakeLibcuda())
    assert len(cuda.devices()) == 2, "a problem that is solved is forgotten"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork")  # Python's, and JAX's where another test has loaded it
@pytest.mark.usefixtures("located")
def test_a_child_of_a_fork_is_told(fake: FakeLibcuda) -> None:
    kernel = cuda.load(SMALL, 0)
    child = os.fork()
    if not child:
        fake.fails = dict.fromkeys(("cuLaunchKernel", "cuMemsetD8Async", "cuCtxPushCurrent_v2"), 3)
        told = 0
        for call in (lambda: kernel.launch(ONE, ONE, 0, b"params", 0), lambda: cuda.clear(1, 2, 0, 0)):
            try:
                call()
            except UnsupportedError as error:
                told += 'Try: multiprocessing.get_context("spawn")' in str(error)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


# ------------------------------------------------------------------------------------------ who takes it

GPU = ("cuda", 0)


def test_cupy_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    assert {backends.driver_of(GPU, library) for library in ("cupy", "dlpack", "torch", "jax")} == {driver}


@pytest.mark.parametrize("asked", [False, True])
def test_torch_and_jax_do_without_cupy(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy") if asked else None)
    if asked:
        monkeypatch.setenv(choice.VARIABLE, "cuda")
    assert {backends.driver_of(GPU, library) for library in ("torch", "jax")} == {cuda}
    assert {backends.driver_of(GPU, library) for library in ("cupy", "dlpack")} == {driver}
    assert choice.why_without_cupy() == ("CUPY_FLASH_DRIVER=cuda" if asked else "CuPy is not installed")


def test_a_cupy_that_is_not_imported_yet_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (tmp_path / "cupy.py").write_text("raise AssertionError('it is not imported for that')")
    monkeypatch.syspath_prepend(tmp_path)
    assert choice.gpu_driver("torch") is driver


def test_arrays_of_numpy_are_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, chosen in (("cuda", None), ("", None), ("simulator:sm_80", simulator)):
        monkeypatch.setenv(choice.VARIABLE, value)
        assert backends.driver_of(("cpu", 0), "numpy") is chosen
    monkeypatch.setenv(choice.VARIABLE, "cudaa")
    with pytest.raises(InvalidArgumentsError, match=r"is 'cudaa'\.\nTry: .*cuda to do without CuPy"):
        backends.driver_of(("cpu", 0), "numpy")


def test_a_call_without_a_stream_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"an array of jax on a GPU.*\nTry: cupy_flash\.jax"):
        cuda.current_stream(0, "jax")


def test_info_says_which_driver_and_why(fake: FakeLibcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = info.info_text()
    assert "gpu       cuda:1 GPU 1, sm_86, 101 multiprocessors, 64 GiB" in text
    assert f"driver    of torch and JAX arrays: {tensor_map.LIBRARY} (CuPy is not installed)\n" in text
    assert "driver    of CuPy arrays: not installed, which only CuPy arrays need\n" in text
    assert info.facts()["versions"]["driver"] == "CUDA 12.8"
