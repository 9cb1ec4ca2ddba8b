"""The logger of the library, for files found, plans, loads and builds, each logged once.

why a module: importing logging takes longer than many calls, and calls on NumPy arrays do not need it.
"""

import logging

__all__ = ["LOG"]

LOG = logging.getLogger("cupy_flash")
LOG.addHandler(logging.NullHandler())
