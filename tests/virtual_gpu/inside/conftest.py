"""These tests run in a process that has the plugin; `cupy` is that of tests/gpu."""

from tests.gpu.conftest import cupy

__all__ = ["cupy"]
