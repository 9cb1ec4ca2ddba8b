"""locate: find the library of an instruction set, and check its manifest and SHA-256."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ... import manifest, trust
from ...errors import CubinNotFoundError
from .isa import OVERRIDE, Isa, host
from .params import ABI_VERSION
from .sources import digest, folder, library_name

__all__ = ["Library", "how_to_get_one", "load", "locate"]

FORMAT = 1
MANIFEST = "manifest.json"
_FIELDS = {"bytes", "compiler", "sha256", "source"}
PACKAGE = "cupy-flash-cpu"
_FROM_A_CHECKOUT = "pip install . in a checkout, with a C++ compiler (g++ 12 or clang++ 15)"


class Library(NamedTuple):
    """A verified file with the core for one instruction set."""

    isa: str
    path: Path
    bytes: int
    compiler: str  # version line of the compiler that built it
    origin: str  # the place where it was found, for messages
    sha256: str
    part: str = ""  # one of `sources.PARTS`


class _Origin(NamedTuple):
    """A place with libraries, <root>/<platform>/<name>.so.

    Attributes
    ----------
    name : str
        Name of the place in messages.
    root : Path
    repair : str
        The command that installs or compiles its libraries again.
    from_sources : bool
        Whether its libraries must have been compiled from the sources of this checkout.
    """

    name: str
    root: Path
    repair: str
    from_sources: bool = False

    def folder(self) -> Path:
        """The folder of the libraries of this platform."""
        return self.root / host().platform


def _origins() -> Iterator[_Origin]:
    """Every place that may hold libraries, in order of precedence."""
    package = trust.own_folder()
    yield _Origin("cupy-flash", package / "_core", "pip install --force-reinstall . in the checkout")
    if folder().is_dir():
        yield _Origin("checkout", package.parent / "build" / "cpu", "scripts/build_cpu.py", from_sources=True)
    installed = trust.package_folder(PACKAGE)
    if installed is not None:
        yield _Origin(PACKAGE, installed / "_core", trust.how_to_install(PACKAGE, again=True))


def _entries(origin: _Origin) -> dict[str, Any]:
    """Manifest entries of a place for this platform, empty if there are none; refuse another version."""
    path = origin.folder() / MANIFEST
    try:
        held = manifest.read(path, "libraries", _FIELDS)
        if (held["format"], held["platform"]) != (FORMAT, host().platform):
            raise ValueError("it does not describe its folder")
        entries = dict(held["libraries"])
        manifest.check_version(held, ABI_VERSION, f"the libraries in {path.parent}", origin.repair)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CubinNotFoundError(
            f"{path} is not a manifest of the core: {error!r}.", hint=origin.repair
        ) from error
    return entries


def _damage(path: Path, entry: dict[str, Any], isa: Isa, part: str, origin: _Origin) -> str:
    """Why a file cannot be used; empty if it can."""
    if found := manifest.damage(path, entry):
        return found
    if origin.from_sources and entry["source"] != digest(isa, part):
        return "its sources have changed since"
    return ""


@functools.cache
def locate(isa: Isa, part: str = "") -> Library | None:
    """Find a library of an instruction set: the first place that has one wins.

    Parameters
    ----------
    isa : Isa
    part : str
        One of `sources.PARTS`.

    Returns
    -------
    Library or None
        A file with the SHA-256 of its manifest, for `load`; None if no place has one.

    Raises
    ------
    CubinNotFoundError
        A library is damaged, stale or of another version. It is never skipped silently.
    """
    name = library_name(isa, part)
    for origin in _origins():
        entry = _entries(origin).get(name)
        if entry is not None:
            path = origin.folder() / f"{name}.so"
            damage = _damage(path, entry, isa, part, origin)
            if damage:
                raise CubinNotFoundError(f"{path} cannot be used: {damage}.", hint=origin.repair)
            return Library(
                isa.name, path, entry["bytes"], entry["compiler"], origin.name, entry["sha256"], part
            )
    return None


@functools.cache
def load(library: Library) -> ctypes.CDLL:
    """Load a library that `locate` has found, after checking its SHA-256 again.

    Linux loads the open file, so that the path cannot be replaced in between; other systems load the path.
    A file that the system refuses to load raises a CubinNotFoundError.
    """
    with library.path.open("rb") as file:
        manifest.check_bytes(library.path, file.read(), library.sha256)
        # why a random path: glibc returns the loaded library for a path that it has seen, file numbers are
        # reused, and a process may hold a second copy of this package.
        unique = "".join("/./" if byte & 1 else "/" for byte in os.urandom(64))
        opened = f"/proc/self/fd{unique}{file.fileno()}"
        by_descriptor = sys.platform == "linux" and Path(opened).exists()
        try:
            return ctypes.CDLL(opened if by_descriptor else str(library.path))
        except OSError as error:  # for a file system mounted noexec: "failed to map segment ..."
            raise CubinNotFoundError(
                f"{library.path} does not load: {str(error).removeprefix(f'{opened}: ')}.",
                hint=f"a file system that is not mounted noexec, or {OVERRIDE}=numpy in the environment",
            ) from error


def how_to_get_one() -> str:
    """The command that installs libraries for this platform."""
    origins = {origin.name for origin in _origins()}
    if "checkout" in origins:
        return "scripts/build_cpu.py"
    if PACKAGE in origins:  # the package of a platform without libraries
        return _FROM_A_CHECKOUT
    return trust.how_to_install(PACKAGE, before=_FROM_A_CHECKOUT)
