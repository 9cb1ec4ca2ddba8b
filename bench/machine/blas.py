"""Limit the threads of NumPy's BLAS by threadpoolctl, if it is installed; GPU machines may lack it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Limit the BLAS to one thread, for many small products: spinning threads slow them tenfold."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits


def names() -> list[str]:
    """NumPy's BLAS, its version and its kernel set; empty without threadpoolctl."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return []
    return [
        f"{library['internal_api']} {library['version']} {library.get('architecture', '')}".strip()
        for library in threadpool_info()
        if library["user_api"] == "blas" and "numpy" in library["filepath"]
    ]
