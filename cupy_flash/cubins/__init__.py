"""Cubins: compile kernels from sources, check their SASS, locate and verify them."""
