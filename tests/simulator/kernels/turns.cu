// Blocks of one thread that take turns: each folds its number into a chain by ordinary loads and stores, and
// adds four floats in bulk. Both come out differently in any other order.
#include "prim.cuh"

struct Params {
    uint32_t* numbers;    // (1), 0
    uint32_t* turns;      // (1), 0
    uint32_t* chain;      // (1)
    float* sums;          // (4)
    const float* x;       // (blocks, 4)
};
struct SharedStorage {
    float staged[4];
};

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const uint32_t number = take_ticket(p.numbers);
    st_shared(smem_addr(s.staged), ld_global(reinterpret_cast<const float4*>(p.x) + number));
    fence_proxy_async();
#if defined(BACKWARDS)
    semaphore_wait(p.turns, gridDim.x - 1 - number);
#else
    semaphore_wait(p.turns, number);
#endif
    st_global(p.chain, 3 * ld_global(p.chain) + number);
    fence_proxy_async_global();
    bulk_reduce_add(p.sums, s.staged, 16);
    tma_store_commit();
    tma_store_wait<0>();
    semaphore_release(p.turns);
}

CF_KERNEL(Params, 1, 1, body)
