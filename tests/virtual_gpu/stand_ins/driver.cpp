// The driver's interface to devices, contexts and errors, as much as CuPy and cupy_flash call.
#include "gpu.h"
#include <cstdio>
#include <utility>
using namespace gpu;

namespace {
int driver_version = CUDA_VERSION;
}

// Be a driver of another CUDA; returns what it was.
API int virtual_gpu_driver_version(int version) { return std::exchange(driver_version, version); }

API CUresult cuInit(unsigned) {
    if (forked()) return CUDA_ERROR_NOT_INITIALIZED;
    return devices().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int* version) {
    *version = driver_version;
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** out) {
    static thread_local std::string name;
    name = std::string("CUDA_ERROR_") + error_name(error);
    *out = name.c_str();
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** out) {
    *out = error_text(error);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
    *count = int(devices().size());
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* out, int ordinal) {
    if (ordinal < 0 || ordinal >= int(devices().size())) return CUDA_ERROR_INVALID_DEVICE;
    *out = ordinal;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* out) {
    if (forked()) return CUDA_ERROR_NOT_INITIALIZED;
    *out = bound ? reinterpret_cast<CUcontext>(&device()) : nullptr;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
    bound = context != nullptr;
    if (bound) current = reinterpret_cast<Device*>(context)->ordinal;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* out) {
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    *out = current;
    return CUDA_SUCCESS;
}
API CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
    Guard guard(lock);
    Stream* s = stream_of(handle);
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    *out = reinterpret_cast<CUcontext>(&devices()[size_t(s->device)]);
    return CUDA_SUCCESS;
}
// The way in of a CUDA runtime that is linked into a module of CuPy's (cub, thrust, random) statically.
API CUresult cuGetExportTable(const void**, const CUuuid*) {
    return CUresult(refuse(CUDA_ERROR_NOT_FOUND, "a CUDA runtime that is not redirected was called"));
}
