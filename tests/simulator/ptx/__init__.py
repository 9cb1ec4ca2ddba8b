"""The PTX that NVRTC makes of the kernels, run on the CPU by the simulator; see README.md."""
