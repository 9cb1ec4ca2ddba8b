"""The benchmark itself: its clock, its counts, its rows, what it says of what is missing."""

from __future__ import annotations

import functools
import itertools
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import __main__ as command
from bench import work
from bench.commands import functions, lengths, memory, spans
from bench.machine import ceilings, conditions, cpu_share, fresh, nvml, place, timing
from bench.measure import accuracy, peers, results, session
from bench.measure.peers import OURS, PEERS, Peer, Skipped

SMALL = work.Case(1, 2, 64, 16)


# ---------------------------------------------------------------------- the clock


def test_the_clock_costs_less_than_two_percent() -> None:
    """Of calls of 2 ms, which time themselves: so others on this machine do not matter."""
    own: list[float] = []

    def call() -> None:
        start = time.perf_counter()
        while (now := time.perf_counter()) < start + 2e-3:
            pass
        own.append(now - start)

    added = []
    for _ in range(15):
        seconds = timing.by_clock(call)
        added.append(seconds / own[-1] - 1)
    assert 0 <= statistics.median(added) < 0.02


def test_threads_that_spin_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a BLAS spin after their work; but not for ever."""

    def spin(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    still_spinning = []
    for _ in range(5):
        spinner = threading.Thread(target=spin, args=(0.1,))
        spinner.start()
        timing.settle()
        still_spinning.append(spinner.is_alive())
        spinner.join()
    assert sum(still_spinning) <= 1  # others may have kept the spinner itself from its processor
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.05)
    spinner = threading.Thread(target=spin, args=(1.0,))
    spinner.start()
    timing.settle()
    assert spinner.is_alive()
    spinner.join()


def test_an_idle_process_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 20.0)
    start = time.perf_counter()
    timing.settle()
    assert time.perf_counter() - start < 10


def test_quartiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "of_others", lambda *_: 0.0)
    durations = iter([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    took = timing.alternate({"a": (lambda: None, lambda _: next(durations))}, 5, 20.0)["a"]
    assert took[:4] == (2.0, 3.0, 4.0, 5)  # the first was to warm up
    assert took.noise == pytest.approx(1 / 3)


def test_samples_beside_other_programs_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    share = iter([0.9, 0.0, 0.8, 0.02, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(cpu_share, "of_others", lambda *_: next(share))
    durations = iter([0.0, 50.0, 1.0, 60.0, 2.0, 3.0, 4.0, 5.0])
    took = timing.alternate({"a": (lambda: None, lambda _: next(durations))}, 5, 20.0)["a"]
    assert took[:4] == (2.0, 3.0, 4.0, 5)
    assert took.others == pytest.approx(0.004)


def test_where_it_is_never_calm_all_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "of_others", lambda *_: 0.5)
    took = timing.alternate({"a": (lambda: None, lambda _: 1.0)}, 6, 0.0)["a"]
    assert (took.samples, took.others) == (timing.LEAST_REPETITIONS, 0.5)
    assert timing.alternate({"a": (lambda: None, lambda _: 1.0)}, 6, 20.0)["a"].samples == 3 * 6


def test_the_share_of_others_is_of_all_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of what all processors did, without this process, its children that ended, and one tick of rounding."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 200 400 9000 9000 800 1600 3200 9000 9000\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(cpu_share, "_STAT", stat)
    children = SimpleNamespace(children_user=2.0, children_system=4.0)
    monkeypatch.setattr(cpu_share, "os", SimpleNamespace(times=lambda: children, cpu_count=lambda: 4))
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    before = cpu_share.sample()
    assert before[1:] == pytest.approx((63.0, 7.0))
    after = cpu_share.Sample(before.wall + 2.0, before.busy + 5.012, before.own + 3.0)
    assert cpu_share.of_others(before, after) == pytest.approx(0.25)
    assert cpu_share.of_others(before, after._replace(own=before.own + 6.0)) == 0
    assert cpu_share.of_others(before, before) == 0
    stat.unlink()
    unknown = cpu_share.sample()
    assert cpu_share.of_others(unknown, unknown._replace(wall=unknown.wall + 1.0)) == 0


def test_others_are_seen() -> None:
    """Another process on a processor, while we sleep. A child counts as another until it is waited for."""
    before = cpu_share.sample()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.5)
    share = cpu_share.of_others(before, cpu_share.sample())
    child.kill()
    child.wait()
    assert share > 0.1


def test_ways_take_turns_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "of_others", lambda *_: 0.0)
    order: list[str] = []
    ways = {name: ((lambda name=name: order.append(name)), _once) for name in "ab"}
    timing.alternate(ways, 50, 0.0, warm_up=0)
    assert order == list("ab") * timing.LEAST_REPETITIONS


def _once(call: timing.Call) -> float:
    call()
    return 1.0


class FakeGpu:
    """Events that count what was enqueued between them."""

    def __init__(self) -> None:
        self.queue: list[str] = []

    def event(self) -> Any:
        return FakeEvent(self)

    def elapsed(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.waited is False
        assert end.waited
        return float(end.at - start.at)

    def flush(self) -> None:
        self.queue.append("flush")

    def synchronize(self) -> None:
        self.queue.append("synchronize")


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.waited = gpu, False

    def record(self) -> None:
        self.at = len(self.gpu.queue)

    def synchronize(self) -> None:
        self.waited = True


def test_events_hold_the_call_alone_behind_a_flush() -> None:
    gpu = FakeGpu()
    stopwatch = timing.by_events(gpu)
    assert stopwatch(lambda: gpu.queue.append("kernel")) == 1.0
    assert gpu.queue == ["flush", "kernel"]


def test_the_wall_clock_starts_when_the_flush_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def clock() -> float:
        gpu.queue.append("clock")
        return 2.0 * len(gpu.queue)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock))
    assert timing.by_wall(gpu)(lambda: gpu.queue.append("kernel")) == 4.0
    assert gpu.queue == ["flush", "synchronize", "clock", "kernel", "clock"]


class FakeNvml:
    """The library of a GPU that reports everything but what is in `silent`."""

    def __init__(self, *silent: str) -> None:
        numbers = {
            "nvmlDeviceGetPowerUsage": {"value": 512_500},
            "nvmlDeviceGetUtilizationRates": {"gpu": 97, "memory": 5},
            "nvmlDeviceGetMemoryInfo": {"total": 30, "free": 10, "used": 20},
            "nvmlDeviceGetClockInfo": {"value": 1980},
            "nvmlDeviceGetTemperature": {"value": 41},
            "nvmlDeviceGetHandleByPciBusId_v2": {"value": 7},
            "nvmlSystemGetDriverVersion": {"value": b"570.1"},
            "nvmlInit_v2": {},
        }
        for name, fields in numbers.items():
            setattr(self, name, functools.partial(self._answer, name in silent, fields))

    def _answer(self, silent: bool, fields: dict[str, Any], *arguments: Any) -> int:
        outs = [getattr(x, "_obj", x) for x in arguments if hasattr(x, "_obj") or hasattr(x, "raw")]
        for name, value in {} if silent else fields.items():
            setattr(outs[0], name, value)
        return int(silent)


def test_what_a_gpu_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(library: FakeNvml | None) -> tuple[nvml.State, str]:
        monkeypatch.setattr(nvml, "_library", lambda: library)
        gpu = nvml.Nvml("0000:0F:00.0")
        return gpu.state(), gpu.driver()

    everything = nvml.State(1980, 512.5, 41, 97, 10)
    assert state(FakeNvml()) == (everything, "570.1")
    assert str(everything) == "1980 MHz 512 W 41 C"
    parts = {"PowerUsage": "watts", "UtilizationRates": "busy_percent", "ClockInfo": "clock_mhz",
             "Temperature": "celsius"}  # fmt: skip
    for name, field in parts.items():
        assert state(FakeNvml(f"nvmlDeviceGet{name}"))[0] == everything._replace(**{field: None})
    less = everything._replace(free_bytes=None)
    assert state(FakeNvml("nvmlDeviceGetMemoryInfo"))[0] == less
    assert state(FakeNvml("nvmlDeviceGetHandleByPciBusId_v2")) == (nvml.State(), "570.1")
    for library in (None, FakeNvml("nvmlInit_v2"), FakeNvml("nvmlInit_v2", "nvmlSystemGetDriverVersion")):
        assert state(library) == (nvml.State(), "")
    assert str(nvml.State()) == "clocks unknown"


# ---------------------------------------------------------------------- work


@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (1, 7)])
def test_work_is_counted_pair_by_pair(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    case = work.Case(2, 4, queries, 16, causal=True, heads_k=2, seqlen_k=keys)
    seen = sum(1 for i in range(queries) for j in range(keys) if j <= i + keys - queries)
    assert case.pairs() == seen
    assert case.flops() == 4 * 2 * 4 * seen * 16
    assert case._replace(passes="backward").flops() == 2.5 * case.flops()


def test_traffic_is_every_operand_once() -> None:
    case = work.Case(1, 4, 10, 8, "float16", heads_k=2, seqlen_k=30)
    assert case.traffic() == 2 * (2 * 4 * 10 * 8 + 2 * 2 * 30 * 8)
    assert set(case.inputs()) == {"q", "k", "v", "do"}


def test_the_reduced_case_keeps_its_kind() -> None:
    case = work.Case(8, 32, 8192, 128, "bfloat16", True, "backward", heads_k=8)
    assert case.reduced() == work.Case(1, 4, 512, 128, "bfloat16", True, "backward", heads_k=1)


def test_float8_is_measured_beside_16_bits() -> None:
    kinds = [case.dtype for case in lengths.on_gpu("forward", ("bfloat16",), quick=True, float8=True)]
    assert kinds[:4] == ["bfloat16", work.FLOAT8] * 2
    assert work.FLOAT8 not in [c.dtype for c in lengths.on_gpu("backward", ("bfloat16",), False, True)]
    case = SMALL._replace(head_dim=128, dtype=work.FLOAT8)
    assert [launch.variant.dtype for launch in case.plan("sm_90").launches] == ["e4m3"]
    assert case.traffic() == (3 + 2) * 2 * 64 * 128
    exact = accuracy.measure(OURS.prepare, case, place.Cpu())
    assert 0 < exact.of_budget < 1
    torch_cpu = next(peer for peer in PEERS if peer.name == "torch")
    with pytest.raises(Skipped, match="no 8-bit floats"):
        torch_cpu.ready(case, {}, place.Cpu())


def test_errors_are_of_the_budget() -> None:
    def wrong(case: Any, inputs: Any, there: Any) -> Any:
        return lambda: (peers.ours(case, inputs, there)()[0] * np.float32(1.01),)

    right = accuracy.measure(peers.ours, SMALL, place.Cpu())
    off = accuracy.measure(wrong, SMALL, place.Cpu())
    assert right.of_budget < 1 < off.of_budget
    assert off.error == pytest.approx(0.01, rel=0.05)


def test_errors_at_full_size_are_of_the_last_rows() -> None:
    case = work.Case(1, 2, 700, 16, causal=True)
    inputs = case.inputs()
    o = peers.ours(case, inputs, place.Cpu())()[0]
    assert accuracy.of_rows(o, case, inputs) < 1e-5
    o[0, 0, -1] += 1
    assert accuracy.of_rows(o, case, inputs) > 0.1


def test_rounding_over_many_keys_is_no_mistake() -> None:
    """Sums in float32 one by one, as a peer may do them, and the same with one of 100,000 keys left out."""
    case = work.Case(1, 1, 1, 32, seqlen_k=100_000)

    def error(of: work.Case, keys: int) -> float:
        inputs = of.inputs()
        q, k, v = (inputs[name] for name in "qkv")
        s = (q @ k[:, :, :keys].swapaxes(2, 3)) * np.float32(32**-0.5)
        p = np.exp(s - s.max())
        total, o = np.cumsum(p, axis=3)[..., -1:], np.cumsum(p[..., None] * v[:, :, None, :keys], axis=3)
        return accuracy.of_rows(o[..., -1, :] / total, of, inputs)

    small = error(case.reduced(), 512)
    assert 10 * small < error(case, 100_000) < accuracy.most_of_rows(small, case) < error(case, 99_999)


# ---------------------------------------------------------------------- peers


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_that_is_missing_is_a_sentence(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "jax", "cupy", "flash_attn", "flash_attn_interface", "flash_attn_3",
                 "fa3_fwd_interface", "flash_attn3_jax"):  # fmt: skip
        monkeypatch.setitem(__import__("sys").modules, name, None)
    if peer.name in ("naive", "cupy_flash numpy"):
        peer.ready(SMALL, SMALL.inputs(), place.Cpu())
        return
    with pytest.raises(Skipped, match=r"not installed|is about|is what"):
        peer.ready(SMALL, SMALL.inputs(), place.Cpu())


@pytest.mark.parametrize("passes", work.PASSES)
@pytest.mark.parametrize("name", ["torch", "torch math", "torch flash", "jax xla", "naive"])
def test_peers_that_are_here_agree_with_fp64(name: str, passes: str) -> None:
    module = name.partition(" ")[0]
    if module != "naive":
        pytest.importorskip(module, reason=f"{module} is not installed")
    peer = next(peer for peer in PEERS if peer.name == name)
    case = SMALL._replace(passes=passes, causal=True)
    if name == "naive" and passes != "forward":
        with pytest.raises(Skipped, match="has no backward pass"):
            peer.ready(case, case.inputs(), place.Cpu())
        return
    call = peer.ready(case, case.inputs(), place.Cpu())
    assert len(call()) == {"forward": 1, "backward": 3, "forward+backward": 4}[passes]
    assert accuracy.measure(peer.prepare, case, place.Cpu()).of_budget < 1


def test_matrices_that_do_not_fit_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.Cpu, "state", lambda _: place.State(free_bytes=10_000))
    naive = next(peer for peer in PEERS if peer.name == "naive")
    with pytest.raises(Skipped, match="for its S x S matrices, 1e-05 GB are free"):
        naive.ready(SMALL, SMALL.inputs(), place.Cpu())


# ---------------------------------------------------------------------- rows


def test_rows_are_appended_and_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    results.append(path, [{"a": "1", "b": "2"}])
    results.append(path, [{"b": "3"}])
    assert results.read(path) == [{"a": "1", "b": "2"}, {"a": "", "b": "3"}]
    with pytest.raises(ValueError, match="no column c"):
        results.append(path, [{"c": "1"}])
    assert results.read(tmp_path / "none.csv") == []


def test_repetitions_of_a_run_are_pooled() -> None:
    """Medians of times, the best of ceilings, all samples, and each note once."""
    times, ceilings_ms, shares = ("3", "1", "8"), ("0.5", "0.75", "0.6"), ("0.0", "0.3", "0.06")
    visits = [
        {"what": "forward", "median_ms": time, "ceiling_ms": least, "copy_gb_per_s": time, "samples": "7",
         "others": share, "note": note, "of_ceiling": "?", "tflops": ""}
        for time, least, share, note in zip(times, ceilings_ms, shares, ("", "a", "a"), strict=True)
    ]  # fmt: skip
    assert results.pooled(visits) == {
        "what": "forward", "median_ms": "3", "ceiling_ms": "0.5", "copy_gb_per_s": "8", "samples": "21",
        "others": "0.120", "note": "a", "of_ceiling": "0.167", "tflops": "",
    }  # fmt: skip
    assert results.pooled(visits[1:2]) == visits[1]


def test_which_rows_count() -> None:
    assert [results.calm({"others": x}) for x in ("", "0.1", "0.101")] == [True, True, False]
    assert [results.right({"of_budget": x}) for x in ("", "1.0", "1.01")] == [True, True, False]
    ours, theirs = ({"implementation": x, "seqlen": "8", "others": x} for x in "ab")
    assert results.case(ours) == results.case(theirs) != results.case({**ours, "seqlen": "9"})
    assert results.identity(ours) != results.identity(theirs)


@pytest.mark.parametrize("path", sorted(results.RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_committed_rows_have_the_columns(path: Path) -> None:
    rows = results.read(path)
    assert rows
    if path.name not in ("agreement.csv", "overhead.csv"):
        assert list(rows[0]) == list(results.COLUMNS)
        assert all(row["commit"] and row["when"] and (row["cpu"] or row["gpu"]) for row in rows)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that are known, and a commit that stays."""
    known = ceilings.Ceilings(4e10, {"float32": 2e11})
    monkeypatch.setattr(ceilings, "measure", lambda *_: known)
    monkeypatch.setattr(conditions, "commit", lambda: "abc")


