"""locate: find the cubin of a variant, and check its manifest and SHA-256."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import manifest, trust
from ..errors import CubinNotFoundError
from ..log import LOG
from ..plan.catalog import SHORT, Variant
from ..program.graph import Body
from ..version import ABI_VERSION, __version__
from . import sources

__all__ = ["Cubin", "CubinSet", "available", "code", "functions_cache", "locate", "unreadable",
           "user_cache"]  # fmt: skip

FORMAT = 1
MANIFEST = "manifest.json"
OVERRIDE = "CUPY_FLASH_CUBIN_DIR"
_FIELDS = {"bytes", "registers", "sha256", "shared_bytes", "source", "spill_bytes"}
PACKAGES = {13: "cupy-flash-cuda13x", 12: "cupy-flash-cuda12x"}


class Cubin(NamedTuple):
    """A verified file with the code of one variant."""

    path: Path
    sha256: str
    # Registers and spilled bytes per thread, bytes of shared memory per block.
    registers: int
    spills: int
    shared_bytes: int
    set: str  # {"cuda12", "cuda13"}
    origin: str  # the place where it was found, for messages
    target: str  # target of the compilation, e.g. "sm_80"; its minor version may be lower than the GPU's


class CubinSet(NamedTuple):
    """The cubins of one target in one place, as `available` lists them."""

    origin: str
    path: Path
    set: str  # {"cuda12", "cuda13"}
    target: str
    # Number of cubins, and their total size.
    kernels: int
    bytes: int
    problem: str  # why the set cannot be used; empty if it can


class Unreadable(NamedTuple):
    """A place whose cubins, if it has any, cannot be read."""

    origin: str
    path: Path
    why: str


class _Origin(NamedTuple):
    """A place with cubins."""

    name: str  # name in messages
    root: Path  # holds cuda12/<target> and cuda13/<target>
    repair: str  # the command that repairs it, a format string with {cuda} and {target}
    from_sources: bool = False  # compiled from the sources on this machine, which may have changed since
    private: bool = False  # must be writable by its owner only

    def folder(self, cuda: int, target: str) -> Path:
        """Where the cubins of a target are."""
        return self.root / f"cuda{cuda}" / target

    def hint(self, cuda: int, target: str) -> str:
        """The command that repairs these cubins."""
        return self.repair.format(cuda=cuda, target=target)


def capability(target: str) -> int:
    """Compute capability x 10 of a target or architecture: 90 for "sm_90a"."""
    return int(target.removeprefix("sm_").rstrip("af"))


def usable_sets(driver_version: int | None) -> tuple[int, ...]:
    """CUDA majors whose cubins a driver loads, best first; all of them for plans without a driver."""
    if driver_version is None:
        return (12, 13)
    return tuple(major for major in (13, 12) if driver_version >= 1000 * major)


def _targets(arch: str) -> list[str]:
    """Targets that run on an architecture, best first: `a`, then equal and lower minors, `f` before plain."""
    number = capability(arch)
    minors = range(number, number // 10 * 10 - 1, -1)
    return [f"sm_{number}a", *(f"sm_{n}{feature}" for n in minors for feature in ("f", ""))]


# ---------------------------------------------------------------------------------------------- places


def user_cache() -> Path:
    """The user's cache of this version; `python -m cupy_flash build` fills it."""
    return trust.user_cache() / "cubins" / __version__


def make_private(store: Path) -> None:
    """Create the user's cache, writable by its owner only."""
    trust.make_folder(store)
    _require_private(store.parent, store)


def _require_private(root: Path, path: Path) -> None:
    """Refuse a path in the cache that another user could have written: its code runs with our rights."""
    neighbours = path.parent.glob("*.cubin") if path.is_file() else ()
    found = trust.exposed(path, neighbours)
    if found is None:
        return
    step, reason = found
    if not step.is_relative_to(root):
        raise CubinNotFoundError(
            f"{step}, on the way to the cubin cache, {reason}.",
            hint=f"chmod go-w {step}, or XDG_CACHE_HOME set to a folder of your own",
        )
    cure = "rm -r" if "belongs" in reason else "chmod -R go-w"
    raise CubinNotFoundError(f"{step}, in the cubin cache, {reason}.", hint=f"{cure} {root}")


def functions_cache(function: Body, out: Path | None = None) -> Path:
    """The folder of the kernels of a score function, in the user's cache of this version or in `out`."""
    cache, name = user_cache(), function.digest[:16]
    return cache.with_name(f"{cache.name}-{name}") if out is None else out / name


def _origins_of_function(variant: Variant, function: Body) -> Iterator[_Origin]:
    """Every place that may hold the kernels of a score function."""
    repair = _how_to_build(variant, "{target}", "{cuda}")
    override = os.environ.get(OVERRIDE)
    if override:
        yield _Origin(OVERRIDE, functions_cache(function, Path(override)), f"unset {OVERRIDE}, or {repair}")
    yield _Origin("user cache", functions_cache(function), repair, from_sources=True, private=True)


