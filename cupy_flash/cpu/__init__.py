"""Tiled attention in NumPy: the same call without a GPU, in linear memory."""

from .backward import backward
from .forward import forward
from .packed import each_sequence

__all__ = ["backward", "each_sequence", "forward"]
