"""The visit to a GPU, rehearsed without one: stages, time-outs, going on, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench.commands import gpu_check, probes
from bench.commands.gpu_check import Stage
from bench.commands.varlen import Packed
from bench.machine import ceilings, nvml, place
from bench.measure import peak, peers, results, session
from bench.work import Case
from cupy_flash.cubins import nvrtc
from cupy_flash.device import choice, cuda
from cupy_flash.dispatch import backends
from cupy_flash.errors import UnsupportedError
from tests.bench.test_compare import row, written


def says(text: str, code: int = 0) -> tuple[str, ...]:
    return ("-c", f"import sys; print({text!r}); sys.exit({code})")


SLOW = ("-c", "import time; print('began', flush=True); time.sleep(60)")


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run gpu_check over these stages; returns its exit code and its state."""
    monkeypatch.setattr(gpu_check.conditions, "commit", lambda: "1234567")  # somebody may be committing

    def run(*stages: Stage, minutes: float = 1.0, **changes: Any) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_check, "stages", lambda *_: list(stages))
        words = {"out": tmp_path / "out", "minutes": minutes, "cubins": None, "only": "", "list": False,
                 "device": "cpu"}  # fmt: skip
        code = gpu_check.run(argparse.Namespace(**words | changes))
        path = tmp_path / "out" / gpu_check.STATE
        return code, json.loads(path.read_text()) if path.exists() else {}

    return run


def statuses(state: dict[str, Any]) -> dict[str, str]:
    return {name: stage["status"] for name, stage in state["stages"].items()}


