"""Kernels as files: made from sources, held to rules, located and trusted."""
