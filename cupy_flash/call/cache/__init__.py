"""Calls over a KV cache: split into arrays and values, checked and described."""
