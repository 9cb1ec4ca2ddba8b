// Code that both kernels of the backward pass share, for a panel and some keys: recomputed weights, and dS.
#pragma once
#include "lse.h"
#include "triples.h"
#include <math.h>

// The rows that a sweep adds: all; those that triples can compute; or the others.
enum class Share { all, usual, others };

// A panel of queries, read for the backward pass, as entries of products.
template <class Entry>
struct GradientPanel {
    using Real = RealOf<Entry>;
    Panel<Real> x;
    const Entry *q_columns, *do_columns;    // times factor_of_q, and 1 / (1 - dropout)
    const Entry *q_rows,
        *do_rows;    // up(head_dim, W) and up(head_dim_v, W) wide; dO times 1 / (1 - dropout)
    PanelLse<Real> lse;
    Real delta[kPanel<Real>];
    uint32_t floats = 0;    // lanes that triples cannot compute, if rows are shared

    static int64_t reals(const Call& p) {
        using Of = Columns<Entry>;
        int64_t d = p.head_dim, dv = p.head_dim_v, lanes = kPanel<Real>, w = W<Real>;
        return Of::space(d) + Of::space(dv) + Of::space(lanes, up(d, w)) + Of::space(lanes, up(dv, w));
    }
    // space holds reals(p); row has room for up(head_dim_v, W).
    GradientPanel(const Call& p, const Sequence& s, const Score<Real>& score, const Panel<Real>& panel,
                  Real* space, Real* row, Share which = Share::all)
        : x(panel) {
        constexpr int64_t w = W<Real>, lanes = kPanel<Real>;
        int64_t d = p.head_dim, dv = p.head_dim_v, wide = up(d, w), wide_v = up(dv, w);
        using Of = Columns<Entry>;
        Real *q_space = space, *do_space = q_space + Of::space(d), *q_rows_space = do_space + Of::space(dv),
             *do_rows_space = q_rows_space + Of::space(lanes, wide);
        Real *q_of = q_space + Of::lead(d), *do_of = do_space + Of::lead(dv),
             *q_by = q_rows_space + Of::lead(lanes, wide), *do_by = do_rows_space + Of::lead(lanes, wide_v);
        read_panel(q_of, p.q, x.lanes, x.in(p.q, s), d, score.factor_of_q(kRounds<Entry>), q_by, wide);
        // why: a query of 0 has a score of NaN with an infinite k; the weight of any other score is 0 in these lanes.
        for (int64_t c = 0; c < d; ++c)
            for (int64_t l = x.lanes; l < lanes; ++l) q_of[c * lanes + l] = q_of[c * lanes + x.lanes - 1];
        read_panel(do_of, p.d_o, x.lanes, x.in(p.d_o, s), dv, Real(1), do_by, wide_v);
        lse.read(p, s, x);
        const LaneOffsets<Real> of_dlse = x.in(p.dlse, s), of_o = x.in(p.o, s);
        for (int64_t l = 0; l < lanes; ++l) {
            delta[l] = 0;
            if (l >= x.lanes) continue;
            widen(row, p.o.data, of_o.of[l], dv, p.o.column, p.o.type);
            for (int64_t c = dv; c < wide_v; ++c) row[c] = 0;
            V<Real> products = zero<Real>();
            for (int64_t c = 0; c < wide_v; c += w) products += load(row + c) * load(do_by + l * wide_v + c);
            delta[l] = sum(products);
            if (p.dlse.data) delta[l] -= static_cast<const Real*>(p.dlse.data)[of_dlse.of[l]];
        }
        if (p.dropout_threshold) {
            V<Real> kept = splat<Real>(Real(p.dropout_scale));
            for (int64_t i = 0; i < lanes * dv; i += w) store(do_of + i, load(do_of + i) * kept);
            for (int64_t i = 0; i < lanes * wide_v; i += w) store(do_by + i, load(do_by + i) * kept);
        }
        if constexpr (kTiles && !kRounds<Entry>)
            if (which != Share::all) {
                floats = unusual_lanes(q_of, d) | unusual_lanes(do_of, dv);
                for (int64_t l = 0; l < lanes; ++l)
                    floats |= uint32_t(!surely_near_0(lse.lse[l]) || !(delta[l] - delta[l] == 0)) << l;
                floats &= x.mask();
                // Lanes of weight 0. why as queries of 0, too: infinite ones would make it NaN.
                for (int64_t l = 0; l < lanes; ++l) {
                    if (which == Share::usual ? (x.mask() & ~floats) >> l & 1 : floats >> l & 1) continue;
                    lse.lse[l] = kInfinity<Real>, delta[l] = 0;
                    if (which == Share::others) continue;
                    for (int64_t c = 0; c < d; ++c) q_of[c * lanes + l] = q_by[l * wide + c] = 0;
                    for (int64_t c = 0; c < dv; ++c) do_of[c * lanes + l] = do_by[l * wide_v + c] = 0;
                }
            }
        q_columns = Of::of(q_space, d, d);
        q_rows = Of::of(q_rows_space, lanes, lanes, wide);
        do_columns = Of::of(do_space, dv, dv);
        do_rows = Of::of(do_rows_space, lanes, lanes, wide_v);
    }
};

