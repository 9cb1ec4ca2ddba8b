// FlashAttention-3's warp scheduler barriers: warpgroups issue their products in turns, so that those of one run under the
// softmax of the others. K has to define kSchedulerBarrier and kConsumers.
// Design note: docs/kernels/forward_sm90.md.
#pragma once
#include "hopper/named_barriers.cuh"
#include "prim.cuh"

template <class K> CF_DEVICE void warp_scheduler_barrier_sync(int warpgroup) {
    // sync: the warpgroup before has started its products.
    if constexpr (K::kSchedulerBarrier) bar_sync(kWarpScheduler + warpgroup, 256);
}
template <class K> CF_DEVICE void warp_scheduler_barrier_arrive(int warpgroup) {
    if constexpr (K::kSchedulerBarrier) bar_arrive(kWarpScheduler + (warpgroup + 1) % K::kConsumers, 256);
}
