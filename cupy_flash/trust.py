"""trust: whose compiled files are loaded: those of installed packages, and what nobody else may write to."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from .version import __version__

__all__ = ["exposed", "how_to_install", "make_folder", "own_folder", "package_folder", "packaged"]


def own_folder() -> Path:
    """The folder of this package; in a checkout that is reached by a link, the one in the checkout.

    why not of the resolved file: in a cache of the Hugging Face hub every file is a link to somewhere else.
    """
    return Path(__file__).parent.resolve()


def package_folder(package: str) -> Path | None:
    """The folder of an installed package of ours; None if it is not there.

    why not a namespace package: that is any folder of this name on sys.path, also in the current directory.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.origin).parent


def packaged(requirement: str, relative: str) -> Path | None:
    """A file or folder of an installed package of others, such as "nvidia-x==1"; None if it is not there.

    why by its metadata: else any folder nvidia on sys.path would do, also one in the current directory.
    """
    import importlib.metadata  # why here: with it come email, zipfile and 50 more, and no call needs them

    try:
        package = importlib.metadata.distribution(requirement.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(relative)))
    return path if path.exists() else None


def how_to_install(package: str, *, again: bool = False) -> str:
    """The command that installs a package of this release, and what to do until it is on an index."""
    command = f"pip install {'--force-reinstall ' * again}{package}=={__version__}"
    return f"{command} (until {__version__} is published: pip install . in a checkout)"


def make_folder(folder: Path) -> None:
    """Make a folder of a cache, and what is missing above it, so that only the user can write to it."""
    for step in reversed((folder, *folder.parents)):
        step.mkdir(mode=0o700, exist_ok=True)


def exposed(path: Path, beside: Iterable[Path] = ()) -> tuple[Path, str] | None:
    """What another user could write to on the way to a file, with the reason; None if there is nothing.

    Parameters
    ----------
    path : Path
        It and every folder and link from the root to it have to belong to the user or root, and nobody
        else may write to them. A sticky folder of root, such as /tmp, will do: there nobody can replace
        what belongs to others.
    beside : iterable of Path
        Other files, in folders that are looked at already.
    """
    if sys.platform == "win32":
        return None  # profiles are private there
    for step in chain(_way(path), beside):
        try:
            status = step.lstat()
        except FileNotFoundError:  # not made yet, or just replaced by a build
            continue
        if status.st_uid not in (os.getuid(), 0):
            return step, "belongs to another user"
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and status.st_uid == 0
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
        if shared and not sticky:
            return step, "can be written to by other users"
    return None


def _way(path: Path) -> Iterator[Path]:
    """Every folder and link from the root to a file, and the file; those that links lead through, too."""
    parts, at = list(reversed(path.absolute().parts)), Path()
    while parts:
        at = at / parts.pop()
        yield at
        if at.is_symlink():
            parts += reversed(at.readlink().parts)
            at = at.parent