@pytest.mark.slow
def test_ceilings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # why: other tests run beside it, and what is wanted are numbers, not good ones.
    monkeypatch.setattr(cpu_share, "of_others", lambda *_: 0.0)
    found = ceilings.measure(place.Cpu(), quick=True)
    assert found.bytes_per_second > 1e8
    assert found.flops["float32"] > 1e8
    long, decoding = work.Case(1, 1, 4096, 64), work.Case(1, 1, 1, 64, seqlen_k=4096)
    known = ceilings.Ceilings(4e10, {"float32": 2e11})
    assert known.least_seconds(long) == (long.flops() / 2e11, "matrix")
    assert known.least_seconds(decoding) == (decoding.traffic() / 4e10, "memory")


def run(*words: str) -> int:
    return command.main([str(word) for word in words])


def test_a_label_that_no_case_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    settings = session.Settings(device="cpu", only="head_dim 64")
    none = session.Session("cpu", settings, bounded=False).cases([SMALL])
    assert not list(none)
    assert f"Try: a part of one, such as {str(SMALL)!r}" in capsys.readouterr().out


@pytest.mark.usefixtures("quiet")
@pytest.mark.slow
def test_a_measurement_is_a_whole_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceilings are measured at every visit: where the first minute is busy, the best of all holds."""
    rates = itertools.chain([1e9, 3e11], itertools.repeat(2e11))
    known = (ceilings.Ceilings(4e10, {"float32": rate}) for rate in rates)
    monkeypatch.setattr(ceilings, "measure", lambda *_: next(known))
    only = ("--only", "S256 D64 float32 forward", "--peers", "naive")
    words = ("forward", "--quick", *only, "--device", "cpu")
    assert run(*words, "--results", tmp_path) == 0
    visits = results.read(tmp_path / "forward.csv")
    assert len(visits) == 2 * session.VISITS
    ours, naive = map(results.pooled, results.runs(visits))
    assert int(ours["samples"]) == sum(int(row["samples"]) for row in visits[::2])
    assert (ours["implementation"], naive["implementation"]) == ("cupy_flash", "naive")
    for row in (ours, naive):
        assert float(row["lower_ms"]) <= float(row["median_ms"]) <= float(row["upper_ms"])
        assert 0 < float(row["of_budget"]) < 1
        assert float(row["copy_gb_per_s"]) > 0
        assert all(row[name] for name in ("load", "cpu", "versions", "commit", "when", "bound", "tflops"))
    of_ours = visits[::2]
    assert [float(row["matrix_tflops"]) for row in of_ours] == [0.001, 0.3, 0.3, 0.3]
    assert float(ours["matrix_tflops"]) == 0.3
    assert float(ours["ceiling_ms"]) == min(float(row["ceiling_ms"]) for row in of_ours)
    share = float(ours["ceiling_ms"]) / float(ours["median_ms"])
    assert float(ours["of_ceiling"]) == pytest.approx(share, 0.1)
    assert ours["variant"] == session.variant(SMALL, place.Cpu())
    assert "measured ceilings" in capsys.readouterr().out
    # What is there already is left out, and the rest is not begun when the time is over.
    assert run(*words, "--results", tmp_path, "--resume") == 0
    assert results.read(tmp_path / "forward.csv") == visits
    assert run("forward", "--quick", "--results", tmp_path, "--minutes", "1e-9", "--device", "cpu") == 0
    assert "minutes are over" in capsys.readouterr().out
    assert results.read(tmp_path / "forward.csv") == visits


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["forward", "latency"])
def test_inputs_that_do_not_fit_are_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(place.Cpu, "inputs", full)
    assert run(name, "--quick", "--device", "cpu", "--results", tmp_path) == 0
    assert "not measured, its inputs do not fit: Unable to allocate 9 TiB" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["decode", "latents", "varlen", "latency"])
def test_other_measurements_run_without_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = functools.partialmethod(session.Session.cases, visits=1)
    monkeypatch.setattr(session.Session, "cases", once)
    only = {"decode": "S1/4096", "latents": "D576 float32", "varlen": "forward", "latency": "S64 "}[name]
    words = ("--quick", "--only", only, "--peers", "", "--device", "cpu", "--results", tmp_path)
    assert run(name, *words) == 0
    rows = results.read(tmp_path / f"{name}.csv")
    assert rows
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert run(name, *words, "--resume") == 0
    assert results.read(tmp_path / f"{name}.csv") == rows, "all of it is there already"


@pytest.mark.parametrize("name", spans.MASKS)
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_ways_of_a_mask_say_the_same(name: str, passes: str) -> None:
    """Intervals, blocks, functions, options and packed sequences, each against FP64."""
    problem = spans.Problem(name, work.Case(1, 2, 512, 16, passes=passes, heads_k=1))
    for way, prepare in problem.mask.ways.items():
        if way != spans.MAKING:
            assert accuracy.measure(prepare, problem, place.Cpu()).of_budget < 1, way


def test_a_mask_that_says_something_else_is_found_out() -> None:
    problem = spans.Problem("causal", work.Case(1, 2, 512, 16))
    without = accuracy.measure(lambda case, *there: peers.ours(case.case, *there), problem, place.Cpu())
    assert without.of_budget > 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", functions.GALLERY)
def test_the_gallery_says_the_same_in_torch(name: str) -> None:
    """Each function of the gallery, ours and flex_attention's, against FP64."""
    pytest.importorskip("torch", reason="torch is not installed")
    case = functions.Gallery(name, work.Case(1, 2, 256, 16))
    for prepare in (peers.ours, functions._flex(compiled=False)):
        assert accuracy.measure(prepare, case, place.Cpu()).of_budget < 1


