"""cupy-flash check: what is right passes, what is wrong is found and named, what is refused is listed."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import api, check, derivatives, info, kv_cache
from cupy_flash.__main__ import main
from cupy_flash.check import COMMON, EVERY, cases, places, report, run, speed
from cupy_flash.check.cached import Cached
from cupy_flash.check.cases import Case, Dense
from cupy_flash.check.second_order import SecondOrder
from cupy_flash.cubins import on_demand
from cupy_flash.errors import CubinNotFoundError, UnsupportedError
from tests.cpu import fake_libcuda
from tests.cpu.fake_cupy import FakeCuda, forget
from tests.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_blas_thread")

SMALL = (
    Dense(lengths=(20, 20), options={"causal": True}),
    Dense(kind="backward", dtype="float32", lengths=(20, 20)),
    Cached(room=32, lengths=(0, 17, 31), new=1),
    Dense(dtype="float32", lengths=(20, 20), options={"precision": "tf32"}),
)


def small(**how: Any) -> check.Found:
    return check.check("cpu", cases=SMALL, with_speed=False, **how)


def spoiled(
    monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Any], Any], module: Any = api
) -> None:
    """Let a public call return something else."""
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **given: spoil(real(*args, **given)))


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard calls are small, and torch takes no time."""
    monkeypatch.setattr(speed, "torch_module", lambda: None)
    monkeypatch.setattr(speed, "ON_CPU", speed.SIMULATED)


# ---- on the core that is here


