// Products of tiles of doubles on the tensor cores: a warp multiplies 16 rows of A by a tile in shared memory.
// Design note: docs/kernels/float64.md.
//
// layout: lane l of a warp, g = l / 4, t = l % 4; accumulators stand as in mma.cuh. Of the 8 values of k of a step
// the instruction gives lane t its t-th and (t + 4)-th. Sums do not ask which values those are, so both operands take
// 2t and 2t + 1 for them: neighbours in a row, which one 16-byte load brings, and in an accumulator, so that P in
// registers is A.
#pragma once
#include "tile/epilogue.cuh"

// d += a b of one step. a: rows g and g + 8 at k = 2t, the same at 2t + 1; b0, b1: column g at k = 2t, 2t + 1.
// kRows of an instruction: 16 (sm_90), or 8 (sm_80).
template <int kRows> CF_DEVICE void multiply_step(double (&d)[4], const double (&a)[4], double b0,
                                                  double b1) {
    static_assert(kRows == 8 || kRows == 16);
    if constexpr (kRows == 16) {
        mma_m16n8k8_f64(d, a, b0, b1);
    } else {
        mma_m8n8k4_f64(d[0], d[1], a[0], b0);
        mma_m8n8k4_f64(d[2], d[3], a[1], b0);
        mma_m8n8k4_f64(d[0], d[1], a[2], b1);
        mma_m8n8k4_f64(d[2], d[3], a[3], b1);
    }
}

// Reads columns 8 step + 2t and + 2t + 1 of row g of 8 rows: of A, and of B whose columns are rows of the tile.
template <class T> struct DoubleRowReader {
    uint32_t lane_address;

    // From row `row` of a tile on, a multiple of 8.
    CF_DEVICE explicit DoubleRowReader(uint32_t tile_address, int row = 0) {
        const int lane = threadIdx.x % 32;
        lane_address = tile_address + T::offset(row + lane / 4, lane % 4);
    }
    CF_DEVICE double2 load(int row, int step) const {
        return ld_shared<double2>((lane_address ^ (step % 2 * 64)) + row * T::kPitch + step / 2 * 128);
    }
};

// Reads 16 columns of rows 2t and 2t + 1 of 8 rows, which are k, for two products: chunk pair_chunk(g) of a group of 8
// chunks gives each of them its column g. Then output_chunk says where their sums stand.
template <class T> struct DoubleColumnReader {
    uint32_t lane_address;

    CF_DEVICE explicit DoubleColumnReader(uint32_t tile_address) {
        const int lane = threadIdx.x % 32;
        lane_address = tile_address + T::offset(lane % 4 * 2, pair_chunk(lane / 4));
    }
    // Row 2t + odd of the 8 from `row` on; 16 columns from 16 `group` on.
    CF_DEVICE double2 load(int row, int group, int odd) const {
        static_assert(T::swizzle(1) == 4,
                      "an odd row is the even one before it with other halves of its groups");
        return ld_shared<double2>((lane_address ^ (odd * 64)) + (row + odd) * T::kPitch + group * 128);
    }
};

// d += rows row_first .. + 15 of a tile, times rows of another one.
template <int kRows, int kSteps, class A, class B, int kN>
CF_DEVICE void multiply_by_rows(double (&d)[kN][4], const DoubleRowReader<A>& a,
                                const DoubleRowReader<B>& b) {
    CF_UNROLL
    for (int step = 0; step < kSteps; step++) {
        const double2 top = a.load(0, step), bottom = a.load(8, step);
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            const double2 column = b.load(8 * n, step);
            multiply_step<kRows>(d[n], {top.x, bottom.x, top.y, bottom.y}, column.x, column.y);
        }
    }
}

// d += the accumulator `weights` times a tile whose rows are k.
template <int kRows, class T, int kK, int kN>
CF_DEVICE void multiply_by_columns(double (&d)[kN][4], const double (&weights)[kK][4],
                                   const DoubleColumnReader<T>& columns) {
    CF_UNROLL
    for (int k = 0; k < kK; k++) {
        const double (&w)[4] = weights[k];
        CF_UNROLL
        for (int n = 0; n < kN; n += 2) {
            const double2 even = columns.load(8 * k, n / 2, 0), odd = columns.load(8 * k, n / 2, 1);
            multiply_step<kRows>(d[n], {w[0], w[2], w[1], w[3]}, even.x, odd.x);
            multiply_step<kRows>(d[n + 1], {w[0], w[2], w[1], w[3]}, even.y, odd.y);
        }
    }
}

// The 16-byte chunk of columns that elements 2 half + i of d[n] and d[n + 1] are after multiply_by_columns.
CF_DEVICE int output_chunk(int n, int i) { return 4 * n + pair_chunk(threadIdx.x % 4 * 2 + i); }

// Rows of a warp, d * factor[0] of the first 8 and d * factor[1] of the others, to `global`, whose row 0 is its first.
// layout: a quad stores four whole sectors at once.
template <int kN>
CF_DEVICE void store_rows(const double (&d)[kN][4], const double (&factor)[2],
                          const GlobalRows<double>& global) {
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int row = 8 * half + threadIdx.x % 32 / 4;
        if (row >= global.rows) continue;
        CF_UNROLL
        for (int n = 0; n < kN; n += 2) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                const int e = 2 * half + i;
                const double2 x{d[n][e] * factor[half], d[n + 1][e] * factor[half]};
                store_chunk(global.row(row), output_chunk(n, i), global.columns,
                            reinterpret_cast<const uint4&>(x));
            }
        }
    }
}
