"""One random call and where it runs: drawn, written down, checked, and made smaller."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.cpu.core import family
from cupy_flash.cpu.core.isa import OVERRIDE

from .cache import Cached, CachedStatistics
from .dense import Dense, MergeOfTwo, SecondOrder, Statistics
from .float8 import Float8
from .memory import Pages
from .packed import Packed, PackedStatistics

__all__ = ["Outcome", "Trial", "draw", "smaller"]

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Dense,
        SecondOrder,
        MergeOfTwo,
        Statistics,
        Packed,
        PackedStatistics,
        Cached,
        CachedStatistics,
        Float8,
    )
}
# How often each is drawn.
SHARES = {
    "Dense": 9,
    "SecondOrder": 3,
    "MergeOfTwo": 1,
    "Statistics": 2,
    "Packed": 4,
    "PackedStatistics": 1,
    "Cached": 6,
    "CachedStatistics": 1,
    "Float8": 1,
}


# A line of `testing.Verdict`: the tensor, and whether its numbers are wrong (max) or its shape, dtype, NaNs.
_FAILED = re.compile(r"^ *(\w+) +FAIL +(\S+)", re.MULTILINE)


class Outcome(NamedTuple):
    """What came of a call.

    Attributes
    ----------
    kind : str
        "right", "refused", or in which way it is wrong; two that are alike fail the same way.
    text : str
        For people.
    """

    kind: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it is a finding."""
        return self.kind not in ("right", "refused")


class Trial(NamedTuple):
    """A call, and where it runs.

    Attributes
    ----------
    call : any of KINDS
    library : str
        Of the CPU core, or "numpy".
    threads : int
    before : bool
        Whether arrays begin right behind a guard page, or end right before one.
    """

    call: Any
    library: str
    threads: int = 1
    before: bool = False

    def check(self) -> None:
        """Compute it and compare it with FP64.

        Raises
        ------
        AssertionError
            A result, or memory that is none, is wrong.
        InvalidArgumentsError, UnsupportedError
            It is refused.
        """
        memory = Pages(before=self.before)
        with (
            mock.patch.dict(os.environ, {OVERRIDE: self.library}),
            mock.patch.object(family, "workers", return_value=self.threads),
            memory.results(),
        ):
            self.call.check(memory)
        memory.check()

    def outcome(self) -> Outcome:
        """Check it; what it raises is in the outcome."""
        try:
            self.check()
        except (InvalidArgumentsError, UnsupportedError) as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # why any: each is a finding
            return Outcome(_way(error), traceback.format_exc(limit=-4))
        return Outcome("right")

    def written(self) -> str:
        """One line of JSON, which `read` reads."""
        return json.dumps({**self._asdict(), "call": [type(self.call).__name__, _unusual(self.call)]})

    @classmethod
    def read(cls, line: str) -> Trial:
        """The trial that was written."""
        given = json.loads(line)
        kind, fields = given["call"]
        fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        return cls(**given | {"call": KINDS[kind](**fields)})

    def script(self) -> str:
        """A program that fails as this trial does, for the root of a checkout."""
        call = self.call
        given = ", ".join(
            f"{f.name}={getattr(call, f.name)!r}"
            for f in dataclasses.fields(call)
            if getattr(call, f.name) != f.default
        )
        kind = type(call).__name__
        where = f"{self.library!r}, threads={self.threads}, before={self.before}"
        return (
            "python - <<'END'\n"
            f"from tests.random_calls.trial import {kind}, Trial\n"
            f"Trial({kind}({given}), {where}).check()\n"
            "END"
        )


def _unusual(call: Any) -> dict[str, Any]:
    """The fields of a call that are not as they are by default."""
    every = {f.name: (getattr(call, f.name), f.default) for f in dataclasses.fields(call)}
    return {name: x for name, (x, default) in every.items() if x != default}


def _way(error: Exception) -> str:
    """In which way a check failed, and of an error budget the first tensor that did: numbers left out."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    words = "".join(c for c in first.partition(":")[0] if not c.isdigit())
    way = f"{type(error).__name__} {words[:60]}".strip()
    failed = _FAILED.search(str(error))
    return f"{way}: {failed[1]}, {failed[2]}" if failed else way


def draw(
    random_: random.Random, libraries: tuple[str, ...], dtypes: tuple[str, ...], kinds: tuple[str, ...] = ()
) -> Trial:
    """Any trial; the first library, the fastest, as often as all others together."""
    names = [*(kinds or SHARES)]
    kind = random_.choices(names, [SHARES[name] for name in names])[0]
    weights = [max(1, len(libraries) - 1)] + [1] * (len(libraries) - 1)
    library = random_.choices(libraries, weights)[0]
    call = KINDS[kind].draw(random_, dtypes)
    if library == "numpy" and getattr(call, "reproducible", None):
        library = libraries[0]  # which keeps it
    return Trial(call, library, random_.choice((1, 2, 3, 7)), random_.random() < 0.5)


def smaller(trial: Trial) -> Iterator[Trial]:
    """Trials that ask for less: options left away first, then sizes halved, then one less."""
    call = trial.call
    fields = dataclasses.fields(call)
    kept = {"dtype", "lengths", "heads", "head_dims", "lengths_q", "lengths_k"}

    def with_(name: str, value: Any) -> Trial:
        return trial._replace(call=dataclasses.replace(call, **{name: value}))

    if isinstance(call, Dense) and type(call) is not Dense:
        plain = {f.name: getattr(call, f.name) for f in dataclasses.fields(Dense)}
        yield trial._replace(call=Dense(**plain))
    for f in fields:
        # why no numbers: those come nearer to 0 below, whatever they are by default
        is_number = isinstance(f.default, int) and not isinstance(f.default, bool) and f.name != "rank"
        if f.name not in kept and not is_number and getattr(call, f.name) != f.default:
            yield with_(f.name, f.default)
    if trial.threads > 1:
        yield trial._replace(threads=1)
    if trial.before:
        yield trial._replace(before=False)
    for f in fields:
        for value in _less(getattr(call, f.name)):
            if f.name != "rank":
                yield with_(f.name, value)
    for name in ("lengths", "lengths_q", "lengths_k", "each"):
        value = getattr(call, name, ())
        if len(value) > 1 and isinstance(call, Packed | Cached):
            several = (
                ["lengths_q", "lengths_k"] if isinstance(call, Packed) else ["lengths", "each", "each_new"]
            )
            for place in range(len(value)):
                rest = {n: x[:place] + x[place + 1 :] for n in several if (x := getattr(call, n))}
                yield trial._replace(call=dataclasses.replace(call, **rest))


def _less(value: Any) -> Iterator[Any]:
    """Numbers nearer to 0, and tuples with one of them."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        sign = -1 if value < 0 else 1
        size = abs(value)
        for less in dict.fromkeys((0, 1, size // 2, size - size // 4, size - 8, size - 2, size - 1)):
            if 0 <= less < size:
                yield sign * less
    elif isinstance(value, tuple):
        if len(value) == 2 and value[0] == value[1]:
            for less in _less(value[0]):
                yield (less, less)
        for place, x in enumerate(value):
            for less in _less(x):
                yield (*value[:place], less, *value[place + 1 :])