def _how_to_build(variant: Variant, arch: str, cuda: object = None) -> str:
    """The call that compiles a kernel of a score function, for hints; for any CUDA major if it is None."""
    assert variant.function is not None
    given = "arguments, " * bool(variant.function.arguments)
    dtype = next((name for name, short in SHORT.items() if short == variant.dtype), "float32")
    kinds = f'archs=["{arch}"], dtypes=["{dtype}"], head_dims=[{variant.head_dim}]'
    kinds += ", second_order=True" * (variant.params == "SecondOrderParams")
    kinds += f", cuda={cuda}" * (cuda is not None)
    return f"build({given}{kinds}) of the score function"


def _origins() -> Iterator[_Origin]:
    """Every place that may hold cubins, in order of precedence."""
    build = "scripts/build_cubins.py --cuda {cuda} --arch {target}"
    override = os.environ.get(OVERRIDE)
    if override:
        escaped = override.replace("{", "{{").replace("}", "}}")
        yield _Origin(OVERRIDE, Path(override), f"unset {OVERRIDE}, or {build} --out {escaped}")
    command = "python -m cupy_flash build --cuda {cuda} --arch {target}"
    yield _Origin("user cache", user_cache(), command, from_sources=True, private=True)
    package = trust.own_folder()
    yield _Origin("cupy-flash", package / "_cubins", "pip install --force-reinstall . in the checkout")
    if sources.folder().parent == package.parent:
        yield _Origin("checkout", package.parent / "build" / "cubins", build, from_sources=True)
    for name in PACKAGES.values():
        folder = trust.package_folder(name)
        if folder is not None:
            yield _Origin(name, folder / "_cubins", trust.how_to_install(name, again=True))


# ---------------------------------------------------------------------------------------------- trust


@functools.lru_cache(maxsize=64)
def _read_manifest(path: Path, modified_ns: int) -> Any:
    del modified_ns  # part of the cache key: a rebuilt set is read again
    return manifest.read(path, "cubins", _FIELDS)