@pytest.mark.usefixtures("without_torch")
def test_quick_is_right(core: Any, capsys: pytest.CaptureFixture[str]) -> None:
    del core
    assert main(["check", "--quick", "--device", "cpu", "--seed", "5"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[-1].startswith("verdict   all right: ")
    assert len(lines) < 25, "one screen"
    assert f"{len(COMMON)} in " in said.out
    assert "--seed 5" in said.out
    for kind in {case.kind for case in COMMON}:
        counts = re.search(rf"^cases +{kind} +([^;]*)", said.out, re.MULTILINE)
        assert counts
        assert sum(map(int, re.findall(r"\d+", counts[1]))) == sum(case.kind == kind for case in COMMON)
    assert "the compiled core for" in said.out
    assert len([line for line in lines if line.startswith("speed ")]) == 3
    assert re.search(r"^refused   forward float32, .*precision=tf32", said.out, re.MULTILINE)


def test_the_table() -> None:
    names = [str(case) for case in EVERY]
    assert len(set(names)) == len(names) >= 60
    dims = {dim for case in EVERY for dim in getattr(case, "head_dims", ())}
    assert {32, 64, 96, 128, 192, 256, 512} <= dims
    assert {case.kind for case in COMMON} == {"forward", "backward", "decode"}
    assert {case.kind for case in EVERY} == {"forward", "backward", "decode", "second order"}
    assert sum("score" in name or "mask function" in name for name in names) == 3
    assert sum("prefix=" in name for name in names) == 2


def test_the_page_says_how_many_cases_there_are() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert f"primitives and {len(EVERY)} cases, times three calls" in page
    assert f"primitives and {len(COMMON)} cases\n" in page


def test_the_same_seed_draws_the_same(core: Any) -> None:
    del core
    used = [[x.used for x in small(seed=seed).outcomes] for seed in (3, 3, 4)]
    assert used[0] == used[1] != used[2]


# ---- what is wrong


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoiled(monkeypatch, "attention", lambda found: (found[0] + found[0].dtype.type(0.01), found[1]))
    monkeypatch.setattr(check, "COMMON", SMALL)
    monkeypatch.setattr(check, "speed_of", lambda *_: [])
    assert main(["check", "--quick", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    name = str(SMALL[0])
    assert f"wrong     {name}\n          o: largest error " in said
    assert re.search(r"largest error 1\.0\de-02 of \S+ allowed", said)
    assert "computed by " in said
    assert said.splitlines()[-1].startswith("verdict   some cases fail: 1 right, 2 wrong, 1 refused")


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, "attention_backward", lambda found: found._replace(dk=found.dk + 1e-3))
    found = small()
    assert found.status == 1
    (wrong,) = found.of(run.WRONG)
    assert wrong.case == str(SMALL[1])
    assert wrong.says.startswith("dk: largest error")
    assert wrong.used is not None
    assert wrong.used > 1
    assert len(wrong.kernels) in (1, 2)


def test_a_wrong_second_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, "hvp", lambda found: found._replace(dk=found.dk * 1.02), derivatives)
    found = check.check("cpu", cases=[SecondOrder("float16"), SecondOrder("float64")], with_speed=False)
    assert [x.says.partition(" error")[0] for x in found.of(run.WRONG)] == ["tangent of dk: largest"] * 2
    assert all(len(x.kernels) == 3 or x.kernels == ("NumPy",) for x in found.outcomes), "all three passes"
    assert re.search(r"^cases     second order 2 wrong$", found.screen(), re.MULTILINE)


@pytest.mark.parametrize(
    ("case", "call", "option"),
    [
        (Dense(arrays=("score",), lengths=(20, 20)), (api, "attention"), "score"),
        (Dense(arrays=("mask function",), lengths=(20, 20)), (api, "attention"), "mask"),
        (Dense(kind="backward", arrays=("score",)), (api, "attention_backward"), "score"),
        (Cached(prefix=9, lengths=(0, 37)), (kv_cache, "attention_with_kv_cache"), "prefix"),
    ],
    ids=lambda x: x[1] if isinstance(x, tuple) and isinstance(x[1], str) else str(x),  # no path of a module
)
def test_an_option_that_is_lost_is_found(
    case: Case, call: tuple[Any, str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check.check("cpu", cases=[case], with_speed=False).status == 0
    module, name = call
    real = getattr(module, name)

    def without(*arrays: Any, **options: Any) -> Any:
        assert options.pop(option) is not None
        return real(*arrays, **options)

    monkeypatch.setattr(module, name, without)
    assert check.check("cpu", cases=[case], with_speed=False).status == 1


def test_kernels_of_score_functions_are_compiled_for_a_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = []
    monkeypatch.setattr(check, "run_cases", lambda *_: policies.append(on_demand._policy) or [])
    check.check("cpu", cases=[], with_speed=False)
    assert (policies, on_demand._policy) == (["allow"], "refuse")


def test_what_a_check_leaves_in_the_cache_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier", tmp_path / "new"
    monkeypatch.setattr(on_demand, "COMPILED", {earlier})
    monkeypatch.setattr(check, "run_cases", lambda *_: on_demand.COMPILED.add(new) or [])
    notes = " ".join(check.check("cpu", cases=[], with_speed=False).notes)
    assert f"stay in {new}" in notes
    assert str(earlier) not in notes


def test_a_wrong_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kv_cache.attention_with_kv_cache

    def spoil(q: Any, k_cache: Any, v_cache: Any, **given: Any) -> Any:
        found = real(q, k_cache, v_cache, **given)
        v_cache[0, 0, -1] = 0  # a row that no sequence appends
        return found

    monkeypatch.setattr(kv_cache, "attention_with_kv_cache", spoil)
    (wrong,) = small().of(run.WRONG)
    assert wrong.case == str(SMALL[2])
    assert re.search(r"v_cache: \d+ stored numbers are wrong", wrong.says)


@pytest.mark.parametrize(
    "error", [CubinNotFoundError("no cubin of x.", hint="build"), RuntimeError("an illegal address\nat 0")]
)
def test_an_error_is_wrong(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(api, "attention", fails)
    found = small()
    assert found.status == 1
    says = [x.says for x in found.of(run.WRONG)]
    assert says == [f"{type(error).__name__}: {str(error).splitlines()[0]}"] * 3


def test_after_a_lost_device_nothing_runs() -> None:
    def lost() -> None:
        raise RuntimeError("the context is gone")

    place = places.Place("numpy", "", False, np.copy, lost)
    bad = Dense(lengths=(8, 8), heads=(3, 2))  # which the library refuses as a mistake
    outcomes = run.run_cases([bad, *SMALL], [place], 0, lambda *_: None)
    assert [x.state for x in outcomes] == [run.WRONG, *[run.LEFT_OUT] * len(SMALL)]
    assert "the context is gone" in outcomes[-1].says


def test_a_problem_of_the_installation_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = info.facts() | {"problems": ["cpu: the core is damaged"]}
    monkeypatch.setattr(info, "facts", lambda: facts)
    found = small()
    assert found.status == 1
    assert found.verdict.startswith("the installation has problems: ")
    assert "1 problem of the installation" in found.verdict
    assert "problem   cpu: the core is damaged" in found.screen()


def test_a_call_that_fails_as_it_is_timed_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = speed.Timing("decode float16", None, says="an illegal address", failed=True)
    monkeypatch.setattr(check, "speed_of", lambda *_: [timing])
    found = check.check("cpu", cases=SMALL)
    assert found.status == 1
    assert "decode failed as it was timed" in found.verdict


# ---- speed


@pytest.mark.torch
def test_speed_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(speed, "ON_CPU", speed.SIMULATED._replace(dtype="float32"))
    (place,), _ = places.find("cpu")
    timings = speed.speed_of(place, True, lambda _: None)
    assert [x.call.split()[0] for x in timings] == ["forward", "backward", "decode"]
    for timing in timings:
        assert timing.says == ""
        assert timing.ratio
        assert timing.ratio > 0


# ---- what is not checked


def test_refusals_are_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("nothing fits.", reasons=[("simple", "it is Tuesday")], hint="wait")

    monkeypatch.setattr(api, "attention", refuses)
    found = check.check("cpu", cases=SMALL[:2], with_speed=False)
    assert found.status == 2
    assert [x.state for x in found.outcomes] == [run.REFUSED] * 2
    assert "it is Tuesday" in found.outcomes[0].says
    assert "wait" not in found.outcomes[0].says
    assert f"refused   {SMALL[0]}: nothing fits." in found.screen()
    assert found.verdict == "nothing could be checked: 2 refused"


def test_without_ml_dtypes_cases_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise UnsupportedError(f"NumPy knows {name} only through ml_dtypes.", hint="pip install ml_dtypes")

    monkeypatch.setattr(cases, "numpy_dtype", missing)
    found = check.check("cpu", cases=[Dense(dtype="bfloat16", lengths=(8, 8))], with_speed=False)
    assert found.status == 2
    assert "ml_dtypes" in found.of(run.LEFT_OUT)[0].says


def test_a_library_without_the_dtype_leaves_it_to_the_next() -> None:
    def refuse(x: np.ndarray) -> Any:
        raise TypeError(f"no {x.dtype}")

    numpy = places.Place("numpy", "", False, np.copy, lambda: None)
    older = numpy._replace(library="cupy", array=refuse)
    assert run.run_case(SMALL[0], [older, numpy], 0).state == run.RIGHT
    (outcome,) = [run.run_case(SMALL[0], [older], 0)]
    assert outcome.state == run.LEFT_OUT
    assert outcome.says == "cupy does not hold its arrays: no float16"


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(places, "_cupy", lambda: None)
    monkeypatch.setattr(places, "_torch", lambda: None)
    assert main(["check", "--device", "gpu"]) in (1, 2)  # 1 where CuPy is installed and finds no driver
    assert "neither CuPy nor torch reaches a GPU here" in capsys.readouterr().out


# ---- places


def test_cupy_comes_first(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    monkeypatch.setattr(places, "torch_gpu", lambda: None)
    cuda.current = 1
    (place,), said = places.find()
    assert (place[:3], place.ordinal, said) == (("cupy", "GPU 1 (sm_86)", True), 1, [])
    place.synchronize()
    assert cuda.log == [("host waits for device", 1)]
    put = place.put(
        {"q": np.zeros(3, np.float16), "mask": cupy_flash.Spans(np.zeros((2, 2), np.int32)), "n": 1}
    )
    assert type(put["q"]).__module__ == type(put["mask"].bounds).__module__ == "cupy"
    assert put["n"] == 1


@pytest.mark.torch
def test_torch_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of the CUDA driver's own library, and what torch says of it."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    forget()
    fake_libcuda.use(monkeypatch, fake_libcuda.FakeLibcuda())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    (place,), said = places.find("gpu")
    assert (place[:3], place.ordinal, said) == (("torch", "GPU 0 (sm_80)", True), 0, [])
    forget()
    fake_libcuda.forget()


def test_a_library_that_fails_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ImportError("libcudart.so.12: not found\nand more")

    monkeypatch.delenv("CUPY_FLASH_DRIVER", raising=False)
    monkeypatch.setattr(places, "_cupy", broken)
    monkeypatch.setattr(places, "_torch", lambda: None)
    (place,), (said,) = places.find()
    assert place.library == "numpy"
    assert said == "broken does not reach a GPU: ImportError: libcudart.so.12: not found"


@pytest.mark.torch
def test_bfloat16_reaches_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.float32([1, -2.5]).astype(cases.numpy_dtype("bfloat16"))
    tensor = places.as_tensor(torch, x)
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.0, -2.5]


# ---- the report

SECRET = "/home/somebody/.cache/cupy_flash/cuda12/sm_80/simple_forward_f16.cubin"


@pytest.fixture
def with_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts and errors that say where things are."""
    row = {"set": "cuda12", "target": "sm_80", "kernels": 3, "bytes": 2**20, "problem": None,
           "origin": "CUPY_FLASH_CUBIN_DIR", "path": SECRET}  # fmt: skip
    facts = info.facts() | {
        "cubins": [row],
        "unreadable": [{"origin": "user cache", "path": SECRET, "why": "Permission denied"}],
        "problems": [f"cpu: {SECRET} is damaged.\nTry: C:\\Users\\somebody\\fix"],
    }
    monkeypatch.setattr(info, "facts", lambda: facts)

    def fails(*_: Any, **__: Any) -> Any:
        raise CubinNotFoundError(f"{SECRET} cannot be read, nor ~/somebody/x.", hint="")

    monkeypatch.setattr(kv_cache, "attention_with_kv_cache", fails)


def user() -> list[str]:
    """The name of the user; a number without an entry in passwd has none."""
    try:
        return [getpass.getuser()]
    except (KeyError, OSError):  # until and from Python 3.13
        return []


@pytest.mark.usefixtures("with_a_path", "without_torch")
@pytest.mark.parametrize("kind", ["markdown", "json"])
def test_the_report_names_nobody(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "COMMON", SMALL)
    assert main(["check", "--quick", "--device", "cpu", "--report", kind]) == 1
    said = capsys.readouterr().out
    words = set(re.findall(r"[\w.-]+", said))
    assert not words & {"somebody", socket.gethostname(), *user()}
    assert not re.search(r"[/\\](home|tmp|usr|root|work|Users)\b", said.replace("\\\\", "\\"))
    assert str(ROOT) not in said
    assert "simple_forward_f16.cubin" in said, "which file it was"
    for case in SMALL:
        assert str(case) in said
    if kind == "json":
        found = json.loads(said)
        assert found["status"] == 1
        assert found["cubins"][0]["verified"] is True
        assert found["unreadable"] == [{"origin": "user cache", "why": "Permission denied"}]
        assert [x["state"] for x in found["cases"]] == ["right", "right", "wrong", "refused"]
        assert found["versions"]["cupy_flash"] == cupy_flash.__version__
        assert len(found["speed"]) == 3
    else:
        assert said.startswith("### cupy-flash check: some cases fail")
        assert "\n- cubins: user cache cannot be read: Permission denied\n" in said
        rows = [line for line in said.splitlines() if line.startswith("| forward")]
        assert all(re.fullmatch(r"\|.*\|", row) for row in rows)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/home/me/.cache/a.cubin cannot", ".../a.cubin cannot"),
        ("in /home/me/work: gone", "in ...: gone"),
        (r"C:\Users\me\x.dll is", ".../x.dll is"),
        ("heads 8/2, head dim 576/512", "heads 8/2, head dim 576/512"),
        ("1/2/3 of a", "1... of a"),
        ("~/me/x", "..."),
    ],
)
def test_paths_go(text: str, found: str) -> None:
    assert report.without_paths(text) == found


# ---- as a command of a shell


IMPORTED = """
import sys
from cupy_flash.check.places import find
from cupy_flash.check.run import run_case
from tests.cpu.test_check import SMALL

places, _ = find("cpu")
before = set(sys.modules)
for case in SMALL:
    run_case(case, places, 0)
sys.exit(" ".join(set(sys.modules) - before))
"""


def test_cases_import_nothing() -> None:
    """Compiled modules, numpy.random among them, lose an interrupt that comes while they are imported."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stderr == "\n"  # the names of what is new


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
from cupy_flash import check
from cupy_flash.__main__ import main
from cupy_flash.check import run
from tests.cpu.test_check import SMALL

check.COMMON = SMALL * 1000
real = run.run_case
run.run_case = lambda *given: (print("a case", flush=True), real(*given))[1]
sys.exit(main(["check", "--quick", "--device", "cpu"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="consoles of Windows interrupt in another way")
def test_it_can_be_interrupted(tmp_path: Path) -> None:
    """Both streams are pipes; nothing is written to where it runs."""
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "a case\n"
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert set(said.splitlines()) <= {"a case"}
    assert error == "interrupted; nothing is left behind\n"
    assert list(tmp_path.iterdir()) == []
