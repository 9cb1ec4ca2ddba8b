"""The PTX that NVRTC makes of the kernels, run on the CPU by the simulator; README.md says what that shows."""
