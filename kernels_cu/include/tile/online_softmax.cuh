// The online softmax of the rows that a thread shares with the other three lanes of its quad.
// Design note: docs/kernels/forward.md.
//
// layout: s[m][n][e] as in mma.cuh; row statistics [m][e / 2], the maximum the same in all four lanes, the
// sum each lane's own share.
#pragma once
#include "attention/softmax.cuh"
#include "tile/mma.cuh"

// Whether a row of the warp has a new maximum, and the factors that the thread's two rows of o are waiting for.
struct Rescale {
    bool any;
    float2 factor;
};

// kHighestLog2: the weight of a row's maximum is 2^this, and so is the unit of sums and of O until `finalize`.
// why: weights of 8 bits are lost below 2^-9, so they should begin near the largest that there is.
// kRescaleThresholdLog2: a maximum is replaced only by one that is so far above it, in log2; weights grow to 2^this. Exact,
// because any reference is: sums and O have the same one. why: then it seldom is, see softmax_rows.
template <class Math, int kM, int kHighestLog2 = 0, int kRescaleThresholdLog2 = 0>
struct OnlineSoftmax {
    static constexpr int kRescaleThreshold = kRescaleThresholdLog2;
    float row_max[kM][2], row_sum[kM][2];    // max in the unit of the scores
    float max_scaled[kM][2];    // max in log2, 0 in a row without a key yet; of softmax_rows only

