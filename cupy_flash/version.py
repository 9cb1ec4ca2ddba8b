"""The version, alone in its module so that builds can read it without importing anything."""

__version__ = "0.1.0"
