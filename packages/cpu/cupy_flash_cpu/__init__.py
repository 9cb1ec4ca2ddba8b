"""The compiled CPU core of cupy_flash; `cupy_flash` finds it without importing this."""
