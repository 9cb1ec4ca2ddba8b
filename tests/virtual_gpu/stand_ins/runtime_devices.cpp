// cuda*: errors, versions and devices.
#include "runtime.h"
#include <cstdio>
#include <cstring>
using namespace gpu;

namespace gpu {
thread_local cudaError_t last = cudaSuccess;
}

namespace {
constexpr int kSharedByDefault = 48 << 10;

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < int(devices().size()); }
int attribute(const Device& d, cudaDeviceAttr a) {
    switch (a) {
        case cudaDevAttrComputeCapabilityMajor: return d.model->capability / 10;
        case cudaDevAttrComputeCapabilityMinor: return d.model->capability % 10;
        case cudaDevAttrMultiProcessorCount: return d.model->multiprocessors;
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return INT32_MAX;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return kSharedByDefault;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return d.model->shared_optin;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return d.model->shared_per_multiprocessor;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock: return 65536;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return d.model->threads_per_multiprocessor;
        case cudaDevAttrMemoryPoolsSupported:
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrManagedMemory: return 1;
        default: return 0;
    }
}
}    // namespace

// ---- errors and versions

API cudaError_t cudaGetLastError() {
    const cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(cudaError_t error) {
    static thread_local std::string name;
    name = std::string("cudaError(") + error_name(error) + ")";
    return name.c_str();
}
API const char* cudaGetErrorString(cudaError_t error) { return error_text(error); }
API cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
// Where redirect.py sends every function of the runtime that is not here.
API cudaError_t virtual_gpu_missing(const char* name) {
    return answer(refuse(cudaErrorNotSupported, "%s is not there", name));
}

// ---- devices

API cudaError_t cudaGetDeviceCount(int* count) {
    *count = int(devices().size());
    return answer(*count ? 0 : cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* out) {
    *out = current;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int ordinal) {
    if (!is_device(ordinal)) return answer(cudaErrorInvalidDevice);
    current = ordinal;
    bound = true;    // since CUDA 12 it makes the context
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    LOCK;
    if (int error = forbidden_by_capture()) return answer(error);
    bound = true;
    drain_device(device());
    return answer(failed);
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    LOCK;
    bound = true;
    *free = device().bytes - device().used;
    *total = device().bytes;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr a, int ordinal) {
    if (!is_device(ordinal)) return answer(cudaErrorInvalidDevice);
    *out = attribute(devices()[size_t(ordinal)], a);
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p,
                                        int ordinal) {    // CUDA 12 makes it _v2 by a macro
    if (!is_device(ordinal)) return answer(cudaErrorInvalidDevice);
    const Device& d = devices()[size_t(ordinal)];
    memset(p, 0, sizeof *p);
    strcpy(p->name, d.model->name);
    p->uuid.bytes[0] = char(ordinal + 1);
    p->major = d.model->capability / 10;
    p->minor = d.model->capability % 10;
    p->totalGlobalMem = d.bytes;
    p->multiProcessorCount = d.model->multiprocessors;
    p->maxThreadsPerMultiProcessor = d.model->threads_per_multiprocessor;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT32_MAX;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->warpSize = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = size_t(kSharedByDefault);
    p->sharedMemPerBlockOptin = size_t(d.model->shared_optin);
    p->sharedMemPerMultiprocessor = size_t(d.model->shared_per_multiprocessor);
    p->reservedSharedMemPerBlock = 1024;
    p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->managedMemory = 1;
    p->memoryPoolsSupported = p->streamPrioritiesSupported = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* out, int bytes, int ordinal) {
    snprintf(out, size_t(bytes), "0000:%02x:00.0", ordinal + 1);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetByPCIBusId(int* out, const char* id) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2 || !is_device(int(bus) - 1))
        return answer(cudaErrorInvalidDevice);
    *out = int(bus) - 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) {
    *can = a != b;
    return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned) {
    LOCK;
    if (!is_device(other)) return answer(cudaErrorInvalidDevice);
    if (device().peers[size_t(other)]) return answer(cudaErrorPeerAccessAlreadyEnabled);
    device().peers[size_t(other)] = true;
    return cudaSuccess;
}
API cudaError_t cudaDeviceDisablePeerAccess(int other) {
    LOCK;
    device().peers[size_t(other)] = false;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetLimit(size_t* out, cudaLimit) {
    *out = 1 << 20;
    return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
