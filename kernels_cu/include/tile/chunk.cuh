// Keys by chunks, counted from key 0 of a sequence. The softmax of a row starts again with each, and those of its
// chunks are merged from left to right, by one function: so chunks may be different blocks', and a row has the same
// bits whether it is part of a prompt or a token of its own.
// Design note: docs/kernels/forward.md.
//
// layout: chunk_o holds rows of O in float, not normalised; chunk_rows the maximum and the sum of weights of each.
#pragma once
#include "abi.cuh"
#include "attention/seqlen.cuh"
#include "tile/online_softmax.cuh"

#if !defined(CF_CHUNK_KEYS)
#define CF_CHUNK_KEYS 2048
#endif
constexpr int kChunkKeys = CF_CHUNK_KEYS;

// Calls act(element) for all that a thread holds of O.
template <int kM, int kN, class Act> CF_DEVICE void each_element(float (&o)[kM][kN][4], Act act) {
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int e = 0; e < 4; e++) act(o[m][n][e]);
        }
    }
}

// The online softmax of a row over some keys, in natural units.
struct SoftmaxState {
    float row_max = -kInfinity, row_sum = 0;
};

// The factors by which O of `all` and O of the next chunk are merged. One of them is exactly 1; a chunk in which the row
// sees nothing leaves the row unchanged.
struct MergeFactors {
    float all, chunk;
    CF_DEVICE float operator()(float o, float o_chunk) const { return fmaf(o, all, o_chunk * chunk); }
};
CF_DEVICE MergeFactors merge(SoftmaxState& all, const SoftmaxState& chunk) {
    const float highest = fmaxf(all.row_max, chunk.row_max);
    const float reference = highest == -kInfinity ? 0.0f : highest;
    const MergeFactors factors{ex2((all.row_max - reference) * kLog2e),
                               ex2((chunk.row_max - reference) * kLog2e)};
    all = {highest, factors(all.row_sum, chunk.row_sum)};
    return factors;
}

// The rows of a warp in chunk_o and chunk_rows, of which the warp has `rows` to itself.
struct ChunkRows {
    float *o, *sums;
    int64_t o_row, sums_row;
    int32_t rows;

    // batch: counts chunks too, those of a whole batch one after the other.
    CF_DEVICE ChunkRows(const ForwardParams& p, int32_t batch, int32_t head, int64_t first_row, int32_t rows_)
        : o(head_rows<float>(p.chunk_o, batch, head, first_row)),
          sums(head_rows<float>(p.chunk_rows, batch, head, first_row)), o_row(p.chunk_o.row),
          sums_row(p.chunk_rows.row), rows(rows_) {}

    // The sums of a row are to be in lane 0 of its quad, see OnlineSoftmax::gather. why: what a lane stores, only it
    // loads again, so that nothing has to be waited for.
    template <class Math, int kM, int kN>
    CF_DEVICE void store(const float (&rO)[kM][kN][4], const OnlineSoftmax<Math, kM>& softmax) const {
        each_row<kM>([&](int m, int half, bool exists, float* to, float* sums_to) {
            if (!exists) return;
            if (threadIdx.x % 4 == 0)
                st_global(reinterpret_cast<float2*>(sums_to),
                          float2{softmax.row_max[m][half], softmax.row_sum[m][half]});
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                CF_UNROLL
                for (int e = 2 * half; e < 2 * half + 2; e++) to[output_column<Math>(n, e)] = rO[m][n][e];
            }
        });
    }
    // What is stored becomes the left part of what the warp holds.
    template <class Math, int kM, int kN>
    CF_DEVICE void merge_with(float (&rO)[kM][kN][4], OnlineSoftmax<Math, kM>& softmax) const {
        each_row<kM>([&](int m, int half, bool exists, const float* from, const float* sums_from) {
            SoftmaxState all;
            if (exists && threadIdx.x % 4 == 0) all = {sums_from[0], sums_from[1]};
            all.row_max = max_over_lanes<4>(all.row_max);
            const MergeFactors by = merge(all, {softmax.row_max[m][half], softmax.row_sum[m][half]});
            softmax.row_max[m][half] = all.row_max, softmax.row_sum[m][half] = all.row_sum;
            if (!exists) return;
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                CF_UNROLL
                for (int e = 2 * half; e < 2 * half + 2; e++)
                    rO[m][n][e] = by(from[output_column<Math>(n, e)], rO[m][n][e]);
            }
        });
    }

  private:
    template <int kM, class Act> CF_DEVICE void each_row(Act act) const {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + 8 * half + threadIdx.x % 32 / 4;
                act(m, half, row < rows, o + row * o_row, sums + row * sums_row);
            }
        }
    }
};
