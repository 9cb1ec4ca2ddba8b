"""Benchmarks, run from a checkout: python -m bench cpu."""
