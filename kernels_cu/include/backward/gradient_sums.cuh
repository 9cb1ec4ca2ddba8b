// The FP32 sums of dQ in global memory, which blocks that own keys add to and dq_convert rounds.
// Design note: docs/kernels/backward.md.
#pragma once
#include "attention/seqlen.cuh"
#include "element.cuh"

// Into how many pieces the rows of a product of rows x columns are cut when a block shares it out over its
// warps: pieces of 32 rows where every warp then gets as many blocks of `block` columns, else of 16.
// why: 32 rows by about as many columns need the fewest reads of shared memory per product.
constexpr int row_groups(int rows, int columns, int warps, int block = 16) {
    int groups = rows % 32 ? 1 : larger(rows / 32, 1);
    while (groups < warps && (warps % groups || columns / block % (warps / groups))) groups *= 2;
    return groups;
}

// Part `index` of `count` of some work.
struct Share {
    int index, count;
};

// The order of the FP32 sums of dQ: tile after tile of kRows queries, for each all heads.
//
// layout: inside a tile in the order of the accumulators, sum r of thread t at r * kThreads + t, so that the
// additions of a warp fall on 128 consecutive bytes. Packed sequences start at tile first_q / kRows + batch,
// which leaves room for the last tile of each.
template <int kRows, int kColumns, int kThreads>
struct GradientSums {
    enum : int {    // why not static members: as in tile.cuh
        kWarps = kThreads / 32,
        kRowGroups = row_groups(kRows, kColumns, kWarps),
        kColumnGroups = kWarps / kRowGroups,
        kM = kRows / kRowGroups / 16,
        kN = kColumns / kColumnGroups / 8
    };
    static_assert(kRows % (16 * kRowGroups) == 0 && kColumns % (16 * kColumnGroups) == 0);

    // Of all tiles, which one this is.
    CF_DEVICE static int64_t number(const Shape& shape, const Sequence& sequence, int32_t tile,
                                    int32_t head) {
        const int64_t first = shape.packed ? sequence.first_q / kRows + sequence.batch
                                           : int64_t(sequence.batch) * cdiv(shape.seqlen_q, kRows);
        return (first + tile) * shape.heads_q + head;
    }
    CF_DEVICE static float* tile(void* sums, int64_t number) {
        return static_cast<float*>(sums) + number * (kRows * kColumns);
    }
    CF_DEVICE static float* tile(void* sums, const Shape& shape, const Sequence& sequence, int32_t tile,
                                 int32_t head) {
        return GradientSums::tile(sums, number(shape, sequence, tile, head));
    }
    // Of the fragment (see mma.cuh) with rows row / 16 * 16 .. + 15 and columns 8 n8 .. + 7: where element e of
    // lane 0 lies; the other lanes follow.
    CF_DEVICE static constexpr int place(int row, int n8, int e) {
        const int block = n8 / 2, column_group = block % kColumnGroups;
        const int m = row / 16 % kM, n = block / kColumnGroups * 2 + n8 % 2;
        return ((m * kN + n) * 4 + e) * kThreads + (column_group * kRowGroups + row / (16 * kM)) * 32;
    }
    // Where tiles of more rows that are not blocks of 32 have other places: those of sums whose rows are columns of dQ.
    // layout: of 16 columns from `column` on and 8 rows 8 m8 .. : where lane 0's four sums begin; its accumulator as in
    // mma.cuh, transposed: sum e of lane l is column l / 4 + 8 (e / 2), row l % 4 * 2 + e % 2.
    static constexpr bool kTransposed = kRows > 32 && kRows % 32 != 0;
    CF_DEVICE static constexpr int transposed(int column, int m8) {
        return (column / 16 * (kRows / 8) + m8) * 128;
    }
    CF_DEVICE static int warp_row() { return threadIdx.x / 32 % kRowGroups * (16 * kM); }
    CF_DEVICE static int column_group() { return threadIdx.x / 32 / kRowGroups; }

    // Adds a share of x.
    CF_DEVICE static void add(float* to, const float (&x)[kM][kN][4], Share share) {
        constexpr int kAll = kM * kN * 4;
        CF_UNROLL
        for (int i = 0; i < kAll; i++)
            if (i * share.count / kAll == share.index)
                atomicAdd(to + i * kThreads + threadIdx.x, x[i / 4 / kN][i / 4 % kN][i % 4]);
    }
    // The 8 sums of row `row`, columns 8 n8 .. 8 n8 + 7: two times four neighbouring lanes.
    CF_DEVICE static void load(float (&x)[8], const float* from, int row, int n8) {
        if constexpr (kTransposed) {
            const float* first =
                from + transposed(8 * n8, row / 8) + row % 8 / 2 * 4 + 2 * (n8 % 2) + row % 2;
            CF_UNROLL
            for (int i = 0; i < 8; i++) x[i] = ld_global(first + 16 * i);
            return;
        }
        const int half = row / 8 % 2, g = row % 8;
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const float* first = from + place(row, n8, 2 * half + i) + g * 4;
            const float4 four = ld_global(reinterpret_cast<const float4*>(first));
            x[i] = four.x, x[2 + i] = four.y, x[4 + i] = four.z, x[6 + i] = four.w;
        }
    }
};
