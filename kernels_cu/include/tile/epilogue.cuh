// Writing accumulated rows to global memory.
// Design note: docs/kernels/forward.md.
#pragma once
#include "element.cuh"
#include "tile/mma.cuh"

// Chunk `chunk` of a row with `columns` elements, whole or the part that exists.
template <class Element>
CF_DEVICE void store_chunk(Element* row, int chunk, int columns, uint4 value) {
    constexpr int kChunkElements = 16 / int(sizeof(Element));
    const int left = columns - chunk * kChunkElements;
    Element* to = row + chunk * kChunkElements;
    if (left >= kChunkElements && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        st_global(reinterpret_cast<uint4*>(to), value);
    } else {
        const Element(&element)[kChunkElements] = reinterpret_cast<const Element(&)[kChunkElements]>(value);
        CF_UNROLL
        for (int i = 0; i < kChunkElements; i++)
            if (i < left) to[i] = element[i];
    }
}

// Rows that a warp has in a tile of its own, at the shared address `staging`, to `global`, 16 bytes a lane.
template <class Staging>
CF_DEVICE void copy_staged_rows(uint32_t staging, const GlobalRows<typename Staging::Element>& global) {
    const int lane = threadIdx.x % 32;
    constexpr int kLane = Staging::kSwizzledChunks, kRowStep = 32 / kLane;
#pragma unroll 1
    for (int row_first = 0; row_first < Staging::kRows; row_first += kRowStep) {
        const int row = row_first + lane / kLane;
        if (row >= global.rows) continue;
        CF_UNROLL
        for (int chunk_first = 0; chunk_first < Staging::kChunks; chunk_first += kLane) {
            const int chunk = chunk_first + lane % kLane;
            if (chunk * Staging::kChunkElements < global.columns)
                store_chunk(global.row(row), chunk, global.columns,
                            ld_shared<uint4>(staging + Staging::offset(row, chunk)));
        }
    }
}

// Floats from a tile, in which each takes the place of two elements, to `to`, 4 bytes a thread of kThreads.
// why no wider: partial results alone leave so, and longer code makes ptxas spill in the main loop of some kernels.
template <class T, int kThreads>
CF_DEVICE void store_floats(const GlobalRows<typename T::Element>& to, uint32_t tile_address) {
    constexpr int kFloats = T::kColumns / 2;
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < T::kRows * kFloats; i += kThreads) {
        const int row = i / kFloats, column = i % kFloats;
        if (row < to.rows && 2 * column < to.columns)
            st_global(reinterpret_cast<float*>(to.row(row)) + column,
                      ld_shared<float>(tile_address + T::offset(row, column / 4) + column % 4 * 4));
    }
}

// Rows of a result from column `first_column` on. floats: it is of floats, each of which takes two elements here.
template <class Element>
CF_DEVICE GlobalRows<Element> rows_of_result(const Tensor& t, int32_t batch, int32_t head, int64_t first,
                                             int32_t rows, int32_t columns, int32_t first_column,
                                             bool floats) {
    const int32_t width = floats ? 2 : 1;
    Element* data = static_cast<Element*>(t.data);
    data += (batch * t.batch + head * t.head + first * t.row + first_column) * width;
    return GlobalRows<Element>(data, t.row * width, rows, (columns - first_column) * width);
}

// The rows of a warp, o[m][n][e] * factor[m][e / 2], to `global`, whose row 0 is the warp's first. `staging`
// is the shared address of 16 kM rows that the warp has to itself (128-byte aligned; not used by 32-bit
// elements). floats: as in rows_of_result; never of 32-bit elements.
template <class Math, int kM, int kN, class Staging = Tile<typename Math::Element, 16 * kM, 8 * kN>>
CF_DEVICE void store_warp_rows(const float (&o)[kM][kN][4], const float (&factor)[kM][2],
                               const GlobalRows<typename Math::Element>& global, uint32_t staging,
                               bool floats = false) {
    using Element = typename Math::Element;
    // why opaque: or ptxas keeps places in `staging` from before the main loop.
    const int lane = (Math::kFloat ? threadIdx.x : opaque(threadIdx.x)) % 32, g = lane / 4, t = lane % 4;
    if constexpr (Math::kFloat) {
        // layout: by output_column a thread holds two chunks of every 32 columns, and a quad stores four whole
        // sectors at once.
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + 8 * half + g;
                if (row >= global.rows) continue;
                CF_UNROLL
                for (int n = 0; n < kN; n += 4) {
                    CF_UNROLL
                    for (int i = 0; i < 2; i++) {
                        const int e = 2 * half + i;
                        const float4 x{o[m][n][e] * factor[m][half], o[m][n + 1][e] * factor[m][half],
                                       o[m][n + 2][e] * factor[m][half], o[m][n + 3][e] * factor[m][half]};
                        store_chunk(global.row(row), 2 * n + pair_chunk(2 * t + i), global.columns,
                                    reinterpret_cast<const uint4&>(x));
                    }
                }
            }
        }
    } else {
        // layout: through a swizzled tile of the warp's rows, so that whole rows leave in 16-byte stores. Of floats half
        // of the columns fill it.
        CF_UNROLL
        for (int part = 0; part < 2; part++) {
            // sync: the lanes of the warp are done with what was in `staging`.
            __syncwarp();
            const auto stage = [&](int n, auto put) {
                CF_UNROLL
                for (int m = 0; m < kM; m++) {
                    CF_UNROLL
                    for (int half = 0; half < 2; half++)
                        put(16 * m + 8 * half + g, float2{o[m][n][2 * half] * factor[m][half],
                                                          o[m][n][2 * half + 1] * factor[m][half]});
                }
            };
            if (floats) {
                CF_UNROLL
                for (int n = 0; n < kN / 2; n++)
                    stage(part * (kN / 2) + n, [&](int row, float2 x) {
                        st_shared(staging + Staging::offset(row, 2 * n + t / 2) + t % 2 * 8, x);
                    });
            } else {
                CF_UNROLL
                for (int n = 0; n < kN; n++)
                    stage(n, [&](int row, float2 x) {
                        st_shared(staging + Staging::offset(row, n) + 4 * t, pack<Element>(x.x, x.y));
                    });
            }
            // sync: every lane's part of the rows is in shared memory before other lanes read it.
            __syncwarp();
            if (!floats) return copy_staged_rows<Staging>(staging, global);
            store_floats<Staging, 32>(global.of_columns(part * 8 * kN, 8 * kN), staging);
        }
    }
}