def test_stages_pass_and_fail_and_are_not_repeated(visit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stages = (Stage("good", says("all is well")), Stage("bad", says("it is broken", 3)))
    code, state = visit(*stages)
    assert code == 0
    assert statuses(state) == {"good": "passed", "bad": "failed"}
    assert state["stages"]["bad"]["last"] == "it is broken"
    assert "rehearsal" in capsys.readouterr().out
    _, again = visit(*stages, Stage("new", says("more")))
    assert again["stages"]["good"] == state["stages"]["good"]
    assert statuses(again)["new"] == "passed"
    assert capsys.readouterr().out.count("known") == 2


def test_a_stage_that_hangs_is_ended_and_tried_again(visit: Any, tmp_path: Path) -> None:
    hanging = Stage("hangs", SLOW, most=0.05)
    _, state = visit(hanging, Stage("after", says("here")), minutes=1.2)
    assert statuses(state) == {"hangs": "timed out", "after": "passed"}
    assert state["stages"]["hangs"]["last"] == "began"
    assert state["stages"]["hangs"]["seconds"] < 15
    _, again = visit(hanging._replace(command=says("this time it ends"), most=1.0))
    assert statuses(again)["hangs"] == "passed"


def test_what_there_is_no_time_for_is_for_the_next_visit(visit: Any) -> None:
    stages = (Stage("first", SLOW, most=1.0), Stage("second", says("never")))
    _, state = visit(*stages, minutes=0.03)
    assert statuses(state) == {"first": "timed out", "second": "no time"}
    _, again = visit(stages[1])
    assert statuses(again)["second"] == "passed"


def test_a_measurement_ends_by_itself_and_goes_on(visit: Any) -> None:
    """It is told how long it has; that its minutes were over means that it is not done."""
    partly = says("0.05 minutes are over; not measured: the rest")
    _, state = visit(Stage("forward", partly, goes_on=True))
    assert statuses(state) == {"forward": "timed out"}
    _, state = visit(Stage("forward", ("-c", "import sys; print(sys.argv[1])"), goes_on=True, most=0.5))
    assert state["stages"]["forward"] == {
        "status": "passed",
        "seconds": pytest.approx(0, abs=5),
        "last": "--minutes",
    }


def test_another_commit_or_gpu_wants_another_folder(visit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, _ = visit(Stage("good", says("x")))
    original = gpu_check.conditions.commit
    gpu_check.conditions.commit = lambda: "0000000"  # type: ignore[assignment]
    try:
        code, _ = visit(Stage("good", says("x")))
    finally:
        gpu_check.conditions.commit = original
    assert code == 2
    assert "give another --out" in capsys.readouterr().err


def test_cubins_that_are_not_there_exit_2(
    visit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = visit(Stage("good", says("x")), cubins=tmp_path)
    assert code == 2
    assert "holds no cuda12 or cuda13" in capsys.readouterr().err


def test_cubins_reach_the_stages(visit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cubins" / "cuda13" / "sm_90a"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    show = ("-c", "import os; print(os.environ['CUPY_FLASH_CUBIN_DIR'])")
    _, state = visit(Stage("show", show), cubins=tmp_path / "cubins")
    assert state["stages"]["show"]["last"] == str(tmp_path / "cubins")


def test_a_loud_stage_keeps_its_beginning_and_end(visit: Any, tmp_path: Path) -> None:
    loud = ("-c", "print('BEGIN'); print('x' * 4_000_000); print('END')")
    visit(Stage("loud", loud))
    text = (tmp_path / "out" / gpu_check.LOG).read_text()
    assert len(text) < gpu_check.LOG_BYTES_PER_STAGE + 1000
    assert "BEGIN" in text
    assert text.rstrip().endswith("END")


def test_the_table_is_ours_beside_the_best_peer(
    visit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(10, tflops="500", of_budget="0.3"), row(12, implementation="torch cudnn"),
            row(30, implementation="torch math"), row(4, what="cold", detail="first call")]  # fmt: skip
    written(tmp_path / "out" / gpu_check.RESULTS, *rows)
    visit(Stage("good", says("x")))
    lines = capsys.readouterr().out.splitlines()
    assert any(
        "500 TFLOP/s" in line and "1.20 x torch cudnn" in line and "0.3 of budget" in line for line in lines
    )
    assert any("4 ms" in line and "no peer" in line for line in lines)


def test_everything_lies_flat_and_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real stages, as far as they are quick: what an image has is looked up, not assumed."""
    out = tmp_path / "out"
    words = ["gpu_check", "--out", str(out), "--device", "cpu", "--minutes", "1"]
    assert command.main([*words, "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(
        name in listed for name in ("info", "probes", "tests/gpu/test_attention.py", "soak", "forward")
    )
    assert command.main([*words, "--only", "info"]) == 0
    assert command.main([*words, "--only", "zzz"]) == 2
    assert {path.name for path in out.iterdir()} == {gpu_check.LOG, gpu_check.STATE}
    assert len({gpu_check.LOG, gpu_check.STATE, gpu_check.RESULTS, gpu_check.PROBES}) <= 8


def test_instructions_come_before_what_is_made_of_them() -> None:
    names = [stage.name for stage in gpu_check.stages(Path(), "gpu", None, 9.0)]
    files = [name.removeprefix("tests/gpu/") for name in names if name.startswith("tests/gpu/")]
    assert files[: len(gpu_check.FIRST)] == list(gpu_check.FIRST)
    assert "test_attention.py" in files[len(gpu_check.FIRST) :]


_WITHOUT = """
import sys
for name in ("hypothesis", "matplotlib", "scipy", "threadpoolctl", "tqdm", *{more!r}):
    sys.modules[name] = None
"""


def _without(more: tuple[str, ...], code: str) -> str:
    """What a process prints that has none of the packages that an image for GPUs may lack."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(more=more) + code], cwd=gpu_check.ROOT,
        env=os.environ | {"PYTHONPATH": str(gpu_check.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_image_needs_little(tmp_path: Path) -> None:
    words = ["gpu_check", "--list", "--device", "cpu", "--out", str(tmp_path)]
    main = f"from bench.__main__ import main; sys.exit(main({words!r}))"
    assert "soak, forward" in _without(("pytest", "ml_dtypes"), main)
    assert "tests/gpu/test_primitives.py" in _without((), main)
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    collect = f"import pytest; sys.exit(pytest.main({options!r}))"
    found = _without((), collect)
    assert "test_primitives.py::test_boxes" in found
    assert "test_adapters.py::test_torch_cuda_graph" in found


def test_without_pytest_the_soak_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED_BY_TESTS", ("no_such_package",))
    names = [stage.name for stage in gpu_check.stages(Path(), "gpu", None, 9.0)]
    assert "soak" in names
    assert not any(name.startswith("tests/gpu") for name in names)


# ---------------------------------------------------------------------- probes


def test_probes_without_a_gpu_measure_what_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probes.ceilings, "measure", lambda _: probes.ceilings.Ceilings(3e10, {"float32": 2e11})
    )
    path = tmp_path / "probes.json"
    assert command.main(["probes", "--out", str(path), "--device", "cpu"]) == 0
    found = json.loads(path.read_text())
    assert found["ceilings"]["copy GB/s"] == 30.0
    assert found["dmma"] == found["exp"] == found["launch"] == found["cubins"] == "needs a GPU"


@pytest.mark.parametrize(
    ("name", "shape"), [("_EXP", ""), ("_LAUNCH", ""), *(("_DMMA", shape) for shape in probes._DMMA_SHAPES)]
)
def test_kernels_of_the_probes_compile(name: str, shape: str) -> None:
    try:
        compiler = nvrtc.Compiler(13)
    except UnsupportedError as error:
        pytest.skip(str(error).splitlines()[0])
    cubin, log = compiler.compile(
        getattr(probes, name),
        f"{name}.cu",
        ["--gpu-architecture=sm_90a", "-std=c++17", *[f"-D{shape}"] * bool(shape)],
    )
    assert cubin
    assert "error" not in log


# ---------------------------------------------------------------------- what the driver says of the GPU


class FakeDriver:
    """libnvidia-ml with one GPU."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, pci: bytes, handle: Any) -> int:
        self.asked.append(pci)
        handle._obj.value = 5
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, _: Any) -> int:
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetPowerUsage(self, _: Any, out: Any) -> int:
        out._obj.value = 612_345
        return 0

    def nvmlDeviceGetUtilizationRates(self, _: Any, out: Any) -> int:
        out._obj.gpu = 37
        return 0

    def nvmlDeviceGetMemoryInfo(self, _: Any, out: Any) -> int:
        out._obj.free = 100
        return 0

    def nvmlDeviceGetClockInfo(self, _: Any, kind: Any, out: Any) -> int:
        assert kind.value == 1
        out._obj.value = 1755
        return 0

    def nvmlDeviceGetTemperature(self, *_: Any) -> int:
        return 3  # not supported


def test_state_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(nvml, "_library", lambda: fake)
    gpu = nvml.Nvml("0000:0F:00.0")
    assert gpu.driver() == "580.1"
    assert fake.asked == [b"0000:0F:00.0"]
    state = gpu.state()
    assert state == nvml.State(1755, 612.345, None, 37, 100)
    assert str(state) == "1755 MHz 612 W"
    busy = place._neighbours(type("Gpu", (), {"state": lambda _: state})())
    assert busy == ["The GPU is 37 % busy with others' work: expect noise."]


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)
    gpu = nvml.Nvml("x")
    assert (gpu.driver(), gpu.state()) == ("", nvml.State())


# ---------------------------------------------------------------------- torch's GPU, with a CPU under it


@pytest.fixture
def fake_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU that `place.find` takes for those of a GPU, events by the clock, known ceilings."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import time
    from types import SimpleNamespace

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    fake = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(name="a fake H200", multi_processor_count=132),
        get_device_capability=lambda _: (9, 0), Event=Event, synchronize=lambda: None,
        mem_get_info=lambda: (10**9, 2 * 10**9),
        memory_allocated=lambda: 1000, max_memory_allocated=lambda: 1234,
        reset_peak_memory_stats=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(place, "FLUSH_BYTES", 4096)
    monkeypatch.setattr(place, "_torch_gpu", lambda: place.TorchGpu(torch, "cpu"))
    monkeypatch.setattr(
        ceilings, "_of_gpu",
        lambda *_: ceilings.Ceilings(4e12, {"bfloat16": 7e14, "float16": 7e14, "float32": 1e14}),
    )  # fmt: skip


@pytest.mark.usefixtures("fake_h200")
def test_measuring_through_torch_rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every line of the GPU path that is not CUDA's own: tensors, events, ceilings, peers, errors, rows."""
    monkeypatch.setattr("bench.commands.lengths.TOKENS", 512)
    monkeypatch.setattr("bench.commands.lengths.FEATURES", 256)
    monkeypatch.setattr("bench.commands.lengths.GPU_LENGTHS", (256,))
    only = "S256 D128 bfloat16 causal"
    for passes in ("forward", "backward"):
        words = [passes, "--quick", "--only", only, "--results", str(tmp_path), "--peers", "torch"]
        assert command.main(words) == 0
        rows = {r["implementation"]: r for r in results.read(tmp_path / f"{passes}.csv")}
        assert {"cupy_flash", "torch math"} <= set(rows)
        assert rows["cupy_flash"]["gpu"] == "a fake H200"
        assert 0 < float(rows["cupy_flash"]["of_budget"]) < 1
        assert rows["cupy_flash"]["variant"].startswith("flash")
        assert float(rows["torch math"]["median_ms"]) > 0


@pytest.mark.usefixtures("fake_h200")
def test_other_commands_through_torch_rehearsed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else is measured on a GPU, smaller: caches, packed sequences, short calls, cold ones, peaks."""
    monkeypatch.setattr("bench.commands.decode.GPU_CACHES", ((2, 4, 2, 256),))
    monkeypatch.setattr("bench.commands.varlen.GPU_SIZES", ((4, 256, 2, 128),))
    monkeypatch.setattr("bench.commands.cold._seconds", lambda *_: [1.0, 2.0, 3.0])
    monkeypatch.setattr("bench.commands.memory._peak", lambda *_: 5_000_000)
    for name, ways, most in (
        ("decode", {"cupy_flash", "cupy_flash paged", "cupy_flash attention", "torch math"}, ()),
        ("varlen", {"cupy_flash", "cupy_flash, one by one"}, ()),
        ("latency", {"cupy_flash"}, ("--only", "S1 D64", "--peers", "")),
        ("cold", {"cupy_flash", "cupy_flash without CuPy", "torch", "jax"}, ()),
        ("memory", {"cupy_flash", "torch math"}, ("--only", "S1024 ")),
    ):  # fmt: skip
        words = [name, "--quick", "--results", str(tmp_path), "--peers", "math", *most]
        assert command.main(words) == 0
        rows = results.read(tmp_path / f"{name}.csv")
        assert ways <= {row["implementation"] for row in rows}, name
        assert {row["gpu"] for row in rows} == {"a fake H200"}
        assert {row["dtype"] for row in rows} == {"float16" if name == "cold" else "bfloat16"}
    assert {row["passes"] for row in results.read(tmp_path / "varlen.csv")} == {"forward", "backward"}
    assert {row["detail"] for row in results.read(tmp_path / "latency.csv")} == {"to result", "to return"}
    assert "cost model (H200" not in capsys.readouterr().out.partition("sequences of")[2]


@pytest.mark.usefixtures("fake_h200")
def test_short_calls_without_cupy_rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row beside ours where ours goes through CuPy, by the driver's own library and nothing else."""
    taken = []
    plain = peers.ours

    def watched(*given: Any, **chosen: Any) -> Any:
        call = plain(*given, **chosen)
        return lambda: (taken.append(backends.gpu_driver("torch")), call())[1]

    monkeypatch.setattr(peers, "ours", watched)
    words = ["latency", "--quick", "--only", "S1 D64", "--peers", "none", "--results", str(tmp_path)]
    monkeypatch.setattr(choice, "why_without_cupy", lambda: "CuPy is not installed")
    assert command.main(words) == 0
    assert {row["implementation"] for row in results.read(tmp_path / "latency.csv")} == {"cupy_flash"}
    assert not taken
    monkeypatch.setattr(choice, "why_without_cupy", lambda: "")
    before = backends.gpu_driver
    assert command.main([*words[:-1], str(tmp_path / "both")]) == 0
    rows = results.read(tmp_path / "both" / "latency.csv")
    assert {row["implementation"] for row in rows} == {"cupy_flash", "cupy_flash without CuPy"}
    assert set(taken) == {cuda}
    assert backends.gpu_driver is before


@pytest.mark.usefixtures("fake_h200")
@pytest.mark.parametrize("name", ["cupy_flash", "torch math"])
def test_a_peak_through_torch_rehearsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(1, 2, 128, 64, "bfloat16", True, "forward+backward")
    assert peak.main(name, json.dumps(case), "gpu") == 0
    assert capsys.readouterr().out == "234\n"


def test_the_cost_model_says_nothing_of_packed_sequences(fake_h200: None) -> None:
    here, _ = place.find("gpu")
    case = Packed((8192, 100), 16, 128, "bfloat16")
    rows = [{"implementation": "cupy_flash", "median_ms": "1"}]
    assert session._model_lines(case, here, rows) == []
    assert len(session._model_lines(case.parts[0], here, rows)) == 2
