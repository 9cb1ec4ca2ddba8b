"""Checks of the values of options: everything that can be refused without looking at an array."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidArgumentsError
from .adopt.torch import lost_derivative
from .arrays import accumulator_of
from .checks import flag, integer, one_of
from .given import Options
from .progress import CALLBACK
from .reproducible import check_reproducible

__all__ = [
    "LAYOUTS",
    "NO_RUN_OPTIONS",
    "RunOptions",
    "check_options",
    "checked_seed",
    "finite_number",
    "score_factors",
    "split_run_options",
]

PRECISIONS = ("ieee", "tf32x3", "tf32")
LAYOUTS = ("bhsd", "bshd")


def finite_number(value: Any, name: str) -> float:
    """An option as a finite float; refuse other values, and tensors whose gradient would be lost."""
    if "torch" in sys.modules and hasattr(value, "requires_grad") and (lost := lost_derivative(value)):
        recorded = "cupy_flash.torch.attention, which gives the gradient of a scale; or "
        raise InvalidArgumentsError(
            f"{name} is a tensor that {lost}, and this function records none.",
            hint=f"{recorded if name == 'scale' else ''}{name}.detach()",
        )
    try:
        one = value
        if isinstance(value, np.ndarray) and value.ndim:  # of which float() depends on the version of NumPy
            one = value.item() if name == "scale" else None
        number = math.nan if isinstance(one, (str, bytes)) else float(one)
    except (TypeError, ValueError, OverflowError):
        shape = getattr(value, "shape", ())
        if name == "scale" and isinstance(shape, tuple) and math.prod(shape) > 1:
            raise InvalidArgumentsError(
                f"scale has shape {tuple(shape)}, and this call takes one number for all heads.",
                hint="q * scale[..., None, None], with scale=1.0; its gradient is q * dq, summed over rows",
            ) from None
        per_head = ", or an array of one number per head" * (name == "scale" and type(value) in (list, tuple))
        raise InvalidArgumentsError(
            f"{name} is {value!r}, not a number.", hint=f"{name}=0.125{per_head}"
        ) from None
    if not math.isfinite(number):
        raise InvalidArgumentsError(f"{name} is {value!r}.", hint=f"a finite {name}, or None for the default")
    return number


# Largest number of each dtype of scores.
_LARGEST = {"float32": (2 - 2.0**-23) * 2.0**127, "float64": sys.float_info.max}


def score_factors(options: Options, head_dim: int, dtype: str) -> tuple[float, float | None]:
    """Return scale and softcap of a call; refuse those that overflow, or whose quotients do, in float32.

    why: an infinite factor times a score of 0 is NaN. For float64 inputs scores are float64.
    """
    scale = head_dim**-0.5 if options.scale is None else finite_number(options.scale, "scale")
    softcap = None if options.softcap is None else float(options.softcap)
    of_scores = accumulator_of(dtype)
    largest = _LARGEST[of_scores]
    numbers = {"scale": scale}
    if softcap is not None:
        numbers |= {"softcap": softcap, "1 / softcap": 1 / softcap, "scale / softcap": scale / softcap}
    for name, number in numbers.items():
        if abs(number) > largest:
            raise InvalidArgumentsError(
                f"{name} is {number:g}, beyond {largest:.1e}, the range of scores in {of_scores}.",
                hint="scale=None for the default; softcap=30.0, or None for none",
            )
    return scale, softcap


def checked_seed(seed: Any) -> int:
    """A seed as an integer in [0, 2**64)."""
    number = integer(seed)
    if number is None or not 0 <= number < 2**64:
        raise InvalidArgumentsError(f"seed is {seed!r}.", hint="an integer in [0, 2**64)")
    return number


class RunOptions(NamedTuple):
    """The values that do not affect how a call is prepared: one `Prepared` serves all of them."""

    seed: int = 0
    progress: Any = None  # the value of `progress.CALLBACK`


# For calls without seed and progress.
NO_RUN_OPTIONS = RunOptions()


def split_run_options(options: Options) -> tuple[Options, RunOptions]:
    """Split off the seed, replaced by 0, and the progress callback, as a `RunOptions`."""
    progress = CALLBACK.get()
    if options.seed is None:
        return options, NO_RUN_OPTIONS if progress is None else RunOptions(0, progress)
    seed = checked_seed(options.seed)
    return options._replace(seed=0), RunOptions(seed, progress)


def check_options(options: Options) -> None:
    """Refuse values of options that are invalid whatever the arrays are."""
    if not one_of(options.layout, LAYOUTS):
        raise InvalidArgumentsError(
            f"layout is {options.layout!r}.",
            hint='layout="bhsd" (batch, heads, seq, head_dim) or layout="bshd"',
        )
    flag(options.causal, "causal")
    if options.precision is not None and not one_of(options.precision, PRECISIONS):
        raise InvalidArgumentsError(
            f"precision is {options.precision!r}.",
            hint='precision="ieee", "tf32x3" or "tf32"; None for the default',
        )
    dropout = finite_number(options.dropout, "dropout")
    if not 0.0 <= dropout < 1.0:
        raise InvalidArgumentsError(
            f"dropout is {dropout}, outside [0, 1).",
            hint="the probability of dropping, e.g. dropout=0.1",
        )
    if dropout and options.seed is None:
        raise InvalidArgumentsError(
            f"dropout is {dropout} but there is no seed, so a backward pass could not drop the same weights.",
            hint="seed=0, and a new one for each step",
        )
    if options.seed is not None:
        checked_seed(options.seed)
    if options.softcap is not None and finite_number(options.softcap, "softcap") <= 0:
        raise InvalidArgumentsError(
            f"softcap is {options.softcap}, not above 0.", hint="softcap=30.0, or None for none"
        )
    check_reproducible(options.reproducible, dropout=dropout, tile=options.tile)
    if options.tile is not None:
        tile = options.tile
        good = isinstance(tile, (tuple, list)) and len(tile) == 2
        if not good or not all((integer(n) or 0) > 0 for n in tile):
            raise InvalidArgumentsError(
                f"tuning.tile is {tile!r}.",
                hint="cupy_flash.Tuning(tile=(64, 64)), queries and keys of a block",
            )
