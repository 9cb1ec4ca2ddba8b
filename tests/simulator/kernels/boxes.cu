// Copies a box of a tensor to shared memory and dumps it, or stores one from there; and contiguous bulk
// copies.
#include "prim.cuh"

struct Params {
    TensorMap map;
    uint32_t* bytes;    // (4096 words): what shared memory holds after a load, or before a store
    float* linear;      // bulk copies
    int32_t mode, rank, box_bytes, c0, c1, c2, c3, c4;
};
struct alignas(1024) SharedStorage {
    uint32_t words[4096];
    uint64_t bar;
};

CF_DEVICE void load(const Params& p, SharedStorage& s) {
    if (threadIdx.x == 0) {
        mbar_arrive_expect_tx(s.bar, p.box_bytes);
        switch (p.rank) {
            case 2: tma_load(s.words, p.map, s.bar, p.c0, p.c1); break;
            case 3: tma_load(s.words, p.map, s.bar, p.c0, p.c1, p.c2); break;
            case 4: tma_load(s.words, p.map, s.bar, p.c0, p.c1, p.c2, p.c3); break;
            default: tma_load(s.words, p.map, s.bar, p.c0, p.c1, p.c2, p.c3, p.c4);
        }
    }
    mbar_wait(s.bar, 0);
    for (int i = threadIdx.x; i < p.box_bytes / 4; i += 64) p.bytes[i] = s.words[i];
}

CF_DEVICE void store(const Params& p, SharedStorage& s) {
    for (int i = threadIdx.x; i < p.box_bytes / 4; i += 64) st_shared(smem_addr(&s.words[i]), p.bytes[i]);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        switch (p.rank) {
            case 2: tma_store(p.map, s.words, p.c0, p.c1); break;
            case 3: tma_store(p.map, s.words, p.c0, p.c1, p.c2); break;
            case 4: tma_store(p.map, s.words, p.c0, p.c1, p.c2, p.c3); break;
            default: tma_store(p.map, s.words, p.c0, p.c1, p.c2, p.c3, p.c4);
        }
        tma_store_commit();
        tma_store_wait_read<0>();
    }
}

// linear[0..63] -> shared -> added twice to linear[64..127] and copied to linear[128..191]
CF_DEVICE void copy(const Params& p, SharedStorage& s) {
    if (threadIdx.x == 0) {
        mbar_arrive_expect_tx(s.bar, 256);
        bulk_load(s.words, p.linear, 256, s.bar);
    }
    mbar_wait(s.bar, 0);
    if (threadIdx.x < 2) bulk_reduce_add(p.linear + 64, s.words, 256);
    if (threadIdx.x == 2) bulk_store(p.linear + 128, s.words, 256);
    tma_store_commit();
    tma_store_wait<0>();
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    if (threadIdx.x == 0) {
        if (p.mode < 2) tma_prefetch(p.map);    // why: bulk copies come without a map
        mbar_init(s.bar, 1);
        mbar_init_fence();
    }
    __syncthreads();
    if (p.mode == 0) load(p, s);
    else if (p.mode == 1) store(p, s);
    else copy(p, s);
}
CF_KERNEL(Params, 64, 1, body)
