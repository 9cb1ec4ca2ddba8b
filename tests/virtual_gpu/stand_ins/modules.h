// Modules as the driver has them, and the two kinds of code that stand for a kernel here.
#pragma once
#include "cubin.h"
#include "gpu.h"
#include <memory>

namespace gpu {

struct Module;
struct Function {
    Entry entry;
    Module* module = nullptr;
    int max_dynamic_shared = 0;    // that a launch may ask for

    // A kernel of cupy_flash: the simulator's library of its variant.
    int (*simulate)(const uint32_t* grid, const uint32_t* block, uint64_t shared,
                    const void* params) = nullptr;
    void (*configure)(int policy, uint64_t seed, int seconds, int counting) = nullptr;
    const char* (*report)() = nullptr;
    // A kernel of CuPy's own, compiled by our NVRTC: sizes of its parameters, and its code.
    const size_t* (*sizes)(size_t* count) = nullptr;
    void (*run)(const uint32_t* grid, const uint32_t* block, uint64_t shared, void** params) = nullptr;
};
struct Module {
    std::string path;    // of a cubin from memory only its target, as a folder
    int device = 0;
    void* host = nullptr;    // library of our NVRTC
    std::map<std::string, std::unique_ptr<Function>> functions;
};

}    // namespace gpu