    CF_DEVICE OnlineSoftmax() {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            row_max[m][0] = row_max[m][1] = -kInfinity;
            row_sum[m][0] = row_sum[m][1] = 0;
            max_scaled[m][0] = max_scaled[m][1] = 0;
        }
    }
    // Scores become weights 2^(factor (s - row_max)), accumulated rows of o follow the new maximum. `factor`
    // > 0 makes scores log2.
    template <int kN, int kNO>
    CF_DEVICE void softmax_rescale_o(float (&s)[kM][kN][4], float (&o)[kM][kNO][4], float factor) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) rescale_row(o, m, half, softmax_row(s, m, half, factor));
        }
    }
    // The same for one row, without o. Returns the factor that its row of o is waiting for.
    template <int kN>
    CF_DEVICE float softmax_row(float (&s)[kM][kN][4], int m, int half, float factor) {
        static_assert(kRescaleThresholdLog2 == 0);
        const MaxUpdate to = update_max(m, half, row_max_of(s, m, half), factor);
        row_sum[m][half] =
            fmaf(row_sum[m][half], to.rescale, scale_apply_exp2(s, m, half, factor, to.reference));
        return to.rescale;
    }
    // Its parts, where others hold more of a row: first the highest of its scores here and before,
    template <int kN>
    CF_DEVICE float row_max_of(const float (&s)[kM][kN][4], int m, int half) const {
        float highest = row_max[m][half];
        CF_UNROLL
        for (int n = 0; n < kN; n++)
            highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        return fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    }
    // then the maximum follows, and says by which factor sums and o do, and what weights refer to,
    struct MaxUpdate {
        float rescale, reference;
    };
    CF_DEVICE MaxUpdate update_max(int m, int half, float highest, float factor) {
        // why: in a row without a key yet, -inf - (-inf) would be NaN; any finite reference gives weight 0.
        const float reference = highest == -kInfinity ? 0.0f : highest;
        const float rescale = ex2((row_max[m][half] - reference) * factor);
        row_max[m][half] = highest;
        return {rescale, reference};
    }
    // then scores become weights, of which this is the sum, in the order of `sum_of`.
    template <int kN>
    CF_DEVICE static float scale_apply_exp2(float (&s)[kM][kN][4], int m, int half, float factor,
                                            float reference) {
        return exponentiate(s, m, half, factor, reference, -reference * factor);
    }
    template <int kN> CF_DEVICE static float sum_of(const float (&weights)[kM][kN][4], int m, int half) {
        float sum = 0;
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) sum += weights[m][n][2 * half + i];
        }
        return sum;
    }
    // The same for both rows with kRescaleThresholdLog2. threshold: that, in the unit of the scores.
    template <int kN>
    CF_DEVICE Rescale softmax_rows(float (&s)[kM][kN][4], int m, float factor, float threshold) {
        const float highest[2] = {row_max_of(s, m, 0), row_max_of(s, m, 1)};
        Rescale rescale{false, {1.0f, 1.0f}};
        // why not "above": NaN is above nothing.
        const bool stay = highest[0] - threshold <= row_max[m][0] && highest[1] - threshold <= row_max[m][1];
        if (__ballot_sync(0xffffffffu, !stay))
            rescale = {true,
                       {update_max_if_above(m, 0, highest[0], factor, threshold),
                        update_max_if_above(m, 1, highest[1], factor, threshold)}};
        CF_UNROLL
        for (int half = 0; half < 2; half++)
            row_sum[m][half] += exponentiate(s, m, half, factor, 0.0f, -max_scaled[m][half]);
        return rescale;
    }
    template <int kNO>
    CF_DEVICE static void rescale_row(float (&o)[kM][kNO][4], int m, int half, float rescale) {
        CF_UNROLL
        for (int n = 0; n < kNO; n++) o[m][n][2 * half] *= rescale, o[m][n][2 * half + 1] *= rescale;
    }
    // The rows of o follow maxima that have risen; where none of the warp's has, nothing is to be done.
    template <int kNO>
    CF_DEVICE static void rescale_o(float (&o)[kM][kNO][4], int m, float2 rescale) {
        if (__ballot_sync(0xffffffffu, rescale.x != 1.0f || rescale.y != 1.0f)) {
            rescale_row(o, m, 0, rescale.x);
            rescale_row(o, m, 1, rescale.y);
        }
    }
    template <int kNO> CF_DEVICE static void rescale_o(float (&o)[kM][kNO][4], int m,
                                                       const Rescale& rescale) {
        if (!rescale.any) return;
        rescale_row(o, m, 0, rescale.factor.x);
        rescale_row(o, m, 1, rescale.factor.y);
    }
    // The sums of all rows, in lane 0 of their quads; the others have none.
    CF_DEVICE void quad_reduce_sums() {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const float sum = sum_over_lanes<4>(row_sum[m][half]);
                row_sum[m][half] = threadIdx.x % 4 == 0 ? sum : 0.0f;
            }
        }
    }
    // What a row came to; `unit` is the factor from scores to natural units.
    CF_DEVICE FinalRow<float> finalize(int m, int half, float unit, float sink) const {
        constexpr float kUnit = 1.0f / (1 << kHighestLog2);
        const float sum = sum_over_lanes<4>(row_sum[m][half]) * kUnit;
        const float natural_max = row_max[m][half] == -kInfinity ? -kInfinity : row_max[m][half] * unit;
        const FinalRow<float> row = finalize_row(natural_max, sum, sink);
        return {row.lse, row.normaliser * kUnit};
    }

  private:
    // A row gets the maximum `highest`, if that is above its own by so much. Returns the factor on its sum and O.
    CF_DEVICE float update_max_if_above(int m, int half, float highest, float factor, float threshold) {
        if (highest - threshold <= row_max[m][half]) return 1.0f;
        // why: the first key of a row finds sums of zeros.
        const float rescale =
            ex2(row_max[m][half] == -kInfinity ? 0.0f : (row_max[m][half] - highest) * factor);
        row_max[m][half] = highest;
        max_scaled[m][half] = highest * factor;
        row_sum[m][half] *= rescale;
        return rescale;
    }
    // Scores become weights 2^(factor * s + offset), or of floats 2^(factor (s - reference)). Returns their sum.
    template <int kN>
    CF_DEVICE static float exponentiate(float (&s)[kM][kN][4], int m, int half, float factor, float reference,
                                        float offset) {
        float sum = 0;
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                float& x = s[m][n][2 * half + i];
                x = weight(x, reference, factor, offset);
                sum += x;
            }
        }
        return sum;
    }
    CF_DEVICE static float weight(float s, float reference, float factor, float offset) {
        // why: one multiply-add instead of two operations; it rounds factor * reference, an error that grows
        // with the scores and that float inputs would show.
        static_assert(!Math::kFloat || kHighestLog2 + kRescaleThresholdLog2 == 0);
        if constexpr (Math::kFloat) return ex2((s - reference) * factor);
        return ex2(fmaf(s, factor, kHighestLog2 == 0 ? offset : offset + kHighestLog2));
    }
};
