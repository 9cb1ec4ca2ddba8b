"""Make torch.compile call public functions as a whole: what they do to memory cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["opaque"]

P = ParamSpec("P")
R = TypeVar("R")


def opaque(
    function: Callable[P, R], why: str = "cupy_flash.torch has functions for compiled programs"
) -> Callable[P, R]:
    """Have torch.compile call a function instead of tracing it, at no cost to any other caller.

    why this way: in place of a function, dynamo traces the function in its attribute ``_torchdynamo_inline``.
    Dynamo executes the import there for real, so that `untraced` can tell it which modules not to trace, and
    then reaches `stop`, which is marked as not traceable: the graph breaks, and the function itself is
    called. With fullgraph=True torch raises an error with the text of `why`.
    """

    def stop(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    def read_by_torch(*args: P.args, **kwargs: P.kwargs) -> R:
        from . import untraced  # noqa: F401

        return stop(*args, **kwargs)

    stop._torchdynamo_disable = True  # type: ignore[attr-defined]
    stop._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    function._torchdynamo_inline = read_by_torch  # type: ignore[attr-defined]
    return function
