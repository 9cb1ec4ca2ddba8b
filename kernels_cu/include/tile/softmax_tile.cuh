// The online softmax of the rows that a thread shares with the other three lanes of its quad.
//
// layout: s[m][n][e] as in mma.cuh; row statistics [m][e / 2], the maximum the same in all four lanes, the
// sum each lane's own share.
#pragma once
#include "attention/softmax.cuh"
#include "tile/mma.cuh"

// What a row came to. Sinks: a key with this score and no value.
struct FinishedRow {
    float lse;           // natural-log; -inf for a row without keys
    float normaliser;    // factor on the row of o; 0 for a row without keys
};
CF_DEVICE FinishedRow finish_row(float natural_max, float sum, float sink) {
    const float highest = fmaxf(natural_max, sink);
    if (highest == -kInfinity) return {-kInfinity, 0.0f};
    const float share = ex2((natural_max - highest) * kLog2e);
    const float total = sum * share + ex2((sink - highest) * kLog2e);
    return {highest + natural_log(total), share / total};
}

// kHighestLog2: the weight of a row's maximum is 2^this, and so is the unit of sums and of O until `finish`.
// why: weights of 8 bits are lost below 2^-9, so they should begin near the largest that there is.
// kSlackLog2: a maximum is replaced only by one that is so far above it, in log2; weights grow to 2^this. Exact,
// because any reference is: sums and O have the same one. why: O is then seldom rescaled, see follow_rows.
// kPolynomials: of so many weights of a row one is a polynomial; 0 for none. why: see ex2_by_polynomial.
template <class Math, int kM, int kHighestLog2 = 0, int kSlackLog2 = 0, int kPolynomials = 0>
struct TileSoftmax {
    float row_max[kM][2], row_sum[kM][2];    // max in the unit of the scores

    CF_DEVICE TileSoftmax() {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            row_max[m][0] = row_max[m][1] = -kInfinity;
            row_sum[m][0] = row_sum[m][1] = 0;
        }
    }
    // Scores become weights 2^(factor (s - row_max)), accumulated rows of o follow the new maximum. `factor`
    // > 0 makes scores log2.
    template <int kN, int kNO>
    CF_DEVICE void weigh(float (&s)[kM][kN][4], float (&o)[kM][kNO][4], float factor) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++)
                rescale_row(o, m, half, weigh_row(s, m, half, factor));
        }
    }
    // The same for one row, without o. Returns the factor that its row of o is waiting for.
    template <int kN>
    CF_DEVICE float weigh_row(float (&s)[kM][kN][4], int m, int half, float factor) {
        const Raised to = raise(m, half, highest_of(s, m, half), factor);
        row_sum[m][half] = fmaf(row_sum[m][half], to.rescale, make_weights(s, m, half, factor, to.reference));
        return to.rescale;
    }
    // Its parts, where others hold more of a row: first the highest of its scores here and before,
    template <int kN>
    CF_DEVICE float highest_of(const float (&s)[kM][kN][4], int m, int half) const {
        float highest = row_max[m][half];
        CF_UNROLL
        for (int n = 0; n < kN; n++)
            highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        return fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    }
    // then the maximum follows, and says by which factor sums and o do, and what weights refer to,
    struct Raised {
        float rescale, reference;
    };
    CF_DEVICE Raised raise(int m, int half, float highest, float factor) {
        // why the difference: a row without a key yet has -inf, which anything finite exceeds by enough.
        if constexpr (kSlackLog2 > 0)
            highest = (highest - row_max[m][half]) * factor > kSlackLog2 ? highest : row_max[m][half];
        // why: in a row without a key yet, -inf - (-inf) would be NaN; any finite reference gives weight 0.
        const float reference = highest == -kInfinity ? 0.0f : highest;
        const float rescale = ex2((row_max[m][half] - reference) * factor);
        row_max[m][half] = highest;
        return {rescale, reference};
    }
    // then scores become weights, of which this is the sum, in the order of `sum_of`.
    template <int kN>
    CF_DEVICE static float make_weights(float (&s)[kM][kN][4], int m, int half, float factor, float reference) {
        float sum = 0;
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                float& x = s[m][n][2 * half + i];
                const bool polynomial = kPolynomials > 0 && (2 * n + i) % kPolynomials == kPolynomials - 1;
                x = weight(x, reference, factor, polynomial);
                sum += x;
            }
        }
        return sum;
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
    template <int kNO>
    CF_DEVICE static void rescale_row(float (&o)[kM][kNO][4], int m, int half, float rescale) {
        CF_UNROLL
        for (int n = 0; n < kNO; n++) o[m][n][2 * half] *= rescale, o[m][n][2 * half + 1] *= rescale;
    }
    // The rows of o follow maxima that have risen; where none of the warp's has, nothing is to be done.
    template <int kNO>
    CF_DEVICE static void follow_rows(float (&o)[kM][kNO][4], int m, float2 rescale) {
        if (__ballot_sync(0xffffffffu, rescale.x != 1.0f || rescale.y != 1.0f)) {
            rescale_row(o, m, 0, rescale.x);
            rescale_row(o, m, 1, rescale.y);
        }
    }
    // The sums of all rows, in lane 0 of their quads; the others have none.
    CF_DEVICE void gather() {
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
    CF_DEVICE FinishedRow finish(int m, int half, float unit, float sink) const {
        constexpr float kUnit = 1.0f / (1 << kHighestLog2);
        const float sum = sum_over_lanes<4>(row_sum[m][half]) * kUnit;
        const float natural_max = row_max[m][half] == -kInfinity ? -kInfinity : row_max[m][half] * unit;
        const FinishedRow row = finish_row(natural_max, sum, sink);
        return {row.lse, row.normaliser * kUnit};
    }

  private:
    CF_DEVICE static float weight(float s, float reference, float factor, bool polynomial) {
        // why: one multiply-add instead of two operations; it rounds factor * reference, an error that grows
        // with the scores and that float inputs would show.
        static_assert(!Math::kFloat || kHighestLog2 == 0);
        float x;
        if constexpr (Math::kFloat) x = (s - reference) * factor;
        else if constexpr (kHighestLog2 == 0) x = fmaf(s, factor, -reference * factor);
        else x = fmaf(s, factor, fmaf(-reference, factor, kHighestLog2));
        return polynomial ? ex2_by_polynomial(x) : ex2(x);
    }
};
