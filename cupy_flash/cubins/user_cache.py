"""Kernels compiled on request, into the user's cache: the shipped ones, and those of a score function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from ..plan import catalog
from ..plan.families import simple
from ..program.graph import Graph
from . import locate, nvrtc
from .build import build, writing

__all__ = ["function_into_cache", "into_user_cache"]


def into_user_cache(
    archs: Sequence[str],
    cudas: Sequence[int] = (12, 13),
    *,
    jobs: int | None = None,
    progress: bool = True,
) -> list[Path]:
    """Compile the shipped sources into the user's cache, where `cubins.locate.locate` finds them.

    Parameters
    ----------
    archs : sequence of str
        E.g. ``["sm_86"]``.
    cudas : sequence of {12, 13}
        CUDA majors that would do, the best first; the first whose compiler is installed is taken.
    jobs, progress
        As in `build`.

    Returns
    -------
    list of Path
        The directory of each architecture.

    Raises
    ------
    Unsupported
        No compiler.
    BuildFailed
        As in `build`.
    CubinNotFound
        The cache could be written by other users.
    """
    store = locate.user_cache()
    with writing(store):
        locate.make_private(store)
    return [x.folder for x in build(_cuda(cudas), archs, store, jobs=jobs, progress=progress)]


def function_into_cache(
    function: Graph,
    archs: Sequence[str],
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    cudas: Sequence[int] = (12, 13),
    *,
    out: Path | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> list[Path]:
    """Compile the kernels of a score function into the user's cache, or a folder.

    Parameters
    ----------
    function : Graph
    archs, cudas, jobs, progress
        As of `into_user_cache`.
    dtypes : sequence of str
        Of q, k and v.
    head_dims : sequence of int
    out : Path, optional
        A folder for CUPY_FLASH_CUBIN_DIR instead; it may hold those of several functions.

    Returns
    -------
    list of Path
        The directory of each architecture.

    Raises
    ------
    Unsupported, BuildFailed, CubinNotFound
        As of `into_user_cache`.
    """
    short = [catalog.SHORT[dtype] for dtype in dtypes]
    wanted = {v.name for x, d in product(short, head_dims) for v in simple.of_function(function, x, d)}
    offered = product(catalog.SHORT.values(), simple.HEAD_DIMS)
    every = tuple(dict.fromkeys(v for x, d in offered for v in simple.of_function(function, x, d)))
    store = locate.functions_cache(function, out)
    if out is None:
        with writing(store):
            locate.make_private(store)
    made = build(_cuda(cudas), archs, store, only=wanted, jobs=jobs, progress=progress, every=lambda _: every)
    return [built.folder for built in made]


def _cuda(cudas: Sequence[int]) -> int:
    """The first CUDA major whose compiler is installed."""
    return next((major for major in cudas if nvrtc.installed(major)), cudas[0])
