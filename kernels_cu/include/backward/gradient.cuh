// P and dS from scores, for every pass of the backward kernels that needs them.
// Design note: docs/kernels/backward.md.
#pragma once
#include "backward/gradient_sums.cuh"
#include "backward/operand.cuh"
#include "tile/score_tile.cuh"

// Rows of a head from `first` on: `rows` of them exist, none beyond is touched.
template <class Element>
CF_DEVICE GlobalRows<Element> rows_of(const Tensor& t, int32_t batch, int32_t head, int64_t first,
                                      int32_t rows, int32_t columns) {
    return GlobalRows<Element>(head_rows<Element>(t, batch, head, first), t.row, rows, columns);
}

// From S and dP of one head to P and dS, for the rows of a warp: float x[kM][kN][4] as in mma.cuh, rows are
// queries. kAny: every option that changes scores, tested at run time; otherwise scale > 0 and the band
// only. kOfProduct: the gradient of scale * q k^T; otherwise that of the score, after the softcap.
template <class Math, bool kAny, int kM, bool kOfProduct = true>
struct ScoreGradient {
    TileScore<Math> score;
    Dropout dropout;
    NarrowBand band;
    const float *gLse, *gDelta;
    int64_t lse_row, delta_row;
    int32_t first_q, seqlen_q;
    float unit_log2, dropout_scale;
    float lse_log2[kM][2], delta[kM][2];    // of this thread's rows

    CF_DEVICE ScoreGradient(const BackwardParams& p, const Sequence& sequence, const Band& of_band,
                            int32_t head)
        : score(p.score, sequence, head), dropout(p.score, sequence.batch, head), band(of_band),
          gLse(head_rows<float>(p.lse, sequence.batch, head, 0)),
          gDelta(head_rows<float>(p.delta, sequence.batch, head, 0)), lse_row(p.lse.row),
          delta_row(p.delta.row), first_q(static_cast<int32_t>(sequence.first_q)),
          seqlen_q(sequence.seqlen_q),
          unit_log2(kAny ? kLog2e : static_cast<float>(p.score.scale * 1.4426950408889634)),
          dropout_scale(dropout.active() ? static_cast<float>(p.score.dropout_scale) : 1.0f) {}

