"""NVRTC from its PyPI wheels, through ctypes: compile CUDA C++ to a cubin without a toolkit or a GPU."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .. import trust
from ..errors import UnsupportedError
from . import sass

__all__ = ["TOOLKITS", "CompileError", "Compiler", "Toolkit", "installed"]


class Toolkit(NamedTuple):
    """The wheels of one CUDA major, and the paths of their files in site-packages."""

    # The version that NVRTC must report. why: another version compiles to different bytes. (why not
    # cuda-pathfinder: where both majors are installed, it finds only that of CUDA 13.)
    version: tuple[int, int]
    requirements: tuple[str, str]  # requirements for pip, of the library and of the headers
    # Paths inside site-packages.
    library: str
    windows_library: str
    include: str

    @property
    def extra_requirements(self) -> tuple[str, ...]:
        """All requirements of the extra compiler12 or compiler13: also nvdisasm, for SASS, and tqdm."""
        return (*self.requirements, sass.REQUIREMENT, "tqdm")

    @property
    def compiler(self) -> str:
        """The name of this compiler in manifests."""
        return "NVRTC {}.{}".format(*self.version)


TOOLKITS = {
    12: Toolkit(
        version=(12, 9),
        requirements=("nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-runtime-cu12==12.9.79"),
        library="nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        windows_library="nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll",
        include="nvidia/cuda_runtime/include",
    ),
    13: Toolkit(
        version=(13, 5),
        requirements=("nvidia-cuda-nvrtc==13.5.37", "nvidia-cuda-runtime==13.5.37"),
        library="nvidia/cu13/lib/libnvrtc.so.13",
        windows_library="nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll",
        include="nvidia/cu13/include",
    ),
}


class CompileError(RuntimeError):
    """NVRTC did not compile a source; the message is its log."""


def _found(toolkit: Toolkit) -> tuple[Path | None, Path | None]:
    """Paths of the library and of the headers of a CUDA major; None for what is not installed."""
    library = toolkit.windows_library if sys.platform == "win32" else toolkit.library
    compiler, runtime = toolkit.requirements
    return trust.packaged(compiler, library), trust.packaged(runtime, toolkit.include)


def installed(cuda: int) -> bool:
    """Whether the wheels of this CUDA major are installed; `Compiler` checks their version."""
    return None not in _found(TOOLKITS[cuda])


class Compiler:
    """The NVRTC of CUDA 12 or 13; thread-safe. If the wheels are missing, the error has pip's command."""

    def __init__(self, cuda: int) -> None:
        self.toolkit = toolkit = TOOLKITS[cuda]
        hint = "pip install " + " ".join(toolkit.extra_requirements)
        library_path, include = _found(toolkit)
        if library_path is None or include is None:
            what = "its headers are" if library_path else "it is"
            raise UnsupportedError(
                f"kernels for CUDA {cuda} are compiled by {toolkit.compiler}, and {what} not installed.",
                hint=hint,
            )
        self.include = include
        self._nvrtc = ctypes.CDLL(str(library_path))
        self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        for path, version in ((library_path, self._version()), (include, self._header_version())):
            if version != toolkit.version:
                raise UnsupportedError(
                    f"kernels for CUDA {cuda} are compiled by {toolkit.compiler}; "
                    f"{path} is of version {version[0]}.{version[1]}.",
                    hint=hint,
                )

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._nvrtc, function)(*args)
        if status:
            text = self._nvrtc.nvrtcGetErrorString(status).decode()
            raise CompileError(f"{function}: {text}")

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _header_version(self) -> tuple[int, int]:
        text = (self.include / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        number = int(match[1]) if match else 0
        return number // 1000, number % 1000 // 10

    @functools.cached_property
    def capabilities(self) -> frozenset[int]:
        """Supported compute capabilities x 10."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", values)
        return frozenset(values)

    def compile(
        self, text: str, name: str, options: Sequence[str], *, result: Literal["CUBIN", "PTX"] = "CUBIN"
    ) -> tuple[bytes, str]:
        """Compile one source.

        Parameters
        ----------
        text : str
            CUDA C++.
        name : str
            File name of the source, for messages.
        options : sequence of str
            Options of NVRTC; the path of the CUDA headers is added.
        result : {"CUBIN", "PTX"}
            A cubin needs an architecture such as sm_90a; PTX may also be for compute_90a, without ptxas.

        Returns
        -------
        result : bytes
            The cubin, or the text of the PTX.
        log : str
            Output of NVRTC and ptxas.

        Raises
        ------
        CompileError
            The message has the log.
        """
        program = ctypes.c_void_p()
        source, label = text.encode(), name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, label, 0, None, None)
        try:
            encoded = [option.encode() for option in (*options, f"-I{self.include}")]
            array = (ctypes.c_char_p * len(encoded))(*encoded)
            status = self._nvrtc.nvrtcCompileProgram(program, len(encoded), array)
            log = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            log_text = log.rstrip(b"\0").decode(errors="replace").strip()
            if status:
                raise CompileError(f"{name} {' '.join(options)}\n{log_text}")
            made = self._read(program, f"nvrtcGet{result}Size", f"nvrtcGet{result}")
            return made if result == "CUBIN" else made.rstrip(b"\0"), log_text
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, size_of: str, read: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(read, program, buffer)
        return buffer.raw
