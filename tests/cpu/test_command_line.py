"""The command line says what the functions say, in a shell's manners."""

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import BlockMask, QuantizedCache, Rotary, Spans, Tuning
from cupy_flash.__main__ import main
from cupy_flash.cubins import user_cache
from cupy_flash.device import choice
from cupy_flash.errors import UnsupportedError
from tests.function_cases import ALIBI
from tests.paths import ROOT

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None


def said(capsys, *words):
    """What a command prints, which must end well."""
    assert main([*words]) == 0
    return capsys.readouterr().out


def ones(*shape, dtype=np.float16):
    return np.ones(shape, dtype)


# Words of a command, and the same as options of a call on q (2, 8, 96, 64) and k and v (2, 4, 96, 64).
OPTIONS = {
    "": {},
    "--causal": {"causal": True},
    "--window 5 open": {"window": (5, None)},
    "--window 0 3": {"window": (0, 3)},
    "--causal --align 3": {"causal": True, "align": 3},
    "--causal --align bottom_right": {"causal": True, "align": "bottom_right"},
    "--scale 0.5": {"scale": 0.5},
    "--softcap 30": {"softcap": 30.0},
    "--dropout 0.1": {"dropout": 0.1, "seed": 7},
    "--reproducible batch": {"reproducible": "batch"},
    "--tile 64 64": {"tuning": Tuning(tile=(64, 64))},
    "--mask keys": {"mask": ones(2, 1, 1, 96, dtype=bool)},
    "--mask full": {"mask": ones(2, 8, 96, 96, dtype=bool)},
    "--spans key": {"mask": Spans(np.zeros((1, 96, 2), np.int32))},
    "--spans query": {"mask": Spans(np.zeros((96, 1, 2), np.int32))},
    "--blocks 32": {"mask": BlockMask(np.zeros((3, 3), np.int32), np.zeros((1, 32, 4), np.uint8))},
    "--bias pairs": {"bias": ones(1, 1, 96, 96)},
    "--bias heads --bias-dtype float32": {"bias": ones(1, 8, 96, 96, dtype=np.float32)},
    "--alibi": {"alibi_slopes": ones(8, dtype=np.float32)},
    "--score tests.function_cases:ALIBI --score-arg float32:1": {
        "score": ALIBI(np.zeros(1, np.float32)),
    },
    "--sinks": {"sinks": ones(8, dtype=np.float32)},
    "--backward": {"direction": "backward"},
    "--backward --reproducible run --bias heads": {
        "direction": "backward", "reproducible": "run", "bias": ones(1, 8, 96, 96),
    },
}  # fmt: skip


