"""Score and mask functions, for ``score=`` and ``mask=`` of `cupy_flash.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .api import adopted
from .call.checks import flag, integer, one_of
from .call.functions import body_of
from .call.opaque import opaque
from .errors import InvalidArgumentsError
from .plan.catalog import SHORT
from .program.function import Program

if TYPE_CHECKING:
    import os

__all__ = ["ScoreFunction", "mask", "score", "set_compile_policy"]


class ScoreFunction(Program):
    """A score or mask function, made by `score` or `mask`; see its ``function``, ``masks`` and ``name``."""

    __slots__ = ()

    def build(
        self,
        arguments: Sequence[Any] = (),
        *,
        archs: Sequence[str] | None = None,
        dtypes: Sequence[str] = ("float16",),
        head_dims: Sequence[int] = (64,),
        second_order: bool = False,
        cuda: int | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> list[Path]:
        """Compile the kernels of this function, so that calls on GPUs find them.

        This needs a compiler (NVRTC), but no GPU. Nothing else compiles: a call whose kernels are missing
        raises CubinNotFoundError, which names this method.

        Parameters
        ----------
        arguments : sequence of array
            Arrays like those that will be bound; only dtypes and ranks matter.
        archs : sequence of str, optional
            Architectures such as "sm_86". Default: those of this machine's GPUs.
        dtypes : sequence of str
            Dtypes of q, k and v: float16, bfloat16, float32, float64.
        head_dims : sequence of int
            Head dims of q, k and v.
        second_order : bool
            Whether to compile the kernels of `derivatives` too, which double backward needs.
        cuda : {12, 13}, optional
            CUDA major. Default: one whose compiler is installed and compiles for ``archs``. For this
            machine's GPUs the driver's is the first choice, else 12.
        out : path, optional
            A folder to use instead of the user's cache, to be named by the environment variable
            CUPY_FLASH_CUBIN_DIR; your package can ship it.

        Returns
        -------
        list of Path
            The folder of the kernels, for each architecture.

        Raises
        ------
        InvalidArgumentsError
            As in a call; or there is no kernel for these arguments.
        UnsupportedError
            No compiler is installed; or there is no GPU here, and no ``archs``.
        cupy_flash.cubins.build.BuildFailed
            Compilation failed.
        """
        from .cubins.user_cache import function_into_cache
        from .device.choice import build_targets
        from .plan.families.simple import HEAD_DIMS

        body = body_of(self, adopted(**{f"bound[{n}]": x for n, x in enumerate(arguments)}))
        archs, cudas = build_targets(archs, cuda)
        _check_list("archs", archs, lambda x: isinstance(x, str), 'archs=["sm_86"]')
        _check_list("dtypes", dtypes, lambda x: one_of(x, SHORT), 'dtypes=["float16", "float32"]')
        if cuda is not None and integer(cuda) not in (12, 13):
            raise InvalidArgumentsError(f"cuda is {cuda!r}.", hint="cuda=12 or cuda=13")
        most = HEAD_DIMS[-1]
        _check_list(
            "head_dims", head_dims, lambda x: 0 < (integer(x) or 0) <= most, f"head_dims=[64], to {most}"
        )
        folder = None if out is None else Path(out)
        return function_into_cache(
            body, archs, dtypes, head_dims, cudas,
            second_order=flag(second_order, "second_order"), out=folder,
        )  # fmt: skip


def _check_list(name: str, given: Any, good: Callable[[Any], bool], hint: str) -> None:
    if not isinstance(given, (tuple, list)) or not given or not all(map(good, given)):
        raise InvalidArgumentsError(f"{name} is {given!r}.", hint=hint)


_once = functools.partial(
    opaque,
    why="a score or mask function is made outside of compiled programs. "
    "Try: it made once, before; or fullgraph=False",
)


@_once
def score(function: Callable[..., Any] | str, *, learned: Sequence[str] = ()) -> ScoreFunction:
    """A score function (score_mod), for ``score=`` of `attention` and `attention_varlen`.

    Parameters
    ----------
    function : callable or str
        Called with the score s (scaled, after softcap), its batch b, head of q h, query i and key j, and one
        parameter per bound array, which it indexes by one integer per axis; arrays of shape () are
        numbers. Returns the new score; -inf masks a pair. Supported are + - * / // %,
        powers from 2 to 8, comparisons, & | ~, casts, and of NumPy or torch where, exp, exp2, log, tanh,
        sigmoid, silu, sqrt, abs, minimum, maximum, clip, square. A str is C text, for GPUs only: a template
        ``T score(T s, int b, int h, int i, int j, ...)`` that takes ``table(h, i)`` where Python takes
        ``table[h, i]``.
    learned : sequence of str
        Names of the parameters whose gradients `attention_backward` returns, as ``dscore``.

    Returns
    -------
    ScoreFunction
        Call it to bind arrays: ``score=f(table)``.

    Raises
    ------
    InvalidArgumentsError
        It takes too few arguments, or ``learned`` names an unknown one. When it is used: it branches in
        Python on a value, does not return a number, or uses an unsupported operation; the line is shown. C
        text does not define the function, or includes a file.
    UnsupportedError
        ``learned`` with C text. When it is used: arrays are on a CPU with C text; integers of a function may
        overflow.

    Notes
    -----
    The function is traced once per combination of dtypes and ranks of its arguments: make it once, outside
    the loop, and pass values that change as arguments. Positions count from 0
    within a sequence, packed ones too, whatever ``align`` says. Integers have 32 or 64 bits: a call
    whose lengths may overflow them is refused. An index outside its axis is clamped; for a visible pair it is
    refused if the arrays are in main memory.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> alibi = cupy_flash.score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j))
    >>> q = k = v = np.ones((1, 2, 16, 8), np.float32)
    >>> cupy_flash.attention(q, k, v, causal=True, score=alibi(np.float32([0.5, 0.25]))).shape
    (1, 2, 16, 8)
    """
    return ScoreFunction(function, False, learned)


def set_compile_policy(policy: Literal["allow", "refuse"]) -> str:
    """Set whether a call on a GPU may compile the missing kernels of a score function.

    Parameters
    ----------
    policy : {"allow", "refuse"}
        Applies to this process, from now on. "allow": NVRTC compiles them into the user's cache while the
        call waits, for seconds, once. "refuse", the default: the call raises CubinNotFoundError, which names
        ``ScoreFunction.build``; no compiler is imported.

    Returns
    -------
    str
        The previous policy.

    Raises
    ------
    InvalidArgumentsError
        Another policy.
    """
    from .cubins import on_demand

    return on_demand.policy(policy)


@_once
def mask(function: Callable[..., Any] | str) -> ScoreFunction:
    """A mask function (mask_mod), for ``mask=`` of `attention`: which pairs to keep.

    Parameters
    ----------
    function : callable or str
        Called with b, h, i, j and arguments, as in `score`; returns a condition, True where query i may
        attend to key j. A text in C defines ``bool mask(int b, int h, int i, int j, ...)``.

    Returns
    -------
    ScoreFunction
        Call it to bind arrays: ``mask=same_document(ids)``.

    Raises
    ------
    InvalidArgumentsError
        As in `score`.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> causal = cupy_flash.mask(lambda b, h, i, j: i >= j)
    >>> q = k = v = np.ones((1, 2, 16, 8), np.float32)
    >>> o = cupy_flash.attention(q, k, v, mask=causal)
    """
    return ScoreFunction(function, True, ())
