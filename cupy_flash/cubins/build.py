"""Compile the catalog into cubins and manifests, in parallel and incrementally; no GPU or toolkit needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..log import LOG
from ..plan import catalog, families
from ..store import BuildFailed, locked, write_atomically, writing
from ..version import ABI_VERSION, __version__
from . import locate, nvrtc, sources
from .compile import compile_variant

__all__ = ["BuildFailed", "Built", "Offered", "archs_here", "build", "native_targets", "targets"]

# The lowest compute capability x 10 that the compiler of a CUDA major has.
OLDEST = {12: 0, 13: 75}
# Returns the variants that a store holds for a target.
Offered = Callable[[str], Sequence[catalog.Variant]]
_LINE_SECONDS = 10.0  # between two lines of progress
_SAVE_SECONDS = 5.0  # between two writes of the manifest: the work that a killed build loses


class Built(NamedTuple):
    """The cubins of one target."""

    folder: Path
    compiled: dict[str, float]  # variants compiled by this build, with the CPU seconds of each


def targets(cuda: int) -> tuple[str, ...]:
    """All targets of a release for a CUDA major."""
    rows = [row for row in catalog.ARCHITECTURES if row.capability >= OLDEST[cuda]]
    return tuple(dict.fromkeys(target for row in rows for target in row.targets))


def native_targets(arch: str) -> tuple[str, ...]:
    """The targets for exactly this GPU, even if a release has no such target: sm_103 for sm_103.

    There are several where an architecture has kernels of its own in addition to those of another target.
    """
    row = catalog.architecture(arch)
    of_release = locate.capability(row.target) == row.capability or row.name == row.own_target
    return (row.target if of_release else row.name, *row.targets[1:])


def archs_here() -> tuple[str, ...]:
    """Architectures of this machine's GPUs that kernels support, from nvidia-smi.

    why not CuPy: it is not installed in the environment that builds the package.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    here = {f"sm_{major}{minor}" for major, minor in re.findall(r"^(\d+)\.(\d)$", told, re.MULTILINE)}
    return tuple(sorted(arch for arch in here if _is_known(arch)))


def _is_known(arch: str) -> bool:
    with contextlib.suppress(UnsupportedError):
        return bool(catalog.architecture(arch))
    return False


# ---------------------------------------------------------------------- one store


def _write_manifest(directory: Path, cuda: int, entries: Mapping[str, Any]) -> None:
    manifest = {
        "format": locate.FORMAT,
        "version": __version__,
        "abi": ABI_VERSION,
        "cuda": cuda,
        "target": directory.name,
        "compiler": nvrtc.TOOLKITS[cuda].compiler,
        "cubins": dict(entries),
    }
    data = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    path = directory / locate.MANIFEST
    if not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data)


