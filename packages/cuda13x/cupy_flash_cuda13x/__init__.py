"""Cubins of cupy_flash for CUDA 13; `cupy_flash` finds them without importing this."""