class TestExplain:
    @pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "cpu"])
    @pytest.mark.parametrize("words", OPTIONS)
    def test_every_option(self, words, arch, capsys):
        if arch == "sm_90a" and "--tile" in words:
            arch = "sm_75"  # the Hopper kernels have tiles of their own
        sizes = "--batch 2 --heads 8 --heads-k 4 --seqlen 96 --head-dim 64"
        text = said(capsys, "explain", "--arch", arch, *sizes.split(), *words.split())
        q, k = ones(2, 8, 96, 64), ones(2, 4, 96, 64)
        assert (
            text
            == cupy_flash.explain(q, k, k, arch=None if arch == "cpu" else arch, **OPTIONS[words]) + "\n\n"
        )

    def test_options_of_attention_are_all_there(self):
        arrays = {"q", "k", "v", "out"}
        elsewhere = {
            "return_lse",
            "seed",
            "layout",
            "precision",
        }  # no part of a plan, or in a test below
        asked = set(inspect.signature(cupy_flash.attention).parameters) - arrays - elsewhere
        assert asked <= {name for options in OPTIONS.values() for name in options}

    def test_layout_and_sizes_of_v(self, capsys):
        words = (
            "--layout bshd --seqlen 7 --seqlen-k 96 --heads 2 --head-dim 64 --head-dim-v 32 --dtype bfloat16"
        )
        text = said(capsys, "explain", "--arch", "sm_80", *words.split())
        bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes").bfloat16
        q, k, v = (ones(1, *shape, dtype=bfloat16) for shape in ((7, 2, 64), (96, 2, 64), (96, 2, 32)))
        assert text == cupy_flash.explain(q, k, v, layout="bshd", arch="sm_80") + "\n\n"

    def test_precision(self, capsys):
        text = said(capsys, "explain", "--arch", "sm_80", "--dtype", "float32", "--precision", "ieee")
        assert "precision=ieee" in text

    def test_float8_has_its_scales(self, capsys):
        assert "result in bfloat16" in said(capsys, "explain", "--arch", "sm_90a", "--dtype", "float8_e4m3fn")

    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_a_cache_in_pages(self, layout, capsys):
        sizes = "--batch 2 --seqlen 1 --heads 8 --heads-k 2 --head-dim 64"
        words = "--cache 250 --page 32 --append 1 --rotary 16 --splits 3 --cache-dtype int8 --layout"
        text = said(capsys, "explain", "--arch", "sm_80", *sizes.split(), *words.split(), layout)

        def array(batch, heads, rows, dtype=np.float16):
            x = ones(batch, heads, rows, 64, dtype=dtype)
            return x if layout == "bhsd" else np.ascontiguousarray(x.swapaxes(1, 2))

        scale, turns, new = ones(2, dtype=np.float32), ones(256, 8, dtype=np.float32), array(2, 2, 1)
        own = {
            "cache_seqlens": 5, "block_table": np.zeros((2, 8), np.int32), "k": new, "v": new,
            "tuning": Tuning(splits=3), "rotary": Rotary(turns, turns),
        }  # fmt: skip
        cache = QuantizedCache(array(16, 2, 32, np.int8), scale)
        q = array(2, 8, 1)
        assert text == cupy_flash.explain(q, cache, cache, layout=layout, arch="sm_80", kv_cache=own) + "\n\n"

    def test_a_cache_in_one_piece(self, capsys):
        text = said(
            capsys, "explain", "--arch", "cpu", "--seqlen", "1", "--cache", "100", "--window", "9", "0"
        )
        assert "cache of float16, contiguous" in text
        assert "seqlen=1x100" in text

    @pytest.mark.parametrize("more", ["--seqlen -3", "--head-dim -8", "--cache -4", "--cache 40 --append -2"])
    def test_sizes_below_0(self, more, capsys):
        assert main(["explain", *more.split()]) == 1
        *_, option, size = more.split()
        assert f"{option} is {size}.\nTry: {option} 0, or more" in capsys.readouterr().err

    @pytest.mark.parametrize("more", ["--mask keys", "--mask pairs", "--spans key"])
    def test_masks_of_a_cache(self, more, capsys):
        words = ["--arch", "cpu", "--seqlen", "3", "--cache", "100", "--page", "16", *more.split()]
        text = said(capsys, "explain", *words)
        assert more.split()[0].strip("-") in text.partition("seqlen=3x112")[2].lower()

    @pytest.mark.parametrize(
        ("words", "message"),
        [("--page 64", "--page is an option of --cache"), ("--splits 0", "--splits is an option of --cache"),
         ("--cache-dtype int8", "--cache-dtype is an option of --cache"),
         ("--score-arg float32:1", "--score-arg is an option of --score"),
         ("--score ..:f", "there is no '..:f'"),
         ("--bias-dtype float32", "--bias-dtype is an option of --bias"),
         ("--cache 64 --page 0", "--page is 0"), ("--cache 64 --rotary 3", "--rotary is 3"),
         ("--heads-k 0", "heads"), ("--cache 64 --heads-k 0", "heads"),
         ("--cache 64 --bias keys", "no option 'bias'"),
         ("--cache 64 --seqlen-k 9", "--seqlen-k and --cache"), ("--cache 64 --backward", "no backward pass"),
         ("--arch H100", "no kernel is compiled for 'H100'")],
    )  # fmt: skip
    def test_what_does_not_fit_is_refused(self, words, message, capsys):
        assert main(["explain", *words.split()]) == 1
        said = capsys.readouterr().err
        assert message in said
        assert said.splitlines()[-1].startswith("Try: ")

    @pytest.mark.parametrize(
        ("words", "shown"), [("--seqlen-k 0", "seqlen=4096x0"), ("--head-dim-v 0", "head_dim is 0")]
    )
    def test_a_size_of_0_is_not_the_default(self, words, shown, capsys):
        main(["explain", "--arch", "cpu", *words.split()])
        assert shown in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "option", ["--out x", "--dtype float32", "--head-dim 32", "--second-order", "--score-arg float32:1"]
)
def test_build_refuses_what_only_score_functions_have(option, monkeypatch, capsys):
    monkeypatch.setattr(user_cache, "into_user_cache", lambda *_: pytest.fail("the shipped kernels"))
    assert main(["build", "--arch", "sm_80", *option.split()]) == 1
    assert f"{option.split()[0]} is an option of --score" in capsys.readouterr().err