    // LSE of the rows from row_first on.
    // why: rows without keys have an LSE of -inf, rows past the end none; +inf gives both P = 0, with no test
    // per element.
    CF_DEVICE void load_lse(int32_t row_first) {
        each_row([&](int m, int half) {
            const int32_t query = row_first + 16 * m + 8 * half + threadIdx.x % 32 / 4;
            const float lse = query < seqlen_q ? ld_global(gLse + (first_q + query) * lse_row) : kInfinity;
            lse_log2[m][half] = lse == -kInfinity ? kInfinity : lse * kLog2e;
        });
    }
    CF_DEVICE void load_delta(int32_t row_first) {
        each_row([&](int m, int half) {
            const int32_t query = row_first + 16 * m + 8 * half + threadIdx.x % 32 / 4;
            delta[m][half] = query < seqlen_q ? ld_global(gDelta + (first_q + query) * delta_row) : 0.0f;
        });
    }
    // The same from shared memory, where row_first's stands at an address, and 0 of rows past the end.
    CF_DEVICE void read_lse(uint32_t address, int32_t row_first) {
        each_row([&](int m, int half) {
            const int row = 16 * m + 8 * half + threadIdx.x % 32 / 4;
            const float lse = ld_shared<float>(address + 4 * row);
            lse_log2[m][half] = row_first + row < seqlen_q && lse != -kInfinity ? lse * kLog2e : kInfinity;
        });
    }
    CF_DEVICE void read_delta(uint32_t address) {
        each_row([&](int m, int half) {
            delta[m][half] = ld_shared<float>(address + 4 * (16 * m + 8 * half + threadIdx.x % 32 / 4));
        });
    }
    // s becomes P times the slope of softcap and score function, which compute_ds needs. Where dropout drops a weight it is
    // negative; with a score function, whose slope may have any sign, its last bit is 1 there. put(left, right, m, n, half)
    // gets dropout(P), elements 2 half and 2 half + 1 of [m][n], without dropout_scale, which is applied to the sum.
    template <int kN, class Put>
    CF_DEVICE void recompute_p(float (&s)[kM][kN][4], const Positions<false>& at, bool whole, Put put) const {
        if constexpr (!kAny) {
            mask(s, at, whole);
            recompute_p(s, Share{0, 1}, put);
        } else {
            column_by_column(s, [&](auto& x, int n) {
                const Positions<false> here = at.of_column(n);
                float slope[kM][1][4], kept[kM][1][4];
                score.apply_softcap(x);
                each<1>([&](int m, int, int e) {
                    slope[m][0][e] = kOfProduct ? score.head.softcap_slope(x[m][0][e]) : 1.0f;
                });
#if defined(CF_FUNCTION)
                if constexpr (kOfProduct) {
                    float steep[kM][1][4];
                    each<1>([&](int m, int, int e) { steep[m][0][e] = x[m][0][e]; });
                    score.each_pair(steep, here, [&](float& y, int32_t query, int32_t key) {
                        y = score.head.function.slope(y, query, key);
                    });
                    each<1>([&](int m, int, int e) { slope[m][0][e] *= steep[m][0][e]; });
                }
#endif
                score.apply_score_mod(x, here);
                // why not on Turing: three of its kernels would spill.
                if constexpr (!Math::kOnTuring) score.apply_mask(x, here);
                mask_band(x, here, band);
                each<1>(
                    [&](int m, int, int e) { kept[m][0][e] = x[m][0][e] = exponential(x[m][0][e], m, e); });
                if (dropout.active()) drop_weights(kept, here, dropout);
                each_pair<1>(Share{0, 1}, [&](int m, int, int half) {
                    put(kept[m][0][2 * half], kept[m][0][2 * half + 1], m, n, half);
                });
                each<1>([&](int m, int, int e) {
                    const bool dropped = kept[m][0][e] == 0.0f;
                    // why the test: a function may have any slope where it masks a pair.
                    if constexpr (kHasFunction)
                        x[m][0][e] =
                            x[m][0][e] == 0.0f ? 0.0f : flagged(x[m][0][e] * slope[m][0][e], dropped);
                    else x[m][0][e] *= dropped ? -slope[m][0][e] : slope[m][0][e];
                });
            });
        }
    }
    // The same in two: mask, then recompute_p share after share.
    template <int kN>
    CF_DEVICE void mask(float (&s)[kM][kN][4], const Positions<false>& at, bool whole) const {
        static_assert(!kAny, "what else a score can meet is not parted from its exponential");
        if (!whole) mask_band(s, at, band);
    }
    template <int kN, class Put>
    CF_DEVICE void recompute_p(float (&s)[kM][kN][4], Share share, Put put) const {
        each_pair<kN>(share, [&](int m, int n, int half) {
            float &left = s[m][n][2 * half], &right = s[m][n][2 * half + 1];
            left = exponential(left, m, 2 * half);
            right = exponential(right, m, 2 * half);
            put(left, right, m, n, half);
        });
    }
    // dp becomes dS, of which put gets each pair of a share.
    template <int kN, class Put>
    CF_DEVICE void compute_ds(float (&dp)[kM][kN][4], const float (&p)[kM][kN][4], Share share,
                              Put put) const {
        each_pair<kN>(share, [&](int m, int n, int half) {
            float &left = dp[m][n][2 * half], &right = dp[m][n][2 * half + 1];
            left = score_gradient(p[m][n][2 * half], left, delta[m][half]);
            right = score_gradient(p[m][n][2 * half + 1], right, delta[m][half]);
            put(left, right, m, n, half);
        });
    }

  private:
    CF_DEVICE float score_gradient(float weight, float dp, float row_delta) const {
        if constexpr (kAny) {
            const uint32_t bits = __float_as_uint(weight);
            const bool dropped = kHasFunction ? bits & 1 : bits >> 31;
            return (kHasFunction ? weight : fabsf(weight)) *
                   ((dropped ? 0.0f : dropout_scale * dp) - row_delta);
        } else {
            return weight * (dp - row_delta);
        }
    }
    // A number with this last bit.
    CF_DEVICE static float flagged(float x, bool flag) {
        return __uint_as_float((__float_as_uint(x) & ~1u) | static_cast<uint32_t>(flag));
    }
    CF_DEVICE float exponential(float s, int m, int e) const {
        return ex2(fmaf(s, unit_log2, -lse_log2[m][e / 2]));
    }
    template <class Act>
    CF_DEVICE static void each_row(Act act) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) act(m, half);
        }
    }
    // The share of the pairs of neighbours in a row.
    template <int kN, class Act>
    CF_DEVICE static void each_pair(Share share, Act act) {
        constexpr int kPairs = 2 * kM * kN;
        CF_UNROLL
        for (int pair = 0; pair < kPairs; pair++)
            if (pair * share.count / kPairs == share.index) act(pair / 2 / kN, pair / 2 % kN, pair % 2);
    }
    template <int kN, class Act>
    CF_DEVICE static void each(Act act) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) act(m, n, e);
            }
        }
    }
};

// The same for S and dP, whose columns may also be cut into single n8 ones where there are few.
constexpr int score_groups(int rows, int columns, int warps) {
    const int groups = row_groups(rows, columns, warps);
    return 16 * groups <= rows ? groups : row_groups(rows, columns, warps, 8);
}