@pytest.mark.parametrize("only", ["causal B1 H2 S1024", "make prefix_lm"])
@pytest.mark.slow
def test_spans_are_rows_of_processor_time(only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "commit", lambda: "abc")
    assert run("spans", "--quick", "--only", only, "--results", tmp_path) == 0
    rows = results.read(tmp_path / "spans.csv")
    ratios = spans.ratios(rows)
    assert len(rows) == session.VISITS * len(ratios) > 0
    for row in rows:
        assert float(row["median_ms"]) > 0
        assert (row["what"], row["note"]) == ("spans", "processor time")
        assert (row["implementation"] == spans.MAKING) == (not row["of_budget"])
        assert all(row[name] for name in ("detail", "commit", "when", "cpu", "versions"))
    assert all(ratio > 0 for ratio in ratios.values())
    assert next(iter(ratios.values())) == 1
    assert run("spans", "--quick", "--only", only, "--results", tmp_path, "--resume") == 0
    assert results.read(tmp_path / "spans.csv") == rows


def test_processor_time_is_of_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(timing, "settle", lambda: called.append("settled"))
    monkeypatch.setattr(timing, "WAKING_SECONDS", 0.0)
    monkeypatch.setattr(time, "process_time", lambda: 3.0 * len(called))
    assert timing.by_processor(lambda: called.append("call")) == 3.0
    assert called == ["settled", "call", "call"]


