// O of the Hopper forward kernels as floats, from registers to global memory.
// Design note: docs/kernels/forward_sm90.md.
#pragma once
#include "hopper/tile_scheduler.cuh"

// The rows of a warp from first_row, n8 blocks of columns from first_column, as floats, not rounded.
template <class K, int kValues>
CF_DEVICE void store_floats(const ForwardParams& call, const WorkTile<K>& work, int32_t first_row,
                            int32_t first_column, const float (&rO)[kValues]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t row = first_row + 8 * half + g;
        if (!work.exists(row)) continue;
        float* to = head_rows<float>(call.o, work.batch, work.head(row),
                                     work.sequence.first_q + work.rows.query(row));
        CF_UNROLL
        for (int n = 0; n < kValues / 4; n++) {
            const int32_t column = first_column + 8 * n + 2 * t;
            if (column < call.shape.head_dim_v)
                st_global(reinterpret_cast<float2*>(to + column),
                          float2{rO[4 * n + 2 * half], rO[4 * n + 2 * half + 1]});
        }
    }
}
