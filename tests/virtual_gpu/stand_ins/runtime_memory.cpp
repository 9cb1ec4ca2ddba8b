// cuda*: memory of the device, of pools, of the host and of both; copies.
#include "runtime.h"
#include <cstdlib>
#include <cstring>
#include <memory>
using namespace gpu;

namespace {
constexpr size_t kPage = 4096;

void move(void* to, const void* from, size_t bytes) {
    std::vector<std::unique_ptr<Opened>> open;
    for (const void* p : {static_cast<const void*>(to), from})
        if (Device* d = owner(p)) open.push_back(std::make_unique<Opened>(*d));
    memmove(to, from, bytes);
}
// Whether a copy may use an address later than the call: device memory, and what is pinned or managed.
bool stays(const void* p) { return owner(p) || is_pinned(p) || managed_by(p) >= 0; }

cudaError_t copy(void* to, const void* from, size_t bytes, Stream* s, bool wait) {
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    if (!whole(to, bytes) || !whole(from, bytes))
        return answer(
            refuse(cudaErrorInvalidValue, "a copy of %zu bytes is outside of what was allocated", bytes));
    if (wait && s->capture) return answer(cudaErrorStreamCaptureUnsupported);
    if (!stays(from) && !s->capture) {    // staged before the call returns
        const auto* first = static_cast<const char*>(from);
        std::vector<char> staged(first, first + bytes);
        if (int e = enqueue(s, [to, staged] { move(to, staged.data(), staged.size()); })) return answer(e);
    } else if (int e = enqueue(s, [=] { move(to, from, bytes); })) {
        return answer(e);
    }
    if (wait || (!stays(to) && !s->capture)) drain(s, s->issued);
    return answer(failed);
}
cudaError_t allocate_on_stream(void** out, size_t bytes, cudaStream_t handle) {
    LOCK;
    const Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    if (s->capture) return answer(refuse(cudaErrorNotSupported, "allocations in graphs are not there"));
    bound = true;
    *out = allocate(device(), bytes);
    return answer(*out ? 0 : cudaErrorMemoryAllocation);
}
}    // namespace

// ---- device memory

API cudaError_t cudaMalloc(void** out, size_t bytes) {
    LOCK;
    if (int error = forbidden_by_capture()) return answer(error);
    bound = true;
    *out = allocate(device(), bytes);
    return answer(*out ? 0 : cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* p) {
    LOCK;
    bound = true;
    if (!p) return cudaSuccess;
    if (int error = forbidden_by_capture()) return answer(error);
    if (const int by = managed_by(p); by >= 0) {
        drain_device(devices()[size_t(by)]);
        return answer(release_managed(p) ? 0 : cudaErrorInvalidValue);
    }
    Device* d = owner(p);
    if (!d) return answer(cudaErrorInvalidValue);
    drain_device(*d);    // it waits for the device
    return answer(release(p) ? 0 : cudaErrorInvalidValue);
}
API cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
    LOCK;
    bound = true;
    *out = allocate_managed(bytes, current);
    return cudaSuccess;
}

// ---- pools of the driver, of which a device has one

API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t s) {
    return allocate_on_stream(out, bytes, s);
}
API cudaError_t cudaMallocFromPoolAsync(void** out, size_t bytes, cudaMemPool_t, cudaStream_t s) {
    return allocate_on_stream(out, bytes, s);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t handle) {
    LOCK;
    Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    return answer(enqueue(s, [p] { release(p); }));
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int ordinal) {
    *out = reinterpret_cast<cudaMemPool_t>(&devices()[size_t(ordinal)]);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* out, int ordinal) {
    return cudaDeviceGetDefaultMemPool(out, ordinal);
}
API cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
// Whether memory is given back above a threshold does not show; CuPy's limit is kept there.
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr a, void* value) {
    LOCK;
    if (a != cudaMemPoolAttrReleaseThreshold) return answer(cudaErrorNotSupported);
    reinterpret_cast<Device*>(pool)->pool_threshold = *static_cast<uint64_t*>(value);
    return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr a, void* out) {
    LOCK;
    const auto& d = *reinterpret_cast<Device*>(pool);
    switch (a) {
        case cudaMemPoolAttrReleaseThreshold: *static_cast<uint64_t*>(out) = d.pool_threshold; break;
        case cudaMemPoolAttrReservedMemCurrent:
        case cudaMemPoolAttrUsedMemCurrent: *static_cast<uint64_t*>(out) = d.used; break;
        default: return answer(cudaErrorNotSupported);
    }
    return cudaSuccess;
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- host memory

API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
    LOCK;
    if (int error = forbidden_by_capture()) return answer(error);
    bound = true;
    *out = aligned_alloc(kPage, (bytes + kPage) / kPage * kPage);
    pin(*out, bytes);
    return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* p) {
    LOCK;
    for (auto& d : devices()) drain_device(d);
    unpin(p);
    free(p);
    return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
    LOCK;
    pin(p, bytes);
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
    LOCK;
    unpin(p);
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    LOCK;
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    char* base;
    if (extent(p, &base)) {
        a->type = cudaMemoryTypeDevice;
        a->device = owner(p)->ordinal;
        a->devicePointer = const_cast<void*>(p);
    } else if (managed_by(p) >= 0) {
        a->type = cudaMemoryTypeManaged;
        a->device = managed_by(p);
        a->devicePointer = a->hostPointer = const_cast<void*>(p);
    } else if (is_pinned(p)) {
        a->type = cudaMemoryTypeHost;
        a->device = current;
        a->devicePointer = a->hostPointer = const_cast<void*>(p);
    }
    return cudaSuccess;
}

// ---- copies

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    LOCK;
    if (int error = forbidden_by_capture()) return answer(error);
    bound = true;
    return copy(to, from, bytes, device().legacy, true);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
    LOCK;
    bound = true;
    return copy(to, from, bytes, find(s), false);
}
API cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
    LOCK;
    return copy(to, from, bytes, device().legacy, true);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t s) {
    LOCK;
    return copy(to, from, bytes, find(s), false);
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t handle) {
    LOCK;
    bound = true;
    Stream* s = find(handle);
    if (!s || s->device != current) return answer(cudaErrorInvalidResourceHandle);
    if (managed_by(p) >= 0) return answer(enqueue(s, [=] { memset(p, value, bytes); }));
    if (!owner(p) || !whole(p, bytes)) return answer(cudaErrorInvalidValue);
    return answer(enqueue(s, [=] {
        Opened opened(*owner(p));
        memset(p, value, bytes);
    }));
}
API cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    return cudaMemsetAsync(p, value, bytes, nullptr);
}
