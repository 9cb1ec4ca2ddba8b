// The consumers of the Hopper backward kernels, two warpgroups, whichever gradient they sum.
// Design note: docs/kernels/backward_sm90.md.
#pragma once
#include "hopper/mask_kind.cuh"
#include "hopper/named_barriers.cuh"
#include "hopper/swizzled_tile.cuh"
#include "hopper/warpgroup.cuh"

constexpr int kStages = 2, kConsumers = 2, kConsumerThreads = 128 * kConsumers;
constexpr int kHelperRegisters = 24, kConsumerRegisters = 240;    // of a thread, by setmaxnreg
static_assert(fit_registers(kConsumers, kConsumerRegisters, kHelperRegisters));
// Of Q and dO that should stay in L2, beside as many sums of dQ; of K and V where a block owns queries.
constexpr uint32_t kL2SectionBytes = 16 << 20;

// Where a sequence ends before a pair of tiles, other rows follow in memory. why: their weights are 0, but 0
// times NaN is NaN.
template <class A, class B>
CF_DEVICE void clear_after(int32_t rows, A& a, B& b) {
    clear_rows(a, rows, threadIdx.x, kConsumerThreads);
    clear_rows(b, rows, threadIdx.x, kConsumerThreads);
    fence_proxy_async();
    // sync: all consumers have cleared their share before products of any read it.
    bar_sync(kCleared, kConsumerThreads);
}
