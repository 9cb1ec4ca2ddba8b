"""tune: candidates that fit, tables that are as before afterwards, building and ranking without a GPU."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import cupy_flash
from bench import __main__ as command
from bench.commands import tune
from bench.measure import peers
from bench.model import candidates
from bench.model.candidates import Question
from bench.work import Case
from cupy_flash.cubins import nvrtc
from cupy_flash.device import simulator
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.families import flash_tiles, hopper

QUESTIONS = [
    Question("flash_forward", "sm_80", "bfloat16", 128),
    Question("flash_forward", "sm_89", "float16", 64, "any"),
    Question("flash_forward", "sm_80", "float32", 64),
    Question("flash_backward", "sm_80", "bfloat16", 64),
    Question("hopper_forward", "sm_90", "bfloat16", 128),
    Question("hopper_backward", "sm_90", "float16", 64),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_a_candidate_is_planned_and_forgotten(question: Question) -> None:
    before = copy.deepcopy((flash_tiles.FORWARD, flash_tiles.BACKWARD, hopper._FORWARD, hopper._BACKWARD))
    found = candidates.cells(question)
    assert found[0] == candidates.now(question)
    assert len(set(found)) == len(found) > 1
    for cell in found[:2]:
        tiles = [launch.variant.tile for launch in tune._plan(question, cell, 2048).launches]
        assert cell[:2] in tiles
    assert before == (flash_tiles.FORWARD, flash_tiles.BACKWARD, hopper._FORWARD, hopper._BACKWARD)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_every_cell_of_the_tables_can_be_replaced(arch: str) -> None:
    """Also one of one architecture alone, under which every candidate was the same kernel once."""
    tried = 0
    for kernel, dtype, head_dim, mask in itertools.product(
        ("flash_forward", "flash_backward"),
        ("float16", "float32"),
        (d for d, v in flash_tiles.HEAD_DIMS if d == v),
        ("band", "any"),
    ):
        question = Question(kernel, arch, dtype, head_dim, mask)
        try:
            cell = candidates.now(question)
        except ValueError:  # the family has no such kernel
            continue
        for other in (cell, (*cell[:1], int(cell[1]) // 2, *cell[2:])):
            launches = tune._plan(question, other, 2048).launches
            assert other[:2] in [launch.variant.tile for launch in launches], question
        tried += 1
    assert tried >= (20 if arch == "sm_75" else 35)


@pytest.mark.parametrize("mask", ["band", "any"])
@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [*(("hopper_forward", d) for d, v in hopper._FORWARD if d == v),
     *(("hopper_backward", d) for d, v in hopper._BACKWARD if d == v)],
)  # fmt: skip
def test_every_cell_of_hopper_can_be_replaced(kernel: str, head_dim: int, mask: str) -> None:
    question = Question(kernel, "sm_90", "float16", head_dim, mask)
    cell = candidates.now(question)
    another = next(x for x in candidates.cells(question) if x[:2] != cell[:2])
    for other in (cell, another):
        launches = tune._plan(question, other, 2048).launches
        assert other[:2] in [launch.variant.tile for launch in launches]


@pytest.mark.simulator
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator compiles kernels with g++")
def test_ranking_without_a_gpu_says_that_it_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["tune", "--dry-run", "--at-most", "2", "--head-dim", "64"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("STAND-IN")
    assert "<- the table's" in text
    assert "measured" not in text.replace("nothing below was measured", "")


def test_candidates_are_built_where_there_is_no_gpu(tmp_path: Path) -> None:
    try:
        nvrtc.Compiler(13)
    except UnsupportedError as error:
        pytest.skip(str(error).splitlines()[0])
    words = ["tune", "--build", str(tmp_path), "--at-most", "2", "--head-dim", "64", "--arch", "sm_80"]
    assert command.main(words) == 0
    table = json.loads((tmp_path / tune.TABLE).read_text())
    assert len(table["cells"]) == 2
    for entry in table["cells"]:
        assert "refused" in entry or list((tmp_path / entry["folder"]).rglob("*.cubin"))


def test_measuring_needs_a_gpu_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.machine import place

    if place.find()[0].name == "gpu":
        pytest.skip("there is a GPU here")
    assert command.main(["tune", "--cubins", str(tmp_path)]) == 0
    assert "--dry-run ranks them without one" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [("--dry-run", "--arch", "sm_61"), ("--dry-run", "--kernel", "hopper_forward", "--dtype", "float32"),
     ("--dry-run", "--head-dim", "999")],
)  # fmt: skip
def test_questions_without_an_answer_exit_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["tune", *words]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_kernels_without_wgmma_are_measured_beside_those_with(
    passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned anew for each call, and forgotten after it; a GPU that runs them anyway measures them once."""
    loaded: list[str] = []
    monkeypatch.setattr(simulator, "load", lambda variant, device=0: loaded.append(variant.kernel) or 1 / 0)
    case = Case(1, 2, 64, 64, "float16", passes=passes)
    inputs = case.inputs()

    def first_kernel(call: Callable[[], object]) -> str:
        loaded.clear()
        with pytest.raises(ZeroDivisionError):
            call()
        return loaded[0]

    monkeypatch.setattr(
        peers, "ours", lambda _case, x, _place: lambda: cupy_flash.attention(*(x[n] for n in "qkv"))
    )
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_90")
    ours, mma_sync = (make(case, inputs, None) for make in (peers.ours, peers._by_mma_sync))
    assert [first_kernel(call) for call in (ours, mma_sync, ours)] == [
        "flash_forward_sm90", "flash_forward", "flash_forward_sm90"
    ]  # fmt: skip
    # float64 has the same kernel there, though the plan says in addition why it is not Hopper's.
    for arch, given in (("sm_80", inputs), ("sm_90", case._replace(dtype="float64").inputs())):
        monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{arch}")
        with pytest.raises(peers.Skipped, match="is what cupy_flash is here"):
            peers._by_mma_sync(case, given, None)
