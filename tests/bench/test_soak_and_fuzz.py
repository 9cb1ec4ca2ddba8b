"""A slice of the fuzz, a slice of the soak, and that both would notice."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_flash
from bench import __main__ as command
from bench.commands import fuzz, soak
from bench.machine import place as places
from bench.machine.memory import growth
from cupy_flash import UnsupportedError, testing
from cupy_flash.cpu.core import isa, sources
from cupy_flash.cpu.core.locate import locate
from cupy_flash.testing import STYLES, kv_cache
from tests.cases import DTYPES
from tests.conftest import skip_without_core
from tests.paths import ROOT
from tests.random_calls import faults, hunt, server
from tests.random_calls.cache import Cached
from tests.random_calls.dense import Dense
from tests.random_calls.memory import Pages
from tests.random_calls.trial import KINDS, Outcome, Trial, _way, draw

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1.26
    from numpy import byte_bounds

PUBLIC = (
    *(name for name in cupy_flash.__all__ if name.startswith("attention")),
    *(f"derivatives.{name}" for name in cupy_flash.derivatives.__all__),
)


def test_three_thousand_calls_with_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    """Other calls than the 100,000 of `python -m bench fuzz`."""
    assert command.main(["fuzz", "--count", "3000", "--seed", "1000000"]) == 0
    text = capsys.readouterr().out
    assert "something else" not in text
    assert "a result" in text
    assert "InvalidArgumentsError" in text


def test_every_right_call_is_right() -> None:
    """Otherwise the fuzz would look at the first mistake only."""
    for name, arguments in fuzz.GOOD.items():
        fuzz.function_of(name)(**arguments)
    assert not [name for name in PUBLIC if name not in fuzz.GOOD]


def test_the_fuzz_would_notice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("from the inside")

    monkeypatch.setattr(fuzz, "call_of", lambda _: (broken, "attention", {}))
    assert command.main(["fuzz", "--count", "5"]) == 1
    assert "5 something else" in (said := capsys.readouterr()).out
    assert "again: python -m bench fuzz --one 0" in said.err


class Here:
    """In place of a process: checks a trial in this one."""

    held: tuple[int, ...] = ()

    def ask(self, trial: Trial) -> Outcome:
        return trial.outcome()


@pytest.fixture
def compiled() -> None:
    """The core of this CPU, of which trials name the libraries."""
    skip_without_core()


def drawn(seed: int, count: int, kind: str) -> list[Trial]:
    random_ = random.Random(seed)
    names = sources.choices(one for one in isa.runnable() if locate(one) is not None)
    return [draw(random_, (*names, "numpy"), DTYPES, (kind,)) for _ in range(count)]


def test_every_push_runs_calls_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """By seeds that are printed: that of the commit, or where none is given another one each time."""
    lines = [line for line in (ROOT / "scripts" / "test").read_text().splitlines() if "bench soak" in line]
    assert [re.findall(r"--minutes \S+", line) for line in lines] == [["--minutes 0.33"], ["--minutes 3"]]
    assert all(line.removesuffix(" &").endswith(" $seed") for line in lines)
    script = (ROOT / "scripts" / "test").read_text()
    assert re.findall(r"^commit=\$\((.+) 2>", script, re.MULTILINE) == ["git rev-parse --short=8 HEAD"]
    assert (ROOT / ".ci" / "run").read_text().count("scripts/test") >= 2
    seeds = set()
    for _ in range(3):
        assert command.main(["soak", "--count", "0", "--device", "cpu", "--isa", "numpy"]) == 0
        seeds.add(re.findall(r"^seed (\d+)$", capsys.readouterr().out, re.MULTILINE)[0])
    assert len(seeds) == 3


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_can_be_put_back(name: str, tmp_path: Path) -> None:
    fault = faults.FAULTS[name]
    place = tmp_path / fault.file
    place.parent.mkdir(parents=True)
    place.write_text((ROOT / fault.file).read_text())
    faults.put_back(fault, tmp_path)
    assert place.read_text() != (ROOT / fault.file).read_text()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy is of what git knows of")
def test_a_fault_that_is_put_back_is_found(tmp_path: Path) -> None:
    """One that needs no compiler; the same calls are right without it."""
    root = faults.copied(tmp_path / "copy")
    calls = ("--seed", "4", "--call", "MergeOfTwo", "--isa", "numpy")
    assert command.main(["soak", "--device", "cpu", "--count", "40", *calls]) == 0
    faults.put_back(faults.FAULTS["empty_part"], root)
    found = faults.searched(root, 60, *calls)
    assert found is not None
    assert found.calls <= 40
    assert re.fullmatch("AssertionError outside the error budget: (o|lse), (max|nan)", found.kind)


def test_a_copy_is_compiled_where_an_installation_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is editable imports the checkout as Python starts."""
    hook, root = tmp_path / "hook", tmp_path / "copy"
    for path, text in {
        hook / "sitecustomize.py": f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cupy_flash",
        root / "cupy_flash" / "__init__.py": "",
        root / "scripts" / "build_cpu.py": "import cupy_flash; open('found', 'w').write(cupy_flash.__file__)",
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(hook)
    faults.compiled(root)
    assert (root / "found").read_text() == str(root / "cupy_flash" / "__init__.py")


@pytest.mark.usefixtures("compiled")
def test_a_few_calls_in_a_process_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["soak", "--count", "6", "--device", "cpu", "--minutes", "1", "--seed", "4"]) == 0
    text = capsys.readouterr().out
    assert "seed 4\n" in text
    assert "seed 4: 6 calls" in text


