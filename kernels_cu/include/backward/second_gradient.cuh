// The derivatives of the gradients of a pair of query and key in a direction, for the passes of second order.
// Design note: docs/kernels/derivatives.md.
#pragma once
#include "tile/score_tile.cuh"

// Of a row of queries: 0 each but for the LSE where there is no such row.
struct RowNumbers {
    float lse_log2, mean, delta, delta_dot;
};
// why: rows without keys have an LSE of -inf, rows past the end none; +inf gives both P = 0.
CF_DEVICE RowNumbers row_numbers(float lse, float mean, float delta, float delta_dot, bool exists) {
    return {exists && lse != -kInfinity ? lse * kLog2e : kInfinity, mean, delta, delta_dot};
}

// The scores of one head and their second derivatives, with the options that only scale, cap or shift a score: softcap,
// ALiBi, band. Each is tested at run time.
template <class Math>
struct SecondGradient {
    TileScore<Math> score;
    NarrowBand band;
    float curve;    // g'' = curve * g g'

    CF_DEVICE SecondGradient(const Score& of, const Sequence& sequence, const Band& of_band, int32_t head)
        : score(of, sequence, head), band(of_band),
          curve(score.head.softcap == 0 ? 0.0f : -2.0f / (score.head.softcap * score.head.softcap)) {}

    // Four pairs of an n8 column, as in mma.cuh.
    //   in:   s = Q K^T, tangent = its tangent, dp = dP, dp_dot = dotdP
    //   out:  s = dotP, dp = the tangent of the gradient of scale * q k^T, dp_dot = that gradient
    // rows: the numbers of the thread's two queries, which are its rows, or its columns where keys are rows.
    template <bool kKeysInRows>
    CF_DEVICE void compute_ds(float (&s)[4], const float (&tangent)[4], float (&dp)[4], float (&dp_dot)[4],
                              const RowNumbers (&rows)[2], const Positions<kKeysInRows>& at,
                              bool whole) const {
        float x[1][1][4] = {{{s[0], s[1], s[2], s[3]}}}, slope[4], curvature[4];
        score.apply_softcap(x);
        CF_UNROLL
        for (int e = 0; e < 4; e++)
            slope[e] = score.head.softcap_slope(x[0][0][e]), curvature[e] = curve * x[0][0][e];
        score.add_alibi(x, at);
        if (!whole) mask_band(x, at, band);
        CF_UNROLL
        for (int e = 0; e < 4; e++) {
            const RowNumbers& row = rows[kKeysInRows ? e % 2 : e / 2];
            // [H.2] [H.3] why the test: 0 times what a masked key makes of a score need not be 0.
            const float weight = ex2(fmaf(x[0][0][e], kLog2e, -row.lse_log2));
            const float score_dot = weight == 0 ? 0.0f : slope[e] * score.head.scale * tangent[e];
            const float weight_dot = weight * (score_dot - row.mean), d_weight = dp[e] - row.delta;
            // [H.4] [H.5]
            const float d_score = weight * d_weight;
            const float d_score_dot = fmaf(weight_dot, d_weight, weight * (dp_dot[e] - row.delta_dot));
            // [H.6]
            s[e] = weight_dot;
            dp[e] = fmaf(d_score_dot, slope[e], curvature[e] * d_score * score_dot);
            dp_dot[e] = d_score * slope[e];
        }
    }
};
