"""What editors show while a call is written: their checkers of types know every option, in each adapter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow  # the checkers read NumPy, torch and JAX first

# Lines of two functions over q, an array of the module's library: right ones, and ones to object to, each.
RIGHT = """
    o: Array = {name}(q, q, q)
    o = {name}(q, q, q, causal=True, window=(128, None), align="bottom_right", layout="bshd")
    o, lse = {name}(q, q, q, mask=q, bias=q, sinks=q, scale=0.5, dropout=0.1, seed=3, return_lse=True)
    o = {name}(q, q, q, precision="tf32x3", softcap=np.float32(30), alibi_slopes=q)
"""
WRONG = """
    {name}(q, q, q, is_causal=True)
    {name}(q, q, q, casual=True)
    {name}(q, q, q, causal="yes")
    {name}(q, q, q, window=128)
    {name}(q, q, q, layout="sbhd")
    {name}(q, q, q, align="left")
    {name}(q, q, q, scale="0.5")
    {name}(q, q, q, True)
    {name}(q, q)
"""
# Options that only some take.
MORE_RIGHT = {
    "cupy_flash": "\n    o = {name}(q, q, q, tuning=cupy_flash.Tuning(tile=(64, 64)), out=q)",
    "cupy_flash.torch": '\n    o = {name}(q, q, q, reproducible="run", scale=0.5)',
    "cupy_flash.jax": '\n    o = {name}(q, q, q, reproducible="run", scale=0.5)',
}
MORE_WRONG = {
    "cupy_flash": "    {name}(q, q, q, deterministic=True)\n",
    "cupy_flash.torch": "    {name}(q, q, q, tile=(64, 64))\n",
    "cupy_flash.jax": "    {name}(q, q, q, tile=(64, 64))\n",
}
ARRAYS = {
    "cupy_flash": "np.ndarray[tuple[int, int, int, int], np.dtype[np.float32]]",
    "cupy_flash.torch": "torch.Tensor",
    "cupy_flash.jax": "jax.Array",
}


def write(module: str, path: Path) -> set[int]:
    """Write calls of a module's attention; the lines to object to."""
    name = f"{module}.attention"
    right = (RIGHT + MORE_RIGHT[module]).format(name=name)
    wrong = (WRONG + MORE_WRONG[module]).format(name=name)
    array = ARRAYS[module]
    needed = sorted({"cupy_flash", module, *({array.split(".")[0]} - {"np"})})
    head = "from typing import TypeAlias\nimport numpy as np\n" + "".join(f"import {x}\n" for x in needed)
    head += f"Array: TypeAlias = {array}\n"
    text = head + "def right(q: Array) -> None:" + right + "\ndef wrong(q: Array) -> None:" + wrong
    path.write_text(text)
    lines = text.splitlines()
    return set(range(lines.index("def wrong(q: Array) -> None:") + 2, len(lines) + 1))


def by_mypy(path: Path) -> dict[int, str]:
    """What mypy objects to, by line."""
    config = path.with_name("mypy.ini")
    # why skip: it takes minutes to read torch and JAX, whose types are left out of this.
    config.write_text(
        "[mypy]\npython_version = 3.10\n"
        "[mypy-torch.*,jax.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
        "[mypy-cupy_flash.*]\nignore_errors = True\n"
    )
    words = [
        "--config-file",
        config,
        "--cache-dir",
        path.parent.with_name("mypy_cache"),
        "--output",
        "json",
        path,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        x["line"]: x["message"]
        for x in found
        if x["severity"] == "error" and Path(x["file"]).name == path.name
    }


def by_pyright(path: Path) -> dict[int, str]:
    """What pyright objects to, by line, as editors set it up."""
    config = path.with_name("pyrightconfig.json")
    config.write_text(
        json.dumps({"include": [path.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"})
    )
    words = ["--outputjson", "-p", str(config), "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", *words],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {x["range"]["start"]["line"] + 1: x["message"] for x in found if x["severity"] == "error"}


CHECKERS = {"mypy": by_mypy, "basedpyright": by_pyright}


@pytest.mark.parametrize("module", ARRAYS)
@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_know_the_options(checker: str, module: str, tmp_path: Path) -> None:
    extra = {"mypy": "dev", "basedpyright": "frameworks"}[checker]
    pytest.importorskip(checker, reason=f"{checker} is not installed: pip install 'cupy-flash[{extra}]'")
    library = ARRAYS[module].split(".")[0]
    if library != "np":
        pytest.importorskip(library, reason=f"{library} is not installed")
    path = tmp_path / "calls.py"
    wrong = write(module, path)
    found = CHECKERS[checker](path)
    lines = path.read_text().splitlines()
    assert found.keys() == wrong, [(lines[i - 1], found.get(i)) for i in sorted(found.keys() ^ wrong)]
