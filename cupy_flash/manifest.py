"""Manifests, which list the properties of compiled files; the same for cubins and for the CPU core."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .errors import CubinNotFoundError
from .version import __version__

__all__ = ["check_bytes", "check_version", "damage", "read"]


def read(path: Path, files: str, fields: Collection[str]) -> dict[str, Any]:
    """Read a manifest.

    Parameters
    ----------
    path : Path
    files : str
        Key of its table: file name -> entry.
    fields : collection of str
        Fields that each entry must have.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError, AttributeError
        It cannot be read, or is not a manifest.
    """
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in manifest[files].items():
        if missing := set(fields) - set(entry):
            raise ValueError(f"{name} lacks {', '.join(sorted(missing))}")
    return manifest


def check_version(manifest: Mapping[str, Any], abi: int, what: str, hint: str) -> None:
    """Refuse files made for another version of the package, or another ABI of params structs.

    Parameters
    ----------
    manifest : mapping
    abi : int
        ABI version of this package.
    what : str
        The files, for the message, such as "the cubins in FOLDER".
    hint : str

    Raises
    ------
    CubinNotFoundError
    """
    found = manifest["version"], manifest["abi"]
    if found != (__version__, abi):
        raise CubinNotFoundError(
            f"{what} are of cupy_flash {found[0]} (ABI {found[1]}); this is {__version__} (ABI {abi}).",
            hint=hint,
        )


def damage(path: Path, entry: Mapping[str, Any]) -> str:
    """Why a file cannot be used; "" if size and SHA-256 match its entry."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    if len(data) != entry["bytes"]:
        return f"it has {len(data)} of {entry['bytes']} bytes"
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        return f"its SHA-256 is {found[:16]}..., not {entry['sha256'][:16]}..."
    return ""


def check_bytes(path: Path, data: bytes, sha256: str) -> None:
    """Refuse bytes about to be loaded, if the file has changed since it was found.

    Parameters
    ----------
    path : Path
        The file that they were read from.
    data : bytes
    sha256 : str
        SHA-256 of the file when it was found.

    Raises
    ------
    CubinNotFoundError
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CubinNotFoundError(
            f"{path} was replaced after it was checked.", hint="python -m cupy_flash info"
        )
