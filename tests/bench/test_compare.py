"""compare, and the figures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as command
from bench.commands import plot
from bench.machine import timing
from bench.measure import results, session


def row(median: float, spread: float = 0.01, **changes: str) -> dict[str, str]:
    values = dict.fromkeys(results.COLUMNS, "") | {
        "what": "forward", "implementation": "cupy_flash", "batch": "1", "heads": "2", "seqlen": "64",
        "head_dim": "16", "dtype": "float32", "causal": "False", "passes": "forward",
        "lower_ms": str(median * (1 - spread)), "median_ms": str(median),
        "upper_ms": str(median * (1 + spread)),
        "commit": "abc", "cpu": "this", "when": "2026-01-01 00:00", "cores": "2",
    }  # fmt: skip
    return values | changes


def written(path: Path, *rows: dict[str, str]) -> Path:
    return results.append(path, rows, results.COLUMNS)


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert command.main(["compare", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path / "a.csv", row(10), row(10, seqlen="128"), row(10, seqlen="256"))
    after = written(tmp_path / "b.csv", row(10.1), row(8, seqlen="128"), row(12, seqlen="256", cpu="other"))
    text = compared(capsys, before, after)
    assert "1 faster, 1 slower, 1 same within noise" in text
    assert "1.250x" in text
    assert "Not one machine" in text


def test_what_the_machine_did_is_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path / "a.csv", row(10), row(20, implementation="torch"))
    after = written(tmp_path / "b.csv", row(5), row(10, implementation="torch"))
    assert "as the machine did: 1.000" in compared(capsys, before, after)


def test_two_commits_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = {"commit": "def", "when": "2026-01-01 00:02"}
    path = written(tmp_path / "a.csv", row(10), row(9, commit="def"), row(5, **later))
    assert "2.000x" in compared(capsys, f"{path}@abc", f"{path}@def")
    assert "no measurement in common" in compared(
        capsys, path, written(tmp_path / "b.csv", row(1, heads="3"))
    )


def test_what_one_visit_found_wrong_is_not_lost() -> None:
    visits = [row(10), row(12, note="WRONG at full size", samples="7"), row(11)]
    (run,) = results.runs(visits)
    pooled = results.pooled(run)
    assert (pooled["median_ms"], pooled["samples"], pooled["note"]) == ("11", "7", "WRONG at full size")


@pytest.mark.parametrize("words", [("none.csv", "cpu.csv"), ("cpu.csv", "cpu.csv@zzzzzzz")])
def test_missing_files_exit_2(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["compare", *words]) == 2
    assert "usage: python -m bench compare" in capsys.readouterr().err


def test_two_runs_of_one_thing_agree_within_the_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine whose speed drifts by a tenth from visit to visit and by a hundredth from call to call."""
    draw = np.random.default_rng(0)

    def visit(n: int, slower: float = 1.0) -> dict[str, str]:
        durations = slower * draw.lognormal(0, 0.1) * (draw.lognormal(0, 0.01, 7) + draw.exponential(0.01, 7))
        lower, median, upper, *_ = timing.Timing.of(list(durations))
        return row(median, seqlen=str(n)) | {"lower_ms": str(lower), "upper_ms": str(upper)}

    def same(a: str, b: str) -> int:
        text = compared(capsys, tmp_path / a, tmp_path / b)
        told = re.search(r"(\d+) same within noise$", text, re.MULTILINE)
        assert told
        return int(told[1])

    for name in ("a", "b"):
        written(tmp_path / f"{name}.csv", *(visit(n) for n in range(200) for _ in range(session.VISITS)))
        written(tmp_path / f"{name}_once.csv", *(visit(n) for n in range(200)))
    slower = (visit(n, 1.8) for n in range(200) for _ in range(session.VISITS))
    written(tmp_path / "slower.csv", *slower)
    assert same("a.csv", "b.csv") >= 199
    assert same("a.csv", "slower.csv") <= 20
    # What one visit knows of itself is not enough.
    assert same("a_once.csv", "b_once.csv") < 100


def test_figures_are_of_measured_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib, which is not installed")
    folder = tmp_path / "results"
    measured = {"tflops": "0.1", "gb_per_s": "5", "copy_gb_per_s": "30", "matrix_tflops": "0.2",
                "error": "1e-6", "ceiling_ms": "1"}  # fmt: skip
    written(folder / "forward.csv", row(10, **measured), row(20, **measured, seqlen="128"))
    written(folder / "memory.csv", row(0, what="memory", megabytes="3", others="0.9"))
    written(folder / "decode.csv", row(9, **measured, what="decode", heads_k="1", others="0.9"))
    assert command.main(["plot", "--results", str(folder), "--out", str(tmp_path / "out")]) == 0
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {f"cpu_{name}.{kind}" for name in ("memory", "error") for kind in ("svg", "png")}
    assert "gpu speed: nothing measured on a calm machine, nothing drawn" in capsys.readouterr().out


