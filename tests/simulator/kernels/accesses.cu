// One access of each counted kind, lanes `stride` bytes apart.
#include "prim.cuh"

struct Params {
    char* data;
    int32_t stride, bytes;
};
struct SharedStorage {
    char x[16384];
};

template <class T> CF_DEVICE void access(const Params& p, uint32_t at) {
    char* global = p.data + threadIdx.x * p.stride;
    const T value = ld_global(reinterpret_cast<const T*>(global));
    st_global(reinterpret_cast<T*>(global), value);
    st_shared(at, value);
    __syncthreads();
    const T back = ld_shared<T>(at);
    if (reinterpret_cast<const char&>(back) == 77) p.data[0] = 1;
    if constexpr (sizeof(T) == 4) cp_async4(at, global);
    else cp_async16(at, global);
    cp_async_commit();
    cp_async_wait<0>();
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const uint32_t at = smem_addr(s.x + threadIdx.x * p.stride);
    if (p.bytes == 4) access<float>(p, at);
    else access<float4>(p, at);
    if (p.bytes == 16) {
        uint32_t r[4];
        __syncwarp();
        ldmatrix_x4(r, at);
        __syncwarp();
        stmatrix_x4(at, r);
        float d[4] = {};
        mma_m16n8k16<__half>(d, r, r[0], r[1]);
    }
    const float y = __shfl_xor_sync(~0u, ex2(float(threadIdx.x)), 1);
    atomicAdd(reinterpret_cast<float*>(p.data), y);
}
CF_KERNEL(Params, 32, 1, body)
