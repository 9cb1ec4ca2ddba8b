"""Score functions: what `cupy_flash.attention` takes as ``score=``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .program.function import Program

__all__ = ["ScoreFunction", "mask", "score"]


class ScoreFunction(Program):
    """What `score` and `mask` make; ``function``, ``masks`` and ``name`` say of what."""

    __slots__ = ()


def score(function: Callable[..., Any], *, learned: Sequence[str] = ()) -> ScoreFunction:
    """A function of each score and its position, as ``score=`` of `attention` and `attention_varlen`.

    Parameters
    ----------
    function : callable
        Takes the score s (scaled, after softcap), its batch b, head of q h, query i and key j, and one
        parameter for each of ``score_args``, whose elements it takes by an integer for each axis; those
        of shape () are numbers. Returns the new score; -inf hides a pair. Known are + - * / // %, powers from
        2 to 8, comparisons, & | ~, and of NumPy where, exp, log, tanh, sqrt, abs, minimum, maximum, clip,
        square.
    learned : sequence of str
        Names of the parameters whose gradient `attention_backward` is to give, as ``dscore_args``.

    Returns
    -------
    ScoreFunction

    Raises
    ------
    InvalidArguments
        It takes too few, or ``learned`` names what it does not take. When it is used: it branches in
        Python on a value, returns no number, or asks for what a score function has not; the line is shown.

    Notes
    -----
    The function is run once for each combination of dtypes and ranks of its arguments, on values without a
    number: make it once, outside of the loop, and give what changes as arguments. Positions count from 0
    within a sequence, packed ones too, whatever ``align`` says. Integers have 32 bits. An index outside of
    its axis is cut off; of a pair that is seen it is refused where the arrays lie in main memory.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> alibi = cupy_flash.score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j))
    >>> q = k = v = np.ones((1, 2, 16, 8), np.float32)
    >>> cupy_flash.attention(q, k, v, causal=True, score=alibi, score_args=(np.float32([0.5, 0.25]),)).shape
    (1, 2, 16, 8)
    """
    return ScoreFunction(function, False, learned)


def mask(function: Callable[..., Any]) -> ScoreFunction:
    """A function of positions that says which pairs are kept, as ``score=`` of `attention`.

    Parameters
    ----------
    function : callable
        Takes b, h, i, j and arguments, as that of `score`; returns a condition, True where query i may see
        key j.

    Returns
    -------
    ScoreFunction
        The score function ``np.where(condition, s, -np.inf)``.

    Raises
    ------
    InvalidArguments
        As of `score`.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> causal = cupy_flash.mask(lambda b, h, i, j: i >= j)
    >>> q = k = v = np.ones((1, 2, 16, 8), np.float32)
    >>> o = cupy_flash.attention(q, k, v, score=causal)
    """
    return ScoreFunction(function, True, ())
