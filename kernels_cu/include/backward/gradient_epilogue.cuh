// How dK and dV of a block leave: through a tile, whose rows are then stored.
#pragma once
#include "backward/operand.cuh"
#include "tile/epilogue.cuh"

// Into the tile: x * factor, 16-row blocks row_group, row_group +
// kRowGroups, ... and columns as in Columns.
template <class T, int kRowGroups, int kColumnGroups, int kM, int kN>
CF_DEVICE void stage_gradient(uint32_t tile_address, const float (&x)[kM][kN][4], float factor, int row_group,
                              int column_group) {
    using Element = typename T::Element;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = 16 * (m * kRowGroups + row_group) + 8 * half + g;
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
