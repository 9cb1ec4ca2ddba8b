"""Modules by the names of flash-attn's ``modules``."""
