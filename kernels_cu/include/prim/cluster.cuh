// Primitives of sm_90 and later between the blocks of a cluster, which run at the same time, each on a
// multiprocessor of its own, and reach each other's shared memory.
//
// A block's shared memory is there from its start to its end:
//   mbar_init, mbar_init_fence(), cluster_arrive(), cluster_wait()
//   ... arrivals and copies into other blocks, each of which a thread there waits for ...
//   cluster_arrive(), cluster_wait(), end
#pragma once

#if __CUDA_ARCH__ >= 900

// Of this block in its cluster.
CF_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The barrier of all threads of the cluster that have not exited; whole warps arrive, then wait. What a
// thread wrote before it arrived is visible to those that have waited.
CF_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
CF_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address, in the shared memory of the cluster, of what in block `rank` lies where *p does in this one.
CF_DEVICE uint32_t cluster_addr(const void* p, uint32_t rank) {
    uint32_t addr;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(addr) : "r"(smem_addr(p)), "r"(rank));
    return addr;
}
// Arrives at the mbarrier of an address from cluster_addr.
CF_DEVICE void mbar_arrive_cluster(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// As mbar_wait, where arrivals come from other blocks of the cluster too.
CF_DEVICE void mbar_wait_cluster(uint64_t& bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait_%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], "
        "%1;\n@!done bra wait_%=;\n}" ::"r"(smem_addr(&bar)),
        "r"(parity)
        : "memory");
}
// A box of a tensor into the same place of several blocks: bit r of `blocks` for block r. It is read once,
// and its bytes come to the mbarrier at the place of `bar` of each, maybe before they are expected there.
CF_DEVICE void tma_load_multicast(void* dst, const TensorMap& map, uint64_t& bar, uint32_t blocks, int c0,
                                  int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], "
        "[%1, {%4,%5,%6,%7}], [%2], %3;" ::"r"(smem_addr(dst)),
        "l"(&map), "r"(smem_addr(&bar)), "h"(static_cast<uint16_t>(blocks)), "r"(c0), "r"(c1), "r"(c2),
        "r"(c3)
        : "memory");
}

#endif
