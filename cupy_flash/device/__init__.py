"""Load and run kernels: on a GPU through CuPy or libcuda, or in the simulator."""
