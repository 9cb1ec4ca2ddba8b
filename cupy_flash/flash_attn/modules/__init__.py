"""Modules with the names of flash-attn's ``modules``."""
