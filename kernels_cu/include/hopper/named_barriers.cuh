// Named barriers of the Hopper kernels; 0 is that of __syncthreads.
#pragma once
#include "prim.cuh"

constexpr int kWarpScheduler = 1;    // the first of kConsumers, one per warpgroup

// FlashAttention-3's warp scheduler barriers: warpgroups issue their products in turns, so that those of one run under the
// softmax of the others. Of K they ask for kSchedulerBarrier and kConsumers.
template <class K> CF_DEVICE void warp_scheduler_barrier_sync(int warpgroup) {
    // sync: the warpgroup before has started its products.
    if constexpr (K::kSchedulerBarrier) bar_sync(kWarpScheduler + warpgroup, 256);
}
template <class K> CF_DEVICE void warp_scheduler_barrier_arrive(int warpgroup) {
    if constexpr (K::kSchedulerBarrier) bar_arrive(kWarpScheduler + (warpgroup + 1) % K::kConsumers, 256);
}