def test_build_without_a_gpu_asks_for_the_architecture(monkeypatch, capsys):
    gone = UnsupportedError("the CUDA driver does not load.", hint="an NVIDIA driver")
    devices = mock.Mock(side_effect=gone)
    monkeypatch.setattr(choice, "gpu_driver", lambda _: mock.Mock(devices=devices))
    assert main(["build"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "UnsupportedError: there is no GPU here to compile kernels for.",
        "  the CUDA driver does not load.",
        'Try: archs=["sm_90a"], or in a shell --arch sm_90a, for the GPU of another machine',
    ]


class TestMemory:
    def test_json_says_what_the_report_says(self, capsys):
        sizes = "--heads 4 --seqlen 100 --head-dim 64 --head-dim-v 32"
        words = "--window 9 open --backward --arch sm_80 --json"
        found = json.loads(said(capsys, "memory", *sizes.split(), *words.split()))
        report = cupy_flash.memory_report(
            1, 4, 100, 64, head_dim_v=32, window=(9, None), backward=True, arch="sm_80", dtype="float16"
        )
        for name in ("naive_bytes", "flash_bytes", "operand_bytes", "flops"):
            assert found[name] == getattr(report, name)
        assert found["problem"] == report.problem.summary()
        assert found["plan"]["workspace_bytes"] == report.plan.workspace_bytes
        names = [kernel["name"] for kernel in found["plan"]["kernels"]]
        assert names == [launch.variant.name for launch in report.plan.launches]

    def test_json_without_a_plan(self, capsys):
        assert json.loads(said(capsys, "memory", "--json"))["plan"] is None


# ---- as a command of a shell


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"cupy_flash {cupy_flash.__version__}\n"


@pytest.mark.skipif(tomllib is None, reason="Python 3.10 cannot read pyproject.toml")
def test_the_console_command(monkeypatch, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    command = importlib.metadata.EntryPoint("cupy-flash", scripts["cupy-flash"], "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/cupy-flash", "--help"])
    with pytest.raises(SystemExit):
        command()
    assert capsys.readouterr().out.startswith("usage: cupy-flash ")


def test_without_a_stdout(monkeypatch):
    """As in ... >&-, and in programs of pythonw."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["memory"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "--window", "a", "0"], "argument --window: 'a' is not a number of keys, nor open"),
        (["explain", "--dtype", "bf16"], "argument --dtype: invalid choice: 'bf16' (choose from "),
        (["check", "--seed", "x"], "argument --seed: 'x' is not an integer"),
        (["check", "--seed", "-1"], "argument --seed: -1 is below 0"),
    ],
)
def test_what_is_wrong_with_a_word_names_nothing_of_the_inside(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("word", ["info", "explain", "memory"])
def test_an_interrupt_ends_without_a_traceback(word, monkeypatch, capsys):
    def interrupted(asked):
        raise KeyboardInterrupt

    monkeypatch.setattr("cupy_flash.__main__._" + word, interrupted)
    assert main([word]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# argparse swallows what happens at once, and nothing that happens at the end.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows end in another way")
@pytest.mark.parametrize("words", [["info"], ["explain"], ["memory"], ["--help"], ["info", "--json"]])
def test_nobody_reads_on(words):
    """As in ... | head -0: no traceback, and the status of a command that the signal ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cupy_flash", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=BUFFERED,
    )
    with process:
        process.stdout.close()
        error = process.stderr.read()
    assert error == ""
    assert process.returncode == 141


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("words", [["info"], ["explain"], ["memory"], ["--help"]])
def test_the_disk_of_the_output_is_full(words):
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "cupy_flash", *words],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, env=BUFFERED,
        )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("Try: "), ended.stderr
    assert "Traceback" not in ended.stderr
