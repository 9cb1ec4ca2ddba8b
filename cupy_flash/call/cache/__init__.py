"""A call over a KV cache: taken apart, its arrays checked, and described."""
