"""driver: what it asks of CuPy, by a CuPy that records, and what it says when something is missing."""

import re
import sys
import threading
import types

import pytest

from cupy_flash import CubinNotFoundError, UnsupportedError
from cupy_flash.cubins import locate
from cupy_flash.device import driver
from tests.cpu.fake_cupy import FakeCuda, forget
from tests.cpu.stub_kernels import stub

SMALL, LARGE = stub(), stub(head_dim=128, shared_bytes=100 * 1024)


@pytest.fixture(autouse=True)
def _fresh():
    forget()
    yield
    forget()


def test_devices(cuda):
    assert [device.arch for device in driver.devices()] == ["sm_80", "sm_86"]
    assert driver.devices()[1] == (1, "GPU 1", "sm_86", 101, 2**30)
    assert (driver.arch(1), driver.multiprocessors(1)) == ("sm_86", 101)
    assert driver.driver_version() == 12080
    assert driver.current_stream(1, "cupy") == 78


def test_launch_passes_the_struct_by_value_on_the_right_device(cuda, located):
    params = bytes(range(200))
    driver.load(SMALL, 0).launch((2, 3, 4), (128, 1, 1), 0, params, 5)
    driver.load(SMALL, 1).launch((1, 1, 1), (64, 1, 1), 512, params, 6)
    assert cuda.log == [
        (SMALL.name, 0, (2, 3, 4), (128, 1, 1), params, 0, 5),
        (SMALL.name, 1, (1, 1, 1), (64, 1, 1), params, 512, 6),
    ]
    assert cuda.current == 0
    assert located == [(SMALL.name, "sm_80", 12080), (SMALL.name, "sm_86", 12080)]


def test_an_empty_grid_launches_nothing(cuda, located):
    driver.load(SMALL, 0).launch((0, 1, 1), (128, 1, 1), 0, b"params", 0)
    assert cuda.log == []


def test_large_shared_memory_is_asked_for_once_at_load(cuda, located):
    kernel = driver.load(LARGE, 0)
    kernel.launch((1, 1, 1), (128, 1, 1), LARGE.shared_bytes, b"params", 0)
    assert kernel._function.max_shared == LARGE.shared_bytes
    assert driver.load(SMALL, 0)._function.max_shared is None


