"""Run the tests of other libraries through their names in ours, on a CPU: python -m tests.peers --help

Our own tests of these names show how we read a contract; those of the library show what its users rely on,
such as a window in a tensor. A random part of the cases runs; what we refuse by name counts as skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT


class Suite(NamedTuple):
    """Tests of a library: its repository, a commit or tag, the files, the first of them to be run."""

    repository: str
    revision: str
    files: tuple[str, ...]
    plugin: str
    words: str = ""  # as of pytest -k


_FLASH_ATTN = "Dao-AILab/flash-attention", "0251105a2fb19d2957484b7f023cd8c115286ced"
# why not all: some tests call flash-attn's C++ operators or want its words of an error, and races of a GPU's
# threads need thousands of calls.
SUITES = {
    "flash_attn": Suite(
        *_FLASH_ATTN,
        ("tests/test_flash_attn.py",),
        "tests.peers.flash_attn",
        "not (generator_arg or num_splits or table_bounds or race_condition)",
    ),
    "flash_attn_3": Suite(
        *_FLASH_ATTN,
        ("hopper/test_flash_attn.py", "hopper/padding.py", "hopper/test_util.py"),
        "tests.peers.flash_attn",
        "not (compatibility or race_condition)",
    ),
    "jax": Suite(
        "jax-ml/jax", "jax-v0.10.2", ("tests/nn_test.py",), "tests.peers.jax", "DotProductAttention"
    ),
}


def _written(suite: Suite, checkout: Path | None, into: Path) -> Path:
    """Write the files of a suite, of a clone or from GitHub, for a CPU; return the tests."""
    revision = suite.revision
    if checkout is None:
        checkout, revision = into / "clone", "FETCH_HEAD"
        subprocess.run(["git", "init", "--quiet", str(checkout)], check=True)
        url = f"https://github.com/{suite.repository}"
        fetch = ["fetch", "--quiet", "--depth=1", url, suite.revision]
        subprocess.run(["git", "-C", str(checkout), *fetch], check=True)
    for name in suite.files:
        show = ["git", "-C", str(checkout), "show", f"{revision}:{name}"]
        text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        (into / Path(name).name).write_text(text.replace('"cuda"', '"cpu"'), encoding="utf-8")
    return into / Path(suite.files[0]).name


def main() -> int:
    """Run the suites; return 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description="tests of other libraries")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"default: {' '.join(SUITES)}")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="a clone to take the tests from")
    parser.add_argument("--cases", type=int, default=40, metavar="N", help="drawn of each test")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed: list[str] = []
    for name in given.suites or SUITES:
        suite = SUITES[name]
        with tempfile.TemporaryDirectory() as folder:
            tests = _written(suite, given.checkout, Path(folder))
            command = [
                sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short", "--rootdir", folder,
                "-p", "no:cacheprovider", "-p", suite.plugin, "-k", suite.words, str(tests),
            ]  # fmt: skip
            environment = {
                **os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), folder)),
                "PEER_CASES": str(given.cases), "PEER_SEED": str(given.seed),
            }  # fmt: skip
            failed += [name] * bool(subprocess.run(command, cwd=folder, env=environment).returncode)
    print("failed: " + " ".join(failed) if failed else "no suite failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
