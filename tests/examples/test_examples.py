"""Every example of examples/ runs, at a small size, and does what it says."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from tests.paths import ROOT

EXAMPLES = ROOT / "examples"


def run(name, *words):
    """What `main` of an example returns."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # why: threads that wait for each other's products cost these small ones several times what they gain.
    with threadpool_limits(1):
        return module.main(list(words))


def needs(*modules):
    for module in modules:
        pytest.importorskip(module, reason=f"the example imports {module}, which is not installed")


@pytest.fixture
def torch():
    module = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")
    threads = module.get_num_threads()
    module.set_num_threads(1)
    yield module
    module.set_num_threads(threads)


@pytest.mark.torch
def test_gpt_torch_learns(torch):
    losses = run("gpt_torch", "--steps", "16", "--width", "32", "--context", "32")
    assert losses[0] > 7
    assert np.mean(losses[-4:]) < 0.9 * losses[0]


@pytest.mark.torch
def test_vit_block_tells_directions(torch):
    assert run("vit_block", "--steps", "30") > 0.5


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's forward mode compiles with it
def test_meanflow_torch_learns(torch):
    losses = run("meanflow_torch", "--steps", "40", "--batch", "32")
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.torch
def test_gradient_penalty_torch_holds_slopes(torch):
    _, slope = run("gradient_penalty_torch", "--steps", "40")
    assert 0.5 < slope < 1.5


@pytest.mark.transformers
def test_finetune_transformers_starts_where_theirs_does(torch):
    needs("transformers")
    apart, losses = run("finetune_transformers", "--steps", "8", "--context", "32")
    assert apart < 1e-4
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.jax
def test_attention_jax_learns():
    needs("jax", "equinox")
    losses = run("attention_jax", "--steps", "40")
    assert np.mean(losses[-10:]) < 0.5 * losses[0]


def test_long_text_is_exact_in_little_memory():
    needs("tqdm")
    error, peak = run("long_text", "--tokens", "3000")
    assert error < 1e-5
    assert peak < 3000 * 3000  # a quarter of the score matrix


def test_kv_cache_decoder_writes_the_same_without_the_cache():
    assert run("kv_cache_decoder", "--tokens", "6") is True


@pytest.mark.torch
@pytest.mark.slow
def test_ring_two_processes():
    needs("torch")
    command = [sys.executable, str(EXAMPLES / "ring_two_processes.py"), "--tokens", "64"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"process [01] holds 32 of 64 rows", done.stdout)) == 2


@pytest.mark.jax
@pytest.mark.slow
def test_context_parallel_jax():
    needs("jax")
    command = [sys.executable, str(EXAMPLES / "context_parallel_jax.py"), "--steps", "40", "--length", "32"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # by which tests of JAX make devices
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    ((devices, error),) = re.findall(r"(\d) devices; .* by (\S+) at most", done.stdout)
    first, last = map(float, re.findall(r"loss (\S+)", done.stdout))
    assert devices == "4"
    assert float(error) < 1e-5
    assert last < 0.5 * first


def test_attention_picture(tmp_path):
    needs("matplotlib")
    assert run("attention_picture", "--out", str(tmp_path / "a.png")).read_bytes()[1:4] == b"PNG"


def test_notebook(tmp_path, monkeypatch):
    """Its cells run in their order, as they are; saved without what they printed."""
    needs("matplotlib")
    import matplotlib as mpl

    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3
    for number, cell in enumerate(cells):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)


def test_every_example_has_a_row_and_a_test():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[(\w+\.\w+)\]\(\1\)", readme, re.MULTILINE)) == files
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [path for path in files if f'"{Path(path).stem}"' not in tests and f'"{path}"' not in tests] == []
