// What a launch costs, counted when asked for: whatever the simulator knows exactly and a GPU would have to
// be measured for.
// why: a mistake in a layout that only costs time then changes a number in a golden file.
#pragma once
#include "block.h"

namespace sim {

struct Cost {
    uint64_t mma_flops;             // 2 m n k of every mma and wgmma
    uint64_t product_bytes;         // shared memory that the operands of wgmma are read from
    uint64_t exps;                  // ex2, per thread
    uint64_t shuffles;              // per warp
    uint64_t barriers;              // __syncthreads and named barriers, per thread that comes
    uint64_t atomics;               // per thread
    uint64_t matrix_loads;          // ldmatrix, in matrices of 8 x 8
    uint64_t matrix_load_cycles;    // at least one per matrix; more are bank conflicts
    uint64_t matrix_stores, matrix_store_cycles;
    uint64_t shared_loads;          // ld_shared: the cycles of 128 bytes that the data needs at least
    uint64_t shared_load_cycles;    // and those it takes with the conflicts
    uint64_t shared_stores, shared_store_cycles;    // st_shared
    uint64_t copy_stores, copy_store_cycles;        // the shared memory side of cp.async
    uint64_t global_load_bytes;                     // ld_global and cp.async: what is asked for
    uint64_t global_load_sectors;                   // and the sectors of 32 bytes that each warp touches
    uint64_t global_store_bytes, global_store_sectors;
    // TMA
    uint64_t bulk_load_bytes, bulk_store_bytes, bulk_reduce_bytes;
};
extern SIM_API Cost cost;

inline void count(uint64_t Cost::* what, uint64_t n) {
    if (block.counting) cost.*what += n;
}

// An access by one thread. Those of the lanes of a warp at the same place, each in its own n-th visit, make
// one instruction.
enum class Access { shared_load, shared_store, copy_store, global_load, global_store };
SIM_API void record_access(Access kind, uint64_t address, int bytes, Site site);
inline void count_access(Access kind, uint64_t address, int bytes, Site site) {
    if (block.counting) record_access(kind, address, bytes, site);
}
// Cycles that the 8 rows of 16 bytes of a matrix take.
SIM_API int cycles_of_rows(const uint32_t (&addresses)[8]);

}    // namespace sim
