// The online softmax of rows whose keys several warps share: a warp has 16 rows of S, and a part of the keys of a block.
// Design note: docs/kernels/wide.md.
//
// A block of keys is
//   share_max(S);  a barrier of the warps that share rows;  make_weights(S);  a barrier of all;  rescale(O)
// and the end, when all are done with the maxima,
//   share_sums();  a barrier of the warps that share rows;  finalize()
#pragma once
#include "tile/online_softmax.cuh"

template <class Math, int kKeyWarps, int kRows>
struct SharedSoftmax {
    struct Storage {
        float of_warp[kKeyWarps][kRows];    // maxima of a warp's keys; in the end their sums
        float factor[kRows];                // that rows of O are waiting for
    };
    Storage& storage;
    const int key_warp, row_first;    // which part of the keys this warp has, and its first row
    OnlineSoftmax<Math, 1> own{};

    // Of the thread's two rows.
    CF_DEVICE int row(int half) const { return row_first + 8 * half + threadIdx.x % 32 / 4; }

    template <int kN> CF_DEVICE void share_max(const float (&s)[1][kN][4]) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) share(half, own.row_max_of(s, 0, half));
    }
    // Scores become weights, of which put(left, right, n, half) gets each pair. `factor` as of OnlineSoftmax.
    template <int kN, class Put> CF_DEVICE void make_weights(float (&s)[1][kN][4], float factor, Put put) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            float highest = storage.of_warp[0][row(half)];
            CF_UNROLL
            for (int w = 1; w < kKeyWarps; w++) highest = fmaxf(highest, storage.of_warp[w][row(half)]);
            const auto to = own.update_max(0, half, highest, factor);
            const float sum = own.scale_apply_exp2(s, 0, half, factor, to.reference);
            own.row_sum[0][half] = fmaf(own.row_sum[0][half], to.rescale, sum);
            if (key_warp == 0 && threadIdx.x % 4 == 0) storage.factor[row(half)] = to.rescale;
            CF_UNROLL
            for (int n = 0; n < kN; n++) put(s[0][n][2 * half], s[0][n][2 * half + 1], n, half);
        }
    }
    // Of O a warp may have any rows, those from 0 on.
    template <int kM, int kNO> CF_DEVICE void rescale(float (&o)[kM][kNO][4]) const {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            const int g = 16 * m + threadIdx.x % 32 / 4;
            OnlineSoftmax<Math, kM>::rescale_o(o, m, float2{storage.factor[g], storage.factor[g + 8]});
        }
    }
    CF_DEVICE void share_sums() {
        CF_UNROLL
        for (int half = 0; half < 2; half++) share(half, sum_over_lanes<4>(own.row_sum[0][half]));
    }
    // As of OnlineSoftmax.
    CF_DEVICE FinalRow<float> finalize(int half, float unit, float sink) const {
        float sum = 0;
        CF_UNROLL
        for (int w = 0; w < kKeyWarps; w++) sum += storage.of_warp[w][row(half)];
        const float top = own.row_max[0][half];
        return finalize_row(top == -kInfinity ? top : top * unit, sum, sink);
    }

  private:
    CF_DEVICE void share(int half, float x) {
        if (threadIdx.x % 4 == 0) storage.of_warp[key_warp][row(half)] = x;
    }
};
