// The online softmax of a panel, and what its rows come to.
#pragma once
#include "tiles.h"
#include <math.h>

// What a row's weights are e^(S - row_max) of, once it has seen `top`: row_max follows the maximum when that is more than
// 8 above it. why: nearly every block has a new maximum for one row of a panel, and then all that was summed has to be
// multiplied; weights of up to e^8 = 2981 are as exact as those of up to 1.
template <class Real>
INLINE V<Real> risen_max(V<Real> row_max, V<Real> top) {
    return top > row_max + splat<Real>(8) ? top : row_max;
}

// row_max, row_sum, and whether anything was added to the sums that the weights multiply.
template <class Real>
struct Softmax {
    Real row_max[kPanel<Real>], row_sum[kPanel<Real>];
    bool fresh;
    Softmax() : fresh(true) {
        for (Real& x : row_max) x = -kInfinity<Real>;
        for (Real& x : row_sum) x = 0;
    }

    // Scores become weights; n vectors of lanes. Where entries are rounded, the tile holds scores without their factor, `unit`
    // > 0. follow(by) multiplies what was summed under the old row_max.
    template <int n, class Entry = Real, class Follow>
    void weigh(Real* tile, int64_t keys, Follow follow, Real unit = 1) {
        constexpr bool scaled = kRounds<Entry>;
        constexpr int w = W<Real>, panel = kPanel<Real>;
        V<Real> old[n], top[n], second[n], finite[n], total[n];
        UNROLL for (int j = 0; j < n; ++j) {
            old[j] = load(row_max + j * w);
            top[j] = second[j] = scaled ? splat<Real>(-kInfinity<Real>) : old[j];
        }
        int64_t key = 0;
        for (; key + 2 <= keys; key += 2) UNROLL for (int j = 0; j < n; ++j) {    // why two: latency
                top[j] = bigger(load(tile + key * panel + j * w), top[j]);
                second[j] = bigger(load(tile + key * panel + panel + j * w), second[j]);
            }
        if (key < keys)
            UNROLL for (int j = 0; j < n; ++j) top[j] = bigger(load(tile + key * panel + j * w), top[j]);
        I<Real> risen = {};
        UNROLL for (int j = 0; j < n; ++j) {
            top[j] = bigger(second[j], top[j]);
            if constexpr (scaled) top[j] *= splat(unit);
            top[j] = risen_max<Real>(old[j], top[j]);
            risen |= top[j] > old[j];
            // A row that has seen no key yet keeps its weights at e^(-inf - 0) = 0.
            finite[j] = top[j] == splat<Real>(-kInfinity<Real>) ? zero<Real>() : top[j];
            total[j] = load(row_sum + j * w);
        }
        if (!fresh && any_bit(risen)) {
            V<Real> by[n];
            UNROLL for (int j = 0; j < n; ++j) by[j] = exp_<Real>(old[j] - finite[j]), total[j] *= by[j];
            follow(by);
        }
        for (key = 0; key < keys; ++key) {
            stay_awake<Entry>(key);
            UNROLL for (int j = 0; j < n; ++j) {
                V<Real> score = load(tile + key * panel + j * w);
                if constexpr (scaled) score = not_fused(score * splat(unit));    // as decode's
                V<Real> x = exp_<Real>(score - finite[j]);
                total[j] += x;
                store(tile + key * panel + j * w, x);
            }
        }
        stay_awake<Entry>(0);
        UNROLL for (int j = 0; j < n; ++j) store(row_max + j * w, top[j]), store(row_sum + j * w, total[j]);
    }
};

// Columns (rows x kPanel) times a factor of each lane.
template <int n, class Real>
INLINE void scale_lanes(Real* columns, int64_t rows, const V<Real>* by) {
    constexpr int w = W<Real>;
    for (int64_t c = 0; c < rows; ++c) UNROLL for (int j = 0; j < n; ++j) {
            Real* at = columns + c * kPanel<Real> + j * w;
            store(at, load(at) * by[j]);
        }
}
