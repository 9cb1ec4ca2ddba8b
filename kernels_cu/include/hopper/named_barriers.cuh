// The named barriers of the Hopper kernels; 0 is that of __syncthreads. Where there is one per consumer warpgroup, its
// number is added.
// Design note: docs/kernels/forward_sm90.md.
#pragma once

enum ForwardBarrier : int {
    kWarpScheduler = 1,    // 1 to 3, one per consumer warpgroup: its turn to issue products
    kVCleared =
        4,    // rows of V past the last key are zeros; where warpgroups share columns of O: 4 and 5, one per warpgroup
    kSkipped =
        6,    // 6 to 8, one per consumer warpgroup: all of its warps know that a K or V to skip has come
    kPFull =
        9,    // P and its rescale factors are visible to the second of the warpgroups that share columns of O,
    kPEmpty = 10,     // which has read them
    kQLoaded = 11,    // consumers have written Q themselves
};
enum BackwardBarrier : int {
    kCleared = 1,       // rows of a pair of tiles past the end of a sequence are zeros
    kDSComplete = 2,    // dS is in shared memory
    kKeysRead = 3,      // no product reads K or V any more
    kPComplete = 4,     // P is in shared memory: flash_backward_wide_sm90
    kOwnDS =
        5,    // 5 and 6, one per consumer warpgroup: its largest dS, then its dS is in shared memory: flash_backward_f16x3_sm90
};