def test_memory_of_flash_is_less_than_naive() -> None:
    case = work.Case(1, 2, 1024, 64)
    naive = next(peer for peer in PEERS if peer.name == "naive")
    ours, textbook = (memory._peak(peer, case, "cpu") for peer in (OURS, naive))
    assert isinstance(ours, int)
    assert isinstance(textbook, int)
    assert ours < textbook / 4


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "words",
    [(), ("frwrd",), ("forward", "--quik"), ("forward", "--minutes", "-1"), ("forward", "--threads", "0"),
     ("compare", "a.csv"), ("fuzz", "--count", "many"), ("forward", "--device", "tpu")],
)  # fmt: skip
def test_wrong_arguments_exit_2_with_usage(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words)
    assert ended.value.code == 2
    assert "usage: python -m bench" in capsys.readouterr().err


def test_no_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_torch_gpu", lambda: None)
    monkeypatch.setattr(place, "_cupy_gpu", lambda: None)
    there, sentences = place.find()
    assert there.name == "cpu"
    assert sentences == ["No GPU that torch or CuPy can use: measuring NumPy arrays on the CPU."]


def test_a_broken_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA driver initialization failed\nand more")

    monkeypatch.setattr(place, "_torch_gpu", broken)
    there, sentences = place.find()
    assert there.name == "cpu"
    assert "torch failed at the GPU (RuntimeError: CUDA driver initialization failed)" in sentences[0]


