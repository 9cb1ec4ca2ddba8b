"""Cubins of cupy_flash for CUDA 12; `cupy_flash` finds them without importing this."""
