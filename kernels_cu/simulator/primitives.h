// What every kernel includes, precompiled: cupy_flash/device/host_build.py.
#include "prim.cuh"
