"""store: folders of compiled files; a build holds the lock of one, and replaces whole files."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from . import trust

__all__ = ["BuildFailed", "file_to_write", "locked", "write_atomically", "writing"]


class BuildFailed(RuntimeError):
    """Files could not be compiled or written, or were refused; the message has every reason."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, after waiting for another build; the system frees it if we die.

    why not filelock: it uses the same system locks, and every build of the package would have to install it.
    """
    with (directory / ".lock").open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            locked = False
            while not locked:
                with contextlib.suppress(OSError):  # LK_LOCK gives up after ten seconds
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                    locked = True
        else:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another build in {directory}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing(store: Path) -> Iterator[None]:
    """Turn an OSError into BuildFailed, which names the file and a remedy."""
    try:
        yield
    except OSError as error:
        # why: no caller names a folder in the user's cache, so that only its variable leads to another one.
        by = f", by {trust.CACHE_VARIABLE}" if store.is_relative_to(trust.user_cache()) else ""
        raise BuildFailed(
            f"cannot write {error.filename or store}: {error.strerror or error}.\n"
            f"Try: free space and rights there, or another folder{by}"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new one, and a failure leaves no temporary."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    # why not tempfile: its files are private, and other users of a shared installation have to read these.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # why: a write to a file descriptor reports a full disk without a name
        raise


def file_to_write(text: str) -> Path:
    """A file that a command is told to write; its folder is made now, not after minutes of compiling."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {path.parent}: {error.strerror}") from error
    return path
