// The grid loop is the simulator's.
#include "library.h"

namespace ptx {

int launch(void (*body)(const void*), const u32 grid[3], const u32 block[3], u64 shared_bytes,
           const void* params, int max_threads) {
    return sim::launch(body, grid, block, shared_bytes, params, u64(max_threads));
}

}    // namespace ptx
