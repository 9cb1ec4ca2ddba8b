"""Tiled attention on the CPU, in linear memory: NumPy here, the compiled core in `core`."""

from .backward import backward
from .decode import decode
from .forward import forward
from .hvp import hvp
from .jvp import jvp
from .packed import each_sequence
from .statistics import statistics

__all__ = ["backward", "decode", "each_sequence", "forward", "hvp", "jvp", "statistics"]