def _entries(origin: _Origin, cuda: int, target: str) -> dict[str, Any]:
    """Manifest entries of a folder, empty if there is none; refuse one of another version."""
    path = origin.folder(cuda, target) / MANIFEST
    hint = origin.hint(cuda, target)
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        return {}
    if origin.private:
        _require_private(origin.root.parent, path)
    try:
        held = _read_manifest(path, modified_ns)
        if held["format"] != FORMAT or (held["cuda"], held["target"]) != (cuda, target):
            raise ValueError("it does not describe its folder")
        entries = dict(held["cubins"])
        manifest.check_version(held, ABI_VERSION, f"the cubins in {path.parent}", hint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CubinNotFoundError(f"{path} is not a manifest of cubins: {error!r}.", hint=hint) from error
    return entries


def _is_folder(path: Path) -> bool:
    """Whether this is a folder. why not Path.is_dir: it raises below a home that is not for this user."""
    return os.path.isdir(path)  # noqa: PTH112


def _why_unreadable(folder: Path) -> str:
    """Why a folder cannot be listed; empty if it can, or if there is none."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unreadable() -> list[Unreadable]:
    """Every place that this user may not read, such as the cache in the home of another user."""
    reasons = [(origin, _why_unreadable(origin.root)) for origin in _origins()]
    return [Unreadable(origin.name, origin.root, why) for origin, why in reasons if why]


def _manifests(origin: _Origin) -> list[Path]:
    """Every manifest of a place."""
    return sorted(origin.root.glob(f"cuda1[23]/*/{MANIFEST}")) if _is_folder(origin.root) else []


# ---------------------------------------------------------------------------------------------- the verb


def locate(variant: Variant, arch: str, driver_version: int | None = None) -> Cubin:
    """Find the cubin of a variant for a GPU.

    The first place that has one wins: CUPY_FLASH_CUBIN_DIR, the user's cache, this package, the
    checkout, the installed data packages. Within a place the driver's own CUDA major comes
    first, then the closest target. A cubin, also that of an `f` target, runs on GPUs of its major
    with an equal or higher minor; a cubin of an `a` target only on its own architecture.

    Parameters
    ----------
    variant : Variant
    arch : str
        The GPU's architecture, e.g. "sm_86".
    driver_version : int, optional
        As CUDA counts, e.g. 12040. By default every set is usable.

    Returns
    -------
    Cubin
        Its file has the manifest's SHA-256; `code` reads it.

    Raises
    ------
    CubinNotFoundError
        No cubin fits; or the one that fits is damaged, stale, of another version, or in a cache
        that other users may write to. Such a place is never skipped silently.
    """
    origins = list(_origins_of_function(variant, variant.function) if variant.function else _origins())
    for origin, cuda, target, entry in _matches(origins, variant, arch, driver_version):
        path = origin.folder(cuda, target) / f"{variant.name}.cubin"
        damage = manifest.damage(path, entry)
        if not damage and origin.from_sources and entry["source"] != sources.digest(variant, target, cuda):
            damage = "its sources have changed since"
        if damage:
            raise CubinNotFoundError(f"{path} cannot be used: {damage}.", hint=origin.hint(cuda, target))
        if origin.name == OVERRIDE:
            with contextlib.suppress(CubinNotFoundError):  # a place that cannot be used hides nothing
                for hidden, *_ in _matches(origins[1:], variant, arch, driver_version):
                    warnings.warn(f"{OVERRIDE} is set, and hides {hidden.name}", RuntimeWarning, stacklevel=2)
                    break
        LOG.debug("found %s for %s: %s, of %s", variant.name, arch, path, origin.name)
        return Cubin(
            path, entry["sha256"], entry["registers"], entry["spill_bytes"], entry["shared_bytes"],
            f"cuda{cuda}", origin.name, target,
        )  # fmt: skip
    raise _not_found(variant, arch, driver_version, origins)


def code(cubin: Cubin) -> bytes:
    """Read a cubin that `locate` has found, and check its SHA-256 again.

    why the driver does not get the path: it would read the file again, which may have been replaced.
    """
    try:
        data = cubin.path.read_bytes()
    except OSError as error:
        raise CubinNotFoundError(
            f"{cubin.path} cannot be read: {error.strerror or error}.", hint="python -m cupy_flash info"
        ) from error
    manifest.check_bytes(cubin.path, data, cubin.sha256)
    return data


def _matches(
    origins: Sequence[_Origin], variant: Variant, arch: str, driver_version: int | None
) -> Iterator[tuple[_Origin, int, str, dict[str, Any]]]:
    """Manifest entries of cubins that could run, best first: (origin, CUDA major, target, entry)."""
    for origin in origins:
        for cuda in usable_sets(driver_version):
            if _is_folder(origin.root / f"cuda{cuda}"):
                for target in _targets(arch):
                    entry = _entries(origin, cuda, target).get(variant.name)
                    if entry is not None:
                        yield origin, cuda, target, entry


def _not_found(
    variant: Variant, arch: str, driver_version: int | None, origins: Sequence[_Origin]
) -> CubinNotFoundError:
    reasons = []
    for origin in origins:
        held = sorted(path.parent.name for path in _manifests(origin))
        what = ", ".join(dict.fromkeys(held)) if held else "no cubins"
        why = _why_unreadable(origin.root)
        reasons.append(
            (origin.name, f"{origin.root} cannot be read: {why}" if why else f"{what} in {origin.root}")
        )
    if variant.function:
        usable = usable_sets(driver_version)
        return CubinNotFoundError(
            f"no cubin of {variant.name} for {arch}: score functions are compiled when it is asked for.",
            reasons=reasons,
            hint=_how_to_build(variant, arch, usable[0] if len(usable) == 1 else None),
        )
    package = PACKAGES[12]
    if driver_version is not None and driver_version >= 13000:
        package = PACKAGES[13]
    elif driver_version is not None:
        version = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        reasons.append(("driver", f"CUDA {version}, which loads no cubins of the CUDA 13 set"))
    in_checkout = any(origin.name == "checkout" for origin in origins)
    ours = f"scripts/build_cubins.py --arch {arch}" if in_checkout else trust.how_to_install(package)
    return CubinNotFoundError(
        f"no cubin of {variant.name} for {arch}.",
        reasons=reasons,
        hint=f"{ours}, or for this GPU alone: python -m cupy_flash build --arch {arch}",
    )


def available(*, verify: bool = False) -> list[CubinSet]:
    """Every set of cubins here, in the order of `locate`; `verify` reads and compares every file."""
    found = []
    for origin in _origins():
        for file in _manifests(origin):
            folder, cuda = file.parent, int(file.parent.parent.name.removeprefix("cuda"))
            entries: dict[str, Any] = {}
            problem = ""
            try:
                entries = _entries(origin, cuda, folder.name)
            except CubinNotFoundError as error:
                problem = str(error)
            for name, entry in entries.items() if verify else ():
                damage = manifest.damage(folder / f"{name}.cubin", entry)
                if damage:
                    hint = origin.hint(cuda, folder.name)
                    problem = f"{folder / name}.cubin cannot be used: {damage}.\nTry: {hint}"
                    break
            size = sum(entry["bytes"] for entry in entries.values())
            found.append(
                CubinSet(origin.name, folder, f"cuda{cuda}", folder.name, len(entries), size, problem)
            )
    return found
