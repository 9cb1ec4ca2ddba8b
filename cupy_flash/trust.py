"""trust: load compiled files only from installed packages, and from paths that no other user can write to."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from .version import __version__

__all__ = ["CACHE_VARIABLE", "exposed", "how_to_install", "make_folder", "own_folder", "package_folder",
           "packaged", "user_cache"]  # fmt: skip

# The environment variable with the folder of the user's caches.
CACHE_VARIABLE = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"


def own_folder() -> Path:
    """The folder of this package; if a checkout is reached by a link, the folder in the checkout.

    why not resolve the file: in a cache of the Hugging Face hub, every file is a link into a folder of blobs.
    """
    return Path(__file__).parent.resolve()


def package_folder(package: str) -> Path | None:
    """The folder of an installed package of this project; None if it is not installed.

    why not a namespace package: any folder of this name on sys.path would match, also in the current
    directory.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.origin).parent


def packaged(requirement: str, relative: str) -> Path | None:
    """A file or folder of an installed third-party package, such as "nvidia-x==1"; None if missing.

    why by metadata: otherwise any folder nvidia on sys.path would match, also in the current directory.
    """
    import importlib.metadata  # why here: it imports email, zipfile and 50 more, and calls do not need it

    try:
        package = importlib.metadata.distribution(requirement.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(relative)))
    return path if path.exists() else None


def how_to_install(package: str, *, again: bool = False, before: str = "pip install . in a checkout") -> str:
    """The command that installs a package of this release, and what to do before it is published."""
    command = f"pip install {'--force-reinstall ' * again}{package}=={__version__}"
    return f"{command} (until {__version__} is published: {before})"


def user_cache() -> Path:
    """The folder of this package among the user's caches.

    why not platformdirs: a dependency instead of a few lines, and it differs only on systems without CUDA.
    """
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():  # a user without an entry in passwd, for whom containers set HOME to the root
        home = Path(os.sep).absolute()  # why not by Path.cwd(): that folder may be gone
    if sys.platform == "win32":
        given, base = os.environ.get("LOCALAPPDATA", ""), home / "AppData" / "Local"
    else:
        given, base = os.environ.get("XDG_CACHE_HOME", ""), home / ".cache"
    # why: a relative folder would be another one after os.chdir; the specification of XDG ignores it, too
    return (Path(given) if Path(given).is_absolute() else base) / "cupy_flash"


def make_folder(folder: Path) -> None:
    """Make a cache folder and missing parents, which only the user can write to."""
    for step in reversed((folder, *folder.parents)):
        step.mkdir(mode=0o700, exist_ok=True)


def exposed(path: Path, others: Iterable[Path] = ()) -> tuple[Path, str] | None:
    """The first part of a path that another user could write to, with the reason; None if there is none.

    Parameters
    ----------
    path : Path
        This file, and every folder and link from the root to it, must belong to the user or root, and must
        not be writable by others. A sticky folder of root, such as /tmp, is allowed: other users cannot
        replace files in it.
    others : iterable of Path
        Other files in folders that are checked already.
    """
    if sys.platform == "win32":
        return None  # user profiles are private on Windows
    for step in chain(_path_components(path), others):
        try:
            status = step.lstat()
        except FileNotFoundError:  # not created yet, or being replaced by a build
            continue
        if status.st_uid not in (os.getuid(), 0):
            return step, "belongs to another user"
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and status.st_uid == 0
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
        if shared and not sticky:
            return step, "can be written to by other users"
    return None


def _path_components(path: Path) -> Iterator[Path]:
    """Every folder and link from the root to a file, the file, and everything that links lead through."""
    parts, at = list(reversed(path.absolute().parts)), Path()
    while parts:
        at = at / parts.pop()
        yield at
        if at.is_symlink():
            parts += reversed(at.readlink().parts)
            at = at.parent