def _up_to_date(directory: Path, cuda: int, every: Offered) -> dict[str, Any]:
    """Manifest entries that match the catalog and the sources, and whose file has the right SHA-256."""
    try:
        old = json.loads((directory / locate.MANIFEST).read_text(encoding="utf-8"))
        entries = dict(old["cubins"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    whole = {}
    for variant in every(directory.name):
        entry = entries.get(variant.name)
        if not isinstance(entry, dict):
            continue
        if entry.get("source") != sources.digest(variant, directory.name, cuda):
            continue
        with contextlib.suppress(OSError):
            data = (directory / f"{variant.name}.cubin").read_bytes()
            if hashlib.sha256(data).hexdigest() == entry.get("sha256"):
                whole[variant.name] = entry
    return whole


def build(
    cuda: int,
    archs: Sequence[str],
    out: Path,
    *,
    only: str | Collection[str] = "*",
    jobs: int | None = None,
    progress: bool = True,
    every: Offered | None = None,
) -> list[Built]:
    """Bring ``out/cuda<major>/<target>/`` up to date for each architecture.

    Parameters
    ----------
    cuda : {12, 13}
        CUDA major of the NVRTC.
    archs : sequence of str
        E.g. "sm_80", "sm_90a". "sm_90" means the catalog's "sm_90a".
    out : Path
        The store; created if missing.
    only : str or collection of str
        Pattern of variant names, or names. Other cubins stay if they are up to date.
    jobs : int, optional
        Parallel compilations; default is the number of processors.
    progress : bool
        Show a bar, or without a terminal or tqdm a line every few seconds.
    every : callable, optional
        Returns all variants of the store for a target; other cubins are removed. Default: the variants of
        the families.

    Returns
    -------
    list of Built
        One for each target of the architectures.

    Raises
    ------
    BuildFailed
        A source does not compile, spills more than its row allows, causes a wgmma warning, overwrites
        a register that a wgmma in flight reads, or waits for products before the work that should
        overlap with them; or a file cannot be written. Finished cubins are kept.
    UnsupportedError
        NVRTC is missing, of another version, or too old for an architecture; or nvdisasm or the sources of
        the kernels are missing.
    """
    if not sources.folder().is_dir():
        raise UnsupportedError(
            f"the sources of the kernels are not in {sources.folder()}.",
            hint="an installed cupy_flash or a checkout, not a copy of the package alone or an archive of it",
        )
    compiler = nvrtc.Compiler(cuda)
    names = list(dict.fromkeys(name for arch in archs for name in native_targets(arch)))
    for name in names:
        if locate.capability(name) not in compiler.capabilities:
            raise UnsupportedError(
                f"{compiler.toolkit.compiler} does not compile for {name}.",
                reasons=[f"the CUDA {cuda} set is {', '.join(targets(cuda))}"],
                hint="--cuda 12, which is for older GPUs" if cuda >= 13 else "a newer cupy_flash",
            )
    store = out / f"cuda{cuda}"
    directories = [store / name for name in names]
    made = [Built(directory, {}) for directory in directories]
    with writing(store):
        out.mkdir(parents=True, exist_ok=True)
        for directory in (store, *directories):
            directory.mkdir(mode=0o755, exist_ok=True)  # not writable by others, whatever the umask
        with locked(store):
            _compile_all(
                compiler, made, only, jobs or os.cpu_count() or 1, progress, every or families.variants
            )
    return made


def _compile_all(
    compiler: nvrtc.Compiler,
    made: Sequence[Built],
    only: str | Collection[str],
    jobs: int,
    progress: bool,
    every: Offered,
) -> None:
    directories = [built.folder for built in made]
    seconds = {built.folder: built.compiled for built in made}
    cuda = compiler.toolkit.version[0]
    entries = {directory: _up_to_date(directory, cuda, every) for directory in directories}
    waiting = [
        (variant, directory)
        for directory in directories
        for variant in every(directory.name)
        if variant.name not in entries[directory] and _is_of(variant.name, only)
    ]
    LOG.info("%d cubins to build in %s", len(waiting), ", ".join(map(str, directories)))
    if waiting:
        # why: if this build is killed, replaced files are missing from the manifest instead of damaged.
        for directory in directories:
            _write_manifest(directory, cuda, entries[directory])
    refused: list[str] = []

    def keep(future: Future[tuple[dict[str, Any], list[str], float]]) -> None:
        variant, directory = futures.pop(future)
        entry, reasons, seconds[directory][variant.name] = future.result()
        spent = seconds[directory][variant.name]
        LOG.info("built %s for %s in %.1f s: %d registers, %d bytes", variant.name, directory.name, spent,
                 entry["registers"], entry["bytes"])  # fmt: skip
        refused.extend(reasons)
        if not reasons:
            entries[directory][variant.name] = entry

    pool = ThreadPoolExecutor(jobs)
    futures = {
        pool.submit(compile_variant, compiler, variant, directory.name, directory): (variant, directory)
        for variant, directory in waiting
    }
    try:
        with _bar(len(waiting), progress) as advance:
            saved = time.monotonic()
            for future in as_completed(tuple(futures)):
                variant, directory = futures[future]
                keep(future)
                if time.monotonic() - saved > _SAVE_SECONDS:
                    for path in directories:
                        _write_manifest(path, cuda, entries[path])
                    saved = time.monotonic()
                advance(f"{directory.name} {variant.name}")
    except nvrtc.CompileError as error:
        raise BuildFailed(
            f"a kernel does not compile:\n{error}\nTry: its source in kernels_cu, by the lines above"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        for future in tuple(futures):  # compilations that ended during an interrupt
            if future.done() and not future.cancelled() and not future.exception():
                keep(future)
        for directory in directories:
            _write_manifest(directory, cuda, entries[directory])
            _remove_unlisted(directory, entries[directory])
    if refused:
        raise BuildFailed(
            "\n  ".join([f"{len(refused)} kernels were compiled and refused:", *sorted(refused)])
            + "\nTry: another tile for each, or higher limits in its row of cupy_flash/plan/families"
        )


def _is_of(name: str, only: str | Collection[str]) -> bool:
    return fnmatch(name, only) if isinstance(only, str) else name in only


def _remove_unlisted(directory: Path, entries: Mapping[str, Any]) -> None:
    for file in directory.glob("*.cubin"):
        if file.stem not in entries:
            file.unlink(missing_ok=True)
    for rest in directory.glob(".*.cubin.*"):  # temporary files of a killed build: we hold the lock
        rest.unlink(missing_ok=True)


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Any]:
    """Yield a function that reports a finished cubin: in a bar on a terminal, else in lines."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or sys.stderr is None or not sys.stderr.isatty():
        yield _lines(total, progress)
        return
    with tqdm(total=total, unit="cubin", disable=not progress or not total) as bar:

        def advance(done: str) -> None:
            bar.set_postfix_str(done, refresh=False)
            bar.update()

        yield advance


def _lines(total: int, progress: bool) -> Callable[[str], None]:
    """Return a function that reports a finished cubin, in a line every few seconds and at the end."""
    start = said = time.monotonic()
    count = 0

    def advance(done: str) -> None:
        nonlocal count, said
        count, now = count + 1, time.monotonic()
        if progress and (now - said >= _LINE_SECONDS or count in (1, total)):
            said = now
            print(f"{count} of {total} cubins in {now - start:.0f} s: {done}", file=sys.stderr, flush=True)

    return advance
