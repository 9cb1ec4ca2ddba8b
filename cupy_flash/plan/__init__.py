"""Which kernels answer a problem: choose, and the families of kernels to choose from."""