def test_threads_hold_the_blas() -> None:
    from threadpoolctl import threadpool_info

    limit = session._limited(1)
    try:
        assert {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"} <= {1}
    finally:
        limit.restore_original_limits()


def test_steps_of_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, each for itself; and with bytecode, without which imports are compilations."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    steps = ["n = 300_000", "sum(range(10 * n))", "import sys; assert not sys.dont_write_bytecode"]
    short, long, _ = fresh.least_us(steps, 1)
    assert 0 <= short < long


def test_where_a_row_was_measured() -> None:
    row = conditions.surroundings(place.Cpu())
    assert {"when", "commit", "cpu", "cores", "load", "gpu", "driver", "versions"} <= set(row)
    assert "numpy" in row["versions"]
    assert row["cpu"]
    if "model name" in (known := Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""):
        assert f"model name\t: {row['cpu']}\n" in known
    assert sys.platform == "win32" or float(row["load"]) >= 0


def test_a_commit_with_changes_has_a_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True).stdout

    monkeypatch.setattr(conditions, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert conditions.commit() == "unknown"
    git("init")
    for name in ("cupy_flash", "kernels_cpu", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("")
    git("add", "."), git("commit", "-m", "a")
    clean = git("rev-parse", "--short", "HEAD").strip()
    (tmp_path / "docs" / "a.txt").write_text("changed")
    (tmp_path / "kernels_cpu" / "new.txt").write_text("no part of the commit")
    assert clean
    assert conditions.commit() == clean
    (tmp_path / "kernels_cpu" / "a.txt").write_text("changed")
    assert conditions.commit() == f"{clean}+"


def test_all_is_every_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    for name, one in list(command.COMMANDS.items()):
        if one.measures and name != "all":
            fake = one._replace(run=lambda settings, name=name: ran.append(f"{name} {settings.quick}"))
            monkeypatch.setitem(command.COMMANDS, name, fake)
    monkeypatch.setattr(command.overhead, "run", lambda: ran.append("overhead"))
    monkeypatch.setattr(command.plot, "run", lambda chosen: ran.append(f"plot {chosen.results}"))
    assert run("all", "--quick", "--results", tmp_path) == 0
    measurements = (
        "forward",
        "backward",
        "decode",
        "latents",
        "varlen",
        "latency",
        "cold",
        "memory",
        "cpu",
        "layers",
        "functions",
        "spans",
    )
    assert ran == [*(f"{name} True" for name in measurements), "overhead", f"plot {tmp_path}"]
