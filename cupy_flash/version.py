"""Versions of the library and of its params structs, in a module of their own for builds to read."""

__version__ = "0.1.0"
# Raised with every change of kernels_cu/include/abi.cuh: cubins with another version are refused.
ABI_VERSION = 5
