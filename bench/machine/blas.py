"""The threads of NumPy's BLAS, where threadpoolctl is there to hold them: an image for GPUs may lack it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Many small products inside: spinning threads would slow them tenfold."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits


def names() -> list[str]:
    """NumPy's BLAS with its version and the kernels it chose; nothing if that cannot be asked for."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return []
    return [
        f"{library['internal_api']} {library['version']} {library.get('architecture', '')}".strip()
        for library in threadpool_info()
        if library["user_api"] == "blas" and "numpy" in library["filepath"]
    ]
