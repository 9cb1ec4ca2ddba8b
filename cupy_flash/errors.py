"""The three errors of the library: what is wrong, the inputs, every reason, and a way out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

__all__ = ["CubinNotFound", "InvalidArguments", "Unsupported"]

P = ParamSpec("P")
R = TypeVar("R")


def _text(
    headline: str,
    table: Iterable[Sequence[str]] | None,
    reasons: Iterable[str | tuple[str, str]],
    hint: str | None,
) -> str:
    lines = [headline]
    for rows in (list(table or ()), [(r, "") if isinstance(r, str) else r for r in reasons]):
        if rows:
            width = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
            for row in rows:
                cells = (cell.ljust(w) for cell, w in zip(row, width, strict=True))
                lines.append(("  " + "  ".join(cells)).rstrip())
    if hint:
        lines.append(f"Try: {hint}")
    return "\n".join(lines)


class _Explained(Exception):
    """An error whose text is a headline, an aligned table of inputs, reasons, and a hint.

    Parameters
    ----------
    headline : str
        What is wrong, with the value.
    table : iterable of equally long sequences of str, optional
        The inputs, one row each.
    reasons : iterable of str or (str, str), optional
        One per kernel (name, reason) or per cause.
    hint : str, optional
        A command or a change that helps; shown after ``Try:``.
    """

    def __init__(
        self,
        headline: str,
        table: Iterable[Sequence[str]] | None = None,
        reasons: Iterable[str | tuple[str, str]] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(_text(headline, table, reasons, hint))


class InvalidArguments(_Explained, ValueError):
    """The call contradicts itself or the rules: no kernel on any machine could answer it."""


class Unsupported(_Explained, NotImplementedError):
    """The call is meaningful, but nothing here can carry it out; every kernel's reason is listed."""


class CubinNotFound(_Explained, LookupError):
    """The kernel that the plan names is not on this machine, or its file cannot be trusted."""


# What people write from other libraries, and our word for it.
_SYNONYMS = {
    "softmax_scale": "scale", "sm_scale": "scale", "is_causal": "causal", "attn_mask": "mask",
    "attn_bias": "bias", "dropout_p": "dropout", "dropout_rate": "dropout", "p": "dropout",
    "window_size": "window", "local_window_size": "window", "sliding_window": "window",
    "logits_soft_cap": "softcap", "learnable_sink": "sinks", "s_aux": "sinks",
    "return_softmax_lse": "return_lse", "return_residual": "return_lse", "tensor_layout": "layout",
}  # fmt: skip


def names_its_options(function: Callable[P, R]) -> Callable[P, R]:
    """Turn the TypeError of an unknown keyword into `InvalidArguments` that names the right one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            unknown = [name for name in kwargs if name not in known]
            if not unknown:
                raise
            name = unknown[0]
        import difflib  # why: it takes 6 ms to import and is needed once in a while

        near = difflib.get_close_matches(name, known, 1, 0.7)  # below it, out is nearest to layout
        ours = _SYNONYMS.get(name, near[0] if near else None)
        if ours not in known:
            ours = None
        raise InvalidArguments(
            f"{function.__name__}() has no option {name!r}.",
            hint=f"{ours}=..." if ours else "one of " + ", ".join(known[3:]),
        )

    return call