def test_figures_of_gpus_are_of_one_gpu_and_of_right_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib, which is not installed")
    here = {"what": "forward", "gpu": "H200", "dtype": "bfloat16", "tflops": "500", "gb_per_s": "100",
            "copy_gb_per_s": "4000", "matrix_tflops": "800", "of_budget": "0.3"}  # fmt: skip
    lengths = [row(1, **here, seqlen=n, head_dim=d) for n in ("512", "1024") for d in ("64", "128")]
    wrong = row(1, **here | {"of_budget": "2e4"}, implementation="flash-attn3-jax", seqlen="512")
    other = row(1, **here | {"gpu": "H100", "tflops": "9"}, seqlen="512", head_dim="64")
    decoding = here | {"what": "decode", "heads_k": "1", "seqlen": "1", "seqlen_k": "4096"}
    folder = tmp_path / "results"
    written(folder / "forward.csv", *lengths, wrong, other)
    written(folder / "decode.csv", row(1, **decoding))
    assert command.main(["plot", "--results", str(folder), "--out", str(tmp_path / "out")]) == 0
    speed = (tmp_path / "out" / "gpu_speed.svg").read_text()
    assert "H200" in speed
    assert "H100" not in speed
    assert "flash-attn3-jax" not in speed
    assert "best copy, 4000 GB/s" in (tmp_path / "out" / "gpu_decode.svg").read_text()
    assert "cpu memory: nothing measured" in capsys.readouterr().out


def test_beside_torch_takes_ratios_of_one_run(tmp_path: Path) -> None:
    def of_run(when: str, **medians: float) -> list[dict[str, str]]:
        names = {"ours": "cupy_flash", "torch": "torch", "jax": "jax xla"}
        return [row(ms, what="cpu", when=when, implementation=names[name]) for name, ms in medians.items()]

    old, new = of_run("2026-01-01", ours=10, torch=20, jax=40), of_run("2026-01-02", ours=10, torch=11)
    busy = [{**row, "others": "0.9"} for row in of_run("2026-01-03", ours=10, torch=99)]
    found = plot.beside_torch([*busy, *new, *old])
    assert {name: [times for _, times in cases] for name, cases in found.items()} == {
        "cupy_flash": [1.1], "torch": [1.0], "jax xla": [0.5],
    }  # fmt: skip


def test_the_first_picture_is_of_one_cpu() -> None:
    every = [row(10, what="cpu", cpu="A", implementation=name) for name in ("cupy_flash", "torch", "jax xla")]
    fewer = [
        row(10, what="cpu", cpu="B", when="2027", implementation=name) for name in ("cupy_flash", "torch")
    ]
    assert plot.of_one_cpu([*every, *fewer]) == plot.of_one_cpu([*fewer, *every]) == every
    assert plot.of_one_cpu([]) == []


def test_the_first_picture_needs_memory_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib, which is not installed")
    folder = tmp_path / "results"
    written(folder / "cpu.csv", row(10, what="cpu"), row(20, what="cpu", implementation="torch"))
    assert command.main(["plot", "--results", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "cpu front: nothing measured" in capsys.readouterr().out
    peak = {"what": "memory", "megabytes": "3", "passes": "forward+backward"}
    written(folder / "memory.csv", row(0, **peak), row(0, **peak, implementation="torch"))
    assert command.main(["plot", "--results", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "cpu_front.png").is_file()


def test_the_first_picture_is_of_one_dtype(tmp_path: Path) -> None:
    """The newest run, of another dtype, is not drawn under its name."""
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib, which is not installed")
    folder = tmp_path / "results"
    newer = {"what": "cpu", "when": "2026-01-02", "dtype": "bfloat16"}
    written(
        folder / "cpu.csv",
        row(10, what="cpu", when="2026-01-01"),
        row(20, what="cpu", when="2026-01-01", implementation="torch"),
        row(10, **newer),
        row(77, **newer, implementation="torch"),
    )
    peak = {"what": "memory", "megabytes": "3", "passes": "forward+backward"}
    written(folder / "memory.csv", row(0, **peak), row(0, **peak, implementation="torch"))
    assert command.main(["plot", "--results", str(folder), "--out", str(tmp_path / "out")]) == 0
    front = (tmp_path / "out" / "cpu_front.svg").read_text()
    assert "2.00<" in front
    assert "7.70<" not in front
