"""What the library tells the standard logging module: what it finds, plans, loads and builds, each once.

why a module: importing logging takes longer than many calls, and arrays of NumPy need none of this.
"""

import logging

__all__ = ["LOG"]

LOG = logging.getLogger("cupy_flash")
LOG.addHandler(logging.NullHandler())
