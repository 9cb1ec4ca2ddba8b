"""Manifests: what a compiled file must be to be loaded. Those of cubins and of the CPU core are alike."""

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
    """What a manifest says.

    Parameters
    ----------
    path : Path
    files : str
        The key of its table: name of a file -> entry.
    fields : collection of str
        What each entry has.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError, AttributeError
        It cannot be read, or is none.
    """
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in manifest[files].items():
        if missing := set(fields) - set(entry):
            raise ValueError(f"{name} lacks {', '.join(sorted(missing))}")
    return manifest


def check_version(manifest: Mapping[str, Any], abi: int, what: str, hint: str) -> None:
    """Refuse what was made for another version of this package, or other params structs.

    Parameters
    ----------
    manifest : mapping
    abi : int
        Ours.
    what : str
        The files, such as "the cubins in FOLDER".
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
    """What is wrong with a file; empty if it is what its entry says."""
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
    """Refuse bytes that are about to be loaded, if they are not those of the file that was found.

    Parameters
    ----------
    path : Path
        Where they were read.
    data : bytes
    sha256 : str
        Of what was found.

    Raises
    ------
    CubinNotFoundError
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CubinNotFoundError(
            f"{path} was replaced after it was checked.", hint="python -m cupy_flash info"
        )