def test_threads_of_a_gpu_check_what_it_draws() -> None:
    """Here on NumPy arrays, which take the same way."""
    found = soak.Soak(places.Cpu(), 0, 1.0, 12)
    found.run(2)
    assert (found.done, found.failures) == (12, [])


def test_the_soak_would_notice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It finds a wrong result, makes the call smaller, and prints a program that fails the same way."""
    right = cupy_flash.attention

    def wrong(*arrays: Any, **options: Any) -> Any:
        o, lse = right(*arrays, **{**options, "return_lse": True, "out": None})
        if options.get("out") is not None:
            options["out"][...] = o
        o += np.asarray(0.05, o.dtype)
        return (o, lse) if options.get("return_lse") else o

    monkeypatch.setattr(cupy_flash, "attention", wrong)
    monkeypatch.setattr(hunt, "Server", Here)
    monkeypatch.setattr(Here, "stop", lambda _: None, raising=False)
    monkeypatch.setattr(hunt, "SHRINKING", 2.0)
    words = ["--count", "3", "--call", "Dense", "--device", "cpu", "--minutes", "1", "--isa", "numpy"]
    assert command.main(["soak", "--seed", "0", *words]) == 1
    text = capsys.readouterr().out
    assert "0 wrong" not in text
    program = re.search(r"python - <<'END'\n(.*?)\nEND", text, re.DOTALL)
    assert program is not None
    with pytest.raises(AssertionError):
        exec(program[1], {})
    monkeypatch.setattr(cupy_flash, "attention", right)
    exec(program[1], {})


def test_a_failing_call_becomes_small() -> None:
    """What fails for its odd bound keeps that alone."""

    class Odd:
        def ask(self, trial: Trial) -> Outcome:
            left = (trial.call.window or (0, 0))[0] or 0
            return Outcome("wrong" if left % 2 and trial.call.lengths[1] > 100 else "right")

    trial = next(t for t in drawn(0, 999, "Dense") if Odd().ask(t).wrong)
    small, _ = hunt.made_smaller(trial, Outcome("wrong"), Odd())  # type: ignore[arg-type]
    assert small.call.window[0] == 1
    assert small.call.lengths == (0, 101)
    assert small.call == dataclasses.replace(
        Dense(), window=small.call.window, lengths=(0, 101), dtype=trial.call.dtype, batch=small.call.batch,
        heads=small.call.heads, head_dims=small.call.head_dims,
    )  # fmt: skip


def test_calls_fail_the_same_way_only_by_the_same_result() -> None:
    """A wrong shape of o is not the large error of lse that was found."""
    x = np.zeros((1, 1, 2, 8), np.float32)
    o, lse = cupy_flash.attention(x, x, x, return_lse=True)
    kinds = []
    for wrong in ({"lse": lse + 1}, {"lse": lse + 2}, {"lse": lse[:, :, :1]}, {"o": o + 1, "lse": lse + 1}):
        with pytest.raises(AssertionError) as error:
            testing.assert_within_budget(wrong, x, x, x)
        kinds.append(_way(error.value))
    budget = "AssertionError outside the error budget"
    assert kinds == [f"{budget}: lse, max"] * 2 + [f"{budget}: lse, shape", f"{budget}: o, max"]


# Found by the seed of 524b8c6e: rotated in float, two numbers of q are rounded to others than in double.
ROTATED = Cached(
    stored="e4m3", kind="indexed", page=64, room=128, lengths=(71, 0, 19), heads=(4, 1), queries=12,
    head_dims=(128, 5), new=12, rotary=30, tables="same", window=(125, None), scale=-0.1, layout="bshd",
    each=(3, 0, 2), each_new=(7, 1, 3), units="float16",
)  # fmt: skip


def test_a_budget_allows_for_either_rounding_of_rotated_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(ROTATED, "numpy")
    assert trial.outcome().kind == "right"
    monkeypatch.setattr(Cached, "_settle", lambda *_: None)
    assert trial.outcome().kind == "right"
    real = kv_cache.rotated_queries
    monkeypatch.setattr(kv_cache, "rotated_queries", lambda q, *how: (real(q, *how)[0], np.zeros(q.shape)))
    assert trial.outcome().kind == "AssertionError outside the error budget: lse, max"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("queries", [0, 1, 2])
def test_packed_calls_may_become_smaller(layout: str, queries: int) -> None:
    """In either layout, and of fewer rows than their sequences had."""
    less = dataclasses.replace(
        ROTATED, layout=layout, queries=queries, new=1, heads=(1, 1), head_dims=(2, 1), rotary=2
    )
    assert Trial(less, "numpy").outcome() == Outcome("right")


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_is_written_and_read(kind: str) -> None:
    """And many options come together."""
    trials = drawn(1, 300, kind)
    assert [Trial.read(trial.written()) for trial in trials] == trials
    assert sum(len(json.loads(trial.written())["call"][1]) >= 8 for trial in trials) > 60


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind_are_right(kind: str) -> None:
    """And few of them refused, or draws would be wasted."""
    found = Counter(trial.outcome().kind for trial in drawn(2, 6, kind))
    assert found["right"] >= 5
    assert found["right"] + found["refused"] == 6


def test_every_public_call_is_drawn() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests" / "random_calls").glob("*.py"))
    text = text.replace(" derivatives.", " cupy_flash.derivatives.")
    text = text.replace(" cached(", " cupy_flash.attention_with_kv_cache(")  # of tests.public
    assert [name for name in (*PUBLIC, "merge") if f"cupy_flash.{name}(" not in text] == []


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("style", [*STYLES, "contiguous"])
def test_a_byte_too_far_ends_the_process(before: bool, style: str) -> None:
    """Of any layout of rows; the first and the last byte themselves may be read."""
    memory = Pages(before=before)
    x = memory.put("x", np.arange(60, dtype=np.float16).reshape(3, 4, 5), style)
    low, high = byte_bounds(x)
    np.testing.assert_array_equal(x.ravel(), np.arange(60))
    read, write = os.pipe()
    for address, there in ((low, True), (high - 1, True), (low - 1 if before else high, False)):
        # why write: the system looks whether memory may be read, and says so without a signal
        result = ctypes.CDLL(None).write(write, ctypes.c_void_p(address), ctypes.c_size_t(1))
        assert (result == 1) == there
    os.close(read)
    os.close(write)


def test_a_changed_input_and_a_hole_in_a_result_are_seen() -> None:
    memory = Pages(before=False)
    x = memory.put("x", np.zeros((2, 3)), "padded")
    x[1, 1] = 1
    with pytest.raises(AssertionError, match=r"an input .* \(x\)"):
        memory.check()
    memory = Pages(before=False)
    memory.out((2, 3), np.float32)[0] = 0
    with pytest.raises(AssertionError, match="3 of 6 elements were never written"):
        memory.check()


def test_the_end_of_a_process_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash and a hang, and the next trial is checked all the same."""
    trial = Trial(Dense(lengths=(3, 3)), "numpy")
    asked = server.Server()
    try:
        assert asked.ask(trial) == Outcome("right")
        os.kill(asked._process.pid, signal.SIGSEGV)  # type: ignore[union-attr]
        assert asked.ask(trial).kind == "crash, SIGSEGV"
        assert asked.ask(trial) == Outcome("right")
        os.kill(asked._process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        monkeypatch.setattr(asked, "_longest", 0.1)
        assert asked.ask(trial).kind == "hang"
    finally:
        asked.stop()


def test_a_leak_is_seen_and_weather_is_not() -> None:
    up_and_down = [100 + 50 * (n % 7) for n in range(80)]
    assert growth(up_and_down) == 0
    assert growth([held + 20 * n for n, held in enumerate(up_and_down)]) > 0
    assert growth([1, 2, 3]) == 0


def test_errors_that_refuse_are_ours() -> None:
    assert fuzz.OURS[1] is UnsupportedError
    assert len(fuzz.OURS) == 3
