// What bulk copies and TMA read here is written by plain C++, through pointers: the rules for kernels ask for st_shared,
// and a compiler may make such stores of anything.
#include "prim.cuh"

struct Params {
    float* to;    // (128)
};
struct alignas(128) SharedStorage {
    float x[128];
};

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    s.x[threadIdx.x] = float(threadIdx.x);
#if !defined(FAULT_NO_FENCE)
    fence_proxy_async();
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(p.to, s.x, sizeof s.x);
        tma_store_commit();
        tma_store_wait<0>();
    }
}
CF_KERNEL(Params, 128, 1, body)
