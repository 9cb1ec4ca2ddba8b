// How dK and dV of a block leave: through a tile, whose rows are then stored.
// Design note: docs/kernels/backward.md.
#pragma once
#include "backward/operand.cuh"
#include "tile/epilogue.cuh"

// Into the tile: x * factor, 16-row blocks row_group, row_group +
// kRowGroups, ... and columns as in Columns. A tile of fewer rows takes those from first_row on.
template <class T, int kRowGroups, int kColumnGroups, int kM, int kN>
CF_DEVICE void stage_gradient(uint32_t tile_address, const float (&x)[kM][kN][4], float factor, int row_group,
                              int column_group, int first_row = 0) {
    using Element = typename T::Element;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = 16 * (m * kRowGroups + row_group) + 8 * half + g - first_row;
                if (T::kRows < 16 * kM * kRowGroups && uint32_t(row) >= T::kRows) continue;
                const int column = grouped_column<kColumnGroups>(n, column_group) + 2 * t;
                const int byte = column * int(sizeof(Element));
                const uint32_t to = tile_address + T::offset(row, byte / 16) + byte % 16;
                const float left = x[m][n][2 * half] * factor, right = x[m][n][2 * half + 1] * factor;
                if constexpr (sizeof(Element) == 4) st_shared(to, float2{left, right});
                else st_shared(to, pack<Element>(left, right));
            }
        }
    }
}
template <class T, int kThreads>
CF_DEVICE void store_tile(const GlobalRows<typename T::Element>& to, uint32_t tile_address) {
#pragma unroll 1
    for (int i = threadIdx.x; i < T::kRows * T::kChunks; i += kThreads) {
        const int row = i / T::kChunks, chunk = i % T::kChunks;
        if (row < to.rows && chunk * T::kChunkElements < to.columns)
            store_chunk(to.row(row), chunk, to.columns,
                        ld_shared<uint4>(tile_address + T::offset(row, chunk)));
    }
}

// The whole gradient as floats, through the place of a tile T, T::kRows rows at a time.
template <class T, int kThreads, int kRowGroups, int kColumnGroups, int kM, int kN>
CF_DEVICE void store_float_gradient(const GlobalRows<float>& to, uint32_t tile_address,
                                    const float (&x)[kM][kN][4], float factor, int row_group,
                                    int column_group) {
    CF_UNROLL
    for (int first_row = 0; first_row < 16 * kM * kRowGroups; first_row += T::kRows) {
        // sync: all are done with what was there.
        __syncthreads();
        stage_gradient<T, kRowGroups, kColumnGroups>(tile_address, x, factor, row_group, column_group,
                                                     first_row);
        // sync: the staged tile is complete before any thread stores it.
        __syncthreads();
        store_tile<T, kThreads>(to.of_rows(first_row), tile_address);
    }
}
