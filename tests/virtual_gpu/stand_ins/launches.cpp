// cuLaunchKernel: its limits, its parameters as the cubin has them, and the work itself.
#include "modules.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
using namespace gpu;

namespace {
constexpr uint64_t kRegisters = 65536;     // of a multiprocessor
constexpr unsigned kMostBlocks = 65535;    // along y and z
constexpr int kSeconds = 600;              // that a launch may take

uint64_t launched = 0, simulated = 0;
int policy = 1;    // of the simulator: late
uint64_t seed = 1;
std::string failure;
bool idle = false;    // launches do nothing

struct Shape {
    uint32_t grid[3], block[3];
    uint64_t threads() const { return uint64_t(block[0]) * block[1] * block[2]; }
};
int check(const Function& f, const Stream* s, const Shape& shape, unsigned dynamic) {
    const char* name = f.entry.name.c_str();
    const auto& [gx, gy, gz] = shape.grid;
    if (!s) return refuse(CUDA_ERROR_INVALID_HANDLE, "launch of %s: not a stream", name);
    if (s->device != current)
        return refuse(CUDA_ERROR_INVALID_HANDLE, "launch of %s: the stream is another device's", name);
    if (f.module->device != current)
        return refuse(CUDA_ERROR_INVALID_HANDLE, "launch of %s: the module is another device's", name);
    if (!gx || !gy || !gz || gx > INT32_MAX || gy > kMostBlocks || gz > kMostBlocks)
        return refuse(CUDA_ERROR_INVALID_VALUE, "launch of %s: grid %u x %u x %u", name, gx, gy, gz);
    if (!shape.threads() || shape.threads() > uint64_t(f.entry.max_threads) || shape.block[2] > 64)
        return refuse(CUDA_ERROR_INVALID_VALUE, "launch of %s: block of %llu threads, it takes %d", name,
                      (unsigned long long)shape.threads(), f.entry.max_threads);
    if (uint64_t(f.entry.registers) * shape.threads() > kRegisters)
        return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "launch of %s: %llu threads of %d registers", name,
                      (unsigned long long)shape.threads(), f.entry.registers);
    if (int64_t(dynamic) > f.max_dynamic_shared)
        return refuse(CUDA_ERROR_INVALID_VALUE, "launch of %s: %u bytes of shared memory, allowed are %d",
                      name, dynamic, f.max_dynamic_shared);
    return CUDA_SUCCESS;
}

int enqueue_of_cupy(Stream* s, const Function& f, const Shape& shape, unsigned dynamic, void** given) {
    size_t count = 0;
    const size_t* sizes = f.sizes(&count);
    std::vector<std::vector<char>> held;
    for (size_t i = 0; i < count; i++) {
        const auto* from = static_cast<const char*>(given[i]);
        held.emplace_back(from, from + sizes[i]);
    }
    return enqueue(s, [&f, shape, dynamic, held]() mutable {
        std::vector<void*> pointers;
        for (auto& one : held) pointers.push_back(one.data());
        f.run(shape.grid, shape.block, dynamic, pointers.data());
    });
}

int enqueue_simulated(Stream* s, const Function& f, const Shape& shape, unsigned dynamic, void** given) {
    const Entry& entry = f.entry;
    if (entry.parameters.size() != 1)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s has %zu parameters, not one struct", entry.name.c_str(),
                      entry.parameters.size());
    const auto [offset, size] = entry.parameters[0];
    if (!given || !given[0] || offset + size > entry.parameter_bytes)
        return refuse(CUDA_ERROR_INVALID_VALUE, "launch of %s: no parameter", entry.name.c_str());
    // As the driver does: the parameter is copied now, by the size that the cubin says.
    // why the base: a struct is aligned by its place in the bank, not by its offset.
    const size_t bytes = (entry.parameter_base + entry.parameter_bytes + 255) / 128 * 128;
    std::shared_ptr<char> bank(static_cast<char*>(aligned_alloc(128, bytes)), free);
    char* params = bank.get() + entry.parameter_base + offset;
    memcpy(params, given[0], size);
    return enqueue(s, [&f, shape, dynamic, bank, params] {
        simulated++;
        f.configure(policy, seed, kSeconds, 0);
        if (f.simulate(shape.grid, shape.block, dynamic, params)) return;
        failure = f.entry.name + ": " + f.report();
        failed = refuse(CUDA_ERROR_LAUNCH_FAILED, "%s", failure.c_str());
    });
}
}    // namespace

// ---- what tests set and ask

// The schedule inside of launches, as of simulator_configure.
API void virtual_gpu_schedule(int chosen, uint64_t drawn) {
    policy = chosen;
    seed = drawn;
}
// Let launches do nothing but count, so that what is left of their time is the caller's.
API void virtual_gpu_idle(int chosen) { idle = chosen; }
API uint64_t virtual_gpu_launched() { return launched; }
API uint64_t virtual_gpu_simulated() { return simulated; }
API const char* virtual_gpu_failure() { return failure.c_str(); }
// Do all work that is left, and go on even if a kernel failed, as no process with a GPU can.
API void virtual_gpu_recover() {
    Guard guard(lock);
    for (auto& d : devices()) drain_device(d);
    failed = 0;
    failure.clear();
}

// ---- the driver's interface

API CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned dynamic, CUstream handle, void** given,
                            void** extra) {
    if (idle) {
        launched++;
        return CUDA_SUCCESS;
    }
    Guard guard(lock);
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    if (failed) return CUresult(failed);
    const auto& f = *reinterpret_cast<Function*>(function);
    if (extra) return CUresult(refuse(CUDA_ERROR_NOT_SUPPORTED, "launch of %s: extra", f.entry.name.c_str()));
    Stream* s = stream_of(handle);
    const Shape shape{{gx, gy, gz}, {bx, by, bz}};
    if (int error = check(f, s, shape, dynamic)) return CUresult(error);
    launched++;
    return CUresult(f.run ? enqueue_of_cupy(s, f, shape, dynamic, given)
                          : enqueue_simulated(s, f, shape, dynamic, given));
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                       unsigned by, unsigned bz, unsigned dynamic, CUstream s, void** given) {
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, dynamic, s, given, nullptr);
}
