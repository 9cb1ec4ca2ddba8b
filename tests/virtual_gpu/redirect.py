"""The CUDA runtime inside CuPy's wheel made to jump to ours.

CuPy links the runtime into one of its modules statically. The wheels are not stripped, so each function
there is found by its name, and a jump is written over its beginning: to ours, or, where we have none, to a
refusal that says the name. Nothing of CuPy is changed on disk.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_OURS = re.compile(r"cuda[A-Z]\w*")
_SYMBOLS, _DYNAMIC_SYMBOLS = 2, 11  # kinds of sections
_PAGE = 4096


class CannotRedirect(RuntimeError):
    """A wheel of CuPy is not built as all those were that this was made for."""


class Function(NamedTuple):
    """Where a function is in an ELF file that is loaded at address 0."""

    address: int
    size: int


class Redirected(NamedTuple):
    """Names of the functions that lead to ours now, and of those that lead to a refusal."""

    ours: tuple[str, ...]
    refused: tuple[str, ...]


def functions(path: Path, kind: int = _SYMBOLS) -> dict[str, Function]:
    """The runtime's functions in an ELF file, static ones included, by name."""
    data = path.read_bytes()
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]
    return {
        name: found
        for section in sections
        if section[1] == kind
        for name, found in _of_table(data, section[4], section[5], sections[section[6]][4])
        if _OURS.fullmatch(name)
    }


def _of_table(data: bytes, start: int, size: int, names: int) -> Iterator[tuple[str, Function]]:
    for at in range(start, start + size, 24):
        name, info, _, _, address, length = struct.unpack_from("<IBBHQQ", data, at)
        if info & 15 == 2 and address:  # a function that is defined there
            end = data.index(b"\0", names + name)
            yield data[names + name : end].decode(), Function(address, length)


def _base(path: Path) -> int:
    """Address at which a library is loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, offset, *_, file = line.split(maxsplit=5)
        if file == str(path) and int(offset, 16) == 0:
            return int(bounds.split("-")[0], 16)
    raise CannotRedirect(f"{path} is not loaded")


def _jump(target: int) -> bytes:
    return b"\xff\x25\0\0\0\0" + struct.pack("<Q", target)  # jmp *0(%rip), and the address


class _Refusals:
    """Little functions that call `virtual_gpu_missing` with a name each."""

    def __init__(self, library: ctypes.CDLL, room: int) -> None:
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._code = mmap.mmap(-1, room * 64, prot=rights)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._target = _address(library.virtual_gpu_missing)
        self._names: list[ctypes.Array[ctypes.c_char]] = []

    def of(self, name: str) -> int:
        """Address of the one that says this name."""
        self._names.append(ctypes.create_string_buffer(name.encode()))
        text = ctypes.addressof(self._names[-1])
        code = b"\x48\xbf" + struct.pack("<Q", text) + _jump(self._target)  # movabs $text, %rdi
        address = self._start + 64 * (len(self._names) - 1)
        ctypes.memmove(address, code, len(code))
        return address


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


_kept: list[_Refusals] = []


def redirect(module: Path, library: ctypes.CDLL, stand_ins: Path) -> Redirected:
    """Make the runtime's functions in a loaded module lead to ours.

    Parameters
    ----------
    module : Path
        Of CuPy, already imported.
    library : CDLL
        Our libcuda, which has the runtime's functions too.
    stand_ins : Path
        Its file.

    Raises
    ------
    CannotRedirect
        The module lacks a function that we have, or has no room for a jump: it would run its own.
    """
    theirs, ours = functions(module), functions(stand_ins, _DYNAMIC_SYMBOLS)
    if lost := sorted(set(ours) - set(theirs)):
        raise CannotRedirect(f"{module} lacks {', '.join(lost[:5])}: {len(lost)} of {len(ours)} functions")
    length = len(_jump(0))
    if short := sorted(name for name in ours if theirs[name].size < length):
        raise CannotRedirect(f"{', '.join(short)} in {module} have no room for a jump")
    refused = sorted(name for name in set(theirs) - set(ours) if theirs[name].size >= length)
    _kept.append(_Refusals(library, len(refused)))
    targets = {name: _address(getattr(library, name)) for name in ours}
    targets |= {name: _kept[-1].of(name) for name in refused}
    base = _base(module)
    for name, target in targets.items():
        _overwrite(base + theirs[name].address, _jump(target))
    return Redirected(tuple(sorted(ours)), tuple(refused))


def _overwrite(address: int, code: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    pages = ctypes.c_void_p(address // _PAGE * _PAGE), ctypes.c_size_t(2 * _PAGE)
    if libc.mprotect(*pages, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC):
        raise CannotRedirect(f"mprotect: errno {ctypes.get_errno()}")
    ctypes.memmove(address, code, len(code))
    libc.mprotect(*pages, mmap.PROT_READ | mmap.PROT_EXEC)
