"""Compile kernels into the user's cache on request: the shipped kernels, or kernels of a score function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, product
from pathlib import Path

from ..plan import catalog, families
from ..plan.families import flash_tiles, simple
from ..program.graph import Body
from ..store import writing
from . import locate, nvrtc
from .build import OLDEST, build, native_targets

__all__ = ["function_into_cache", "into_user_cache", "kernel_into_cache"]

# Head dims that have kernels of their own.
_HEAD_DIMS = sorted({*simple.HEAD_DIMS, *(d for d, _ in flash_tiles.HEAD_DIMS)})


def into_user_cache(archs: Sequence[str], cudas: Sequence[int] = (12, 13)) -> list[Path]:
    """Compile the shipped sources into the user's cache, where `cubins.locate.locate` finds them.

    Parameters
    ----------
    archs : sequence of str
        E.g. ``["sm_86"]``.
    cudas : sequence of {12, 13}
        Acceptable CUDA majors, best first; the first one that has these architectures and an installed
        compiler is used.

    Returns
    -------
    list of Path
        The directory of each target.

    Raises
    ------
    UnsupportedError
        No compiler.
    BuildFailed
        As in `build`.
    CubinNotFoundError
        The cache could be written by other users.
    """
    store = locate.user_cache()
    with writing(store):
        locate.make_private(store)
    return [x.folder for x in build(_cuda(cudas, archs), archs, store)]


def function_into_cache(
    function: Body,
    archs: Sequence[str],
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    cudas: Sequence[int] = (12, 13),
    *,
    second_order: bool = False,
    out: Path | None = None,
) -> list[Path]:
    """Compile the kernels of a score function into the user's cache, or a folder.

    Parameters
    ----------
    function : Body
    archs, cudas
        As in `into_user_cache`.
    dtypes : sequence of str
        Dtypes of q, k and v.
    head_dims : sequence of int
    second_order : bool
        Also compile kernels of tangents and second derivatives.
    out : Path, optional
        A folder for CUPY_FLASH_CUBIN_DIR instead; it may hold kernels of several functions.

    Returns
    -------
    list of Path
        The directory of each target.

    Raises
    ------
    UnsupportedError, BuildFailed, CubinNotFoundError
        As in `into_user_cache`.
    """
    selected = [target for arch in archs for target in native_targets(arch)]
    wanted = {
        v.name for target in selected for v in _offered(function, target, dtypes, head_dims, second_order)
    }
    return _into(function, archs, wanted, cudas, out=out)


def kernel_into_cache(variant: catalog.Variant, arch: str, cudas: Sequence[int]) -> list[Path]:
    """Compile one kernel of a score function into the user's cache; errors as in `into_user_cache`."""
    assert variant.function is not None
    return _into(variant.function, [arch], {variant.name}, cudas, progress=False)


def _into(
    function: Body,
    archs: Sequence[str],
    wanted: Collection[str],
    cudas: Sequence[int],
    *,
    out: Path | None = None,
    progress: bool = True,
) -> list[Path]:
    """Compile kernels of a score function by name; others that are in the store stay."""

    def every(target: str) -> tuple[catalog.Variant, ...]:
        return _offered(function, target, catalog.SHORT, _HEAD_DIMS, True)

    store = locate.functions_cache(function, out)
    if out is None:
        with writing(store):
            locate.make_private(store)
    made = build(_cuda(cudas, archs), archs, store, only=wanted, progress=progress, every=every)
    return [built.folder for built in made]


def _offered(
    function: Body, target: str, dtypes: Iterable[str], head_dims: Iterable[int], second_order: bool
) -> tuple[catalog.Variant, ...]:
    kinds = product(dtypes, head_dims)
    found = (families.of_function(function, x, d, target, second_order) for x, d in kinds)
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def _cuda(cudas: Sequence[int], archs: Sequence[str]) -> int:
    """The first CUDA major that has these architectures and an installed compiler, or else the first of all.

    why the architectures: a driver of CUDA 13 also runs GPUs that only the compiler of CUDA 12 has.
    """
    oldest = min(catalog.architecture(arch).capability for arch in archs)
    fit = [major for major in cudas if oldest >= OLDEST[major]] or [*cudas]
    return next((major for major in fit if nvrtc.installed(major)), fit[0])
