"""Tiled attention in NumPy: the same call without a GPU, in linear memory."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
