"""The versions of the library and of its params structs, alone so that builds read them without imports."""

__version__ = "0.1.0"
# Raised with every change of kernels_cu/include/abi.cuh: cubins of another one are refused.
ABI_VERSION = 4