def test_many_threads_load_once(cuda, located):
    barrier, found = threading.Barrier(8), []

    def work():
        barrier.wait()
        found.append([driver.load(variant, device) for variant in (SMALL, LARGE) for device in (0, 1)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(kernels == found[0] for kernels in found)
    assert sorted(cuda.loads) == sorted((v.name, d) for v in (SMALL, LARGE) for d in (0, 1))
    assert len(located) == 4


def test_what_is_found_and_loaded_is_logged_once(cuda, located, caplog):
    caplog.set_level("INFO", "cupy_flash")
    for _ in range(2):
        driver.load(SMALL, 1)
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["found cuda:0, GPU 0, sm_80", "found cuda:1, GPU 1, sm_86"]
    (loaded,) = said[2:]
    assert re.fullmatch(rf"loaded .*{SMALL.name}.* on cuda:1 in [\d.]+ ms", loaded)


def test_a_load_that_failed_is_tried_again(cuda, located):
    cuda.fails_to_load = True
    with pytest.raises(
        CubinNotFoundError, match=r"the driver \(CUDA 12\.8\) does not load .*NO_BINARY(.|\n)*Try: "
    ):
        driver.load(SMALL, 0)
    cuda.fails_to_load = False
    assert driver.load(SMALL, 0) is driver.load(SMALL, 0)


def test_what_is_loaded_is_what_was_checked(cuda, located, tmp_path):
    """A file that is replaced after it was found is not given to the driver."""
    driver.load(SMALL, 0)
    assert cuda.codes == [b""]
    path = tmp_path / f"{LARGE.name}.cubin"
    find = locate.locate

    def found_and_replaced(*asked):
        cubin = find(*asked)
        path.write_bytes(b"another one")
        return cubin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate, "locate", found_and_replaced)
        with pytest.raises(CubinNotFoundError, match=r"was replaced after it was checked.\nTry: "):
            driver.load(LARGE, 0)
    assert cuda.codes == [b""]


def test_workspace_comes_from_the_pool_of_the_device(cuda):
    assert driver.empty(0, 1).pointer == 0
    assert driver.empty(100, 1).pointer == 4096
    assert cuda.log == [("alloc", 1, 100)]


@pytest.mark.parametrize("older", [False, True])
def test_workspace_for_a_stream_of_another_library(cuda, older):
    """CuPy's pool reuses memory in the order of the stream that is current when it is asked."""
    if older:
        sys.modules["cupy"].cuda.Stream = object  # without from_external
    own = driver.current_stream(1)
    driver.empty(100, 1, "cupy", own)
    driver.empty(100, 1, "jax", own + 1)
    once = ("alloc", 1, 100)
    assert cuda.log == [once, ("on stream", own + 1), once, ("off stream", own + 1)]


def test_workspace_of_a_recorded_graph_is_kept(cuda):
    driver._recorded.clear()
    driver.empty(100, 1)
    assert not driver._recorded
    cuda.capturing = {78}
    for stream in (None, 78):
        driver.empty(100, 1, "cupy", stream)
    assert [memory.ptr for memory in driver._recorded] == [4096, 4096]
    driver._recorded.clear()


def test_clearing_is_enqueued_on_the_stream(cuda):
    kernel = driver.Kernel(None, None, 1)
    kernel.clear(4096, 4, 99)
    assert cuda.log[-1] == ("memset", 1, 4096, 0, 4, 99)


def test_reading_waits_for_the_stream(cuda):
    assert len(driver.read(4096, 8, 1, 99)) == 8
    assert cuda.log == [("copy", 1, 4096, 8, "to host", 99), ("host waits for", 99)]


def test_torch_has_its_own_stream_and_pool(cuda, monkeypatch):
    torch = types.ModuleType("torch")
    torch.uint8 = "uint8"
    torch.cuda = types.SimpleNamespace(current_stream=lambda _device: types.SimpleNamespace(cuda_stream=9))
    torch.empty = lambda n, dtype, device: types.SimpleNamespace(
        data_ptr=lambda: 512, asked=(n, dtype, device)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert driver.current_stream(1, "torch") == 9
    workspace = driver.empty(64, 1, "torch")
    assert (workspace.pointer, workspace._owner.asked) == (512, (64, "uint8", "cuda:1"))
    assert cuda.log == []


# ------------------------------------------------------------------------------------------ what is missing


def unsupported(match):
    with pytest.raises(UnsupportedError, match=match) as caught:
        driver.devices()
    lines = str(caught.value).splitlines()
    assert any("attention on NumPy arrays needs neither CuPy nor a GPU" in line for line in lines)
    assert lines[-1].startswith("Try: ")
    return lines[-1]


def test_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install cupy-cuda13x" in unsupported(
        "arrays that are neither torch's nor JAX's need CuPy, which is not installed"
    )


def test_a_broken_cupy(monkeypatch, tmp_path):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        "raise ImportError('first line\\nlibcudart.so.12: not found')"
    )
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(driver, "installed_cupys", lambda: ("cupy-cuda12x", "cupy-cuda13x"))
    hint = unsupported(r"CuPy \(cupy-cuda12x and cupy-cuda13x\) does not import: libcudart.so.12: not found")
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in hint


@pytest.mark.parametrize(
    ("fake", "match", "hint"),
    [
        (FakeCuda(driver_version=0), "there is no NVIDIA driver", "nvidia-smi"),
        (FakeCuda(count=0), "CUDA sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (
            FakeCuda(12080, 13000),
            r"CuPy is built for CUDA 13\.0, the driver is for CUDA 12\.8",
            "cupy-cuda12x",
        ),
        (
            FakeCuda(13000, 11080),
            r"CuPy is built for CUDA 11\.8, the driver is for CUDA 13\.0",
            "cupy-cuda13x",
        ),
        (
            FakeCuda(11080, 12090),
            r"CuPy is built for CUDA 12\.9, the driver is for CUDA 11\.8",
            "driver of version",
        ),
    ],
)
def test_what_is_missing_or_mismatched(monkeypatch, fake, match, hint):
    monkeypatch.setitem(sys.modules, "cupy", fake.module())
    assert hint in unsupported(match)


def test_rocm(monkeypatch):
    cupy = FakeCuda().module()
    cupy.cuda.runtime.is_hip = True
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert "pip install cupy-cuda12x" in unsupported("built for ROCm")


def test_a_problem_that_is_mended_is_forgotten(monkeypatch, cuda):
    cuda.count = 0
    unsupported("CUDA sees no GPU")
    cuda.count = 1
    assert len(driver.devices()) == 1


def test_a_child_of_a_fork_is_told(monkeypatch):
    """By what the runtime answers there, which is not that there is no GPU."""
    cupy = FakeCuda().module()

    def count():
        error = cupy.cuda.runtime.CUDARuntimeError("cudaErrorInitializationError: initialization error")
        error.status = 3
        raise error

    cupy.cuda.runtime.getDeviceCount = count
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert '"spawn"' in unsupported("this process was forked from one that had used CUDA")
