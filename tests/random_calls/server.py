"""A process that checks trials, and one that asks it and outlives it: crashes and hangs are outcomes."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine.memory import resident
from tests import sanitized
from tests.paths import ROOT

from .trial import Outcome, Trial

__all__ = ["Server"]

# Seconds that a trial may take, and how many times as many with a sanitizer.
LONGEST, SLOWER = 60.0, 10
_SAYS = re.compile(
    r"ERROR: AddressSanitizer: ([\w-]+)|runtime error: (.*)|WARNING: ThreadSanitizer: ([\w ]+)"
)


class Server:
    """The process: started when it is first asked, and again after it has died.

    Parameters
    ----------
    sanitizer : str, optional
        Of `sanitized.SANITIZERS`.
    libraries : Path, optional
        Where those with the sanitizer are.
    """

    def __init__(self, sanitizer: str | None = None, libraries: Path | None = None) -> None:
        self._words = [] if libraries is None else [str(libraries)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        self._longest = LONGEST
        if sanitizer is not None:
            self._environment = sanitized.surroundings(sanitizer)
            self._longest *= SLOWER
        self._process: subprocess.Popen[str] | None = None
        self.held: list[int] = []

    def ask(self, trial: Trial) -> Outcome:
        """Check a trial."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(trial.written() + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended("crash")
        if not select.select([process.stdout], [], [], self._longest)[0]:
            return self._ended("hang")
        line = process.stdout.readline()
        if not line:
            return self._ended("crash")
        kind, text, held = json.loads(line)
        self.held.append(held)
        return Outcome(kind, text)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes its pipes
            self._errors.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self.held = []
        # why no context: it is read after the process has died
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *["-S"] * sys.flags.no_site, "-m", "tests.random_calls.server", *self._words],
            cwd=ROOT,
            env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True,
        )  # fmt: skip
        return self._process

    def _ended(self, how: str) -> Outcome:
        """What the end of the process says."""
        assert self._process is not None
        if how == "hang":
            self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        self.stop()
        if found := _SAYS.search(said):
            how = next(filter(None, found.groups()))
        elif how == "crash":
            name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            how = f"crash, {name}"
        return Outcome(how, said[-6000:])


def main(words: list[str]) -> None:
    """Answer: one outcome a line of the output, for each trial a line of the input."""
    # why a copy: what a call prints must not end up among outcomes
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if words:
        sanitized.use(Path(words[0]))
    for line in sys.stdin:
        answers.write(json.dumps([*Trial.read(line).outcome(), resident()]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
