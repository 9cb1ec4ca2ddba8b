// One warp through the copies of cp.async: every size of what exists, and what does not.
#include "prim.cuh"

struct Params {
    const unsigned char* from;    // (1536)
    uint32_t* to;                 // (320): shared memory afterwards
};
// layout: as `from`, and `from` is read in this layout too.
struct alignas(16) SharedStorage {
    uint4 part16[32];
    uint32_t part4[32], whole4[32];
    uint4 whole16[32];
};

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const uint32_t base = smem_addr(&s);
    const int t = threadIdx.x;
    for (int i = t; i < 320; i += 32) st_shared(base + 4 * i, 0xffffffffu);
    __syncwarp();
    const auto source = [&](const void* place) { return p.from + (smem_addr(place) - base); };
    cp_async16_part(smem_addr(&s.part16[t]), source(&s.part16[t]), t <= 16 ? t : 32 - t);
    cp_async_commit();
    cp_async4_part(smem_addr(&s.part4[t]), source(&s.part4[t]), t % 5);
    cp_async4(smem_addr(&s.whole4[t]), source(&s.whole4[t]), t % 2);
    cp_async16(smem_addr(&s.whole16[t]), source(&s.whole16[t]), t % 4);
    cp_async_commit();
    cp_async_wait<1>();
    __syncwarp();
    for (int i = t; i < 128; i += 32) p.to[i] = ld_shared<uint32_t>(base + 4 * i);
    cp_async_wait<0>();
    __syncwarp();
    for (int i = 128 + t; i < 320; i += 32) p.to[i] = ld_shared<uint32_t>(base + 4 * i);
}
CF_KERNEL(Params, 32, 1, body)
