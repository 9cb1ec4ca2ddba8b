// Scores of kind "any" in units of log2, for the backward kernels of Hopper: scale * q.k, capped.
// Design note: docs/kernels/backward_sm90.md.
#pragma once
#include "tile/score_tile.cuh"

template <class Math> struct CappedScore {
    float cap, inverse_cap, scale;

    CF_DEVICE explicit CappedScore(const HeadScore<float>& head)
        : cap(head.softcap * kLog2e), inverse_cap(cap == 0 ? 0.0f : rcp(cap)), scale(head.scale * kLog2e) {}
    template <int n> CF_DEVICE void apply(float (&s)[n]) const {
        if (cap == 0) {
            CF_UNROLL
            for (float& x : s) x *= scale;
        } else {
            CF_UNROLL
            for (float& x : s) x = cap * bounded_tanh<Math::kFloat>(x * (scale * inverse_cap));
        }
    }
    // What the cap makes of a gradient, for a capped score.
    CF_DEVICE float slope(float s) const {
        // why fmaxf: of a masked score, -inf, it makes a slope of 0, not NaN.
        const float tanh = fmaxf(s * inverse_cap, -1.0f);
        return fmaf(-tanh, tanh, 1.0f);
    }
};