// The tiles of a panel and a block of keys, each (keys x kPanel).
template <class Entry>
struct GradientTiles {
    using Real = RealOf<Entry>;
    Real *weights, *ds;    // what multiplies dO, and dS, which multiplies K and Q
    Real *seen, *bias, *capped, *dropped;

    template <class Scratch>
    void allocate(Scratch& scratch, const Call& p, int64_t keys) {
        int64_t n = keys * kPanel<Real>;
        const auto lines = [&](Real*& x, int64_t behind) {
            scratch.allocate(x, Lines<Entry>::space(keys) + behind);
            if (x) x += Lines<Entry>::lead(keys);
        };
        lines(weights, 0), lines(ds, p.function_reals);
        scratch.allocate(seen, Score<Real>::masked(p) ? n : 0), scratch.allocate(bias, p.bias.data ? n : 0);
        scratch.allocate(capped, p.softcap > 0 ? n : 0);
        if (p.dropout_threshold) lines(dropped, 0);
    }

    // [A2.11] [A2.13] [A2.14]; false if the mask leaves nothing. dbias is the gradient before the slopes of the function
    // and of softcap; sums get the gradients of what the function reads.
    // look(scores) sees them before they become weights.
    template <class Look>
    bool compute(const Call& p, const Score<Real>& score, const GradientPanel<Entry>& g, int64_t from,
                 int64_t keys, const Entry* k, int64_t k_step, const Entry* v, int64_t v_step, bool of_bias,
                 double* sums, Look look) {
        constexpr int64_t w = W<Real>, panel = kPanel<Real>, depth = kDepth<Entry>;
        if (!score.read_mask(g.x, from, keys, seen, ds, ds + kSpanKeys * panel)) return false;
        product<Along::depth>(k, k_step, g.q_columns, weights, keys, blocks_of(p.head_dim, depth), false);
        const Real of_score = score.scale_or_leave(weights, keys * panel, kRounds<Entry>);
        score.finish(g.x, from, keys, weights, seen, bias, capped, ds + kSpanKeys * panel);
        look(weights);
        product<Along::depth>(v, v_step, g.do_columns, ds, keys, blocks_of(p.head_dim_v, depth), false);
        V<Real> lse[kVectors], unit[kVectors], delta[kVectors];
        UNROLL for (int j = 0; j < kVectors; ++j) lse[j] = load(g.lse.lse + j * w),
                                                  unit[j] = load(g.lse.unit + j * w),
                                                  delta[j] = load(g.delta + j * w);
        const auto weight = [&](int64_t at, int64_t j) __attribute__((always_inline)) {
            V<Real> x = load(weights + at);
            if constexpr (kRounds<Entry>) x *= splat(of_score);
            return exp_<Real, true>(x - lse[j]) * unit[j];
        };
        if (!p.dropout_threshold) {
            for (int64_t key = 0; key < keys; ++key) UNROLL for (int j = 0; j < kVectors; ++j) {
                    int64_t at = key * panel + j * w;
                    V<Real> x = weight(at, j);
                    store(weights + at, x);
                    store(ds + at, x * (load(ds + at) - delta[j]));
                }
        } else {
            for (int64_t i = 0; i < keys * panel; i += w) store(weights + i, weight(i, i / w % kVectors));
            memcpy(dropped, weights, size_t(keys * panel) * sizeof(Real));
            score.drop(g.x, from, keys, dropped, ds);
            for (int64_t i = 0; i < keys * panel; i += w)
                store(ds + i, load(weights + i) * (load(ds + i) - delta[i / w % kVectors]));
            Real* kept = dropped;
            dropped = weights, weights = kept;
        }
        if (p.function && !of_bias)
            score.call_function(g.x, from, keys, nullptr, ds, nullptr, ds + kSpanKeys * panel, sums);
        if (p.softcap > 0 && !of_bias)
            for (int64_t i = 0; i < keys * panel; i += w)
                store(ds + i, load(ds + i) * (splat<Real>(1) - load(capped + i) * load(capped + i)));
        return true;
    }
};
