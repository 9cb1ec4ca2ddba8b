// A ring of tiles that the two blocks of a cluster fill together: each loads half of every tile for both, and
// frees what it has read at both. Macros make it wrong.
#include "prim.cuh"

#if !defined(WAITERS)
#define WAITERS 2    // blocks that a slot waits for
#endif
#if !defined(RANK)
#define RANK t    // of the blocks at which a thread arrives
#endif
#if !defined(COLUMN)
#define COLUMN 0    // where boxes begin
#endif
constexpr int kThreads = 128, kStages = 2, kRows = 16, kColumns = 32;

struct Params {
    TensorMap map;    // (kColumns, rows, 1, 1) in boxes of half a tile
    float* out;       // (2, rows, kColumns): what each block saw
    int32_t steps;
};
struct alignas(1024) SharedStorage {
    float tiles[kStages][kRows * kColumns];
    uint64_t full[kStages], empty[kStages];
};

CF_DEVICE void fill(const Params& p, SharedStorage& s, uint32_t rank, int step) {
    const int stage = step % kStages;
    mbar_wait_cluster(s.empty[stage], (step / kStages & 1) ^ 1);
    mbar_arrive_expect_tx(s.full[stage], sizeof s.tiles[stage]);
    tma_load_multicast(s.tiles[stage] + rank * (kRows / 2 * kColumns), p.map, s.full[stage], 3, COLUMN,
                       step * kRows + int(rank) * (kRows / 2), int(blockIdx.x) / 2, 0);
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const uint32_t rank = cluster_rank();
    const int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < kStages; i++) mbar_init(s.full[i], 1), mbar_init(s.empty[i], WAITERS);
        mbar_init_fence();
    }
#if defined(NO_START)
    __syncthreads();
#else
    cluster_arrive();
    cluster_wait();
#endif
    if (t == 0)
        for (int step = 0; step < smaller(kStages, p.steps); step++) fill(p, s, rank, step);
    for (int step = 0; step < p.steps; step++) {
        const int stage = step % kStages;
        mbar_wait(s.full[stage], step / kStages & 1);
        for (int i = t; i < kRows * kColumns; i += kThreads)
            st_global(p.out + (int64_t(blockIdx.x) * p.steps + step) * kRows * kColumns + i,
                      ld_shared<float>(smem_addr(&s.tiles[stage][i])));
        __syncthreads();
#if defined(RELEASE_OWN)
        if (t == 0) mbar_arrive(s.empty[stage]);
#elif defined(LOCAL_ADDRESS)
        if (t < 2) mbar_arrive_cluster(smem_addr(&s.empty[stage]));
#else
        if (t < 2) mbar_arrive_cluster(cluster_addr(&s.empty[stage], RANK));
#endif
        if (t == 0 && step + kStages < p.steps) fill(p, s, rank, step + kStages);
        __syncwarp();
    }
#if !defined(NO_END)
#if !defined(NO_ARRIVE)
    cluster_arrive();
#endif
#if !defined(NO_WAIT)
    cluster_wait();
#endif
#endif
}
CF_CLUSTER_KERNEL(Params, kThreads, 2, body)
