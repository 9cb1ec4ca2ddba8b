"""progress=: whom a call tells how much of it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from ..errors import InvalidArguments

__all__ = ["Tell", "checked_progress", "telling"]

# What is told: the share of the call that is done, from 0 to 1.
Tell: TypeAlias = Callable[[float], Any]


def checked_progress(progress: Any) -> Any:
    """What was asked for: True, a function, or None for nothing."""
    if progress is None or progress is False:
        return None
    if progress is True:
        _bar_class()
    elif not callable(progress):
        raise InvalidArguments(
            f"progress is {progress!r}.",
            hint="progress=True, or a function of the share that is done, 0 to 1",
        )
    return progress


def _bar_class() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise InvalidArguments(
            "progress=True shows a bar of tqdm, which is not installed.",
            hint="pip install tqdm; or progress=print",
        ) from None
    return tqdm


@contextmanager
def telling(progress: Any) -> Iterator[Tell]:
    """Whom to tell, while a call runs; at its end 1.0 is told, unless it failed.

    Parameters
    ----------
    progress : object
        From `checked_progress`, not None.
    """
    if progress is not True:
        yield progress
        progress(1.0)
        return
    # why disable: a program without a console, such as one of pythonw, has no stderr to draw on.
    hidden = sys.stderr is None
    with _bar_class()(total=1.0, bar_format="{l_bar}{bar}| {elapsed}<{remaining}", disable=hidden) as bar:

        def move(share: float) -> None:
            bar.update(share - bar.n)

        yield move
        move(1.0)
