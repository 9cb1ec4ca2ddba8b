"""The three errors of the library; each shows what is wrong, the inputs, every reason, and a way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["CubinNotFoundError", "InvalidArgumentsError", "UnsupportedError"]


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
        # why not super(): torch.compile shows the arguments of this call where it cannot trace further
        Exception.__init__(self, _text(headline, table, reasons, hint))


class InvalidArgumentsError(_Explained, ValueError):
    """The call contradicts itself or the rules: no kernel on any machine could run it."""


class UnsupportedError(_Explained, NotImplementedError):
    """The call is valid, but nothing here can run it; every kernel's reason is listed."""


class CubinNotFoundError(_Explained, LookupError):
    """The kernel that the plan names is not on this machine, or its file cannot be trusted."""
