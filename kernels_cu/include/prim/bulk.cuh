// Primitives of sm_90 and later: mbarriers, bulk copies by the tensor memory accelerator, and the fence
// between the two proxies.
#pragma once

#if __CUDA_ARCH__ >= 900

// ---- mbarrier. A phase ends when `count` arrivals and all expected bytes have come; then comes the other.

CF_DEVICE void mbar_init(uint64_t& bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(&bar)), "r"(count) : "memory");
}
// After mbar_init, before a bulk copy or another thread may use the barrier (other threads: and a
// __syncthreads).
CF_DEVICE void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
CF_DEVICE void mbar_arrive(uint64_t& bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(&bar)) : "memory");
}
CF_DEVICE void mbar_arrive_expect_tx(uint64_t& bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(&bar)), "r"(bytes)
                 : "memory");
}
// Until the phase of this parity has ended. A fresh barrier is in phase 0: waiting for parity 1 passes.
CF_DEVICE void mbar_wait(uint64_t& bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra "
        "wait_%=;\n}" ::"r"(smem_addr(&bar)),
        "r"(parity)
        : "memory");
}

// Ordinary writes of this thread to shared memory become visible to bulk copies and wgmma. By the writer,
// then a barrier.
CF_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What this thread has seen of global memory comes before its bulk copies from here on.
CF_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- boxes of a tensor. A load counts the full box at the barrier, zeros outside the tensor included; a
// store drops what is past the end. The first coordinate is a multiple of 16 bytes, and none of a store is
// negative: anything else is an illegal instruction (an H200, driver 580.159.04, 2026-11-26).

CF_DEVICE void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#define CF_TMA_LOAD(rank, coordinates, ...)                                                                  \
    asm volatile("cp.async.bulk.tensor." rank                                                                \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " coordinates              \
                 "], [%2];" ::"r"(smem_addr(dst)),                                                           \
                 "l"(&map), "r"(smem_addr(&bar)), __VA_ARGS__                                                \
                 : "memory")
#define CF_TMA_STORE(rank, coordinates, ...)                                                                 \
    asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.bulk_group [%0, " coordinates             \
                 "], [%1];" ::"l"(&map),                                                                     \
                 "r"(smem_addr(src)), __VA_ARGS__                                                            \
                 : "memory")
CF_DEVICE void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1) {
    CF_TMA_LOAD("2d", "{%3,%4}", "r"(c0), "r"(c1));
}
CF_DEVICE void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, int c2) {
    CF_TMA_LOAD("3d", "{%3,%4,%5}", "r"(c0), "r"(c1), "r"(c2));
}
CF_DEVICE void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, int c2, int c3) {
    CF_TMA_LOAD("4d", "{%3,%4,%5,%6}", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
CF_DEVICE void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, int c2, int c3,
                        int c4) {
    CF_TMA_LOAD("5d", "{%3,%4,%5,%6,%7}", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}
CF_DEVICE void tma_store(const TensorMap& map, const void* src, int c0, int c1) {
    CF_TMA_STORE("2d", "{%2,%3}", "r"(c0), "r"(c1));
}
CF_DEVICE void tma_store(const TensorMap& map, const void* src, int c0, int c1, int c2) {
    CF_TMA_STORE("3d", "{%2,%3,%4}", "r"(c0), "r"(c1), "r"(c2));
}
CF_DEVICE void tma_store(const TensorMap& map, const void* src, int c0, int c1, int c2, int c3) {
    CF_TMA_STORE("4d", "{%2,%3,%4,%5}", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
CF_DEVICE void tma_store(const TensorMap& map, const void* src, int c0, int c1, int c2, int c3, int c4) {
    CF_TMA_STORE("5d", "{%2,%3,%4,%5,%6}", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}
#undef CF_TMA_LOAD
#undef CF_TMA_STORE

// ---- contiguous bytes: addresses and sizes are multiples of 16

CF_DEVICE void bulk_load(void* dst, const void* src, int bytes, uint64_t& bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_addr(dst)),
        "l"(src), "r"(bytes), "r"(smem_addr(&bar))
        : "memory");
}
CF_DEVICE void bulk_store(void* dst, const void* src, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                 "r"(smem_addr(src)), "r"(bytes)
                 : "memory");
}
// Adds floats to global memory, each atomically.
CF_DEVICE void bulk_reduce_add(float* dst, const void* src, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(smem_addr(src)), "r"(bytes)
                 : "memory");
}

// ---- groups of tma_store, bulk_store and bulk_reduce_add of this thread

CF_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the newest kNewest groups have read their shared memory: it may be overwritten, and the
// thread may exit.
template <int kNewest> CF_DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}
// Until they have also written.
template <int kNewest> CF_DEVICE void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

#endif
