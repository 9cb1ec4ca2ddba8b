// What every translated kernel includes, precompiled: tests/simulator/ptx/toolchain.py.
#include "ptx.h"
