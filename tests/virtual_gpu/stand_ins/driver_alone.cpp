// What cupy_flash calls of the driver where there is no CuPy: contexts, attributes, memory and streams. Unlike the
// runtime these make no context by themselves: a thread that has none is refused.
#include "runtime.h"
#include <cstdio>
using namespace gpu;

namespace {
struct Before {
    bool bound;
    int current;
};
thread_local std::vector<Before> stack;
std::vector<bool> retained;    // devices whose primary context is kept

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < int(devices().size()); }
}    // namespace

#define IN_CONTEXT                                                                                           \
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT

// ---- contexts

API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
    Guard guard(lock);
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    retained.resize(devices().size());
    retained[size_t(ordinal)] = true;
    *out = reinterpret_cast<CUcontext>(&devices()[size_t(ordinal)]);
    return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent(CUcontext context) {
    Guard guard(lock);
    if (forked()) return CUDA_ERROR_NOT_INITIALIZED;
    const int ordinal = context ? reinterpret_cast<Device*>(context)->ordinal : -1;
    if (!is_device(ordinal) || !retained[size_t(ordinal)]) return CUDA_ERROR_INVALID_CONTEXT;
    stack.push_back({bound, current});
    bound = true;
    current = ordinal;
    return CUDA_SUCCESS;
}
API CUresult cuCtxPopCurrent(CUcontext* out) {
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *out = reinterpret_cast<CUcontext>(&device());
    bound = stack.back().bound;
    current = stack.back().current;
    stack.pop_back();
    return CUDA_SUCCESS;
}

// ---- devices

API CUresult cuDeviceGetName(char* out, int bytes, CUdevice ordinal) {
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, size_t(bytes), "%s", devices()[size_t(ordinal)].model->name);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem(size_t* out, CUdevice ordinal) {
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *out = devices()[size_t(ordinal)].bytes;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice ordinal) {
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    const Model& model = *devices()[size_t(ordinal)].model;
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = model.multiprocessors; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = model.capability / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = model.capability % 10; break;
        default: return CUresult(refuse(CUDA_ERROR_INVALID_VALUE, "attribute %d of a device", int(which)));
    }
    return CUDA_SUCCESS;
}

// ---- memory and streams, as the runtime has them

API CUresult cuMemAlloc(CUdeviceptr* out, size_t bytes) {
    IN_CONTEXT;
    return CUresult(cudaMalloc(reinterpret_cast<void**>(out), bytes));
}
API CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream s) {
    IN_CONTEXT;
    return CUresult(cudaMallocAsync(reinterpret_cast<void**>(out), bytes, s));
}
API CUresult cuMemFreeAsync(CUdeviceptr p, CUstream s) {
    IN_CONTEXT;
    return CUresult(cudaFreeAsync(reinterpret_cast<void*>(p), s));
}
API CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char value, size_t bytes, CUstream s) {
    IN_CONTEXT;
    return CUresult(cudaMemsetAsync(reinterpret_cast<void*>(p), value, bytes, s));
}
API CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream s) {
    IN_CONTEXT;
    return CUresult(cudaMemcpyAsync(to, reinterpret_cast<void*>(from), bytes, cudaMemcpyDeviceToHost, s));
}
API CUresult cuStreamSynchronize(CUstream s) {
    IN_CONTEXT;
    return CUresult(cudaStreamSynchronize(s));
}
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* out) {
    IN_CONTEXT;
    return CUresult(cudaStreamIsCapturing(s, reinterpret_cast<cudaStreamCaptureStatus*>(out)));
}
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    std::swap(*reinterpret_cast<int*>(mode), capture_mode);
    return CUDA_SUCCESS;
}
