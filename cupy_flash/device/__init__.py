"""Load a kernel and run it: on a GPU by CuPy, or in the simulator."""
